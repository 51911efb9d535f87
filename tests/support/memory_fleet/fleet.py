"""The same sessions under a virtual clock and an in-memory network: thousands of faults a second.

Nodes are killed, frozen and started again; it holds no recovery logic of its own: what happens
after a fault is what ``RelaySession`` decides, and a node serves what its session counts as
verified. What may never happen, whatever fails, is an ``AssertionError`` at once: a version shown
before all of it is durable, a budget overspent, somebody blamed who did nothing, a session that
waits for nothing.
"""

from __future__ import annotations

import math

from paceline.errors import PeerLost
from paceline.manifest import Manifest
from paceline.relay.protocol.events import (
    SLEPT_S,
    Abandon,
    Complete,
    Fail,
    Fetch,
    LanesAssigned,
    LanesConfirmed,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    ReportCorrupt,
    ReportSourceLost,
    Resumed,
    SessionAction,
    SessionEvent,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.relay.protocol.extents import Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.session import RelaySession
from paceline.schemas.plan import WorkerLanes
from paceline.schemas.records import WorkerStatus
from tests.support.memory_fleet.network import Network
from tests.support.memory_fleet.nodes import Faults, Node, Stream

DELIVERING_S = 0.25  # a source that sent a good piece so recently is not given up
EVENTS_A_SECOND = 150  # of one node, on the average,
EVENTS_AT_LEAST = 2000  # beyond so many; more is a busy loop


class MemoryFleet(Network):
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
        super().__init__(
            pieces or PieceMap(manifest), list(names), link_bytes_s, faults or Faults(), seed
        )
        self._coordinated = coordinated
        self.manifest = manifest
        self._seed = seed
        self._limits = limits
        self._commits = 0
        for node in self.nodes.values():
            self._fresh(node)

    # ── what tests do ────────────────────────────────────────────────────────────────────────────

    def assign(self, lanes: WorkerLanes) -> None:
        """Hand a worker its lanes; older ones than it has must change nothing."""
        self._tell(self.nodes[lanes.worker_id], LanesAssigned(lanes))

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
        self._tell(node, Resumed(slept_s, replaced=self._coordinated and slept_s >= SLEPT_S))
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
            self._tell(node, LanesConfirmed())

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
