"""What an in-memory fleet runs on: a virtual clock, links, and streams that carry pieces.

A link is a time from which it is free; a stream sends the first piece wanted that its source has
verified. Here pieces arrive corrupt, twice, late or not at all, and here a bad piece that is
forwarded is an ``AssertionError``. What a session makes of it is ``fleet``'s business.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random

from paceline.errors import PacelineError, PeerLost
from paceline.relay.protocol.events import (
    Fetch,
    HeldPiecesCorrupt,
    PieceRejected,
    PieceVerified,
    SessionEvent,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap
from paceline.relay.protocol.session import RelaySession
from tests.support.memory_fleet.nodes import Faults, Node, Stream

LATENCY_S = 0.001
COMMIT_S = 0.5
KEEPALIVE_S = 0.25
ORIGIN = "origin"


class Network(ABC):
    """Nodes ``names`` and an origin, all with links of one rate."""

    def __init__(
        self, pieces: PieceMap, names: list[str], link_bytes_s: float, faults: Faults, seed: int
    ) -> None:
        self.now_s = 0.0
        self.events = 0
        self.origin_pieces = 0  # sent by the origin
        self.origin_again = 0  # of these, sent before, though somebody else could have sent them
        self.reliable = set(names)  # who is counted on to send them
        self._origin_sent: set[int] = set()
        self._pieces = pieces
        self._random = Random(seed)
        self._faults = faults
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        everything = Extents([Extent(0, pieces.count)])
        self.origin = Node(ORIGIN, link_bytes_s, everything=everything)
        self.nodes = {name: Node(name, link_bytes_s) for name in names}

    # ── what the sessions' side does ─────────────────────────────────────────────────────────────

    @abstractmethod
    def _tell(self, node: Node, event: SessionEvent) -> None:
        """Give ``node``'s session an event."""

    @abstractmethod
    def _deliver(self, node: Node, session: RelaySession, event: SessionEvent) -> None:
        """Do the same, if it is ``session`` still."""

    @abstractmethod
    def _commit(self, node: Node, session: RelaySession) -> None:
        """Make durable what is pending at ``node``."""

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def at(self, when_s: float, what: Callable[..., None], *args: object) -> None:
        """Do ``what`` at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, what, args))

    def run(self, until_s: float) -> None:
        """Let events happen until the virtual time ``until_s`` or until nothing is left to do."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, what, args = pop(heap)
            what(*args)
            self.events += 1

    def _later(self, delay_s: float, what: Callable[..., None], *args: object) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._order, what, args))

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
                self._tell(node, HeldPiecesCorrupt(extent))
