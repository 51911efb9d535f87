"""Several files uploaded by one caller: each ends by its own reason, or arrives."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.errors import AccessDenied, Cancelled, SourceChanged
from paceline.storage import ObjectInfo, ObjectStore, uploads
from paceline.storage import client as patience
from tests.support.rclone import RcloneS3

AT = "s3://together/model"
PART = 5 * 1024 * 1024  # the least that S3 knows
SIZE = 2 * PART + 12_345
LONG_S = 30.0


@pytest.fixture
def store(s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(uploads, "PART_BYTES", PART)
    monkeypatch.setattr(patience, "BACKOFF_S", 0.001)
    made = s3.store()
    made.ensure_bucket("together")
    made.delete_prefix(AT)
    return made


def write(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes(Random(name).randbytes(2 * SIZE if name == "shrinks" else SIZE))
    return path


def test_two_files_of_which_one_fails_end_by_their_own_reasons(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three are in the middle of a part when the first one fails."""
    upload_part = store._client.upload_part
    failed, under_way = threading.Event(), threading.Barrier(3)
    met: set[str] = set()

    def watched(**request: Any) -> Any:
        name = request["Key"].rpartition("/")[2]
        if name not in met:
            met.add(name)
            under_way.wait(LONG_S)
        if name == "shrinks":
            raise SourceChanged("planted: it became shorter", where=name)
        assert failed.wait(LONG_S)
        if name == "refused":
            raise AccessDenied("planted: not this one", where=name)
        return upload_part(**request)

    monkeypatch.setattr(store._client, "upload_part", watched)
    stopping = threading.Event()
    paths = {name: write(tmp_path, name) for name in ("shrinks", "refused", "arrives")}
    with ThreadPoolExecutor(3) as pool:
        done: dict[str, Future[ObjectInfo]] = {
            name: pool.submit(store.upload_file, path, f"{AT}/{name}", stopping=stopping)
            for name, path in paths.items()
        }
        with pytest.raises(SourceChanged, match="shorter"):
            done["shrinks"].result(LONG_S)
        failed.set()
        with pytest.raises(AccessDenied, match="not this one"):
            done["refused"].result(LONG_S)
        assert done["arrives"].result(LONG_S).size == SIZE
    assert not stopping.is_set(), "whether to go on is the caller's to say"
    assert store.get_bytes(f"{AT}/arrives") == paths["arrives"].read_bytes()


def test_where_the_caller_says_stop_all_are_stopped(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_part, stopping = store._client.upload_part, threading.Event()

    def stops(**request: Any) -> Any:
        stopping.set()
        return upload_part(**request)

    monkeypatch.setattr(store._client, "upload_part", stops)
    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(store.upload_file, write(tmp_path, name), f"{AT}/{name}", stopping=stopping)
            for name in ("one", "other")
        ]
        for each in done:
            with pytest.raises(Cancelled, match="stopped"):
                each.result(LONG_S)
