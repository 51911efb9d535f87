"""State of simulated hosts, of the flows between them, and the simulated disk. No decisions.

A host's pieces are what it really holds; reports to its session may lag behind by an extent
(``Gathering``). On the disk, pieces become durable in groups, and a whole version is published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import PacelineError
from paceline.relay.protocol import Extent, Extents, PiecesDurable, RelaySession, SessionEvent
from paceline.schemas import EdgeTally, WorkerLanes
from paceline.simulation.network import Clock
from paceline.simulation.scenario import Timing


@dataclass(eq=False, slots=True)
class Tally:
    """Counts of one edge's closed streams: bytes, busy time, good and corrupt pieces."""

    bytes: float = 0.0
    busy_s: float = 0.0
    pieces: int = 0
    corrupt: int = 0


@dataclass(eq=False, slots=True)
class Host:
    """A worker, or the origin (which has all pieces and no session)."""

    name: str
    rack: str
    nic_in: int
    nic_out: int
    uplink_in: int = 0
    uplink_out: int = 0
    session: RelaySession | None = None
    lanes: WorkerLanes | None = None
    have: Extents = field(default_factory=Extents)  # verified
    durable: Extents = field(default_factory=Extents)
    # What it pulls, by source key and lane: a stream that serves two lanes alternates.
    feeds: dict[tuple[str, int], Flow] = field(default_factory=dict)
    lane_starts: list[int] = field(default_factory=list)  # first piece of each lane,
    lane_sources: list[str] = field(default_factory=list)  # and its source in the plan
    readers: dict[Flow, None] = field(default_factory=dict)  # flows that pull from it
    waiting: dict[Flow, None] = field(default_factory=dict)  # of these, those without pieces
    edges: dict[tuple[str, str], Tally] = field(default_factory=dict)
    alive: bool = True
    frozen: bool = False
    frozen_s: float = 0.0  # since when
    slept: bool = False  # True after a long freeze, until the coordinator confirmed its lanes
    missed: list[SessionEvent] = field(default_factory=list)  # events while it was frozen
    corrupts: float = 0.0  # share of the pieces it sends
    incarnation: int = 1
    origin_bytes: float = 0.0
    corrupt_pieces: int = 0
    begun_s: float = 0.0  # when the current session began
    complete: bool = False
    published_s: float | None = None
    error: PacelineError | None = None
    told_s: float = 0.0  # time of the last event to its session
    timer_s: float | None = None  # when to check its session's deadline next
    commit_s: float | None = None

    @property
    def is_origin(self) -> bool:
        """Return whether this is the source of the model."""
        return self.rack == ORIGIN_RACK

    @property
    def serves(self) -> bool:
        """Return whether its process runs and responds."""
        return self.alive and not self.frozen

    def edge(self, source: str, reader: str) -> Tally:
        """Return the counts of one edge, created where missing."""
        return self.edges.setdefault((source, reader), Tally())


ORIGIN_RACK = "\0origin"
NOTHING = Extent(0, 0)


@dataclass(eq=False, slots=True)
class Flow:
    """One lane's part of a stream: the pieces that its reader still wants, and the current run."""

    slot: int
    reader: Host
    source: Host
    key: str
    number: int
    lane: int
    crosses: bool
    wanted: Extents = field(default_factory=Extents)
    moving: bool = False
    parked: bool = False  # stopped within a run, because the source has no further pieces yet
    base: int = 0  # pieces of the current run before it have arrived
    stop: int = 0  # end of the current run
    cut: int | None = None  # the current run ends here: the source lacks what follows
    extent: Extent = NOTHING  # reported to the session as one
    bad: Extent | None = None  # pieces of it that will not match their digests
    leader: Flow | None = None
    followers: dict[Flow, None] = field(default_factory=dict)
    unreported: list[Extent] = field(default_factory=list)
    open: bool = False
    closed: bool = False


def tallies_of(host: Host, running: dict[tuple[str, str], Tally]) -> tuple[EdgeTally, ...]:
    """Return the counts that a host reports: of closed streams plus ``running`` of open ones."""
    made = []
    for source, reader in {**host.edges, **running}:
        closed = host.edges.get((source, reader), NONE)
        running_one = running.get((source, reader), NONE)
        made.append(
            EdgeTally(  # a million of them: model_construct takes a third longer than validating
                source=source,
                reader=reader,
                bytes=round(closed.bytes + running_one.bytes),
                busy_s=closed.busy_s + running_one.busy_s,
                pieces=max(0, closed.pieces + running_one.pieces),
                corrupt=max(0, closed.corrupt + running_one.corrupt),
            )
        )
    return tuple(sorted(made, key=lambda edge: -(edge.bytes + edge.pieces))[:MOST_EDGES])


NONE = Tally()
MOST_EDGES = 512  # limit of one heartbeat


