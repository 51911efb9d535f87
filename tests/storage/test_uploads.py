"""Files to objects: in parts, resumed, refused when damaged; over a real S3 server."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.errors import AccessDenied, Cancelled, ServiceUnavailable, SourceChanged
from paceline.storage import ObjectInfo, ObjectStore, client as patience, uploads
from tests.support.rclone import RcloneS3

URL = "s3://uploads/model/weights.bin"
PART = 5 * 1024 * 1024  # the least that S3 knows
SIZE = 3 * PART + 12_345


@pytest.fixture
def store(s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(uploads, "PART_BYTES", PART)
    monkeypatch.setattr(patience, "BACKOFF_S", 0.001)
    made = s3.store()
    made.ensure_bucket("uploads")
    made.abort_uploads("s3://uploads/model")
    made.delete_prefix("s3://uploads/model")
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(Random(7).randbytes(SIZE))
    return path


class Crash(BaseException):
    """What ends a process before it can clean up."""


def crash_after(store: ObjectStore, parts: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the store's client upload ``parts`` parts, then die in each further one."""
    client, sent, there, changed = store._client, [], [], threading.Condition()
    upload_part = client.upload_part

    def counted(**request: Any) -> Any:
        with changed:
            if len(sent) >= parts:
                # The first to fail ends those under way: what was to arrive arrives before.
                assert changed.wait_for(lambda: len(there) == parts, 30)
                raise Crash
            sent.append(request["PartNumber"])
        answer = upload_part(**request)
        with changed:
            there.append(request["PartNumber"])
            changed.notify_all()
        return answer

    monkeypatch.setattr(client, "upload_part", counted)
    return sent


