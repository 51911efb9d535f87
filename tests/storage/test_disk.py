"""A disk as an object store: the same promises as S3's, whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.errors import (
    AccessDenied,
    InvalidInput,
    PacelineError,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
    StorageFailed,
    StorageFull,
)
from paceline.storage import DiskStore, join_url


@pytest.fixture
def store() -> DiskStore:
    return DiskStore()


@pytest.fixture
def root(store: DiskStore, tmp_path: Path) -> str:
    return store.url_of(tmp_path / "a place")


def test_what_is_written_is_read_listed_and_deleted(store: DiskStore, root: str) -> None:
    assert store.list(root) == []
    info = store.put_bytes(join_url(root, "v1", "x"), b"abc")
    store.put_bytes(join_url(root, "v10", "x"), b"defg")
    assert [(each.url, each.size) for each in store.list(root)] == [
        (join_url(root, "v1", "x"), 3),
        (join_url(root, "v10", "x"), 4),
    ]
    assert [each.size for each in store.list(join_url(root, "v1"))] == [3]
    assert store.directories(root) == ("v1", "v10")
    assert store.head(info.url) == info
    assert store.get_bytes(info.url) == b"abc"
    with pytest.raises(InvalidInput, match="too large"):
        store.get_bytes(info.url, max_bytes=2)
    store.delete(info.url)
    store.delete(info.url)
    assert not store.exists(info.url)
    assert store.delete_prefix(join_url(root, "v10")) == 1
    assert store.directories(root) == ("v1",)


def test_files_go_in_and_out_whole(store: DiskStore, root: str, tmp_path: Path) -> None:
    data = os.urandom(9 * 1024 * 1024)
    (tmp_path / "in").write_bytes(data)
    url = join_url(root, "deep", "er", "object")
    told: list[int] = []
    info = store.upload_file(tmp_path / "in", url, on_bytes=told.append)
    assert (info.size, sum(told)) == (len(data), len(data))
    store.download_file(url, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    part = bytearray(1000)
    store.read_range_into(url, 77, memoryview(part), etag=store.head(url).etag)
    assert part == data[77:1077]
    with pytest.raises(SourceChanged):
        store.read_range_into(url, len(data) - 3, memoryview(part), etag="")
    etag = store.head(url).etag
    store.put_bytes(url, data[:5000])
    with pytest.raises(SourceChanged):
        store.read_range_into(url, 0, memoryview(part), etag=etag)


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "file://host/x", "file:///a/../b", "file:///a/%2e%2e/b", "file:///a\n"]
)
def test_a_url_that_is_no_plain_path_is_refused(store: DiskStore, url: str) -> None:
    with pytest.raises(InvalidInput):
        store.put_bytes(url, b"")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EIO, StorageFailed),
        (errno.ESTALE, ServiceUnavailable),
        (errno.EROFS, AccessDenied),
    ],
)
def test_a_write_that_fails_leaves_what_was_there(
    store: DiskStore,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[PacelineError],
) -> None:
    url = join_url(root, "x")
    store.put_bytes(url, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("paceline.storage.disk.os.fsync", fail)
    with pytest.raises(kind):
        store.put_bytes(url, b"new")
    assert store.get_bytes(url) == b"old"
    assert [path.name for path in store.path_of(root).iterdir()] == ["x"]


def test_leftovers_of_a_killed_write_are_never_listed_and_can_be_removed(
    store: DiskStore, root: str
) -> None:
    store.put_bytes(join_url(root, "d", "x"), b"1")
    left = store.path_of(root) / "d" / ".y.1.2.part"
    left.write_bytes(b"half")
    assert [each.size for each in store.list(root)] == [1]
    assert store.abort_uploads(root, older_than_s=3600) == 0
    assert store.abort_uploads(root) == 1
    assert not left.exists()


def test_what_is_missing_says_so(store: DiskStore, root: str) -> None:
    with pytest.raises(SourceMissing):
        store.get_bytes(join_url(root, "x"))
    with pytest.raises(SourceMissing):
        store.head(root)
