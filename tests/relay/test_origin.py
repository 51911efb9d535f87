"""Reading the source over real S3: parallel ranges, pinned, checked, counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import AccessDenied, DeploymentFailed
from paceline.manifest import FileEntry, Manifest, publish_model, verify_directory
from paceline.relay import DirectoryReader, OnSocket, OriginStream, S3Reader, range_bytes
from paceline.relay.protocol import Extent, SessionEvent, SessionLimits
from paceline.relay.sources import below_roots
from paceline.relay.store import Store
from paceline.relay.transport import MAX_SLEEP_S, Pacer, PullSpec, ReadCoalescer, TransferCounters
from paceline.schemas import Source, WorkerLanes
from paceline.storage import ObjectStore
from tests.relay.kit import DEPLOYMENT, manifest_of, paper_manifest, plan, until, write_model
from tests.support.local_fleet import LocalFleet
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
        assert "arrived corrupt" in str(caught.value)
        assert fleet.drivers["node-0"].store.versions() == []


def test_no_reader_sleeps_where_nothing_is_slow(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(self: ReadCoalescer, wait_s: float) -> bool:
        slept.append(wait_s)
        return plain(self, wait_s)

    plain = ReadCoalescer.sleep
    monkeypatch.setattr(ReadCoalescer, "sleep", sleep)
    model = write_model(tmp_path / "model", 60_000_000)
    manifest = publish_model(model, URL, model_id="m", version="v1", store=store, link_mbit=1000)
    with LocalFleet(tmp_path / "nodes", NAMES, open_source=opener(store)) as fleet:
        fleet.deploy(manifest, lanes(manifest, fleet))
        fleet.receipts(DEPLOYMENT)
    assert sum(min(each, MAX_SLEEP_S) for each in slept) < 5, "at 5 MB/s it were twelve seconds"


class Replacing(S3Reader):
    """Replaces the object once it has been read from."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        super().__init__(url, store)
        self._objects, self._done, self._one_by_one = store, False, threading.Lock()

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        with self._one_by_one:
            yield from super().stream(file, offset, view, on_socket)
            if not self._done and file.path == "shards/a.bin":
                self._done = True
                self._objects.put_bytes(f"{URL}/{file.path}", bytes(file.size))