def die_after(store: ObjectStore, parts: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload ``parts`` parts of ``file`` and die; the next store goes on from there."""
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_after(store, parts, patch)
        store.upload_file(file, URL)


def read(store: ObjectStore) -> bytes:
    return store.get_bytes(URL)


def test_an_upload_that_died_goes_on_with_its_parts(
    store: ObjectStore, s3: RcloneS3, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after(store, 2, file, monkeypatch)
    assert not store.exists(URL)
    again = s3.store()
    sent = crash_after(again, 99, monkeypatch)
    again.upload_file(file, URL)
    assert len(sent) == 2
    assert again.reused_bytes >= PART + 12_345
    assert read(again) == file.read_bytes()
    assert again.abort_uploads("s3://uploads/model") == 0


def test_parts_of_other_bytes_are_sent_again(
    store: ObjectStore, s3: RcloneS3, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after(store, 3, file, monkeypatch)
    file.write_bytes(Random(8).randbytes(SIZE))  # the same size, the same number of parts
    again = s3.store()
    again.upload_file(file, URL)
    assert again.reused_bytes == 0
    assert read(again) == file.read_bytes()


def test_parts_of_another_cut_are_left_alone(
    store: ObjectStore, s3: RcloneS3, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after(store, 1, file, monkeypatch)
    with file.open("ab") as longer:
        longer.write(bytes(PART))
    monkeypatch.setattr(uploads, "PART_BYTES", PART + 1024 * 1024)
    again = s3.store()
    again.upload_file(file, URL)
    assert again.reused_bytes == 0
    assert read(again) == file.read_bytes()
    assert again.abort_uploads("s3://uploads/model") == 1  # the other one, when it is asked for


def test_only_old_uploads_are_aborted_when_an_age_is_given(
    store: ObjectStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after(store, 1, file, monkeypatch)
    assert store.abort_uploads("s3://uploads/model", older_than_s=3600) == 0
    assert store.abort_uploads("s3://uploads/model") == 1


def test_an_upload_ended_from_outside_begins_anew(
    store: ObjectStore, s3: RcloneS3, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after(store, 1, file, monkeypatch)
    again = s3.store()
    resume = uploads.PartsUpload._resume

    def too_late(self: uploads.PartsUpload) -> None:
        resume(self)
        store.abort_uploads("s3://uploads/model")

    monkeypatch.setattr(uploads.PartsUpload, "_resume", too_late)
    again.upload_file(file, URL)
    assert read(again) == file.read_bytes()


def test_a_file_that_shrinks_meanwhile_is_no_object(
    store: ObjectStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    md5 = uploads.md5_of

    def shrinking(body: uploads.Body) -> bytes:
        with file.open("r+b") as shorter:
            shorter.truncate(PART)
        return md5(body)

    monkeypatch.setattr(uploads, "md5_of", shrinking)
    with pytest.raises(SourceChanged, match="shorter"):
        store.upload_file(file, URL)
    assert not store.exists(URL)


def test_a_stopped_upload_ends_within_a_part_and_can_be_resumed(
    store: ObjectStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, client, began = threading.Event(), store._client, []
    upload_part = client.upload_part

    def stopped(**request: Any) -> Any:
        began.append(request["PartNumber"])
        if request["PartNumber"] == 2:
            stopping.set()
        return upload_part(**request)

    monkeypatch.setattr(uploads, "PARALLEL", 1)
    monkeypatch.setattr(client, "upload_part", stopped)
    with pytest.raises(Cancelled):
        store.upload_file(file, URL, stopping=stopping)
    assert began == [1, 2], "nothing was tried again, nothing else was begun"
    monkeypatch.setattr(client, "upload_part", upload_part)
    before = store.reused_bytes
    assert store.upload_file(file, URL).size == SIZE
    assert store.reused_bytes - before == PART


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_a_small_file_is_known_by_its_digest(store: ObjectStore, file: Path, size: int) -> None:
    file.write_bytes(bytes(size))
    digest = hashlib.sha256(bytes(size)).hexdigest()
    assert not store.holds(URL, size, digest)
    store.upload_file(file, URL, digest)
    assert store.holds(URL, size, digest)
    assert not store.holds(URL, size, "0" * 64)
    assert not store.holds(URL, size + 1, digest)


@pytest.mark.parametrize("call", ["upload_part", "complete_multipart_upload"])
def test_two_that_upload_one_file_at_once_share_it_and_both_succeed(
    store: ObjectStore, s3: RcloneS3, file: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    first, meanwhile = getattr(store._client, call), threading.Lock()
    others: list[ObjectStore] = []

    def late(**request: Any) -> Any:
        with meanwhile:
            if not others:  # the other one finds this upload, goes on with it and ends it
                others.append(s3.store())
                others[0].upload_file(file, URL, digest)
        return first(**request)

    monkeypatch.setattr(store._client, call, late)
    assert store.upload_file(file, URL, digest).size == SIZE
    assert read(store) == file.read_bytes()
    assert store.abort_uploads("s3://uploads/model") == 0


def test_an_upload_always_ended_from_outside_is_given_up_by_name(
    store: ObjectStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_part, client = store._client.upload_part, store._client

    def aborted(**request: Any) -> Any:
        where = {each: request[each] for each in ("Bucket", "Key", "UploadId")}
        with contextlib.suppress(client.exceptions.NoSuchUpload):
            client.abort_multipart_upload(**where)
        return upload_part(**request)

    monkeypatch.setattr(client, "upload_part", aborted)
    with pytest.raises(ServiceUnavailable, match=r"another process.*Find the other writer"):
        store.upload_file(file, URL, "0" * 64)
    assert not store.exists(URL)


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
            under_way.wait(30.0)
        if name == "shrinks":
            raise SourceChanged("planted: it became shorter", where=name)
        assert failed.wait(30.0)
        if name == "refused":
            raise AccessDenied("planted: not this one", where=name)
        return upload_part(**request)

    monkeypatch.setattr(store._client, "upload_part", watched)
    stopping = threading.Event()
    paths = {name: tmp_path / name for name in ("shrinks", "refused", "arrives")}
    for name, path in paths.items():
        path.write_bytes(Random(name).randbytes(SIZE))
    with ThreadPoolExecutor(3) as pool:
        done: dict[str, Future[ObjectInfo]] = {
            name: pool.submit(
                store.upload_file, path, f"s3://uploads/model/{name}", stopping=stopping
            )
            for name, path in paths.items()
        }
        with pytest.raises(SourceChanged, match="shorter"):
            done["shrinks"].result(30.0)
        failed.set()
        with pytest.raises(AccessDenied, match="not this one"):
            done["refused"].result(30.0)
        assert done["arrives"].result(30.0).size == SIZE
    assert not stopping.is_set(), "whether to go on is the caller's to say"
    assert store.get_bytes("s3://uploads/model/arrives") == paths["arrives"].read_bytes()
