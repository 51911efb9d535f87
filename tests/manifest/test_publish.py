from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import (
    Cancelled,
    Conflict,
    InvalidInput,
    InvalidManifest,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing as Missing,
    UntrustedManifest,
)
from paceline.manifest import (
    MANIFEST_FILE,
    Manifest,
    PublishProgress,
    TrustPolicy,
    build,
    build_manifest,
    fetch_manifest,
    load_key,
    new_key,
    publish_model,
    verify_directory,
    write_manifest,
)
from paceline.storage import ObjectStore, join_url, uploads
from tests.support.rclone import RcloneS3


class Recorder(ObjectStore):
    """A real store that remembers what it wrote, and fails to write what it is told to."""

    def __init__(self, s3: RcloneS3) -> None:
        super().__init__(
            endpoint_url=s3.endpoint_url, access_key=s3.access_key, secret_key=s3.secret_key
        )
        self.written: list[str] = []
        self.fail = ""
        self._others_there = threading.Semaphore(0)

    def upload_file(  # type: ignore[override]
        self, path: Path | str, url: str, sha256: str = "", **how: Any
    ) -> object:
        if self.fail and url.endswith(self.fail):
            for _ in range(2):  # a failure ends the others where they are: first they arrive
                assert self._others_there.acquire(timeout=30)
            raise ServiceUnavailable("planted")
        self.written.append(url)
        info = super().upload_file(path, url, sha256, **how)
        self._others_there.release()
        return info

    def put_bytes(self, url: str, data: bytes) -> object:  # type: ignore[override]
        self.written.append(url)
        return super().put_bytes(url, data)


@pytest.fixture
def store(s3: RcloneS3) -> Recorder:
    store = Recorder(s3)
    store.ensure_bucket("manifests")
    return store


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://manifests/{request.node.name}/1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for name, size in (("config.json", 300), ("weights", 4_000_000), ("sub/empty", 0)):
        (directory / name).write_bytes(os.urandom(size))
    return directory


def publish(model: Path, url: str, store: ObjectStore, **options: object) -> Manifest:
    given = {"model_id": "m", "version": "1", "link_mbit": 40.0, **options}
    return publish_model(model, url, store=store, **given)  # type: ignore[arg-type]


def test_a_published_model_comes_back_whole(
    model: Path, url: str, store: Recorder, tmp_path: Path
) -> None:
    manifest = publish(model, url, store)
    assert store.written[-1] == join_url(url, MANIFEST_FILE), "the manifest goes last"
    fetched = fetch_manifest(url, store)
    assert fetched == manifest
    for file in fetched.files:
        target = tmp_path / "back" / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        store.download_file(join_url(url, file.path), target)
    verify_directory(tmp_path / "back", fetched)


def test_publishing_twice_uploads_nothing_even_for_another_link(
    model: Path, url: str, store: Recorder
) -> None:
    first = publish(model, url, store)
    store.written.clear()
    slow = build_manifest(model, model_id="m", version="1", link_mbit=1)
    assert slow.chunk_bytes != first.chunk_bytes
    assert publish(model, url, store, link_mbit=1.0) == first
    assert store.written == []


def test_a_version_published_with_sha256_pieces_keeps_them(
    model: Path, url: str, store: Recorder
) -> None:
    first = publish(model, url, store, piece_hash="sha256")
    store.written.clear()
    assert publish(model, url, store) == first
    assert store.written == []
    with pytest.raises(Conflict, match="new version"):
        publish(model, url, store, piece_hash="blake3")


def test_a_foreign_manifest_json_is_refused_and_our_own_is_accepted(
    model: Path, url: str, store: Recorder
) -> None:
    (model / MANIFEST_FILE).write_text('{"weights": "theirs"}')
    with pytest.raises(InvalidManifest, match=r"is not Paceline's.*Rename"):
        publish(model, url, store)
    assert store.written == []
    (model / MANIFEST_FILE).unlink()
    write_manifest(model, build_manifest(model, model_id="old", version="9", link_mbit=1))
    assert publish(model, url, store).model_id == "m"


def test_no_version_is_called_active(model: Path, url: str, store: Recorder) -> None:
    with pytest.raises(InvalidManifest, match="active"):
        publish(model, url, store, version="active")


def test_a_lost_file_is_restored(model: Path, url: str, store: Recorder) -> None:
    publish(model, url, store)
    store.delete(join_url(url, "weights"))
    store.written.clear()
    publish(model, url, store)
    assert store.written == [join_url(url, "weights")]


def test_other_bytes_at_a_version_are_a_conflict_and_change_nothing(
    model: Path, url: str, store: Recorder
) -> None:
    first = publish(model, url, store)
    (model / "config.json").write_bytes(b"other")
    store.written.clear()
    with pytest.raises(Conflict, match=first.digest):
        publish(model, url, store)
    assert store.written == []
    assert fetch_manifest(url, store) == first


def test_a_publish_that_broke_off_is_not_there_and_can_be_done_again(
    model: Path, url: str, store: Recorder
) -> None:
    store.fail = "config.json"
    with pytest.raises(ServiceUnavailable, match="planted"):
        publish(model, url, store)
    with pytest.raises(Missing):
        fetch_manifest(url, store)
    store.fail = ""
    (model / "weights").write_bytes(b"z" * 4_000_000)  # what the first try uploaded is stale
    manifest = publish(model, url, store)
    assert store.get_bytes(join_url(url, "weights")) == b"z" * 4_000_000
    assert fetch_manifest(url, store) == manifest


