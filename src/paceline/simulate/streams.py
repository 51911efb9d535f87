"""The simulated data plane: what sessions ask for becomes flows, what arrives becomes events.

Each session is the production ``RelaySession``. Here is only what sockets, disks and servers do: a
server sends the first asked piece that it has, a piece may be passed on once it is verified, a
corrupt one is refused by its reader, a reset is seen at once and silence is not. After a fault
nothing here decides anything.

**Coalescing.** Positions are exact, but a session is told of up to ``coalesce`` pieces at once. In
an extent of n pieces Binomial(n, q) arrive corrupt, as one run. Readers behind are sent as many
bytes in their place and are owed the pieces: these arrive the moment they are verified upstream.
With ``coalesce`` 1 nothing is rounded: each piece is on its own, what is missing is sent later.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from paceline.errors import PacelineError, PeerLost
from paceline.manifest import Manifest
from paceline.relay.session.events import (
    Abandon,
    Complete,
    Fail,
    Fetch,
    LanesAssigned,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    SessionEvent,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.limits import PieceMap, SessionLimits
from paceline.relay.session.session import RelaySession
from paceline.simulate.hosts import Flow, Host, Tally
from paceline.simulate.network import NEAR, Network
from paceline.simulate.scenario import Timing
from paceline.wire.plan import Source

WATCH_S = 0.25  # a stream that has not moved for so long says that it waits, like the real one
LEAST_EXTENTS = 8  # extents shrink towards a host's end, to this part of the longest
ASIDE = -1  # instead of a lane's number
EARLIEST, LATEST = 0.1, 0.75  # corrupt runs begin in this part of their extent
MUCH_CORRUPT = 0.05  # beyond it, rejections are not gathered


class Streams:
    """Hosts, the streams between them, and a virtual clock. ``step_s`` is how finely it looks."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        limits: SessionLimits,
        timing: Timing,
        coalesce: int = 1,
        corrupt: float = 0.0,
        step_s: float = 0.0,
        lag_bytes: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.manifest = manifest
        self.network = Network()
        self.hosts: dict[str, Host] = {}
        self.origin: Host | None = None
        self.events = 0  # that sessions were told
        self.cross_rack_bytes = 0.0
        self.violations: list[str] = []
        self.on_published: Callable[[Host], None] = lambda _host: None
        self._pieces = PieceMap(manifest)
        self._piece_bytes = float(manifest.piece_bytes)
        self._size = float(manifest.total_size)
        self._limits = limits
        self._timing = timing
        self._coalesce = coalesce
        self._corrupt = corrupt
        self._step_s = step_s
        self._lag_bytes = lag_bytes
        self._random = np.random.default_rng([seed, 0x70616365])
        self._seed = seed
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._inbox: deque[tuple[Host, RelaySession, SessionEvent]] = deque()
        self._to_start: deque[Flow] = deque()
        self._to_report: deque[Flow] = deque()
        self._by_slot: dict[int, Flow] = {}
        self._pairs: dict[tuple[str, str], int] = {}
        self._vouched = np.zeros(64, np.bool_)  # sessions know that these flows move

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` after a virtual while."""
        self.at(self.now_s + delay_s, what)

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Let time pass until ``done()``, or until there is nothing left to happen before then."""
        self._settle()
        network = self.network
        while not done():
            next_s = min(network.next_s(), self._heap[0][0] if self._heap else np.inf)
            next_s = max(next_s, network.now_s + self._step_s)
            if next_s > until_s:
                self.now_s = until_s
                return
            # Within a step, one thing leads to another at its own time: a reset costs a
            # connection, and not three steps.
            self._happen(np.nextafter(next_s, 0.0))
            self.now_s = next_s
            for slot in network.advance(next_s).tolist():
                flow = self._by_slot.get(slot)
                if flow is not None and flow.moving:
                    self._crossed(flow)
                    self._settle()
            self._happen(next_s)

    def _happen(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, what = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, at_s)
            what()
            self._settle()

    def _settle(self) -> None:
        """Tell sessions what happened and do what they ask, until nobody has anything to say."""
        while self._inbox or self._to_start or self._to_report:
            while self._to_report:
                self._report(self._to_report.popleft())
            while self._to_start:
                self._select(self._to_start.popleft())
            if self._inbox:
                host, session, event = self._inbox.popleft()
                if host.session is session and host.alive:
                    self._handle(host, session, event)

    # ── what the control plane and faults do ─────────────────────────────────────────────────────

    def begin(self, host: Host) -> None:
        """Give a host a session, with what its disk holds."""
        host.have = host.durable.copy()
        host.begun_s, host.complete, host.error = self.now_s, False, None
        host.session = RelaySession(
            worker_id=host.name,
            manifest=self.manifest,
            held=host.durable,
            limits=self._limits,
            seed=self._seed,
            pieces=self._pieces,
        )

    def tell(self, host: Host, event: SessionEvent) -> None:
        """Tell a session something, after everything that arrived before."""
        if host.session is None:
            return
        if host.frozen:
            host.missed.append(event)
        else:
            self._inbox.append((host, host.session, event))

    def assign(self, host: Host, event: LanesAssigned) -> None:
        """Hand a worker its lanes."""
        host.lanes = event.lanes
        chunks = self._pieces.chunks
        host.lane_starts = sorted(chunks[lane.first_chunk].first for lane in event.lanes.lanes)
        self._flush(host.feeds.values())
        self.tell(host, event)

    def kill(self, host: Host) -> None:
        """End a process: its peers see a reset, its disk keeps what was durable."""
        self._silence(host)
        for flow in list(host.readers):
            flow.open = False
            lost = PeerLost("the connection was reset", where=host.name)
            self._later_failed(flow, lost)
        for flow in list(host.feeds.values()):
            self._close(flow)
        host.alive = False
        host.session, host.timer_s, host.commit_s = None, None, None
        host.missed.clear()
        host.have = host.durable.copy()

    def freeze(self, host: Host) -> None:
        """Stop a process without a word."""
        self._silence(host)
        host.frozen = True

    def thaw(self, host: Host) -> None:
        """Let a frozen process go on where it stopped."""
        if not host.frozen:
            return
        host.frozen = False
        self._to_start.extend([*host.readers, *host.feeds.values()])
        host.commit_s = None
        self._commit_soon(host)
        if host.complete:
            self._publish_soon(host)
        missed, host.missed = host.missed, []
        for event in (*missed, Tick()):
            self.tell(host, event)

    def limit(self, host: Host, bytes_s: float) -> None:
        """Give a host's NIC another rate, both ways."""
        self.network.limit(host.nic_in, bytes_s)
        self.network.limit(host.nic_out, bytes_s)

    def running(self, host: Host) -> dict[tuple[str, str], Tally]:
        """Return what is to be added to a host's counts for its open streams.

        Corrupt pieces come in one run an extent here: they are counted as if they were spread.
        """
        network, sums = self.network, dict[tuple[str, str], Tally]()
        for flow in host.readers:
            tally = sums.setdefault((flow.key, flow.reader.name), Tally())
            tally.bytes += float(network.carried[flow.slot])
            tally.busy_s += float(network.busy_s[flow.slot])
        for flow in host.feeds.values():
            tally = sums.setdefault((flow.key, host.name), Tally())
            if flow.source is self.origin:
                tally.bytes += float(network.carried[flow.slot])
                tally.busy_s += float(network.busy_s[flow.slot])
            corrupt = self._unspread(flow)
            tally.pieces += self._reached(flow) - flow.base - corrupt
            tally.corrupt += corrupt
        return sums

    def _unspread(self, flow: Flow) -> int:
        """Return how many more corrupt pieces would have come by now, had they been spread."""
        reached, drawn = self._reached(flow), flow.drawn
        if not flow.drawn_pieces or not drawn.first <= reached <= drawn.stop:
            return 0
        refused = flow.drawn_pieces - (flow.drawn_bad.size if flow.drawn_bad else 0)
        return round(flow.drawn_pieces * (reached - drawn.first) / drawn.size) - refused

    def watch(self) -> None:
        """Say who lives and who sends, as keepalives and arriving bytes do.

        While bytes flow a session is told so once, until further notice.
        """
        going = self.network.moved_since(self.now_s - WATCH_S)
        slots = np.flatnonzero(~(going & self._vouched[: going.size]))
        streams: dict[tuple[Host, str, int], None] = {}
        for slot in slots.tolist():
            flow = self._by_slot.get(slot)
            if flow is not None and flow.open:
                streams[flow.reader, flow.key, flow.number] = None
        for host, key, number in streams:
            flows = [f for f in host.feeds.values() if f.key == key and f.number == number]
            asked = [f for f in flows if f.wanted]
            if not asked or not host.serves or not asked[0].source.serves:
                continue
            moving = [bool(going[f.slot]) for f in asked]
            self._vouch(flows, key, number, moving)
        self.after(WATCH_S, self.watch)

    def assure(self) -> None:
        """Say again of slow streams that they move, before sessions think that all is lost."""
        every_s = self._limits.give_up_s / 4
        for host in self.hosts.values():
            if host.session is None or self.now_s - host.told_s < every_s:
                continue
            for flow in host.feeds.values():
                if self._vouched[flow.slot]:
                    self.tell(host, SourceAlive(flow.key, flow.number, moving=True, until_s=np.inf))
        self.after(every_s, self.assure)

    def _vouch(self, flows: list[Flow], key: str, number: int, moving: list[bool]) -> None:
        host = flows[0].reader
        if all(moving) and all(self._vouched[flow.slot] for flow in flows):
            return
        if all(moving):
            news = SourceAlive(key, number, moving=True, until_s=np.inf)
        else:
            self._flush(f for f in flows if self._vouched[f.slot])
            news = SourceAlive(key, number, moving=any(moving))
        for flow in flows:
            self._vouched[flow.slot] = all(moving)
        self.tell(host, news)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    def _handle(self, host: Host, session: RelaySession, event: SessionEvent) -> None:
        self.events += 1
        host.told_s = self.now_s
        for action in session.handle(event, self.now_s):
            match action:
                case Fetch(source, number, extent):
                    self._fetch(host, source, number, extent)
                case Abandon(key, number):
                    for flow in [f for f in host.feeds.values() if f.key == key]:
                        if flow.number == number:
                            self._close(flow)
                case Complete():
                    self._completed(host)
                case Fail(error):
                    host.error = error
        self._arm(host, session)

    def _arm(self, host: Host, session: RelaySession) -> None:
        deadline_s = session.deadline_s()
        if deadline_s is None or (host.timer_s is not None and host.timer_s <= deadline_s):
            return
        host.timer_s = max(deadline_s, self.now_s + 1e-6)
        due_s = host.timer_s

        def ring() -> None:
            if host.session is not session or host.timer_s != due_s:
                return
            host.timer_s = None
            again_s = session.deadline_s()
            if again_s is not None and again_s <= self.now_s:
                self._flush(f for f in host.feeds.values() if not self._vouched[f.slot])
                self.tell(host, Tick())
            else:
                self._arm(host, session)

        self.at(host.timer_s, ring)

    def _completed(self, host: Host) -> None:
        if host.durable.count != self._pieces.count:
            lacking = self._pieces.count - host.durable.count
            self.violations.append(f"I1 {host.name} published with {lacking} pieces missing")
        host.complete = True
        self._publish_soon(host)

    def _publish_soon(self, host: Host) -> None:
        session = host.session

        def published() -> None:
            if host.session is session and host.serves and host.published_s is None:
                host.published_s = self.now_s
                self.on_published(host)

        self.after(self._timing.publish_s, published)

    # ── streams ──────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, host: Host, source: Source, number: int, extent: Extent) -> None:
        lane = bisect_right(host.lane_starts, extent.first)
        flow = host.feeds.get((source.key, lane))
        if flow is not None and flow.number == number and extent.stop <= flow.base:
            lane = ASIDE  # a repair: it takes turns with what is on its way
            flow = host.feeds.get((source.key, lane))
        if flow is None or flow.number != number:
            flow = self._open(host, source, number, lane)
        if next(host.have.common(extent), None) is not None and not host.frozen:
            again = sum(run.size for run in host.have.common(extent))
            self._asked_again(host, extent, again)
        flow.wanted.add(extent)
        if flow.moving:
            self._extend(flow)
        elif flow.open:
            self._to_start.append(flow)

    def _asked_again(self, host: Host, extent: Extent, again: int) -> None:
        told = host.session.progress().pieces_verified if host.session else 0
        if told >= host.have.count:  # it knew of every one of them
            self.violations.append(f"{host.name} asked again for {again} pieces of {extent}")

    def _open(self, host: Host, source: Source, number: int, lane: int) -> Flow:
        far = self.origin if source.kind == "origin" else self.hosts[source.worker_id or ""]
        if far is None:
            raise AssertionError("there is no origin")
        flow = self._stream(host, far, source.key, number, lane)
        if not far.alive:
            self._later_failed(flow, PeerLost("connection refused", where=source.key))
        else:
            self.after(self._timing.connect_s, lambda: self._opened(flow))
        return flow

    def _stream(self, host: Host, far: Host, key: str, number: int, lane: int) -> Flow:
        known = host.feeds.get((key, lane))
        if known is not None:
            self._close(known)
        crosses = not far.is_origin and far.rack != host.rack
        uses: tuple[int, ...] = (host.nic_in, far.nic_out)
        if crosses:
            uses = (*uses, far.uplink_out, host.uplink_in)
        lanes = max(1, len(host.lanes.lanes)) if host.lanes else 1
        pair = self._pairs.setdefault((far.name, host.name), len(self._pairs))
        slot = self.network.add(uses, self._piece_bytes + self._lag_bytes / lanes, pair)
        if slot >= self._vouched.size:
            self._vouched = np.concatenate([self._vouched, np.zeros_like(self._vouched)])
        self._vouched[slot] = False
        flow = Flow(slot, host, far, key, number, lane, crosses)
        host.feeds[key, lane] = self._by_slot[slot] = flow
        far.readers[flow] = None
        return flow

    def _opened(self, flow: Flow) -> None:
        if not flow.closed and flow.source.alive:
            flow.open = True
            self._to_start.append(flow)

    def _later_failed(self, flow: Flow, error: PacelineError) -> None:
        session = flow.reader.session

        def failed() -> None:
            if not flow.closed and flow.reader.session is session:
                self.tell(flow.reader, SourceFailed(flow.key, flow.number, error))

        self.after(self._timing.latency_s, failed)

    def _close(self, flow: Flow) -> None:
        """Drop a stream: what arrived is reported, what was on its way is lost."""
        if flow.closed:
            return
        self._arrive(flow, self._reached(flow))
        self._report(flow)
        judged = flow.reader.edge(flow.key, flow.reader.name)
        corrupt = self._unspread(flow)
        judged.corrupt += corrupt
        judged.pieces -= corrupt
        self._halt(flow)
        flow.closed, flow.open = True, False
        network, slot = self.network, flow.slot
        keeper = flow.reader if flow.source is self.origin else flow.source
        tally = keeper.edge(flow.key, flow.reader.name)
        tally.bytes += float(network.carried[slot])
        tally.busy_s += float(network.busy_s[slot])
        if flow.source is self.origin and flow.stop > flow.base:
            partial = float(network.pos[slot]) - flow.base * self._piece_bytes
            flow.reader.origin_bytes += max(0.0, min(partial, self._piece_bytes))
        network.remove(slot)
        del self._by_slot[slot]
        flow.source.readers.pop(flow, None)
        flow.source.waiting.pop(flow, None)
        if flow.reader.feeds.get((flow.key, flow.lane)) is flow:
            del flow.reader.feeds[flow.key, flow.lane]

    def _silence(self, host: Host) -> None:
        """Nothing leaves or reaches a host any more; what arrived by now is reported."""
        for flow in (*host.readers, *host.feeds.values()):
            self._flush([flow])
            self._halt(flow)
            if self._vouched[flow.slot]:
                self._vouched[flow.slot] = False
                self.tell(flow.reader, SourceAlive(flow.key, flow.number))
        host.waiting.clear()

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    def _select(self, flow: Flow) -> None:
        """Begin with the first asked piece that the source has, or that is on its way to it."""
        source = flow.source
        if flow.closed or not flow.open or not flow.wanted:
            return
        if flow.moving:
            if flow.parked:
                self._resume(flow)
            return
        if not source.serves or not flow.reader.serves:
            return
        found: tuple[int, int, int] | None = None  # first, stop of what is there, stop of the run
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
        if leader is None:  # what the source has beyond the present request may be asked for next
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
        self._next_extent(flow)
        self._to_start.extend(flow.reader.waiting)

    def _resume(self, flow: Flow) -> None:
        """Let a flow go on where it ran dry, if its source has more or is being sent it."""
        source, piece = flow.source, self._reached(flow)
        has, leader = piece, None
        there = next(source.have.common(Extent(piece, self._pieces.count)), None)
        if there is not None and there.first == piece:
            has = there.stop
        for other in source.feeds.values():
            if other.moving and other.base <= has < other.stop:
                leader = other
        if leader is None and has == piece:
            if there is not None and next(flow.wanted.common(there), None) is not None:
                self._halt(flow)  # it goes on elsewhere
                self._to_start.append(flow)
            return
        flow.parked = False
        source.waiting.pop(flow, None)
        flow.leader = leader
        if leader is not None:
            leader.followers[flow] = None
        slot = -1 if leader is None else leader.slot
        self.network.resume(flow.slot, self._offset(has), slot)

    def _offset(self, piece: int) -> float:
        return min(piece * self._piece_bytes, self._size)

    def _extend(self, flow: Flow) -> None:
        """Let a flow run on into what was asked for since."""
        run = next((r for r in flow.wanted if r.first <= flow.stop <= r.stop), None)
        if run is None or run.stop <= flow.stop:
            return
        flow.stop = run.stop
        if flow.cut is None:
            self.network.extend(flow.slot, self._offset(flow.stop))

    def _halt(self, flow: Flow) -> None:
        """End the present run where it is; whoever followed has what arrived."""
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

    def _next_extent(self, flow: Flow) -> None:
        """Fix where the session is told next, and what of it will be corrupt."""
        share = max(self._corrupt, flow.source.corrupts)
        drawn = flow.drawn
        if drawn.first <= flow.base < drawn.stop:  # a repair came between
            flow.extent_stop = min(drawn.stop, flow.stop)
            flow.bad = flow.drawn_bad
            if flow.bad is not None and flow.bad.stop <= flow.base:
                flow.bad = None
        else:
            longest = self._extent_pieces(flow, share)
            stop = min((flow.base // longest + 1) * longest, flow.stop)
            flow.extent_stop = stop
            flow.bad = self._draw(flow.base, stop, share) if share > 0 else None
            if flow.base >= drawn.stop:
                flow.drawn, flow.drawn_bad = Extent(flow.base, stop), flow.bad
                flow.drawn_pieces = flow.bad.size if flow.bad is not None else 0
        edge = flow.extent_stop if flow.bad is None else min(flow.bad.stop, flow.extent_stop)
        self.network.edge[flow.slot] = self._offset(edge)

    def _draw(self, first: int, stop: int, share: float) -> Extent | None:
        """Return which pieces of an extent will be corrupt."""
        bad = int(self._random.binomial(stop - first, share))
        if not bad:
            return None
        # After some that are good, or the source would look bad; and not too near the end: it is
        # repaired when others report the extent.
        room = stop - first - bad
        first += int((EARLIEST + self._random.random() * (LATEST - EARLIEST)) * (room + 1))
        return Extent(first, first + bad)

    def _extent_pieces(self, flow: Flow, corrupt: float) -> int:
        if self._coalesce == 1:
            return 1
        if corrupt > MUCH_CORRUPT:
            return max(1, min(self._coalesce, int(1 / corrupt)))
        left = (self._pieces.count - flow.reader.have.count) // max(1, len(flow.reader.feeds))
        least = max(1, self._coalesce // LEAST_EXTENTS)
        longest = least
        while longest * 2 <= min(self._coalesce, left // 3):
            longest *= 2  # powers of two: an extent's edges are everywhere the same pieces
        return longest

    def _crossed(self, flow: Flow) -> None:
        """A flow is at an edge, at its run's end, or has caught up with a source that waits."""
        at = float(self.network.pos[flow.slot])
        reached = self._reached(flow)
        self._arrive(flow, reached)
        ended = at >= self.network.stop[flow.slot] - NEAR
        if reached >= flow.extent_stop or ended:
            self._report(flow)
            self._settle()
            if not flow.moving:
                return
            ended = at >= self.network.stop[flow.slot] - NEAR
        dry = flow.leader is None and at >= self.network.static[flow.slot] - NEAR
        if ended:
            self._halt(flow)
            self._to_start.append(flow)
            self._settle()
            if not flow.moving:
                self._report(flow)
            return
        if dry:
            flow.parked = True
            self.network.park(flow.slot)
            flow.source.waiting[flow] = None
            self._to_start.append(flow)
        if reached >= flow.extent_stop:
            self._next_extent(flow)
        elif flow.bad is None:
            self.network.edge[flow.slot] = self._offset(flow.extent_stop)

    def _reached(self, flow: Flow) -> int:
        """Return before which piece everything of the present run has arrived."""
        if not flow.moving:
            return flow.base
        at = float(self.network.pos[flow.slot]) + NEAR
        if at >= self._size:
            return self._pieces.count
        return max(flow.base, int(at // self._piece_bytes))

    def _arrive(self, flow: Flow, upto: int) -> None:
        """Take pieces off the wire: keep those that match their digests, refuse the others."""
        upto = min(upto, flow.stop)
        while flow.base < upto:
            bad = flow.bad
            if bad is None or upto <= bad.first:
                self._keep(flow, upto)
            elif flow.base < bad.first:
                self._keep(flow, bad.first)
            else:
                self._refuse(flow, Extent(flow.base, min(bad.stop, upto)))
                left = Extent(flow.base, bad.stop) if flow.base < bad.stop else None
                if flow.drawn_bad == bad:
                    flow.drawn_bad = left
                flow.bad = left

    def _keep(self, flow: Flow, upto: int) -> None:
        run = Extent(flow.base, upto)
        behind: list[Flow] = []  # what is on its way to the source counts there first
        ahead = flow.leader
        while ahead is not None and ahead.base < upto:
            behind.append(ahead)
            ahead = ahead.leader
        for other in reversed(behind):  # no recursion: a line may have ten thousand hops
            self._arrive(other, min(upto, self._reached(other)))
        flow.base = upto
        reader, size = flow.reader, self._pieces.bytes_of(run)
        self._count(flow, size)
        source = flow.source
        got = [run] if source.is_origin else list(source.have.common(run))
        if sum(each.size for each in got) < run.size:
            for each in source.have.gaps(run):
                flow.owed.add(each)
        self._take(flow, got)
        reader.edge(flow.key, reader.name).pieces += run.size

    def _refuse(self, flow: Flow, rotten: Extent) -> None:
        self._report(flow)  # what came before it counts when the source is judged
        flow.wanted.remove(rotten)
        flow.base = rotten.stop
        self._count(flow, self._pieces.bytes_of(rotten))
        reader = flow.reader
        reader.corrupt_pieces += rotten.size
        reader.edge(flow.key, reader.name).corrupt += rotten.size
        if self._coalesce == 1:  # nobody has begun with it: whoever follows passes it by
            for other in flow.followers:
                if other.base <= rotten.first < other.stop:
                    other.cut = rotten.first
                    self.network.extend(other.slot, self._offset(rotten.first))
        self.tell(reader, PieceRejected(flow.key, flow.number, rotten))

    def _count(self, flow: Flow, size: int) -> None:
        if flow.crosses:
            self.cross_rack_bytes += size
        if flow.source is self.origin:
            flow.reader.origin_bytes += size

    def _take(self, flow: Flow, runs: Iterable[Extent]) -> None:
        """These pieces are at the reader now, and verified; whoever waits there for them learns."""
        todo = [(flow, run) for run in runs]
        for _, run in todo:
            flow.wanted.remove(run)
        while todo:
            flow, run = todo.pop()
            flow.unreported.append(run)
            if not flow.reader.have.add(run):
                continue
            for other in flow.reader.readers:
                if other.owed:  # it was sent something in their place
                    owed = list(other.owed.common(run))
                    for each in owed:
                        other.owed.remove(each)
                        other.wanted.remove(each)
                        todo.append((other, each))
                    if owed and not other.moving:
                        self._to_report.append(other)
            self._gained(flow.reader, run)

    def _gained(self, host: Host, run: Extent) -> None:
        """Wake up who waited for these pieces; where they were passed by they are sent first."""
        for flow in host.waiting:
            if next(flow.wanted.common(run), None) is not None:
                self._to_start.append(flow)
        for flow in list(host.readers):
            if flow.moving and run.first < flow.base:
                behind = Extent(run.first, min(run.stop, flow.base))
                passed = list(flow.wanted.common(behind))
                for each in passed:
                    flow.wanted.remove(each)
                    self._aside(flow, each)

    def _aside(self, flow: Flow, extent: Extent) -> None:
        """Send pieces that were passed by, in turns with what is on its way."""
        reader = flow.reader
        aside = reader.feeds.get((flow.key, ASIDE))
        if aside is None or aside.number != flow.number:
            aside = self._stream(reader, flow.source, flow.key, flow.number, ASIDE)
            aside.open = True
        aside.wanted.add(extent)
        self._to_start.append(aside)

    def _report(self, flow: Flow) -> None:
        """Tell the session what arrived since it was told last."""
        if not flow.unreported:
            return
        runs, flow.unreported = Extents(flow.unreported), []
        for run in runs:
            self.tell(flow.reader, PieceVerified(flow.key, flow.number, run))
        self._commit_soon(flow.reader)

    def _flush(self, flows: Iterable[Flow]) -> None:
        for flow in list(flows):
            self._arrive(flow, self._reached(flow))
            self._report(flow)

    # ── the disk ─────────────────────────────────────────────────────────────────────────────────

    def _commit_soon(self, host: Host) -> None:
        """Make what is verified durable with the next group, or now when nothing is missing."""
        full = host.have.count == self._pieces.count
        group_s = 0.0 if full else self._timing.group_s
        due_s = self.now_s + group_s + self._timing.commit_s
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

        self.at(due_s, commit)

    def _commit(self, host: Host, have: Extents) -> None:
        everything = Extent(0, self._pieces.count)
        for gap in list(host.durable.gaps(everything)):
            for run in list(have.common(gap)):
                host.durable.add(run)
                self.tell(host, PiecesDurable(run))
