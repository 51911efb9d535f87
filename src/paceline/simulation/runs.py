"""Transfers between hosts: which pieces a source sends next, and what arrives.

A source sends the first requested piece that it has or is receiving. Pieces that match their
digests are kept, others are rejected; flows that waited for a kept piece start. Arrivals are
reported to a session at the ends of extents (see coalescing), and at once where that matters.

Nothing is decided here after a fault: sessions decide which pieces to request from which source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from paceline.relay.protocol import (
    Extent,
    Extents,
    PieceMap,
    PieceRejected,
    PieceVerified,
    SessionEvent,
)
from paceline.simulation.hosts import Disk, Flow, Gathering, Host
from paceline.simulation.network import NEAR, Clock, Network

ASIDE = -1  # in place of a lane number: a repair, or pieces that were skipped
MARKS = 8  # parts of an extent


class Runs:
    """Every flow, and the run of pieces that each is carrying.

    ``lag_bytes`` is how far a reader is behind its source's own position, in addition to one piece.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        network: Network,
        pieces: PieceMap,
        size_bytes: int,
        lag_bytes: float,
        gathering: Gathering,
        disk: Disk,
        deliver: Callable[[Host, SessionEvent], None],
        settled: Callable[[], None],
    ) -> None:
        """``settled`` is called to process all consequences of what has happened so far."""
        self.network = network
        self.by_slot: dict[int, Flow] = {}
        self.cross_rack_bytes = 0.0
        self._clock = clock
        self._pieces = pieces
        self._piece_bytes = gathering.piece_bytes
        self._size = float(size_bytes)
        self._lag_bytes = lag_bytes
        self._gathering = gathering
        self._disk = disk
        self._deliver = deliver
        self._settled = settled
        self._pairs: dict[tuple[str, str], int] = {}
        self.to_start: deque[Flow] = deque()  # what ``settle`` has to do

    # ── requests of streams ──────────────────────────────────────────────────────────────────────

    def start_soon(self, *flows: Flow) -> None:
        """Start or continue these flows when the current event is processed."""
        self.to_start.extend(flows)

    def settle(self) -> None:
        while self.to_start:
            self._select(self.to_start.popleft())

    def open(self, host: Host, far: Host, key: str, number: int, lane: int) -> Flow:
        known = host.feeds.get((key, lane))
        if known is not None:
            self.close(known)
        crosses = not far.is_origin and far.rack != host.rack
        uses: tuple[int, ...] = (host.nic_in, far.nic_out)
        if crosses:
            uses = (*uses, far.uplink_out, host.uplink_in)
        lanes = max(1, len(host.lanes.lanes)) if host.lanes else 1
        pair = self._pairs.setdefault((far.name, host.name), len(self._pairs))
        slot = self.network.add(uses, self._piece_bytes + self._lag_bytes / lanes, pair)
        flow = Flow(slot, host, far, key, number, lane, crosses)
        host.feeds[key, lane] = self.by_slot[slot] = flow
        far.readers[flow] = None
        return flow

    def want(self, flow: Flow, run: Extent) -> None:
        """Request pieces; the caller then starts or extends the flow."""
        flow.wanted.add(run)
        self.network.idle[flow.slot] = False

    def close(self, flow: Flow) -> None:
        """Drop a stream: what arrived is reported, what was under way is lost."""
        if flow.closed:
            return
        self._arrive(flow, self.reached(flow))
        self.report(flow)
        self.halt(flow)
        flow.closed, flow.open = True, False
        network, slot = self.network, flow.slot
        keeper = flow.reader if flow.source.is_origin else flow.source
        tally = keeper.edge(flow.key, flow.reader.name)
        tally.bytes += float(network.carried[slot])
        tally.busy_s += float(network.busy_s[slot])
        if flow.source.is_origin:
            flow.reader.origin_bytes += min(self.partial(flow), self._piece_bytes)
        network.remove(slot)
        del self.by_slot[slot]
        flow.source.readers.pop(flow, None)
        flow.source.waiting.pop(flow, None)
        if flow.reader.feeds.get((flow.key, flow.lane)) is flow:
            del flow.reader.feeds[flow.key, flow.lane]

    def extend(self, flow: Flow) -> None:
        """Extend a flow's run by pieces that were requested since it began."""
        run = next((r for r in flow.wanted if r.first <= flow.stop <= r.stop), None)
        if run is None or run.stop <= flow.stop:
            return
        flow.stop = run.stop
        if flow.cut is None:
            self.network.stop[flow.slot] = self._offset(flow.stop)

    def arrive(self, flow: Flow, extent: Extent) -> None:
        """Report ``extent`` as soon as it arrives, before the current extent ends.

        A session requests a single piece to find out how far a source is.
        """
        if self.reached(flow) >= extent.stop:
            self.flush([flow])
        elif flow.base <= extent.first and extent.stop < flow.extent.stop:
            if flow.bad is not None and flow.bad.stop > extent.stop:
                flow.bad = None
            flow.extent = Extent(flow.extent.first, extent.stop)
            self._set_edge(flow)

    def flush(self, flows: Iterable[Flow]) -> None:
        for flow in list(flows):
            self._arrive(flow, self.reached(flow))
            self.report(flow)

    def report(self, flow: Flow) -> None:
        """Report to the session what arrived since the last report."""
        if not flow.unreported:
            return
        runs, flow.unreported = Extents(flow.unreported), []
        for run in runs:
            self._deliver(flow.reader, PieceVerified(flow.key, flow.number, run))
        self._disk.commit_soon(flow.reader)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    def _select(self, flow: Flow) -> None:
        """Start with the first requested piece that the source has or is receiving."""
        source = flow.source
        if flow.closed or not flow.open:
            return
        if not flow.wanted:
            if flow.parked:
                self.halt(flow)  # the piece that it waits for arrived from another flow
            return
        if flow.moving:
            if flow.parked:
                self._resume(flow)
            return
        if not source.serves or not flow.reader.serves:
            return
        # First piece, stop of what the source has, stop of the run.
        found: tuple[int, int, int] | None = None
        for run in flow.wanted:
            there = next(source.have.common(run), None)
            if there is not None:
                found = there.first, there.stop, run.stop
                break
        leader: Flow | None = None
        if found is not None:
            for other in source.feeds.values():
                if other.moving and other.base == found[1] < found[2]:
                    leader = other
        else:
            for other in source.feeds.values():
                if not other.moving:
                    continue
                common = next(flow.wanted.common(Extent(other.base, other.stop)), None)
                if common is not None and (found is None or common.first < found[0]):
                    stop = next(r.stop for r in flow.wanted if r.stop > common.first)
                    found, leader = (common.first, common.first, stop), other
        if found is None:
            source.waiting[flow] = None
            return
        source.waiting.pop(flow, None)
        first, has, stop = found
        if leader is None:  # what the source has beyond this request may be requested next
            has = next(source.have.common(Extent(first, self._pieces.count))).stop
        flow.base, flow.stop, flow.cut = first, stop, None
        flow.moving = True
        flow.leader = leader
        if leader is not None:
            leader.followers[flow] = None
        size = self._piece_bytes
        self.network.start(
            flow.slot,
            first * size,
            self._offset(stop),
            self._offset(has),
            -1 if leader is None else leader.slot,
        )
        self._next_edge(flow)
        self.to_start.extend(flow.reader.waiting)

    def _resume(self, flow: Flow) -> None:
        """Continue a parked flow if its source has more pieces or is receiving them."""
        source, piece = flow.source, self.reached(flow)
        has, leader = piece, None
        there = next(source.have.common(Extent(piece, self._pieces.count)), None)
        if there is not None and there.first == piece:
            has = there.stop
        for other in source.feeds.values():
            if other.moving and other.base <= has < other.stop and not _follows(other, flow):
                leader = other
        if leader is None and has == piece:
            if there is not None and next(flow.wanted.common(there), None) is not None:
                self.halt(flow)  # it continues at other pieces
                self.to_start.append(flow)
            return
        flow.parked = False
        source.waiting.pop(flow, None)
        flow.leader = leader
        if leader is not None:
            leader.followers[flow] = None
        slot = -1 if leader is None else leader.slot
        self.network.resume(flow.slot, self._offset(has), slot)

    def halt(self, flow: Flow) -> None:
        """End the current run at its position; followers may read what has arrived."""
        if not flow.moving:
            return
        flow.moving = flow.parked = False
        self.network.halt(flow.slot)
        for other in flow.followers:
            other.leader = None
            self.network.let_go(other.slot, self._offset(flow.base))
        flow.followers.clear()
        if flow.leader is not None:
            flow.leader.followers.pop(flow, None)
            flow.leader = None
        flow.bad = None

    def _next_edge(self, flow: Flow) -> None:
        self._gathering.next_extent(flow)
        self._set_edge(flow)

    def _set_edge(self, flow: Flow) -> None:
        edge = flow.extent.stop if flow.bad is None else flow.bad.stop
        self.network.edge[flow.slot] = self._offset(edge)

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def crossed(self, flow: Flow) -> None:
        """Process a flow at an edge, at its run's end, or at the end of what its source has."""
        at = float(self.network.pos[flow.slot])
        reached = self.reached(flow)
        ended = at >= self.network.stop[flow.slot] - NEAR
        dry = flow.leader is None and at >= self.network.static[flow.slot] - NEAR
        # Steps end anywhere, but edges are the same pieces on every host: the few pieces beyond an
        # edge are processed with what follows, otherwise all flows upstream had to be processed.
        edge = reached if ended or dry else self._edge(flow, reached)
        self._arrive(flow, edge)
        if reached >= flow.extent.stop or ended:
            self.report(flow)
            self._settled()
            if not flow.moving:
                return
            ended = at >= self.network.stop[flow.slot] - NEAR
        dry = flow.leader is None and at >= self.network.static[flow.slot] - NEAR
        if ended:
            self.halt(flow)
            self.to_start.append(flow)
            self._settled()
            if not flow.moving:
                self.report(flow)
            return
        if dry:
            flow.parked = self.network.parked[flow.slot] = True
            flow.source.waiting[flow] = None
            self.report(flow)
            self.to_start.append(flow)
        if reached >= flow.extent.stop:
            self._next_edge(flow)
        else:
            self._set_edge(flow)

    def _edge(self, flow: Flow, reached: int) -> int:
        """Return the edge that a flow has just passed, or ``reached`` where it is far behind."""
        bad, stop = flow.bad, flow.extent.stop
        edge = bad.stop if bad is not None and bad.stop <= reached < stop else stop
        return edge if 0 <= reached - edge < flow.extent.size // MARKS else reached

    def reached(self, flow: Flow) -> int:
        """Return the first piece of the current run that has not arrived."""
        if not flow.moving:
            return flow.base
        at = self.network.pos.item(flow.slot) + NEAR
        if at >= self._size:
            return self._pieces.count
        return max(flow.base, int(at // self._piece_bytes))

    def partial(self, flow: Flow) -> float:
        """Return how many bytes of the current run have arrived but are not processed."""
        if flow.stop <= flow.base:
            return 0.0
        return max(0.0, float(self.network.pos[flow.slot]) - flow.base * self._piece_bytes)

    def _offset(self, piece: int) -> float:
        return min(piece * self._piece_bytes, self._size)

    def _arrive(self, flow: Flow, upto: int) -> None:
        """Process arrived pieces: keep those that match their digests, reject the others."""
        upto = min(upto, flow.stop)
        while flow.base < upto:
            bad = flow.bad
            if bad is None or upto <= bad.first:
                self._keep(flow, upto)
            elif flow.base < bad.first:
                self._keep(flow, bad.first)
            else:
                self._refuse(flow, Extent(flow.base, min(bad.stop, upto)))
                flow.bad = Extent(flow.base, bad.stop) if flow.base < bad.stop else None

    def _keep_above(self, flow: Flow, upto: int) -> None:
        """Process what the flows upstream have received up to a piece."""
        behind: list[Flow] = []
        ahead = flow.leader
        while ahead is not None and ahead.base < upto:
            behind.append(ahead)
            ahead = ahead.leader
        for other in reversed(behind):  # no recursion: a chain may have ten thousand hops
            self._arrive(other, min(upto, self.reached(other)))

    def _keep(self, flow: Flow, upto: int) -> None:
        self._keep_above(flow, upto)  # pieces on their way to the source are counted there first
        run = Extent(flow.base, upto)
        flow.base = upto
        self._count(flow, self._pieces.bytes_of(run))
        for each in list(flow.source.have.common(run)):  # the rest is sent once it is repaired
            flow.wanted.remove(each)
            self._take(flow, each)
        flow.reader.edge(flow.key, flow.reader.name).pieces += run.size
        if again := self._gathering.spread(run.size):
            self._count(flow, again * self._piece_bytes)
            self._count_corrupt(flow, again)

    def _refuse(self, flow: Flow, rotten: Extent) -> None:
        self.report(flow)  # earlier good pieces count when the session judges the source
        flow.base = rotten.stop
        flow.wanted.remove(rotten)
        self._count(flow, self._pieces.bytes_of(rotten))
        self._count_corrupt(flow, rotten.size)
        if self._gathering.exact:  # no follower has begun with it: they skip it
            for other in flow.followers:
                if other.base <= rotten.first < other.stop:
                    other.cut = rotten.first
                    self.network.stop[other.slot] = self._offset(rotten.first)
        self._deliver(flow.reader, PieceRejected(flow.key, flow.number, rotten))

    def _count_corrupt(self, flow: Flow, pieces: int) -> None:
        flow.reader.corrupt_pieces += pieces
        flow.reader.edge(flow.key, flow.reader.name).corrupt += pieces

    def _count(self, flow: Flow, size: float) -> None:
        if flow.crosses:
            self.cross_rack_bytes += size
        if flow.source.is_origin:
            flow.reader.origin_bytes += size

    def _take(self, flow: Flow, run: Extent) -> None:
        """Record verified pieces at the reader, and wake the flows that wait for them there."""
        flow.unreported.append(run)
        if flow.reader.have.add(run):
            self._gained(flow.reader, run)

    def _gained(self, host: Host, run: Extent) -> None:
        """Start flows that wait for these pieces; send them aside to flows that skipped them."""
        for flow in host.waiting:
            if next(flow.wanted.common(run), None) is not None:
                self.to_start.append(flow)
        first = run.first
        passing = [each for each in host.readers if each.base > first and each.moving]
        for flow in passing:
            behind = Extent(run.first, min(run.stop, flow.base))
            passed = list(flow.wanted.common(behind))
            for each in passed:
                flow.wanted.remove(each)
                self._aside(flow, each)

    def _aside(self, flow: Flow, extent: Extent) -> None:
        """Send skipped pieces in a side flow, in parallel to the current run."""
        reader = flow.reader
        aside = reader.feeds.get((flow.key, ASIDE))
        if aside is None or aside.number != flow.number:
            aside = self.open(reader, flow.source, flow.key, flow.number, ASIDE)
            aside.open = True
        self.want(aside, extent)
        self.to_start.append(aside)


def _follows(flow: Flow, other: Flow) -> bool:
    """Return whether ``flow`` follows ``other``, directly or over flows between them.

    Across a change of plans workers may wait for each other in a ring.
    """
    ahead: Flow | None = flow if other.followers else None
    while ahead is not None:
        if ahead is other:
            return True
        ahead = ahead.leader
    return False
