from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from paceline.config import ObjectAccess
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
)
from paceline.manifest import fetch_manifest, publish_model
from paceline.standalone import distribute
from paceline.storage import ObjectStore, client as clients
from tests.support.conditional_s3 import conditional_s3
from tests.support.rclone import RcloneS3, rclone_s3
from tests.support.stack import CLOSED_PROXY
from tests.support.web import Answer, Call, serving


@pytest.fixture(scope="module")
def store(s3: RcloneS3) -> ObjectStore:
    store = s3.store()
    store.ensure_bucket("objects")
    return store


def test_what_was_put_comes_back(store: ObjectStore) -> None:
    url = "s3://objects/some dir/ü.bin"
    info = store.put_bytes(url, b"hello")
    assert (info.size, info.url) == (5, url)
    assert store.head(url) == info
    assert store.exists(url)
    assert store.get_bytes(url) == b"hello"


def test_an_object_beyond_the_limit_is_not_read(store: ObjectStore) -> None:
    store.put_bytes("s3://objects/large", b"x" * 100)
    with pytest.raises(InvalidInput, match="at most 99 bytes"):
        store.get_bytes("s3://objects/large", max_bytes=99)


def test_a_range_is_read_into_the_callers_memory(store: ObjectStore) -> None:
    data = os.urandom(3_000_000)
    info = store.put_bytes("s3://objects/range", data)
    into = bytearray(2_000_000)
    store.read_range_into(info.url, 500_001, memoryview(into), etag=info.etag, size=info.size)
    assert into == data[500_001:2_500_001]


def test_a_store_counts_the_bytes_that_it_read(s3: RcloneS3, tmp_path: Path) -> None:
    store = s3.store()
    store.ensure_bucket("objects")
    info = store.put_bytes("s3://objects/counted", b"x" * 1000)
    assert store.read_bytes == 0
    store.get_bytes(info.url)
    store.download_file(info.url, tmp_path / "counted")
    store.read_range_into(info.url, 900, memoryview(bytearray(100)), etag=info.etag)
    reading = store.stream_range(info.url, 0, memoryview(bytearray(1000)), etag=None)
    assert next(reading) == 1000
    reading.close()  # as of a hedged request that another one overtook
    assert store.read_bytes == 3100


def test_a_replaced_object_is_source_changed_never_a_mix(store: ObjectStore) -> None:
    pinned = store.put_bytes("s3://objects/replaced", b"one one one")
    store.put_bytes(pinned.url, b"two two two")
    into = bytearray(11)
    with pytest.raises(SourceChanged):
        store.read_range_into(pinned.url, 0, memoryview(into), etag=pinned.etag)
    assert into == bytes(11)


def test_a_shrunken_object_is_source_changed(store: ObjectStore) -> None:
    pinned = store.put_bytes("s3://objects/shrunk", b"long enough")
    store.put_bytes(pinned.url, b"short")
    for offset in (0, 4, 8):
        with pytest.raises(SourceChanged):
            store.read_range_into(pinned.url, offset, memoryview(bytearray(3)), etag=pinned.etag)


def test_files_go_up_and_down_in_parts(store: ObjectStore, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(1024) * 34 * 1024)  # beyond the multipart threshold
    info = store.upload_file(source, "s3://objects/file")
    assert info.size == source.stat().st_size
    assert store.download_file(info.url, target) == info
    assert target.read_bytes() == source.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_download_that_fails_leaves_the_old_file(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with pytest.raises(SourceMissing):
        store.download_file("s3://objects/nothing-here", target)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_prefix_is_a_directory_not_a_beginning(store: ObjectStore) -> None:
    for key in ("p/v1/a", "p/v1/b/c", "p/v10/a"):
        store.put_bytes(f"s3://objects/{key}", b"x")
    assert [info.url for info in store.list("s3://objects/p/v1")] == [
        "s3://objects/p/v1/a",
        "s3://objects/p/v1/b/c",
    ]
    assert store.delete_prefix("s3://objects/p/v1") == 2
    assert [info.url for info in store.list("s3://objects/p/")] == ["s3://objects/p/v10/a"]
    assert store.list("s3://objects/nowhere") == []
    assert store.directories("s3://objects/p") == ("v10",)


def test_a_whole_bucket_is_never_deleted_as_a_prefix(store: ObjectStore) -> None:
    with pytest.raises(InvalidInput):
        store.delete_prefix("s3://objects/")


def test_missing_bucket_and_key_are_source_missing(store: ObjectStore) -> None:
    for call in (
        lambda: store.head("s3://objects/missing"),
        lambda: store.get_bytes("s3://objects/missing"),
        lambda: store.head("s3://no-such-bucket/key"),
        lambda: store.put_bytes("s3://no-such-bucket/key", b"x"),
        lambda: store.list("s3://no-such-bucket/"),
    ):
        with pytest.raises(SourceMissing, match="s3://"):
            call()


@pytest.mark.parametrize("wrong", ["access_key", "secret_key"])
def test_wrong_credentials_are_access_denied(s3: RcloneS3, store: ObjectStore, wrong: str) -> None:
    keys = {"access_key": s3.access_key, "secret_key": s3.secret_key, wrong: "wrong"}
    stranger = ObjectStore(endpoint_url=s3.endpoint_url, **keys)
    for call in (
        lambda: stranger.head("s3://objects/x"),
        lambda: stranger.put_bytes("s3://objects/x", b"x"),
        lambda: stranger.list("s3://objects/"),
    ):
        with pytest.raises(AccessDenied, match="Check the access key"):
            call()


def test_a_stopped_server_is_service_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "RETRY_BUDGET_S", 1.0)
    with rclone_s3() as server:
        store = server.store()
        store.ensure_bucket("objects")
        info = store.put_bytes("s3://objects/x", b"x" * 10)
        server.stop()
        for call in (
            lambda: store.head(info.url),
            lambda: store.read_range_into(info.url, 0, memoryview(bytearray(1)), etag=info.etag),
        ):
            with pytest.raises(ServiceUnavailable, match=server.endpoint_url):
                call()


