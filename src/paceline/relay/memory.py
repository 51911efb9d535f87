"""The same sessions under a virtual clock and an in-memory network: thousands of faults a second.

Nodes have a link each way, streams have requests, pieces take their time; seeded faults kill,
freeze and restart nodes, corrupt, duplicate and delay. It holds no recovery logic of its own: what
happens after a fault is what ``RelaySession`` decides. Bytes exist only as "good" or "bad", and a
node that would forward a bad piece is an assertion.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from paceline.errors import PacelineError, PeerLost
from paceline.manifest import Manifest
from paceline.relay.events import (
    Abandon,
    Complete,
    Fail,
    Fetch,
    LanesAssigned,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    ReportCorrupt,
    SessionEvent,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.relay.extents import Extent, Extents
from paceline.relay.limits import PieceMap, SessionLimits
from paceline.relay.session import RelaySession
from paceline.wire.plan import WorkerLanes

LATENCY_S = 0.001
COMMIT_S = 0.2
ORIGIN = "origin"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often things go wrong, as shares of the pieces sent."""

    corrupt: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0  # events reach the session up to this much later, out of order
    corrupt_from: frozenset[str] = frozenset()  # these nodes send only bad pieces


@dataclass(eq=False)
class Stream:
    """One open connection: what its reader still wants of its source."""

    reader: Node
    source: Node
    key: str
    number: int
    wanted: Extents = field(default_factory=Extents)
    busy: bool = False
    open: bool = True


@dataclass(eq=False)
class Node:
    """A worker, or the origin (which has no session and everything)."""

    name: str
    session: RelaySession | None = None
    verified: Extents = field(default_factory=Extents)
    durable: Extents = field(default_factory=Extents)
    streams: dict[str, Stream] = field(default_factory=dict)  # by source key
    alive: bool = True
    frozen: bool = False
    complete: bool = False
    error: PacelineError | None = None
    in_free_s: float = 0.0
    out_free_s: float = 0.0
    received_pieces: int = 0
    corrupt_seen: dict[str, int] = field(default_factory=dict)
    next_tick_s: float | None = None


