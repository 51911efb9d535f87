"""What only a full S3 server shows: If-Match is honoured, versions are kept, uploads resume."""

from __future__ import annotations

import datetime
import os
import threading
import time
from pathlib import Path

import botocore.auth
import pytest

from paceline.errors import AccessDenied, SourceChanged, SourceMissing
from paceline.manifest import fetch_manifest, publish_model, verify_directory
from paceline.standalone import distribute
from paceline.storage import ObjectStore, uploads
from tests.relay.kit import write_model

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("rgw")]  # one server
URL = "s3://real/object"


@pytest.fixture(scope="module")
def store(rgw: ObjectStore) -> ObjectStore:
    rgw.ensure_bucket("real")
    return rgw


def read(store: ObjectStore, etag: str, version_id: str | None = None) -> bytes:
    into = bytearray(1000)
    store.read_range_into(
        URL, 500, memoryview(into), etag=etag, size=100_000, version_id=version_id
    )
    return bytes(into)


def test_a_replaced_object_is_refused_by_the_server_itself(store: ObjectStore) -> None:
    first, second = os.urandom(100_000), os.urandom(100_000)
    info = store.put_bytes(URL, first)
    assert read(store, info.etag) == first[500:1500]
    store.put_bytes(URL, second)
    with pytest.raises(SourceChanged, match="412"):
        read(store, info.etag)


def test_with_versioning_the_content_that_was_pinned_is_read_to_the_end(
    store: ObjectStore,
) -> None:
    store.ensure_bucket("versions")
    store._client.put_bucket_versioning(
        Bucket="versions", VersioningConfiguration={"Status": "Enabled"}
    )
    url, first = "s3://versions/object", os.urandom(100_000)
    store.put_bytes(url, first)
    info = store.head(url)
    assert info.version_id
    store.put_bytes(url, os.urandom(100_000))
    into = bytearray(100_000)
    store.read_range_into(
        url, 0, memoryview(into), etag=info.etag, size=info.size, version_id=info.version_id
    )
    assert bytes(into) == first


def test_parts_of_a_dead_upload_are_gone_on_with(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 5 * 1024 * 1024)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(16 * 1024 * 1024))
    client, upload_part = store._client, store._client.upload_part
    begun: list[object] = []
    lock, uploaded = threading.Lock(), threading.Semaphore(0)

    class Crash(BaseException):
        pass

    def dying(**request: object) -> object:
        with lock:
            is_first = len(begun) < 2
            begun.append(request["PartNumber"])
        if is_first:
            try:
                return upload_part(**request)
            finally:
                uploaded.release()
        uploaded.acquire(timeout=30)  # dies once a part is there
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(client, "upload_part", dying)
        store.upload_file(file, "s3://real/large")
    before = store.reused_bytes
    store.upload_file(file, "s3://real/large")
    assert store.reused_bytes > before  # the part that came first: 5 MiB, or the last one
    assert store.get_bytes("s3://real/large") == file.read_bytes()
    assert store.abort_uploads("s3://real/large") == 0


def test_a_model_is_published_fetched_and_distributed(store: ObjectStore, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", 900_000)
    url = "s3://real/models/m/1"
    manifest = publish_model(model, url, model_id="m", version="1", store=store, link_mbit=1000)
    assert fetch_manifest(url, store) == manifest
    done = distribute(url, tmp_path / "nodes", 3, objects=store)
    assert done.origin_bytes == done.total_bytes
    for receipt in done.receipts:
        verify_directory(Path(receipt.path), manifest)
    uploaded = store.uploaded_files
    publish_model(model, url, model_id="m", version="1", store=store, link_mbit=1000)
    assert store.uploaded_files == uploaded


def test_its_errors_are_ours(store: ObjectStore) -> None:
    with pytest.raises(SourceMissing):
        store.head("s3://real/nothing")
    with pytest.raises(SourceMissing, match="bucket"):
        store.put_bytes("s3://no-such-bucket/x", b"x")
    stranger = ObjectStore(endpoint_url=store.endpoint_url, access_key="a", secret_key="b" * 20)
    with pytest.raises(AccessDenied):
        stranger.put_bytes(URL, b"x")


def test_a_clock_that_is_off_is_named_and_not_the_access_key(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_bytes(URL, b"now")
    ahead_s = 20 * 60.0
    ahead = botocore.auth.get_current_datetime() + datetime.timedelta(seconds=ahead_s)
    now_s = time.time
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: ahead)
    monkeypatch.setattr("paceline.storage.client.time.time", lambda: now_s() + ahead_s)
    with pytest.raises(AccessDenied, match=r"clock here is \+20 min .*Set the clock"):
        store.get_bytes(URL)
