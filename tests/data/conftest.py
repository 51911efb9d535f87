"""A small directory of text, a bucket of its own, and a snapshot of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.config import DataSettings
from paceline.data import Snapshot, build_snapshot
from paceline.storage import ObjectStore
from tests.support.rclone import RcloneS3

_numbers = itertools.count()


@pytest.fixture
def store(s3: RcloneS3) -> ObjectStore:
    return s3.store()


@pytest.fixture
def url(store: ObjectStore) -> str:
    bucket = f"data-{next(_numbers)}"
    store.ensure_bucket(bucket)
    return f"s3://{bucket}/data"


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
