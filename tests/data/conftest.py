"""A small directory of text, and a snapshot of it on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import DataSettings
from paceline.data import Snapshot, build_snapshot
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