def test_a_proxy_does_not_catch_loopback_that_awss_settings_name(
    s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.store().ensure_bucket("objects")
    monkeypatch.setattr(clients, "_sessions", {})
    monkeypatch.setenv("HTTP_PROXY", CLOSED_PROXY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    store = ObjectStore(access_key=s3.access_key, secret_key=s3.secret_key)
    assert store.put_bytes("s3://objects/behind", b"it").size == 2


def test_an_endpoint_without_scheme_is_refused() -> None:
    with pytest.raises(InvalidInput, match="http"):
        ObjectStore(endpoint_url="127.0.0.1:9000", access_key="a", secret_key="b")


def test_a_bucket_that_is_not_there_is_told_from_an_object(store: ObjectStore) -> None:
    with pytest.raises(SourceMissing, match="bucket does not exist: got no-such-bucket"):
        store.get_bytes("s3://no-such-bucket/key")
    with pytest.raises(SourceMissing, match="object does not exist"):
        store.get_bytes("s3://objects/no-such-key")


@pytest.mark.parametrize("names_it", [True, False])
def test_a_wrong_region_is_mended_or_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, *, names_it: bool
) -> None:
    """As AWS and MinIO answer: no server here minds the region. A refused HEAD has no body."""
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    said = "The region 'us-east-1' is wrong; expecting 'eu-west-3'"
    region = "<Region>eu-west-3</Region>" if names_it else ""
    refusal = f"<Error><Code>AuthorizationHeaderMalformed</Code><Message>{said}</Message>{region}"

    def answer(call: Call) -> Answer:
        if "/eu-west-3/s3/" not in call.headers["Authorization"]:
            return 400, f"{refusal}</Error>".encode()
        return 200, b"four", {"ETag": '"e"', "Last-Modified": "Sun, 22 Nov 2026 12:00:00 GMT"}

    with serving(answer) as server:
        store = ObjectStore(endpoint_url=server.url, access_key="a", secret_key="b")
        if names_it:
            assert store.get_bytes("s3://models/a") == b"four"
            return
        with pytest.raises(AccessDenied) as refused:
            store.get_bytes("s3://models/a")
        assert len(server.calls) < 8, "it is not tried for long"
    line = refused.value.one_line()
    assert f"another region: got AuthorizationHeaderMalformed (400): {said}" in line
    assert "[objects] region" in line


def test_a_bucket_is_a_host_where_the_profile_or_awss_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = socket.getaddrinfo

    def below(host: str, *more: Any, **named: Any) -> Any:
        return find("127.0.0.1" if host == "models.s3.example" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", below)
    monkeypatch.setattr(clients, "_sessions", {})
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with rclone_s3(None, "--force-path-style=false") as server:
        (server.root / "models").mkdir()
        url = server.endpoint_url.replace("127.0.0.1", "s3.example")
        keys = {"access_key": server.access_key, "secret_key": server.secret_key}
        named = ObjectStore(ObjectAccess(endpoint_url=url, addressing="virtual", **keys))
        named.put_bytes("s3://models/a", b"four")
        assert (server.root / "models/a").read_bytes() == b"four"
        with pytest.raises(ServiceUnavailable, match=r"s3\.example"):
            ObjectStore(ObjectAccess(endpoint_url=url, **keys)).head("s3://models/a")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        assert ObjectStore(ObjectAccess(**keys)).get_bytes("s3://models/a") == b"four"


def test_a_server_that_takes_no_newer_headers_is_enough(s3: RcloneS3, tmp_path: Path) -> None:
    """Google's storage by its S3 protocol: no checksums, no chunked payloads, no batch deletes."""
    s3.store().ensure_bucket("google")
    model = tmp_path / "model"
    model.mkdir()
    (model / "large").write_bytes(bytes(40_000_000))
    (model / "small").write_bytes(b"few")
    url = "s3://google/models/m/1"
    with conditional_s3(s3, "google") as server:
        store = server.store()
        wanted = publish_model(model, url, model_id="m", version="1", store=store, link_mbit=1000)
        assert fetch_manifest(url, store) == wanted
        done = distribute(url, tmp_path / "nodes", 2, objects=store)
        assert done.origin_bytes == done.total_bytes == 40_000_003
        default = boto3.client(
            "s3",
            endpoint_url=store.endpoint_url,
            aws_access_key_id=s3.access_key,
            aws_secret_access_key=s3.secret_key,
            region_name="us-east-1",
        )
        with pytest.raises(ClientError, match="InvalidArgument"):
            default.put_object(Bucket="google", Key="other", Body=b"x")
        assert store.delete_prefix(url) > 2
        assert store.list(url) == []