class MemoryFleet:
    """Nodes ``names`` and an origin; drive it with ``assign``, ``kill`` and ``run``."""

    def __init__(
        self,
        manifest: Manifest,
        names: list[str],
        *,
        seed: int = 0,
        link_bytes_s: float = 1e6,
        faults: Faults | None = None,
        limits: SessionLimits | None = None,
    ) -> None:
        self.now_s = 0.0
        self.manifest = manifest
        self.origin_pieces = 0
        self._pieces = PieceMap(manifest)
        self._random = Random(seed)
        self._seed = seed
        self._rate = link_bytes_s
        self._faults = faults or Faults()
        self._limits = limits
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        everything = Extents([Extent(0, self._pieces.count)])
        self.origin = Node(ORIGIN, verified=everything, durable=everything.copy())
        self.nodes = {name: self._fresh(Node(name)) for name in names}

    # ── what tests do ────────────────────────────────────────────────────────────────────────────

    def assign(self, lanes: WorkerLanes) -> None:
        """Hand a worker its lanes."""
        self._tell(self.nodes[lanes.worker_id], LanesAssigned(lanes))

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, what))

    def kill(self, name: str) -> None:
        """End a node: its peers see a reset, its disk keeps what was durable."""
        node = self.nodes[name]
        node.alive, node.complete = False, False
        node.verified = node.durable.copy()
        node.streams.clear()
        for stream in self._streams_from(node):
            stream.open = False
            self._later(LATENCY_S, self._failing(stream, PeerLost("reset", where=name)))

    def freeze(self, name: str) -> None:
        """Stop a node without a word: its peers only notice the silence."""
        self.nodes[name].frozen = True

    def thaw(self, name: str) -> None:
        """Let a frozen node go on where it stopped."""
        node = self.nodes[name]
        node.frozen = False
        for stream in [*self._streams_from(node), *node.streams.values()]:
            self._serve(stream)
        self._tell(node, Tick())

    def restart(self, name: str) -> None:
        """Start a killed node again, with what its disk has; it needs lanes anew."""
        self._fresh(self.nodes[name]).alive = True

    def run(self, until_s: float) -> None:
        """Let events happen until the virtual time ``until_s`` or until nothing is left to do."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._heap)
            what()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _fresh(self, node: Node) -> Node:
        node.session = RelaySession(
            worker_id=node.name,
            manifest=self.manifest,
            held=node.durable.pieces(),
            limits=self._limits,
            seed=self._seed,
        )
        node.verified, node.error, node.frozen = node.durable.copy(), None, False
        return node

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, what)

    def _streams_from(self, source: Node) -> Iterator[Stream]:
        for node in self.nodes.values():
            for stream in list(node.streams.values()):
                if stream.source is source:
                    yield stream

    def _failing(self, stream: Stream, error: PacelineError) -> Callable[[], None]:
        return lambda: self._tell(stream.reader, SourceFailed(stream.key, stream.number, error))

    def _tell(self, node: Node, event: SessionEvent) -> None:
        if not node.alive or node.session is None:
            return
        if node.frozen:
            self._later(0.1, lambda: self._tell(node, event))
            return
        for action in node.session.handle(event, self.now_s):
            match action:
                case Fetch():
                    self._fetch(node, action)
                case Abandon(key, number):
                    stream = node.streams.get(key)
                    if stream is not None and stream.number == number:
                        stream.open = False
                        del node.streams[key]
                case Complete():
                    node.complete = True
                case Fail(error):
                    node.error = error
                case ReportCorrupt(key, _):
                    node.corrupt_seen[key] = node.corrupt_seen.get(key, 0) + 1
        self._arm(node)

    def _arm(self, node: Node) -> None:
        session = node.session
        deadline_s = session.deadline_s() if session else None
        if deadline_s is None or (
            node.next_tick_s is not None and self.now_s < node.next_tick_s <= deadline_s
        ):
            return
        node.next_tick_s = max(deadline_s, self.now_s + 1e-6)

        def tick() -> None:
            if node.session is session:
                self._tell(node, Tick())

        self.at(node.next_tick_s, tick)

    def _fetch(self, node: Node, action: Fetch) -> None:
        key = action.source.key
        stream = node.streams.get(key)
        if stream is None or stream.number != action.stream:
            if action.source.kind == "origin":
                source = self.origin
            else:
                source = self.nodes[action.source.worker_id or ""]
            stream = node.streams[key] = Stream(node, source, key, action.stream)
            if not source.alive:
                refused = PeerLost("connection refused", where=key)
                self._later(LATENCY_S, self._failing(stream, refused))
                return
            self._keep_alive(stream)
        stream.wanted.add(action.extent)
        self._serve(stream)

    def _keep_alive(self, stream: Stream) -> None:
        if not stream.open or not stream.source.alive:
            return
        if not stream.source.frozen:
            self._tell(stream.reader, SourceAlive(stream.key, stream.number))
        self._later(0.25, lambda: self._keep_alive(stream))

    def _serve(self, stream: Stream) -> None:
        """Start to send the first wanted piece that the source has verified, if it is free to."""
        source, reader = stream.source, stream.reader
        if stream.busy or not stream.open or not source.alive or source.frozen:
            return
        runs = (run for want in stream.wanted for run in source.verified.common(want))
        run = next(runs, None)
        if run is None:
            return
        piece = Extent(run.first, run.first + 1)
        stream.wanted.remove(piece)
        stream.busy = True
        duration_s = self._pieces.bytes_of(piece) / self._rate
        source.out_free_s = max(source.out_free_s, self.now_s) + duration_s
        reader.in_free_s = max(reader.in_free_s, self.now_s) + duration_s
        arrives_s = max(source.out_free_s, reader.in_free_s) + LATENCY_S
        session = reader.session

        def arrive() -> None:
            stream.busy = False
            if stream.open and reader.alive and reader.session is session and source.alive:
                self._arrive(stream, piece)
            self._serve(stream)

        self.at(arrives_s, arrive)

    def _arrive(self, stream: Stream, piece: Extent) -> None:
        reader, faults, random = stream.reader, self._faults, self._random
        if not stream.source.verified.covers(piece):
            raise AssertionError(f"{stream.source.name} forwarded unverified {piece}")
        reader.received_pieces += 1
        self.origin_pieces += stream.source is self.origin
        event: SessionEvent
        if stream.source.name in faults.corrupt_from or random.random() < faults.corrupt:
            event = PieceRejected(stream.key, stream.number, piece)
        else:
            event = PieceVerified(stream.key, stream.number, piece)
            reader.verified.add(piece)
            session = reader.session
            self._later(COMMIT_S * random.random(), lambda: self._commit(reader, session, piece))
            for waiting in self._streams_from(reader):
                self._serve(waiting)
        for _ in range(2 if random.random() < faults.duplicate else 1):
            self._later(faults.delay_s * random.random(), lambda: self._tell(reader, event))

    def _commit(self, node: Node, session: RelaySession | None, piece: Extent) -> None:
        if node.alive and node.session is session:
            node.durable.add(piece)
            self._tell(node, PiecesDurable(piece))