def test_a_publish_that_broke_off_uploads_only_what_is_missing(
    model: Path, url: str, store: Recorder
) -> None:
    store.fail = "config.json"
    with pytest.raises(ServiceUnavailable):
        publish(model, url, store)
    store.fail = ""
    store.written.clear()
    publish(model, url, store)
    assert sorted(store.written) == [join_url(url, "config.json"), join_url(url, MANIFEST_FILE)]


def test_a_version_beside_a_newer_one_is_refused_unless_asked(
    model: Path, url: str, store: Recorder
) -> None:
    parent = url.removesuffix("/1")
    publish(model, f"{parent}/2", store, version="2")
    store.put_bytes(f"{parent}/3/weights", b"a publish that broke off")
    store.written.clear()
    with pytest.raises(Conflict, match="later than 2"):
        publish(model, url, store)
    assert store.written == []
    publish(model, url, store, allow_older=True)
    publish(model, url, store)
    publish(model, f"{parent}/elsewhere", store)  # not where versions stand side by side


def test_a_signature_comes_with_the_manifest(
    model: Path, url: str, store: Recorder, tmp_path: Path
) -> None:
    policy = TrustPolicy(trusted=(new_key(tmp_path / "key"),), required=True)
    unsigned = publish(model, url, store)
    with pytest.raises(UntrustedManifest, match=url):
        fetch_manifest(url, store, policy)
    store.written.clear()
    signed = publish(model, url, store, key=load_key(tmp_path / "key"))
    assert store.written == [join_url(url, MANIFEST_FILE)]
    assert fetch_manifest(url, store, policy) == signed
    assert signed.digest == unsigned.digest


def test_a_damaged_manifest_names_its_place(model: Path, url: str, store: Recorder) -> None:
    publish(model, url, store)
    store.put_bytes(join_url(url, MANIFEST_FILE), b"{}")
    with pytest.raises(InvalidManifest, match="s3://manifests"):
        fetch_manifest(url, store)


def test_a_local_directory_is_a_source_too(model: Path) -> None:
    with pytest.raises(Missing, match="Publish"):
        fetch_manifest(str(model), None)
    manifest = build_manifest(model, model_id="m", version="1", link_mbit=40)
    write_manifest(model, manifest)
    assert fetch_manifest(str(model), None) == manifest


def test_an_object_url_wants_a_store() -> None:
    with pytest.raises(InvalidInput, match="no object store"):
        fetch_manifest("s3://bucket/model", None)


@pytest.mark.parametrize("part_bytes", [16 * 1024 * 1024, 1024 * 1024], ids=["whole", "in parts"])
def test_a_file_changed_after_digesting_is_never_published(
    model: Path, url: str, store: Recorder, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", part_bytes)
    weights, before = model / "weights", (model / "weights").read_bytes()
    mtime, upload = weights.stat().st_mtime_ns, uploads.send_file

    def meddle(client: Any, endpoint: str, path: Path, *given: Any, **more: Any) -> int:
        if path == weights:
            weights.write_bytes(bytes(len(before)))
            os.utime(weights, ns=(1, 1))
        return upload(client, endpoint, path, *given, **more)

    with monkeypatch.context() as patch, pytest.raises(SourceChanged, match="weights"):
        patch.setattr("paceline.storage.store.send_file", meddle)
        publish(model, url, store)
    weights.write_bytes(before)
    os.utime(weights, ns=(mtime, mtime))  # as it was: what is there may look like it
    publish(model, url, store)
    assert store.get_bytes(join_url(url, "weights")) == before
    assert not store.abort_uploads(url)


def test_a_publish_that_is_stopped_shows_no_version(model: Path, url: str, store: Recorder) -> None:
    stopping = threading.Event()

    def stop_at_upload(moved: PublishProgress) -> None:
        if moved.stage == "upload":
            stopping.set()

    with pytest.raises(Cancelled):
        publish(model, url, store, stopping=stopping, on_progress=stop_at_upload)
    assert not store.exists(join_url(url, MANIFEST_FILE))
    stopping.set()
    with pytest.raises(Cancelled):
        publish(model, url, store, stopping=stopping)
    publish(model, url, store)
    assert fetch_manifest(url, store).total_size == 4_000_300


def test_a_file_that_fails_ends_the_digests_of_the_others(
    tmp_path: Path, url: str, store: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stopping = tmp_path / "two", threading.Event()
    model.mkdir()
    for name in ("a", "b"):
        (model / name).write_bytes(bytes(2_000_000))
    read = build._Reader.read

    def planted(self: build._Reader, length: int) -> memoryview:
        if self._where.name == "b":
            raise SourceChanged("planted", where=self._where)
        assert stopping.wait(30), "a long file hears that another one failed"
        return read(self, length)

    monkeypatch.setattr(build._Reader, "read", planted)
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    with pytest.raises(SourceChanged, match="planted"):
        publish(model, url, store, stopping=stopping, chunk_bytes=1_000_000)


def test_who_was_quicker_with_other_files_is_not_overwritten(
    model: Path, url: str, store: Recorder, s3: RcloneS3, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights").write_bytes(b"theirs")
    theirs: list[Manifest] = []

    def meanwhile(moved: PublishProgress) -> None:
        if moved.stage == "upload" and moved.is_over and not theirs:
            theirs.append(publish(other, url, s3.store()))

    with pytest.raises(Conflict, match="never changes"):
        publish(model, url, store, on_progress=meanwhile)
    assert fetch_manifest(url, store) == theirs[0]
