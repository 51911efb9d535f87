"""Whole relays over loopback sockets and real disks, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import DeploymentFailed, NotReady
from paceline.manifest import FileEntry, Manifest, verify_directory
from paceline.relay import FIRST_RANGE, DirectoryReader, OnSocket
from paceline.relay.protocol import Extent, PullState, SessionLimits, SourceStream
from paceline.schemas import Receipt, Source, WorkerLanes, WorkerStatus
from tests.relay.kit import (
    DEPLOYMENT,
    damage,
    lanes,
    manifest_of,
    plan,
    until,
    worker,
    write_model,
)
from tests.support.local_fleet import LocalFleet

NAMES = ["node-0", "node-1", "node-2", "node-3"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 1_000_000)


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return manifest_of(model)


Lanes = Callable[[dict[str, str]], dict[str, WorkerLanes]]


def chain(manifest: Manifest, model: Path, **more: object) -> Lanes:
    def made(addresses: dict[str, str]) -> dict[str, WorkerLanes]:
        planned = plan(manifest, addresses, source_url=str(model), **more)  # type: ignore[arg-type]
        return {each.worker_id: each for each in planned.workers}

    return made


def distribute(root: Path, names: list[str], manifest: Manifest, made: Lanes) -> dict[str, Receipt]:
    """Bring ``manifest`` to drivers ``names`` by ``made(addresses)`` and return their receipts."""
    with LocalFleet(root, names) as fleet:
        mine = made(fleet.addresses)
        fleet.deploy(manifest, mine)
        return fleet.receipts(next(iter(mine.values())).deployment_id)


def order(manifest: Manifest) -> list[str]:
    return [each.worker_id for each in plan(manifest, dict.fromkeys(NAMES, "x:1")).workers]


@pytest.mark.parametrize("topology", ["tree", "direct"])  # chains are in all tests below
def test_every_worker_shows_the_model_and_the_origin_is_read_once(
    tmp_path: Path, model: Path, manifest: Manifest, topology: str
) -> None:
    receipts = distribute(
        tmp_path / "nodes", NAMES, manifest, chain(manifest, model, topology=topology)
    )
    for name, receipt in receipts.items():
        assert receipt.path == str(tmp_path / "nodes" / name / "store/models/m/v1")
        verify_directory(Path(receipt.path), manifest)
        assert receipt.received_bytes + receipt.origin_bytes == manifest.total_size
        assert receipt.refetched_bytes == receipt.corrupt_pieces == 0
    once = 4 if topology == "direct" else 1
    assert sum(r.origin_bytes for r in receipts.values()) == once * manifest.total_size


def test_a_second_deployment_of_the_same_version_moves_nothing(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    for deployment in ("d-1", "d-2"):
        receipts = distribute(
            tmp_path / "nodes",
            NAMES[:2],
            manifest,
            chain(manifest, model, deployment_id=deployment),
        )
    assert all(r.received_bytes == r.origin_bytes == 0 for r in receipts.values())


def test_a_new_version_moves_only_what_changed(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    distribute(tmp_path / "nodes", NAMES[:2], manifest, chain(manifest, model))
    damage(model / "shards/a.bin", 100_000, b"fine-tuned")
    newer = manifest_of(model, version="v2")
    receipts = distribute(tmp_path / "nodes", NAMES[:2], newer, chain(newer, model))
    for receipt in receipts.values():
        assert receipt.received_bytes + receipt.origin_bytes == newer.piece_bytes
        assert receipt.reused_pieces == newer.piece_count - 1
        verify_directory(Path(receipt.path), newer)


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[LocalFleet]:
    """Four workers whose links take a second and a half for the model: time to break things."""
    limits = SessionLimits(window_bytes=131_072, give_up_s=10)
    with LocalFleet(tmp_path / "nodes", NAMES, link_mbit=6, limits=limits) as fleet:
        yield fleet


def test_the_line_closes_up_when_its_second_worker_dies(
    paced: LocalFleet, manifest: Manifest, model: Path
) -> None:
    first, second, *rest = order(manifest)
    paced.deploy(manifest, chain(manifest, model, link_mbit=6)(paced.addresses))
    until(lambda: (beat := paced.beat(second, DEPLOYMENT)) is not None and beat.pieces_held > 10)
    paced.drivers[second].server.stop()
    paced.drivers.pop(second).stop()
    receipts = paced.receipts(DEPLOYMENT, [first, *rest])
    assert sum(r.origin_bytes for r in receipts.values()) == manifest.total_size
    for name in rest:
        assert receipts[name].refetched_bytes <= 0.02 * manifest.total_size
        verify_directory(Path(receipts[name].path), manifest)
    beat = paced.beat(rest[0], DEPLOYMENT)
    assert beat is not None
    assert beat.lost_sources == (second,)


def test_new_lanes_midway_lose_nothing(paced: LocalFleet, manifest: Manifest, model: Path) -> None:
    paced.deploy(manifest, chain(manifest, model, link_mbit=6)(paced.addresses))
    tail = order(manifest)[-1]
    until(lambda: (beat := paced.beat(tail, DEPLOYMENT)) is not None and beat.pieces_held > 10)
    paced.deploy(manifest, chain(manifest, model, link_mbit=6, epoch=2, seed=5)(paced.addresses))
    receipts = paced.receipts(DEPLOYMENT)
    for name, receipt in receipts.items():
        assert receipt.refetched_bytes <= FIRST_RANGE  # one that was on its way may come twice
        assert (beat := paced.beat(name, DEPLOYMENT)) is not None
        assert beat.epoch == 2


def test_a_cancel_leaves_no_trace(tmp_path: Path, manifest: Manifest, model: Path) -> None:
    with LocalFleet(tmp_path / "nodes", NAMES, link_mbit=1.5) as fleet:  # six seconds of a model
        fleet.deploy(manifest, chain(manifest, model, link_mbit=1.5)(fleet.addresses))
        until(lambda: all((b := fleet.beat(n, DEPLOYMENT)) and b.pieces_held for n in NAMES))
        for driver in fleet.drivers.values():
            driver.cancel(DEPLOYMENT)
        until(lambda: all(fleet.beat(name, DEPLOYMENT) is None for name in NAMES))
        for driver in fleet.drivers.values():
            assert driver.store.versions() == []
            assert list((driver.store.root / "staging").iterdir()) == []


def test_activation_waits_for_completion(
    paced: LocalFleet, manifest: Manifest, model: Path
) -> None:
    name = NAMES[0]
    paced.deploy(manifest, {name: chain(manifest, model)(paced.addresses)[name]})
    paced.drivers[name].activate(DEPLOYMENT)
    paced.deploy(manifest, chain(manifest, model)(paced.addresses))
    paced.receipts(DEPLOYMENT)
    assert paced.drivers[name].store.active("m") is None
    paced.drivers[name].activate(DEPLOYMENT)
    until(lambda: (beat := paced.beat(name, DEPLOYMENT)) is not None and beat.activated)
    assert paced.drivers[name].store.active("m") == "v1"


def test_a_peer_with_a_rotten_disk_is_named_and_worked_around(
    tmp_path: Path, manifest: Manifest, model: Path
) -> None:
    with LocalFleet(tmp_path / "nodes", NAMES) as fleet:
        holders = {name: fleet.addresses[name] for name in NAMES[:2]}
        fleet.deploy(manifest, chain(manifest, model)(holders))
        receipts = fleet.receipts(DEPLOYMENT, NAMES[:2])
        damage(Path(receipts["node-0"].path, "shards/b.bin"), 50_000, b"rot")
        upstream = [worker(name, fleet.addresses[name]) for name in ("node-0", "node-1")]
        third = worker("node-2", fleet.addresses["node-2"])
        fleet.deploy(
            manifest,
            {
                "node-2": lanes("node-2", manifest, *upstream, budget=0),
                "node-3": lanes("node-3", manifest, third, budget=0),
            },
        )
        receipts = fleet.receipts(DEPLOYMENT, ["node-2", "node-3"])
        beats = {name: fleet.beat(name, DEPLOYMENT) for name in ("node-2", "node-3")}
    assert beats["node-2"].corrupt_sources == ("node-0",)  # type: ignore[union-attr]
    assert beats["node-3"].corrupt_sources == ()  # type: ignore[union-attr]
    assert receipts["node-2"].corrupt_pieces == 1
    assert receipts["node-3"].corrupt_pieces == 0
    for receipt in receipts.values():
        verify_directory(Path(receipt.path), manifest)


def test_a_worker_whose_unfinished_copy_rots_repairs_itself(
    paced: LocalFleet, manifest: Manifest, model: Path
) -> None:
    first, second, *_ = order(manifest)
    alone = chain(manifest, model, link_mbit=6)(paced.addresses)[first]
    most = manifest.total_size * 2 // 3  # it stops there, so that it is found out before its end
    paced.deploy(manifest, {first: alone.model_copy(update={"origin_budget_bytes": most})})
    until(lambda: (beat := paced.beat(first, DEPLOYMENT)) is not None and beat.pieces_held > 20)
    staging = next((paced.drivers[first].store.root / "staging").iterdir())
    damage(staging / "data/shards/a.bin", 50_000, b"rot")
    paced.deploy(manifest, chain(manifest, model, link_mbit=6, epoch=2)(paced.addresses))
    receipts = paced.receipts(DEPLOYMENT)
    for receipt in receipts.values():
        verify_directory(Path(receipt.path), manifest)
    assert receipts[second].corrupt_pieces == 1
    assert receipts[first].origin_bytes == manifest.total_size + manifest.piece_bytes


def test_a_published_copy_that_rots_is_withdrawn_and_mended(
    paced: LocalFleet, manifest: Manifest, model: Path
) -> None:
    first, second, *_ = order(manifest)
    alone = chain(manifest, model, link_mbit=6)(paced.addresses)[first]
    paced.deploy(manifest, {first: alone})
    path = Path(paced.receipts(DEPLOYMENT, [first])[first].path)
    damage(path / "shards/a.bin", 50_000, b"rot")
    both = chain(manifest, model, link_mbit=6, epoch=2)(paced.addresses)
    paced.deploy(manifest, {second: both[second]})
    until(lambda: paced.drivers[first].withdrawals == 1)
    assert not path.exists()
    paced.deploy(manifest, {first: both[first]})
    receipts = paced.receipts(DEPLOYMENT, [first, second])
    for receipt in receipts.values():
        verify_directory(Path(receipt.path), manifest)
    # It read a piece again, the rest was held; what it had read before is still counted.
    again = receipts[first].origin_bytes - manifest.total_size
    assert again == manifest.piece_bytes


def test_what_an_earlier_process_began_is_forgotten_unless_it_is_wanted(
    paced: LocalFleet, manifest: Manifest, model: Path
) -> None:
    first, second, *_ = order(manifest)
    for name in (first, second):
        paced.drivers[name].store.open(manifest).close()
    staged = {name: paced.drivers[name].store.root / "staging" for name in (first, second)}
    lanes = chain(manifest, model, link_mbit=6)(paced.addresses)[first]
    paced.deploy(manifest, {first: lanes})
    until(lambda: bool(paced.beat(first, DEPLOYMENT)))
    for name in (first, second):
        paced.drivers[name].forget(manifest.digest)
    until(lambda: not list(staged[second].iterdir()))
    path = Path(paced.receipts(DEPLOYMENT, [first])[first].path)
    verify_directory(path, manifest)


def test_a_flipped_byte_at_the_origin_is_named_and_shown_to_nobody(
    tmp_path: Path, manifest: Manifest, model: Path
) -> None:
    damage(model / "shards/a.bin", 20_000, b"!")
    with LocalFleet(tmp_path / "nodes", NAMES) as fleet:
        fleet.deploy(manifest, chain(manifest, model)(fleet.addresses))
        head = order(manifest)[0]
        with pytest.raises(DeploymentFailed):
            fleet.receipts(DEPLOYMENT, [head])
        beat = fleet.beat(head, DEPLOYMENT)
        assert beat is not None
        assert beat.failure is not None
        assert beat.failure.code == "CorruptData"
        assert str(model) in beat.failure.message
        assert "piece 2" in beat.failure.message
        assert all(driver.store.versions() == [] for driver in fleet.drivers.values())


def test_a_source_that_changed_its_size_is_said_to_have_changed(
    tmp_path: Path, manifest: Manifest, model: Path
) -> None:
    with (model / "shards/a.bin").open("ab") as file:
        file.write(b"more")
    with LocalFleet(tmp_path / "nodes", NAMES[:1]) as fleet:
        fleet.deploy(manifest, chain(manifest, model)(fleet.addresses))
        with pytest.raises(DeploymentFailed, match="SourceChanged"):
            fleet.receipts(DEPLOYMENT)


class StuckReader:
    """A source that reads nothing for a while, as S3 does on a bad day."""

    def __init__(self, directory: Path, gate: list[bool]) -> None:
        self._reader, self._gate = DirectoryReader(directory), gate

    def pin(self, file: FileEntry) -> None:
        pass

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        until(lambda: self._gate[0])
        return self._reader.stream(file, offset, view, on_socket)


def test_downstream_waits_while_its_upstream_waits_for_the_source(
    tmp_path: Path, manifest: Manifest, model: Path
) -> None:
    gate = [False]

    def slow(url: str) -> StuckReader:
        return StuckReader(Path(url), gate)

    with LocalFleet(tmp_path / "nodes", NAMES, open_source=slow) as fleet:
        fleet.deploy(manifest, chain(manifest, model)(fleet.addresses))
        time.sleep(2.5)  # two and a half piece deadlines
        gate[0] = True
        receipts = fleet.receipts(DEPLOYMENT)
        assert sum(r.origin_bytes for r in receipts.values()) == manifest.total_size
        for name in NAMES:
            beat = fleet.beat(name, DEPLOYMENT)
            assert beat is not None
            assert beat.lost_sources == ()


def test_two_deployments_of_one_model_at_once_do_not_mix(
    paced: LocalFleet, manifest: Manifest, model: Path
) -> None:
    name = NAMES[0]
    for deployment in ("d-1", "d-2"):
        mine = chain(manifest, model, deployment_id=deployment)({name: paced.addresses[name]})
        paced.deploy(manifest, mine)
    receipts = paced.receipts("d-1", [name])
    verify_directory(Path(receipts[name].path), manifest)
    beat = paced.beat(name, "d-2")
    assert beat is not None
    assert beat.status is WorkerStatus.FAILED
    assert beat.failure is not None
    assert beat.failure.code == "Conflict"


def test_a_planted_session_bug_is_caught_on_sockets_too(
    paced: LocalFleet, manifest: Manifest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_what_was_in_flight(self: PullState, stream: SourceStream, extent: Extent) -> None:
        for task, part in self.tasks.parts(extent):
            self.drop_from(stream, task, part)

    monkeypatch.setattr(PullState, "requeue", forgets_what_was_in_flight)
    _, second, third, *_ = order(manifest)
    paced.deploy(manifest, chain(manifest, model, link_mbit=6)(paced.addresses))
    until(lambda: (beat := paced.beat(second, DEPLOYMENT)) is not None and beat.pieces_held > 10)
    paced.drivers.pop(second).stop()
    with pytest.raises(NotReady):
        paced.receipts(DEPLOYMENT, [third], timeout_s=4)


def test_a_dead_source_without_spares_ends_in_a_clear_failure(
    tmp_path: Path, manifest: Manifest
) -> None:
    limits = SessionLimits(give_up_s=1.0)
    with LocalFleet(tmp_path / "nodes", ["node-0"], limits=limits) as fleet:
        gone = Source(kind="worker", worker_id="gone", address="127.0.0.1:1")
        fleet.deploy(manifest, {"node-0": lanes("node-0", manifest, gone)})
        with pytest.raises(DeploymentFailed, match="PeerLost"):
            fleet.receipts(DEPLOYMENT)
