"""What only a full S3 server shows: If-Match is honoured, versions are kept, uploads resume."""

from __future__ import annotations

import base64
import datetime
import os
import threading
import time
from pathlib import Path

import botocore.auth
import pytest

from paceline.config import ObjectAccess
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    PermanentError,
    SourceChanged,
    SourceMissing,
)
from paceline.manifest import publish_model, verify_directory
from paceline.standalone import distribute
from paceline.storage import ObjectStore, Signed, uploads
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


@pytest.mark.parametrize(
    "settings",
    [
        {"parameters": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "models"}},
        {"customer_key_env": "KEY_OF_THE_BUCKET"},
    ],
    ids=["SSE-KMS", "SSE-C"],
)
def test_objects_are_encrypted_as_the_profile_says(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Whole objects, parts, ranges and what is signed for a reader without credentials."""
    monkeypatch.setenv("KEY_OF_THE_BUCKET", base64.b64encode(os.urandom(32)).decode())
    monkeypatch.setattr(uploads, "PART_BYTES", 5 * 1024 * 1024)
    access = ObjectAccess.model_validate(store.access.model_dump() | settings)
    encrypts, plain = ObjectStore(access), store
    model = write_model(tmp_path / "model", 12_000_000)
    url = f"s3://real/models/encrypted-{len(str(settings))}/1"
    manifest = publish_model(model, url, model_id="m", version="1", store=encrypts, link_mbit=1000)

    def sign(method: str, asked: str, version_id: str) -> Signed:
        return Signed(encrypts.signed(method, asked, version_id, 60), 60)

    without = access.model_copy(update={"access_key": "", "secret_key": ""})
    for reader in (encrypts, ObjectStore(without, sign=sign)):
        done = distribute(url, tmp_path / f"nodes-{id(reader)}", 2, objects=reader)
        for receipt in done.receipts:
            verify_directory(Path(receipt.path), manifest)
    if "customer_key_env" in settings:
        with pytest.raises(PermanentError, match=r"InvalidArgument \(400\): .*Customer provided"):
            plain.get_bytes(f"{url}/manifest.json")
        monkeypatch.setenv("KEY_OF_THE_BUCKET", "c2hvcnQ=")
        with pytest.raises(InvalidInput, match=r"got \$KEY_OF_THE_BUCKET of 5 bytes"):
            ObjectStore(access).head(url)
        return
    key = f"models/{url.split('/')[4]}/1/manifest.json"
    head = plain._client.head_object(Bucket="real", Key=key)
    assert {each: head.get(each) for each in settings["parameters"]} == settings["parameters"]


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
