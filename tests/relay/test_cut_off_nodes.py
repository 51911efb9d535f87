"""When a node that no coordinator answers reads the origin, and when it leaves that to others (I6).

Drivers of one process on loopback sockets, answered or not as each test says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.manifest import Manifest
from paceline.relay import RelayDriver, node as driver_module
from paceline.relay.store import Store
from paceline.relay.transport import TcpTransport
from paceline.schemas import DeploymentBeat, Source, WorkerLanes, WorkerStatus
from tests.relay.kit import lanes, manifest_of, until, worker, write_model
from tests.support.local_fleet import open_directory

SIZE = 1_500_000
PIECE = 4096
MBIT = 8.0  # a second and a half for all of it
UNHEARD_S = 0.1
Make = Callable[..., RelayDriver]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", SIZE)


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return manifest_of(model, piece_bytes=PIECE)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(driver_module, "COORDINATOR_TIMEOUT_S", UNHEARD_S)
    monkeypatch.setattr(driver_module, "LONGEST_WAIT_S", 0.05)
    made: list[RelayDriver] = []

    def one(name: str, link_mbit: float = MBIT) -> RelayDriver:
        driver = RelayDriver(
            worker_id=name,
            store=Store(tmp_path / name),
            transport=TcpTransport("t"),
            open_source=open_directory,
            link_mbit=link_mbit,
            coordinated=True,
        )
        driver.start()
        made.append(driver)
        return driver

    yield one
    for driver in made:
        driver.stop()


def seeding(name: str, manifest: Manifest, model: Path, *spares: Source) -> WorkerLanes:
    """Return the lanes of a head as a coordinator grants them; so little is asked ahead."""
    origin = Source(kind="origin", url=str(model))
    made = lanes(name, manifest, origin, *spares)
    slow = tuple(each.model_copy(update={"expected_bytes_s": 20_000.0}) for each in made.lanes)
    return made.model_copy(update={"lanes": slow, "origin_tell_bytes": 20_000})


def beat_of(driver: RelayDriver) -> DeploymentBeat | None:
    return next(iter(driver.beats()), None)


def held(driver: RelayDriver) -> int:
    beat = beat_of(driver)
    return beat.bytes_held if beat else 0


def is_cut_off(driver: RelayDriver) -> bool:
    beat = beat_of(driver)
    return beat is not None and beat.failure is not None and "cut off" in beat.failure.message


def completes(driver: RelayDriver) -> bool:
    return driver.wait(
        lambda beats: any(beat.status is WorkerStatus.COMPLETE for beat in beats), 20.0
    )


def test_a_cut_off_head_stops_without_readers_and_resumes_when_answered(
    make: Make, manifest: Manifest, model: Path
) -> None:
    head, other = make("head"), make("other")
    head.coordinator_answered(time.monotonic())
    head.deploy(seeding("head", manifest, model), manifest)
    other.deploy(lanes("other", manifest, worker("head", head.server.address)), manifest)
    unheard_s = time.monotonic() + UNHEARD_S
    until(lambda: held(other) > SIZE // 20 and time.monotonic() > unheard_s)
    assert not is_cut_off(head), "somebody reads here: the coordinator is away from all"
    other.cancel("d-1")  # as if a plan had another source for it
    until(lambda: is_cut_off(head))
    beat = beat_of(head)
    assert beat is not None
    assert beat.origin_bytes < SIZE
    head.coordinator_answered(time.monotonic(), next_s=20.0)
    assert completes(head)


def test_a_cut_off_worker_goes_on_when_a_reader_returns(
    make: Make, manifest: Manifest, model: Path
) -> None:
    head, other = make("head"), make("other")
    head.origin_reads.of("d-1").served()  # in an earlier process; this one has heard no answer yet
    head.deploy(seeding("head", manifest, model), manifest)
    until(lambda: is_cut_off(head))
    other.deploy(lanes("other", manifest, worker("head", head.server.address)), manifest)
    assert completes(head)
    assert completes(other)


def test_a_worker_alone_in_its_plan_waits_for_no_reader(
    make: Make, manifest: Manifest, model: Path
) -> None:
    head = make("head", 100.0)
    head.deploy(seeding("head", manifest, model), manifest)
    assert completes(head)


def test_workers_planned_to_read_all_from_the_origin_do_not_wait(
    make: Make, manifest: Manifest, model: Path
) -> None:
    head = make("head", 100.0)
    direct = seeding("head", manifest, model, worker("other", "127.0.0.1:1"))
    head.deploy(direct.model_copy(update={"origin_tell_bytes": 0}), manifest)
    assert completes(head)


def test_what_a_withdrawn_copy_had_read_is_still_counted(
    make: Make, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    head = make("head", 100.0)
    given = seeding("head", manifest, model)
    head.deploy(given, manifest)
    assert completes(head)
    receipt = next(iter(head.beats())).receipt
    assert receipt is not None
    head._deployments.library.find(manifest.digest, 0.0)  # open, as for a reader
    head.post(lambda now: head._deployments.rotten(manifest.digest, 0, now))
    until(lambda: not head.beats())
    head.deploy(given.model_copy(update={"epoch": 2}), manifest)
    until(lambda: bool(head.beats()))
    assert next(iter(head.beats())).origin_bytes >= SIZE