def test_an_object_replaced_midway_fails_as_changed_and_is_never_mixed(
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


def test_ranges_grow_up_to_a_chunk_and_are_whole_pieces() -> None:
    assert range_bytes(paper_manifest(64, piece_bytes=1024, chunk_pieces=16)) == 16_384
    assert range_bytes(paper_manifest(4, piece_bytes=1024, chunk_pieces=1)) == 1024


class Watched(DirectoryReader):
    """A source that lets one range go on only as far as it is told, and notes what was asked."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked: list[tuple[str, int, int]] = []
        self.pinned: list[str] = []
        self.gate = threading.Semaphore(0)
        self.step = 16_384  # bytes

    def pin(self, file: FileEntry) -> None:
        self.pinned.append(file.path)

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        self.asked.append((file.path, offset, len(view)))
        done = 0
        for filled in super().stream(file, offset, view, on_socket):
            while done < filled:
                self.gate.acquire()
                done = min(filled, done + self.step)
                yield done


class Pulled:
    """An OriginStream of one directory into a store of its own, and what it reported."""

    def __init__(self, tmp_path: Path, size: int, **cut: int) -> None:
        model = write_model(tmp_path / "model", size)
        self.manifest = manifest_of(model, **cut)
        self.reader = Watched(model)
        self.staging = Store(tmp_path / "store").open(self.manifest)
        self.events: list[SessionEvent] = []
        self.source = Source(kind="origin", url=str(model))
        self.stream = OriginStream(
            PullSpec(
                source=self.source,
                stream=1,
                worker_id="node-0",
                staging=self.staging,
                pacer=Pacer(None),
                counters=TransferCounters(),
                keepalive_s=0.1,
                report=self.events.append,
            ),
            self.reader,
        )

    @property
    def verified(self) -> int:
        return self.staging.verified.count


def test_a_piece_is_forwarded_before_its_range_is_complete(tmp_path: Path) -> None:
    pulled = Pulled(tmp_path, 900_000)
    part = pulled.manifest.file_pieces(2)  # config.json, empty, shards/a.bin
    pulled.stream.request(Extent(part.start, part.start + 16))  # one range of 256 KiB
    pulled.reader.gate.release()
    until(lambda: pulled.verified == 1)
    assert list(pulled.staging.verified.common(Extent(part.start, part.stop)))
    for _ in range(200):
        pulled.reader.gate.release()
    until(lambda: pulled.verified == 16)
    pulled.stream.close()


def test_ranges_begin_small_and_grow(tmp_path: Path) -> None:
    pulled = Pulled(tmp_path, 60_000_000, piece_bytes=65_536, chunk_bytes=16 * 1024 * 1024)
    pulled.reader.step = 1024 * 1024
    pulled.reader.gate.release(5_000)
    pulled.stream.request(Extent(0, pulled.manifest.piece_count))
    until(lambda: pulled.verified == pulled.manifest.piece_count)
    pulled.stream.close()
    sizes = [size for path, _, size in pulled.reader.asked if path == "shards/a.bin"]
    assert min(sizes) <= 256 * 1024 * 2
    assert max(sizes) >= 4 * 1024 * 1024
    assert len(sizes) < 40


def test_pieces_asked_for_one_by_one_are_read_in_one_range(tmp_path: Path) -> None:
    pulled = Pulled(tmp_path, 900_000)
    part = pulled.manifest.file_pieces(2)
    for piece in range(part.start, part.start + 30):
        pulled.stream.request(Extent(piece, piece + 1))
    for _ in range(200):
        pulled.reader.gate.release()
    until(lambda: pulled.verified == 30)
    pulled.stream.close()
    assert len(pulled.reader.asked) < 12


def test_the_next_files_are_looked_up_before_they_are_wanted(tmp_path: Path) -> None:
    pulled = Pulled(tmp_path, 900_000)
    pulled.stream.request(Extent(0, 1))
    until(lambda: len(pulled.reader.pinned) >= 3)
    assert pulled.reader.pinned[:3] == ["empty", "shards/a.bin", "shards/b.bin"]
    pulled.stream.close()


def test_an_edge_reports_the_bytes_it_carried_and_its_busy_time(tmp_path: Path) -> None:
    pulled = Pulled(tmp_path, 900_000)
    for _ in range(200):
        pulled.reader.gate.release()
    began = time.monotonic()
    pulled.stream.request(Extent(0, pulled.manifest.piece_count))
    until(lambda: pulled.verified == pulled.manifest.piece_count)
    spent = time.monotonic() - began
    (edge,) = pulled.staging.edges.tallies()
    pulled.stream.close()
    assert (edge.source, edge.reader) == (pulled.source.key, "node-0")
    assert edge.bytes == pulled.manifest.total_size
    assert 0 < edge.busy_s <= spent + 0.1  # four threads at once are busy once


def test_a_directory_outside_the_allowed_roots_is_no_source(tmp_path: Path) -> None:
    inside, outside = tmp_path / "roots/model", tmp_path / "elsewhere"
    inside.mkdir(parents=True)
    outside.mkdir()
    assert below_roots(inside, [tmp_path / "roots"]) == inside
    (tmp_path / "roots/link").symlink_to(outside)
    for refused in (outside, tmp_path / "roots/../elsewhere", tmp_path / "roots/link"):
        with pytest.raises(AccessDenied, match=r"security\.source_roots"):
            below_roots(refused, [tmp_path / "roots"])
    with pytest.raises(AccessDenied, match="none allowed"):
        below_roots(inside, [])
