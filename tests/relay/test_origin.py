"""Reading the source over real S3: parallel ranges, pinned, checked, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import DeploymentFailed
from paceline.manifest import FileEntry, Manifest, publish_model, verify_directory
from paceline.objects import ObjectStore
from paceline.relay.limits import SessionLimits
from paceline.relay.local import LocalFleet
from paceline.relay.origin import S3Reader, range_bytes
from paceline.wire.plan import WorkerLanes
from tests.relay.kit import DEPLOYMENT, paper_manifest, plan, write_model
from tests.support.rclone import RcloneS3

URL = "s3://relay/models/m/v1"
NAMES = ["node-0", "node-1"]


@pytest.fixture
def store(s3: RcloneS3) -> ObjectStore:
    made = s3.store()
    made.ensure_bucket("relay")
    made.delete_prefix("s3://relay/models")
    return made


@pytest.fixture
def manifest(tmp_path: Path, store: ObjectStore) -> Manifest:
    model = write_model(tmp_path / "model", 3_000_000)
    return publish_model(
        model, URL, model_id="m", version="v1", store=store, link_mbit=1000, piece_bytes=16_384
    )


def lanes(manifest: Manifest, fleet: LocalFleet) -> dict[str, WorkerLanes]:
    planned = plan(manifest, fleet.addresses, source_url=URL)
    return {each.worker_id: each for each in planned.workers}


def opener(store: ObjectStore) -> Callable[[str], S3Reader]:
    return lambda url: S3Reader(url, store)


def test_a_model_comes_from_s3_once_for_all(
    tmp_path: Path, store: ObjectStore, manifest: Manifest
) -> None:
    with LocalFleet(tmp_path / "nodes", NAMES, open_source=opener(store)) as fleet:
        fleet.deploy(manifest, lanes(manifest, fleet))
        receipts = fleet.receipts(DEPLOYMENT)
    assert sum(r.origin_bytes for r in receipts.values()) == manifest.total_size
    for receipt in receipts.values():
        verify_directory(Path(receipt.path), manifest)


def test_a_flipped_byte_in_the_bucket_names_url_and_piece(
    tmp_path: Path, s3: RcloneS3, store: ObjectStore, manifest: Manifest
) -> None:
    with (s3.root / "relay/models/m/v1/shards/b.bin").open("r+b") as file:
        file.seek(100_000)
        file.write(b"!")
    limits = SessionLimits(backoff_s=0.05)
    with LocalFleet(
        tmp_path / "nodes", NAMES[:1], open_source=opener(store), limits=limits
    ) as fleet:
        fleet.deploy(manifest, lanes(manifest, fleet))
        with pytest.raises(DeploymentFailed, match="CorruptData") as caught:
            fleet.receipts(DEPLOYMENT)
        assert URL in str(caught.value)
        assert "3 times" in str(caught.value)
        assert fleet.drivers["node-0"].store.versions() == []


class Replacing(S3Reader):
    """Replaces the object once it has been read from."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        super().__init__(url, store)
        self._objects, self._done, self._one_by_one = store, False, threading.Lock()

    def read(self, file: FileEntry, offset: int, view: memoryview) -> None:
        with self._one_by_one:
            super().read(file, offset, view)
            if not self._done and file.path == "shards/a.bin":
                self._done = True
                self._objects.put_bytes(f"{URL}/{file.path}", bytes(file.size))


def test_an_object_replaced_midway_is_said_to_have_changed_and_never_mixed(
    tmp_path: Path, store: ObjectStore, manifest: Manifest
) -> None:
    with LocalFleet(
        tmp_path / "nodes", NAMES[:1], open_source=lambda url: Replacing(url, store)
    ) as fleet:
        fleet.deploy(manifest, lanes(manifest, fleet))
        with pytest.raises(DeploymentFailed, match="SourceChanged"):
            fleet.receipts(DEPLOYMENT)


def test_a_missing_object_fails_at_once(
    tmp_path: Path, store: ObjectStore, manifest: Manifest
) -> None:
    store.delete(f"{URL}/shards/b.bin")
    with LocalFleet(tmp_path / "nodes", NAMES[:1], open_source=opener(store)) as fleet:
        fleet.deploy(manifest, lanes(manifest, fleet))
        with pytest.raises(DeploymentFailed, match="SourceMissing"):
            fleet.receipts(DEPLOYMENT)


def test_ranges_are_short_for_small_models_and_never_beyond_a_chunk() -> None:
    small = paper_manifest(64, piece_bytes=1024, chunk_pieces=16)
    assert range_bytes(small) == 4096
    tiny = paper_manifest(4, piece_bytes=1024)
    assert range_bytes(tiny) == 1024
