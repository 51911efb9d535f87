"""The origin's fuse while no coordinator is heard: real agents, a head that alone reads (I6).

An agent that is not answered cannot tell a coordinator that is away from one that has given its
place to somebody else. Its readers can: they stay, or they have left it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.manifest import Manifest, verify_directory
from paceline.schemas.plan import WorkerLanes
from tests.relay.agents import LINK_MBIT, NAMES, Fleet, until
from tests.relay.fake_coordinator import FakeCoordinator
from tests.relay.kit import manifest_of, write_model

SIZE = 3_000_000
TELL = 20_000
AHEAD = TELL + 4096  # written down before it is read
PLANNED_MBIT = LINK_MBIT / 8  # so little is asked of the origin ahead of time
# What was asked for comes after all, and from the last answer to the stop are 3 s and a look.
UNTIL_STOPPED = int(4.5 * LINK_MBIT * 1e6 / 8)


class Coordinator(FakeCoordinator):
    """Lets nobody but the head read the origin, and has it tell soon, as a coordinator does."""

    budget = 2 * SIZE

    def replan(self, epoch: int) -> None:
        super().replan(epoch)
        assert self.plan is not None
        head, *others = self.plan.workers
        stamped = [self._stamped(head, self.budget), *(self._stamped(each, 0) for each in others)]
        self.plan = self.plan.model_copy(update={"workers": tuple(stamped)})

    def _stamped(self, given: WorkerLanes, budget: int) -> WorkerLanes:
        told = self.beats.get(given.worker_id)
        counted = told.origin_bytes if told else 0
        tell = TELL if given.origin_lanes else 0
        update = {"origin_budget_bytes": budget, "origin_counted_bytes": counted}
        return given.model_copy(update={**update, "origin_tell_bytes": tell})


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return manifest_of(write_model(tmp_path / "model", SIZE), piece_bytes=4096)


@pytest.fixture
def fleet(tmp_path: Path, manifest: Manifest) -> Iterator[Fleet]:
    with Coordinator(manifest, str(tmp_path / "model"), NAMES[:3], PLANNED_MBIT) as coordinator:
        made = Fleet(tmp_path / "state", coordinator)
        try:
            yield made
        finally:
            made.close()


def started(fleet: Fleet, link_mbit: float = LINK_MBIT) -> list[str]:
    """Start three agents; return their names, the head first."""
    for name in NAMES[:3]:
        fleet.start(name, limit_mbit=str(link_mbit))
    until(lambda: fleet.coordinator.plan is not None, "three agents and a plan")
    assert fleet.coordinator.plan is not None
    return [each.worker_id for each in fleet.coordinator.plan.workers]


def says(fleet: Fleet, name: str, code: str, words: str) -> bool:
    beat = fleet.coordinator.beats.get(name)
    failure = beat and beat.failure
    return failure is not None and failure.code == code and words in failure.message


@pytest.mark.chaos
def test_a_head_whose_place_was_given_away_unheard_stops_reading_and_says_why(
    fleet: Fleet, manifest: Manifest
) -> None:
    slow = LINK_MBIT / 4
    head, second, third = started(fleet, slow)
    coordinator = fleet.coordinator
    until(lambda: fleet.pieces(third) > 5, "pieces at the end of the line")
    with coordinator.lock:
        coordinator.unheard.add(head)  # it is heard, and hears no answer
        coordinator.targets = [second, third]
        coordinator.replan(2)
    read = fleet.origin_bytes(head)
    until(lambda: says(fleet, head, "ServiceUnavailable", "cut off"), "it says why it stopped")
    stopped = fleet.origin_bytes(head)
    assert stopped <= read + UNTIL_STOPPED // 4 < SIZE
    until(lambda: fleet.is_complete(third), "the others complete without it")
    assert fleet.origin_bytes(head) <= stopped + TELL, "not a range more"
    with coordinator.lock:
        coordinator.targets = [head, second, third]
        coordinator.replan(3)
        coordinator.unheard.clear()
    until(lambda: fleet.is_complete(head), "it goes on when it is answered")
    verify_directory(fleet.final(head), manifest)


@pytest.mark.chaos
def test_while_the_coordinator_is_away_from_all_the_head_reads_on(
    fleet: Fleet, manifest: Manifest
) -> None:
    names = started(fleet, LINK_MBIT / 2)  # six seconds: longer than it may be unheard
    until(lambda: fleet.pieces(names[-1]) > 5, "pieces at the end of the line")
    fleet.coordinator.unheard.update(names)
    until(lambda: all(map(fleet.is_complete, names)), "completion without a single answer")
    assert sum(map(fleet.origin_bytes, names)) <= 1.02 * manifest.total_size


@pytest.mark.chaos
def test_a_killed_head_goes_on_with_what_is_left_of_its_grant_and_no_more(fleet: Fleet) -> None:
    assert isinstance(fleet.coordinator, Coordinator)
    grant = fleet.coordinator.budget = 3 * SIZE // 4
    head, _, third = started(fleet)
    until(lambda: fleet.pieces(third) > 300, "a good part at the end of the line")
    fleet.coordinator.server.shutdown()
    fleet.coordinator.server.server_close()
    fleet.kill(head)
    written = next(fleet.state.glob(f"nodes/{head}/readings/*.read"))
    fleet.start(head)
    until(lambda: read_of(written) >= grant - 8192, "it reads what it was granted")
    time.sleep(1.5)  # in which it could read all there is
    assert read_of(written) <= grant + AHEAD
    assert not fleet.final(head).exists()


def read_of(path: Path) -> int:
    """Return what an agent has written that it read, over all its processes."""
    return int.from_bytes(path.read_bytes()[40:48])
