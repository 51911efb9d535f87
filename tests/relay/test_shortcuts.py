"""A session's short way decides for one lane what looking at everything would decide."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from paceline.relay.protocol.events import (
    Abandon,
    Complete,
    Fetch,
    LanesAssigned,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    SessionAction,
    SessionEvent,
    Tick,
)
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.protocol.session import RelaySession
from paceline.schemas.plan import Lane, WorkerLanes
from tests.relay.kit import lanes, paper_manifest, worker

PIECES = 240
MANIFEST = paper_manifest(PIECES)


def made(window: int) -> RelaySession:
    limits = SessionLimits(window_bytes=window * 1024, window_pieces=window)
    return RelaySession(worker_id="me", manifest=MANIFEST, limits=limits, seed=3)


def three_lanes() -> WorkerLanes:
    """Return three lanes, each with the others' sources as its spares."""
    given = lanes("me", MANIFEST, worker("a"), worker("b"), worker("c"))
    (lane,) = given.lanes
    third = (lane.last_chunk + 1) // 3
    cuts = [0, third, 2 * third, lane.last_chunk + 1]
    sources = [lane.source, *lane.spares]
    parts = tuple(
        Lane(
            first_chunk=cuts[at],
            last_chunk=cuts[at + 1] - 1,
            source=source,
            spares=tuple(each for each in (lane.source, *lane.spares) if each.key != source.key),
        )
        for at, source in enumerate(sources)
    )
    return given.model_copy(update={"lanes": parts})


class Wire:
    """Sources that send what is asked, in order, in runs of one to four; some arrive corrupt."""

    def __init__(self, seed: int, corrupt: float) -> None:
        self.random = Random(seed)
        self.corrupt = corrupt
        self.asked: dict[tuple[str, int], deque[Extent]] = {}
        self.verified = Extents()

    def take(self, actions: list[SessionAction]) -> bool:
        """Do what a session asks; return whether it is complete."""
        for action in actions:
            if isinstance(action, Fetch):
                stream = action.source.key, action.stream
                self.asked.setdefault(stream, deque()).append(action.extent)
            elif isinstance(action, Abandon):
                self.asked.pop((action.source_key, action.stream), None)
        return any(isinstance(action, Complete) for action in actions)

    def next(self) -> SessionEvent:
        ready = [stream for stream, runs in self.asked.items() if runs]
        if self.verified and (not ready or self.random.random() < 0.1):
            run = self.random.choice(list(self.verified))
            self.verified.remove(run)
            return PiecesDurable(run)
        if not ready or self.random.random() < 0.05:
            return Tick()
        key, stream = self.random.choice(ready)
        runs = self.asked[key, stream]
        first, stop = runs.popleft()
        until = min(stop, first + self.random.randint(1, 4))
        if until < stop:
            runs.appendleft(Extent(until, stop))
        run = Extent(first, until)
        if self.random.random() < self.corrupt:
            return PieceRejected(key, stream, run)
        self.verified.add(run)
        return PieceVerified(key, stream, run)


@pytest.mark.parametrize("corrupt", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_decides_what_the_long_way_does(
    seed: int, window: int, corrupt: float
) -> None:
    short, long, wire = made(window), made(window), Wire(seed, corrupt)
    event: SessionEvent = LanesAssigned(three_lanes())
    now_s = 0.0
    for _ in range(20 * PIECES):
        long._pull._steady = False
        decided = short.handle(event, now_s)
        assert repr(decided) == repr(long.handle(event, now_s)), "errors are equal as text"
        assert short.progress() == long.progress()
        if wire.take(decided):
            break
        deadline_s = short.deadline_s()
        assert deadline_s is not None
        assert deadline_s <= (long.deadline_s() or 0.0), "it may look too early, never too late"
        event, now_s = wire.next(), now_s + 0.002
    assert short.progress().pieces_held == PIECES
