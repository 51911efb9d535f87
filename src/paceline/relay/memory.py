"""The same sessions under a virtual clock and an in-memory network: thousands of faults a second.

Nodes have a link each way, streams have requests, pieces take their time; seeded faults kill,
freeze and restart nodes, corrupt, rot, duplicate and delay. It holds no recovery logic of its own:
what happens after a fault is what ``RelaySession`` decides, and a node serves what its session
counts as verified. Bytes exist only as "good" or "bad". What may never happen, whatever fails, is
an ``AssertionError`` at once: a bad piece forwarded, a version shown before all of it is durable, a
budget overspent, somebody blamed who did nothing, a session that waits for nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from random import Random

from paceline.errors import PacelineError, PeerLost
from paceline.manifest import Manifest
from paceline.relay.nodes import Faults, Node, Stream
from paceline.relay.session.events import (
    SLEPT_S,
    Abandon,
    Complete,
    Confirmed,
    Fail,
    Fetch,
    LanesAssigned,
    PieceRejected,
    PiecesDurable,
    PiecesRotten,
    PieceVerified,
    ReportCorrupt,
    ReportSourceLost,
    SessionAction,
    SessionEvent,
    SourceAlive,
    SourceFailed,
    Tick,
    Woke,
)
from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.limits import PieceMap, SessionLimits
from paceline.relay.session.session import RelaySession
from paceline.wire.plan import WorkerLanes
from paceline.wire.records import WorkerStatus

LATENCY_S = 0.001
COMMIT_S = 0.5
KEEPALIVE_S = 0.25
DELIVERING_S = 0.25  # a source that sent a good piece so recently is not given up
EVENTS_A_SECOND = 150  # of one node, on the average,
EVENTS_AT_LEAST = 2000  # beyond so many; more is a busy loop
ORIGIN = "origin"


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
        pieces: PieceMap | None = None,
        coordinated: bool = False,
    ) -> None:
        """``coordinated``: lanes come from somebody who may give them to others while a node stands
        still; he says so with ``confirm``.
        """
        self.now_s = 0.0
        self._coordinated = coordinated
        self.manifest = manifest
        self.origin_pieces = 0  # sent by the origin
        self.origin_again = 0  # of these, sent before, though somebody else could have sent them
        self.reliable = set(names)  # who is counted on to send them
        self._origin_sent: set[int] = set()
        self._commits = 0
        self.events = 0
        self._pieces = pieces or PieceMap(manifest)
        self._random = Random(seed)
        self._seed = seed
        self._faults = faults or Faults()
        self._limits = limits
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        everything = Extents([Extent(0, self._pieces.count)])
        self.origin = Node(ORIGIN, link_bytes_s, everything=everything)
        self.nodes = {name: Node(name, link_bytes_s) for name in names}
        for node in self.nodes.values():
            self._fresh(node)

    # ── what tests do ────────────────────────────────────────────────────────────────────────────

    def assign(self, lanes: WorkerLanes) -> None:
        """Hand a worker its lanes; older ones than it has must change nothing."""
        self._tell(self.nodes[lanes.worker_id], LanesAssigned(lanes))

    def at(self, when_s: float, what: Callable[..., None], *args: object) -> None:
        """Do ``what`` at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, what, args))

    def kill(self, name: str) -> None:
        """End a node: its peers see a reset, its disk keeps what was durable."""
        node = self.nodes[name]
        node.alive = node.complete = False
        node.session = None
        node.pending = Extents()
        node.backlog.clear()
        for stream in node.streams.values():
            self._close(stream)
        node.streams.clear()
        for stream in list(node.readers):
            self._close(stream)
            late_s = self._faults.late_failure_s * self._random.random()
            self._fail(stream, PeerLost("reset", where=name), late_s)

    def reset(self, name: str) -> None:
        """Break every connection of a node that lives on; its peers may hear of it twice."""
        node = self.nodes[name]
        if node.alive and not node.frozen:
            for stream in [*node.readers, *node.streams.values()]:
                if stream.open:
                    self._close(stream)
                    self._fail(stream, PeerLost("reset", where=stream.key))
                    late_s = self._faults.late_failure_s * self._random.random()
                    self._fail(stream, PeerLost("reset", where=stream.key), late_s)

    def freeze(self, name: str) -> None:
        """Stop a node without a word: its peers only notice the silence."""
        node = self.nodes[name]
        node.frozen, node.frozen_s = True, self.now_s

    def thaw(self, name: str) -> None:
        """Let a frozen node go on where it stopped."""
        node = self.nodes[name]
        node.frozen = False
        backlog, node.backlog = node.backlog, []
        slept_s = self.now_s - node.frozen_s  # the first that its loop sees
        peers = [
            stream
            for stream in node.streams.values()
            if stream.open and stream.source is not self.origin
        ]
        self._tell(node, Woke(slept_s, replaced=self._coordinated and slept_s >= SLEPT_S))
        if blamed := [stream.key for stream in peers if not stream.open]:
            raise AssertionError(f"{name} blames {blamed} for its own sleep")
        for event in backlog:
            self._tell(node, event)
        for stream in [*node.readers, *node.streams.values()]:
            self._serve(stream)
        self._tell(node, Tick())

    def confirm(self, name: str) -> None:
        """Let a node that is awake hear that its lanes stand."""
        node = self.nodes[name]
        if node.alive and not node.frozen:
            self._tell(node, Confirmed())

    def restart(self, name: str) -> None:
        """Start a killed node again, with what its disk has; it needs lanes anew."""
        node = self.nodes[name]
        node.alive, node.frozen, node.error, node.epoch, node.lanes = True, False, None, 0, None
        self._fresh(node)

    def rot(self, name: str, piece: int) -> None:
        """Let a held piece go bad on a node's disk: it is found when a peer complains of it."""
        if piece in self.nodes[name].durable:
            self.nodes[name].rotten.add(piece)

    def slow_down(self, name: str, factor: float) -> None:
        """Make a node's links ``factor`` times slower."""
        self.nodes[name].link_bytes_s /= factor

    @property
    def liars(self) -> frozenset[str]:
        """Return who sends only bad pieces."""
        return self._faults.corrupt_from

    def unfinished(self) -> list[str]:
        """Return who lives and is not complete."""
        return [name for name, node in self.nodes.items() if node.alive and not node.complete]

    def run(self, until_s: float) -> None:
        """Let events happen until the virtual time ``until_s`` or until nothing is left to do."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, what, args = pop(heap)
            what(*args)
            self.events += 1

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    def _fresh(self, node: Node) -> None:
        node.session = RelaySession(
            worker_id=node.name,
            manifest=self.manifest,
            held=node.durable,
            limits=self._limits,
            seed=self._seed,
            pieces=self._pieces,
        )
        node.next_tick_s = math.inf

    def _later(self, delay_s: float, what: Callable[..., None], *args: object) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._order, what, args))

    def _deliver(self, node: Node, session: RelaySession, event: SessionEvent) -> None:
        if node.session is session:
            self._tell(node, event)

    def _tell(self, node: Node, event: SessionEvent) -> None:
        session = node.session
        if session is None:
            return
        if node.frozen:
            node.backlog.append(event)
            return
        node.events += 1
        if node.events > EVENTS_AT_LEAST + EVENTS_A_SECOND * self.now_s:
            raise AssertionError(f"{node.name} is busy with nothing at {self.now_s}: {event}")
        if isinstance(event, LanesAssigned) and event.lanes.epoch > node.epoch:
            node.epoch, node.error, node.lanes = event.lanes.epoch, None, event.lanes
            node.origin_bytes, node.origin_budget_bytes = 0, event.lanes.origin_budget_bytes
        other = self._other_stream(node, event)
        actions = session.handle(event, self.now_s)
        if session.epoch < node.epoch:
            raise AssertionError(f"{node.name} went back to epoch {session.epoch}")
        for action in actions:
            self._do(node, session, action)
        if other is not None and node.streams.get(other.key) is not other:
            raise AssertionError(f"{node.name} gave a stream up at news of an earlier one")
        if isinstance(event, PieceVerified):
            told = node.streams.get(event.source_key)
            if told is not None and told.number == event.stream:
                told.told_s = self.now_s
            if node.distrusted:
                node.distrusted.remove(event.extent)
            for waiting in node.readers:
                if not waiting.busy:
                    self._serve(waiting)
            if not actions:
                return  # progress without a request: deadlines have only moved away
        elif not actions and isinstance(event, PiecesDurable | SourceAlive):
            return
        self._arm(node, session)

    def _other_stream(self, node: Node, event: SessionEvent) -> Stream | None:
        """Return the stream in use where ``event`` is bad news of an earlier one."""
        if not isinstance(event, SourceFailed | PieceRejected):
            return None
        stream = node.streams.get(event.source_key)
        return stream if stream is not None and stream.number != event.stream else None

    def _do(self, node: Node, session: RelaySession, action: SessionAction) -> None:
        match action:
            case Fetch():
                self._fetch(node, session, action)
            case Abandon(key, number):
                stream = node.streams.get(key)
                if stream is not None and stream.number == number:
                    self._close(stream)
                    del node.streams[key]
            case Complete():
                if node.durable.count != self._pieces.count:
                    raise AssertionError(f"{node.name} shows what is not durable (I1)")
                node.complete = True
            case Fail(error):
                node.error = error
            case ReportCorrupt(key, _):
                node.corrupt_seen[key] = node.corrupt_seen.get(key, 0) + 1
                if key not in node.corrupt_sent:
                    raise AssertionError(f"{node.name} blames {key}, which sent good bytes")
            case ReportSourceLost(key, reason):
                self._check_lost(node, key, reason)

    def _check_lost(self, node: Node, key: str, reason: str) -> None:
        # The session says so before or after it abandons the stream; both name the same source.
        for stream in node.streams.values():
            if stream.key == key and stream.open and not stream.source.frozen:
                since_s = self.now_s - stream.told_s
                if since_s < DELIVERING_S and not stream.corrupted:
                    raise AssertionError(f"{node.name} gave up {key} that delivers: {reason}")

    def _arm(self, node: Node, session: RelaySession) -> None:
        deadline_s = session.deadline_s()
        if deadline_s is None:
            if session.progress().status is WorkerStatus.RECEIVING:
                raise AssertionError(f"{node.name} waits without a deadline (I12)")
            return
        if self.now_s < node.next_tick_s <= deadline_s:
            return
        node.next_tick_s = max(deadline_s, self.now_s + 1e-6)
        self.at(node.next_tick_s, self._tick, node, session, node.next_tick_s)

    def _tick(self, node: Node, session: RelaySession, at_s: float) -> None:
        if node.session is session and node.next_tick_s == at_s:
            node.next_tick_s = math.inf
            self._tell(node, Tick())

    # ── streams ──────────────────────────────────────────────────────────────────────────────────

    def _close(self, stream: Stream) -> None:
        if stream.open:
            stream.open = False
            if stream in stream.source.readers:
                stream.source.readers.remove(stream)

    def _fail(self, stream: Stream, error: PacelineError, delay_s: float = 0.0) -> None:
        event = SourceFailed(stream.key, stream.number, error)
        self._later(LATENCY_S + delay_s, self._deliver, stream.reader, stream.session, event)

    def _fetch(self, node: Node, session: RelaySession, action: Fetch) -> None:
        key, extent = action.source.key, action.extent
        source = self.nodes[key] if action.source.kind == "worker" else self.origin
        if source is self.origin:
            node.origin_bytes += self._pieces.bytes_of(extent)
            if node.origin_bytes > node.origin_budget_bytes:
                raise AssertionError(f"{node.name} overspends the origin's budget (I6)")
        stream = node.streams.get(key)
        if stream is None or stream.number != action.stream:
            if stream is not None:
                self._close(stream)
            stream = node.streams[key] = Stream(node, source, key, action.stream, session)
            if not source.alive:
                stream.open = False
                self._fail(stream, PeerLost("connection refused", where=key))
                return
            source.readers.append(stream)
        if stream.open:
            stream.wanted.append(extent)
            if not stream.watched:
                stream.watched = True
                self._later(KEEPALIVE_S, self._keep_alive, stream)
            self._serve(stream)

    def _keep_alive(self, stream: Stream) -> None:
        stream.watched = stream.open and (stream.busy or bool(stream.wanted))
        if stream.watched:
            if not stream.source.frozen:
                event = SourceAlive(stream.key, stream.number, moving=stream.busy)
                self._deliver(stream.reader, stream.session, event)
            self._later(KEEPALIVE_S, self._keep_alive, stream)

    def _serve(self, stream: Stream) -> None:
        """Start to send the first wanted piece that the source has verified, if it is free to."""
        source, reader = stream.source, stream.reader
        if stream.busy or not stream.wanted or not stream.open or source.frozen:
            return
        piece = self._take_next(stream)
        if piece is None:
            return
        stream.busy = True
        size = self._pieces.bytes_of(Extent(piece, piece + 1))
        source.out_free_s = max(source.out_free_s, self.now_s) + size / source.link_bytes_s
        reader.in_free_s = max(reader.in_free_s, self.now_s) + size / reader.link_bytes_s
        self.at(
            max(source.out_free_s, reader.in_free_s) + LATENCY_S,
            self._arrive,
            stream,
            piece,
            source.session,
        )

    def _take_next(self, stream: Stream) -> int | None:
        """Take the first wanted piece that can be sent out of the queue, and return it."""
        source, wanted = stream.source, stream.wanted
        held = source.verified
        for at in range(len(wanted)):
            first, stop = wanted[at]
            run = next(held.common(Extent(first, stop)), None)
            if run is None or run.first in source.distrusted:
                continue
            piece = run.first
            rest = [Extent(first, piece), Extent(piece + 1, stop)]
            rest = [each for each in rest if each.size]
            if rest:
                wanted[at] = rest[0]
                if len(rest) > 1:
                    wanted.insert(at + 1, rest[1])
            else:
                del wanted[at]
            return piece
        return None

    def _arrive(self, stream: Stream, piece: int, sent_by: RelaySession | None) -> None:
        stream.busy = False
        source, reader = stream.source, stream.reader
        if not stream.open or source.session is not sent_by:
            return
        if piece in source.bad:
            raise AssertionError(f"{source.name} forwarded piece {piece} unverified (I3)")
        faults, random, session = self._faults, self._random, stream.session
        extent = Extent(piece, piece + 1)
        reader.received_pieces += 1
        reader.received_s = self.now_s
        if source is self.origin:
            self._count_origin(reader, piece)
        event: SessionEvent
        rotten = piece in source.rotten
        if rotten or source.name in faults.corrupt_from or random.random() < faults.corrupt:
            event = PieceRejected(stream.key, stream.number, extent)
            reader.corrupt_sent.add(stream.key)
            stream.corrupted = True
            if piece not in reader.pending and piece not in reader.durable:
                reader.bad.add(piece)  # what is good is never written again
            if rotten:
                self._later(LATENCY_S, self._found_rotten, source, piece)
        else:
            event = PieceVerified(stream.key, stream.number, extent)
            reader.bad.discard(piece)
            if not reader.durable.covers(extent):
                if not reader.pending:
                    self._later(COMMIT_S * (1 + random.random()) / 2, self._commit, reader, session)
                reader.pending.add(extent)
        if faults.delay_s == 0.0:
            self._deliver(reader, session, event)
        else:
            self._later(faults.delay_s * random.random(), self._deliver, reader, session, event)
        if faults.duplicate and random.random() < faults.duplicate:
            self._later(faults.delay_s * random.random(), self._deliver, reader, session, event)
        self._serve(stream)

    def _count_origin(self, reader: Node, piece: int) -> None:
        self.origin_pieces += 1
        if piece in self._origin_sent:
            self.origin_again += any(
                piece in node.verified and piece not in node.distrusted
                for node in self.nodes.values()
                if node is not reader and node.alive and not node.frozen
                if node.name in self.reliable and node.name not in self._faults.corrupt_from
            )
        self._origin_sent.add(piece)

    def _found_rotten(self, node: Node, piece: int) -> None:
        """A peer complained, and the node has looked at its disk: as the peer port does."""
        if piece in node.rotten and node.session is not None:
            extent = Extent(piece, piece + 1)
            node.rotten.discard(piece)
            node.durable.remove(extent)
            node.distrusted.add(extent)
            if not node.complete:  # what is published, drivers withdraw
                self._tell(node, PiecesRotten(extent))

    def _commit(self, node: Node, session: RelaySession) -> None:
        if node.session is not session:
            return
        fresh, node.pending = node.pending, Extents()
        for run in fresh:
            node.durable.add(run)
            node.rotten.difference_update(range(*run))
            self._deliver(node, session, PiecesDurable(run))
        self._commits += 1
        if self._commits % 8 == 0 and session.progress().pieces_held > node.durable.count:
            raise AssertionError(f"{node.name} reports what is not durable (I2)")
