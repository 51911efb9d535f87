"""A small directory of text, and a snapshot of it on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DataSettings
from paceline.data import Snapshot, build_snapshot
from paceline.data.formats import ParquetProcess
from paceline.storage import DiskStore, ObjectStore


@pytest.fixture
def store() -> ObjectStore:
    return DiskStore()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return DiskStore.url_of(tmp_path / "store")


@pytest.fixture
def settings() -> DataSettings:
    return DataSettings(
        max_bytes=200_000, shard_bytes=4096, held_out_share=0.2, purpose="tests", seed=3
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(40):
        body = "".join(f"line {number * 7 + n} says {n**3}\n" for n in range(20 + number))
        (directory / f"file-{number:02d}.txt").write_text(body)
    return directory


@pytest.fixture
def snapshot(texts: Path, url: str, settings: DataSettings, store: ObjectStore) -> Snapshot:
    return build_snapshot(str(texts), url, settings, store)


@pytest.fixture(scope="session")
def parquet_readers() -> Iterator[list[Any]]:
    """The child process that reads Parquet for all tests, once there is one."""
    found: list[Any] = []
    yield found
    for each in found:
        each.end()


@pytest.fixture(autouse=True)
def one_parquet_reader(parquet_readers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read one snapshot's files after another's in one process: it takes longer to start than to
    read. Where a file is not read to its end, the process ends, as it does for users."""
    start, read = ParquetProcess.__init__, ParquetProcess.samples

    def reuse(self: Any) -> None:
        if parquet_readers and parquet_readers[0]._process.poll() is None:
            self._child = parquet_readers[0]
            return
        start(self)
        parquet_readers[:] = [self._child]

    def samples(self: Any, *given: Any, **named: Any) -> Iterator[Any]:
        self.is_reading = True
        yield from read(self, *given, **named)
        self.is_reading = False

    def leave(self: Any, *_: object) -> None:
        if getattr(self, "is_reading", False):
            self._child.end()

    for name, each in (("__init__", reuse), ("samples", samples), ("__exit__", leave)):
        monkeypatch.setattr(ParquetProcess, name, each)