class Disk:
    """Every host's disk. ``on_published`` is called when a version is at its final path."""

    def __init__(
        self,
        clock: Clock,
        pieces: int,
        timing: Timing,
        deliver: Callable[[Host, SessionEvent], None],
    ) -> None:
        self.violations: list[str] = []
        self.on_published: Callable[[Host], None] = lambda _host: None
        self._clock = clock
        self._pieces = pieces
        self._timing = timing
        self._deliver = deliver

    def commit_soon(self, host: Host) -> None:
        """Schedule the next group commit of verified pieces, without delay for a full version."""
        full = host.have.count == self._pieces
        group_s = 0.0 if full else self._timing.group_s
        due_s = self._clock.now_s + group_s + self._timing.commit_s
        if host.commit_s is not None and host.commit_s <= due_s:
            return
        host.commit_s = due_s
        session = host.session
        ready = host.have.copy() if full else None

        def commit() -> None:
            if host.session is not session or host.commit_s != due_s or not host.serves:
                return
            host.commit_s = None
            self._commit(host, ready if ready is not None else host.have)

        self._clock.at(due_s, commit)

    def completed(self, host: Host) -> None:
        """Publish the version that the session reports as complete."""
        if host.durable.count != self._pieces:
            lacking = self._pieces - host.durable.count
            self.violations.append(f"I1 {host.name} published with {lacking} pieces missing")
        host.complete = True
        self.publish_soon(host)

    def publish_soon(self, host: Host) -> None:
        """Mark the version as published after ``publish_s``."""
        session = host.session

        def published() -> None:
            if host.session is session and host.serves and host.published_s is None:
                host.published_s = self._clock.now_s
                self.on_published(host)

        self._clock.after(self._timing.publish_s, published)

    def _commit(self, host: Host, have: Extents) -> None:
        everything = Extent(0, self._pieces)
        for gap in list(host.durable.gaps(everything)):
            for run in list(have.common(gap)):
                host.durable.add(run)
                self._deliver(host, PiecesDurable(run))


# Coalescing of pieces: positions are exact, but up to ``coalesce`` pieces are reported to a session
# in one event. With ``coalesce`` 1 each piece is reported, and is corrupt, by itself. Where pieces
# are coalesced, the corrupt ones of a healthy fleet are spread over all transfers and repaired
# within milliseconds, one by one: as runs of an extent they would cost several times as much. There
# they only take their share of every link (``Simulation``) and are counted; a source that corrupts
# more than the others still sends corrupt runs, which its readers' sessions repair.

# On a spare source extents are this part of the longest, because failback is judged by pieces.
ON_SPARE_EXTENTS = 128
LEAST_EXTENTS = 8  # extents shrink as a host nears completion, to this part of the longest


class Gathering:
    """Chooses the extents of flows; ``corrupt`` is the share of all transfers that are corrupt."""

    def __init__(
        self, *, pieces: int, piece_bytes: int, coalesce: int, corrupt: float, seed: int
    ) -> None:
        self.piece_bytes = float(piece_bytes)
        self.longest = coalesce
        self._count = pieces
        self._corrupt = corrupt
        self._random = np.random.default_rng([seed, 0x70616365])

    @property
    def exact(self) -> bool:
        """Return whether every piece is reported by itself."""
        return self.longest == 1

    def next_extent(self, flow: Flow) -> None:
        """Choose where the next report to the session ends, and which of its pieces are corrupt."""
        share = flow.source.corrupts
        share = max(self._corrupt, share) if self.exact or share > self._corrupt else 0.0
        longest = self._extent_pieces(flow, share)
        stop = min((flow.base // longest + 1) * longest, flow.stop)
        flow.extent = Extent(flow.base, stop)
        bad = int(self._random.binomial(stop - flow.base, share)) if share > 0 else 0
        first = flow.base + int(self._random.random() * (stop - flow.base - bad + 1)) if bad else 0
        flow.bad = Extent(first, first + bad) if bad else None

    def spread(self, pieces: int) -> int:
        """Return how many corrupt transfers were repaired beside ``pieces`` that were coalesced."""
        if self.exact or not self._corrupt:
            return 0
        return int(self._random.negative_binomial(pieces, 1 - self._corrupt))

    def _extent_pieces(self, flow: Flow, corrupt: float) -> int:
        if self.exact:
            return 1
        if corrupt > 0:
            return max(1, min(self.longest, int(1 / corrupt)))
        if flow.source.is_origin:  # its window is some seconds long, and is requested in halves
            return max(1, self.longest // ON_SPARE_EXTENTS)
        planned = flow.reader.lane_sources
        if 0 < flow.lane <= len(planned) and planned[flow.lane - 1] != flow.key:
            return max(1, self.longest // ON_SPARE_EXTENTS)
        left = (self._count - flow.reader.have.count) // max(1, len(flow.reader.feeds))
        least = max(1, self.longest // LEAST_EXTENTS)
        longest = least
        while longest * 2 <= min(self.longest, left // 3):
            longest *= 2  # powers of two: an extent's edges are the same pieces on every host
        return longest
