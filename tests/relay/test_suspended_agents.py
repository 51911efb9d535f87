"""Real agent processes that are stopped in mid-transfer and go on later: SIGSTOP, SIGCONT.

Their clock jumps while they stand still. Others get by without them; a thawed agent believes nobody
dead for its own sleep, and asks the coordinator before it reads on in a place that others may have
taken.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.manifest import Manifest, verify_directory
from paceline.relay.protocol import REPLACED_AFTER_S, SessionLimits
from paceline.schemas import Receipt
from tests.relay.agents import LINK_MBIT, NAMES, Fleet
from tests.relay.fake_coordinator import FakeCoordinator
from tests.relay.kit import manifest_of, until, write_model

SIZE = 3_000_000
PLANNED_MBIT = LINK_MBIT / 8  # what plans count on: so little is asked of the origin ahead of time
# What was asked for comes after all, and the last beat before the freeze was a moment old.
ON_ITS_WAY = int((SessionLimits().origin_window_s * PLANNED_MBIT + 0.2 * LINK_MBIT) * 1e6 / 8)


class Coordinator(FakeCoordinator):
    """Plans once, and lets nobody but the head read the origin."""

    def replan(self, epoch: int) -> None:
        super().replan(epoch)
        assert self.plan is not None
        head, *others = self.plan.workers
        spared = [each.model_copy(update={"origin_budget_bytes": 0}) for each in others]
        self.plan = self.plan.model_copy(update={"workers": (head, *spared)})

    @property
    def line(self) -> list[str]:
        """Return the workers in the order of the chain."""
        return [each.worker_id for each in self.plan.workers] if self.plan else []


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return manifest_of(write_model(tmp_path / "model", SIZE), piece_bytes=4096)


@pytest.fixture
def fleet(tmp_path: Path, manifest: Manifest) -> Iterator[Fleet]:
    with Coordinator(manifest, str(tmp_path / "model"), NAMES[:3], PLANNED_MBIT) as coordinator:
        made = Fleet(tmp_path / "state", coordinator)
        try:
            for name in NAMES[:3]:
                made.start(name)
            until(lambda: coordinator.plan is not None, "three agents and a plan")
            yield made
        finally:
            made.close()


def line_of(fleet: Fleet) -> list[str]:
    assert isinstance(fleet.coordinator, Coordinator)
    return fleet.coordinator.line


def freeze(fleet: Fleet, name: str) -> float:
    """Stop an agent; return when it will have stood still so long that others may replace it."""
    os.kill(fleet.processes[name].pid, signal.SIGSTOP)
    return time.monotonic() + REPLACED_AFTER_S + 0.5


def thaw(fleet: Fleet, name: str, not_before_s: float) -> None:
    until(lambda: time.monotonic() > not_before_s, "long enough")
    os.kill(fleet.processes[name].pid, signal.SIGCONT)


def receipt(fleet: Fleet, name: str) -> Receipt:
    found = fleet.coordinator.beats[name].receipt
    assert found is not None
    return found


@pytest.mark.nightly
def test_a_thawed_head_resumes_reading_once_answered_and_feeds_the_line(
    fleet: Fleet, manifest: Manifest
) -> None:
    coordinator = fleet.coordinator
    first, second, third = line_of(fleet)
    until(lambda: fleet.origin_bytes(first) > SIZE // 4, "a quarter at the head")
    coordinator.unconfirmed.add(first)
    due_s = freeze(fleet, first)
    read = fleet.origin_bytes(first)
    until(lambda: first in coordinator.beats[second].lost_sources, "the next one misses it")
    thaw(fleet, first, due_s)

    def waits() -> bool:
        failure = coordinator.beats[first].failure
        return failure is not None and "was suspended" in failure.message

    until(waits, "it says why it reads no more")
    said = coordinator.said[first]
    until(lambda: coordinator.said[first] >= said + 2, "two more beats that nobody answered")
    assert fleet.origin_bytes(first) <= read + ON_ITS_WAY, "without it a second's worth at least"
    coordinator.unconfirmed.clear()
    names = (first, second, third)
    until(lambda: all(map(fleet.is_complete, names)), "the whole line completes")
    told = [receipt(fleet, name) for name in names]
    assert sum(each.origin_bytes for each in told) <= 1.02 * manifest.total_size
    assert [each.origin_bytes for each in told[1:]] == [0, 0]
    # What the others have can only have come through the head: it took its place again.
    assert told[0].origin_bytes >= manifest.total_size
    assert [each.incarnation for each in told] == [1, 1, 1]
    assert coordinator.beats[first].lost_sources == ()
    assert [each.corrupt_pieces for each in told] == [0, 0, 0]
    for name in names:
        verify_directory(fleet.final(name), manifest)
