"""The simulated data plane: requests of sessions become flows, arrivals become events.

Each session is the production ``RelaySession``. This module does only what sockets, disks and
servers do: a server sends the first requested piece that it has (``runs``), a piece may be passed
on once it is verified and becomes durable with others (``Disk``), peers see a reset at once but
must detect silence (``keepalives``). Nothing is decided here after a fault.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable

import numpy as np

from paceline.errors import PacelineError, PeerLost
from paceline.manifest import Manifest
from paceline.relay.protocol import (
    REPLACED_AFTER_S,
    Abandon,
    Complete,
    Extent,
    Fail,
    Fetch,
    LanesAssigned,
    LanesConfirmed,
    PieceMap,
    RelaySession,
    ReportSourceLost,
    Resumed,
    SessionEvent,
    SessionLimits,
    SourceFailed,
    Tick,
)
from paceline.schemas import Source, WorkerLanes
from paceline.simulation.hosts import Disk, Flow, Gathering, Host, Tally
from paceline.simulation.keepalives import Keepalives
from paceline.simulation.network import Clock, Network
from paceline.simulation.runs import ASIDE, Runs
from paceline.simulation.scenario import Timing


class Streams:
    """Hosts, their sessions and the streams between them; ``step_s`` is the least time step."""

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
        self.clock = Clock()
        self.manifest = manifest
        self.network = Network()
        self.hosts: dict[str, Host] = {}
        self.origin: Host | None = None
        self.events = 0  # sent to sessions
        self.on_change: Callable[[Host], None] = lambda _host: None  # its agent reports at once
        self._pieces = PieceMap(manifest)
        self._limits = limits
        self._timing = timing
        self._step_s = step_s
        self._seed = seed
        self._inbox: deque[tuple[Host, RelaySession, SessionEvent]] = deque()
        self.disk = Disk(self.clock, self._pieces.count, timing, self.deliver)
        self.runs = Runs(
            clock=self.clock,
            network=self.network,
            pieces=self._pieces,
            size_bytes=manifest.total_size,
            lag_bytes=lag_bytes,
            gathering=Gathering(
                pieces=self._pieces.count,
                piece_bytes=manifest.piece_bytes,
                coalesce=coalesce,
                corrupt=corrupt,
                seed=seed,
            ),
            disk=self.disk,
            deliver=self.deliver,
            settled=self._settle,
        )
        self.keepalives = Keepalives(self.clock, self.runs, self.hosts, limits, self.deliver)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Advance time until ``done()``, or until no event is left before ``until_s``."""
        self._settle()
        clock, network, runs = self.clock, self.network, self.runs
        while not done():
            next_s = network.now_s + self._step_s
            if clock.next_s > next_s:  # otherwise the usual step: a flow's due time does not matter
                next_s = max(next_s, min(network.next_s(), clock.next_s))
            if next_s > until_s:
                clock.now_s = until_s
                return
            # Within a step, callbacks run at their own times: a reset costs one connection setup,
            # not three steps.
            clock.happen(float(np.nextafter(next_s, 0.0)), self._settle)
            clock.now_s = next_s
            for slot in network.advance(next_s).tolist():
                flow = runs.by_slot.get(slot)
                if flow is not None and flow.moving:
                    runs.crossed(flow)
                    self._settle()
            clock.happen(next_s, self._settle)

    def _settle(self) -> None:
        """Pass events to sessions and execute their actions, until there are none left."""
        while self._inbox or self.runs.to_start:
            self.runs.settle()
            if self._inbox:
                host, session, event = self._inbox.popleft()
                if host.session is session and host.alive:
                    self._handle(host, session, event)

    # ── calls of the control plane and of faults ─────────────────────────────────────────────────

    def begin(self, host: Host) -> None:
        """Create a host's session with the pieces on its disk."""
        host.have = host.durable.copy()
        host.begun_s, host.complete, host.error = self.clock.now_s, False, None
        host.commit_s = None  # a pending commit belonged to no session, or to an ended one
        host.session = RelaySession(
            worker_id=host.name,
            manifest=self.manifest,
            held=host.durable,
            limits=self._limits,
            seed=self._seed,
            pieces=self._pieces,
        )

    def deliver(self, host: Host, event: SessionEvent) -> None:
        """Queue an event for a host's session; a frozen host gets it when it thaws."""
        if host.session is None:
            return
        if host.frozen:
            host.missed.append(event)
        else:
            self._inbox.append((host, host.session, event))

    def assign(self, host: Host, given: WorkerLanes) -> None:
        host.lanes = given
        chunks = self._pieces.chunks
        lanes = sorted(given.lanes, key=lambda lane: lane.first_chunk)
        host.lane_starts = [chunks[lane.first_chunk].first for lane in lanes]
        host.lane_sources = [lane.source.key for lane in lanes]
        self.runs.flush(host.feeds.values())
        self.deliver(host, LanesAssigned(given, origin_read_bytes=self.origin_bytes(host)))

    def origin_bytes(self, host: Host) -> int:
        """Return the bytes that a host has read from the origin, as its sockets count them."""
        going = sum(
            self.runs.partial(each) for each in host.feeds.values() if each.source.is_origin
        )
        return round(host.origin_bytes + going)

    def kill(self, host: Host) -> None:
        """End a process: its peers see a reset, its disk keeps the durable pieces."""
        self._silence(host)
        for flow in list(host.readers):
            flow.open = False
            lost = PeerLost("the connection was reset", where=host.name)
            self._later_failed(flow, lost)
        for flow in list(host.feeds.values()):
            self.runs.close(flow)
        host.alive = False
        host.session, host.timer_s, host.commit_s = None, None, None
        host.missed.clear()
        host.have = host.durable.copy()

    def freeze(self, host: Host) -> None:
        """Stop a process without a reset."""
        self._silence(host)
        host.frozen, host.frozen_s = True, self.clock.now_s

    def thaw(self, host: Host) -> None:
        """Continue a frozen process where it stopped."""
        if not host.frozen:
            return
        host.frozen = False
        self.runs.start_soon(*host.readers, *host.feeds.values())
        host.commit_s = None
        self.disk.commit_soon(host)
        if host.complete:
            self.disk.publish_soon(host)
        missed, host.missed = host.missed, []
        slept_s = self.clock.now_s - host.frozen_s
        host.slept = slept_s >= REPLACED_AFTER_S
        for event in (Resumed(slept_s, replaced=host.slept), *missed, Tick()):
            self.deliver(host, event)

    def confirm(self, host: Host) -> None:
        """Confirm to a host that had been frozen that its lanes are valid."""
        if host.slept:
            host.slept = False
            self.deliver(host, LanesConfirmed())

    def slow_down(self, host: Host, share: float) -> None:
        """Reduce the rate of a host's NIC to ``share`` of its present rate."""
        for nic in (host.nic_in, host.nic_out):
            self.network.limit(nic, self.network.capacity(nic) * share)

    def running(self, host: Host) -> dict[tuple[str, str], Tally]:
        """Return the counts of a host's open streams, to be added to its counts."""
        runs, sums = self.runs, dict[tuple[str, str], Tally]()
        for flow in host.readers:
            self._add_carried(sums, flow)
        for flow in host.feeds.values():
            if flow.source.is_origin:
                tally = self._add_carried(sums, flow)
            else:
                tally = sums.setdefault((flow.key, flow.reader.name), Tally())
            tally.pieces += runs.reached(flow) - flow.base
        return sums

    def _add_carried(self, sums: dict[tuple[str, str], Tally], flow: Flow) -> Tally:
        tally = sums.setdefault((flow.key, flow.reader.name), Tally())
        tally.bytes += self.network.carried.item(flow.slot)
        tally.busy_s += self.network.busy_s.item(flow.slot)
        return tally

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    def _handle(self, host: Host, session: RelaySession, event: SessionEvent) -> None:
        self.events += 1
        host.told_s = self.clock.now_s
        for action in session.handle(event, self.clock.now_s):
            match action:
                case Fetch(source, number, extent):
                    self._fetch(host, source, number, extent)
                case Abandon(key, number):
                    for flow in [f for f in host.feeds.values() if f.key == key]:
                        if flow.number == number:
                            self.runs.close(flow)
                case Complete():
                    self.disk.completed(host)
                case Fail(error):
                    host.error = error
                    self.on_change(host)
                case ReportSourceLost():
                    self.on_change(host)
        self._arm(host, session)

    def _arm(self, host: Host, session: RelaySession) -> None:
        deadline_s = session.deadline_s()
        if deadline_s is None or (host.timer_s is not None and host.timer_s <= deadline_s):
            return
        host.timer_s = max(deadline_s, self.clock.now_s + 1e-6)
        due_s = host.timer_s

        def ring() -> None:
            if host.session is not session or host.timer_s != due_s:
                return
            host.timer_s = None
            again_s = session.deadline_s()
            if again_s is not None and again_s <= self.clock.now_s:
                self.runs.flush(f for f in host.feeds.values() if not self.network.noted[f.slot])
                self.deliver(host, Tick())
            else:
                self._arm(host, session)

        self.clock.at(host.timer_s, ring)

    # ── streams ──────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, host: Host, source: Source, number: int, extent: Extent) -> None:
        lane = bisect_right(host.lane_starts, extent.first)
        flow = host.feeds.get((source.key, lane))
        if source.kind == "origin" and extent.first > host.lane_starts[lane - 1]:
            flow = self._going_on(host, source.key, number, extent) or flow
        if flow is not None and flow.number == number and extent.stop <= flow.base:
            lane = ASIDE  # a repair: it runs in parallel to the current run
            flow = host.feeds.get((source.key, lane))
        if flow is None or flow.number != number:
            flow = self._open(host, source, number, lane)
        lacking = list(host.have.gaps(extent))
        if (again := extent.size - sum(run.size for run in lacking)) and not host.frozen:
            self._asked_again(host, extent, again)
            self.runs.flush(host.feeds.values())  # these arrived, but were not reported yet
        for run in lacking:
            self.runs.want(flow, run)
        if flow.moving:
            self.runs.extend(flow)
            if extent.size == 1:
                self.runs.arrive(flow, extent)
        elif flow.open:
            self.runs.start_soon(flow)

    def _going_on(self, host: Host, key: str, number: int, extent: Extent) -> Flow | None:
        """Return the stream's flow that will deliver the piece before ``extent``, or None.

        That piece was requested under another lane, of older lanes. A stream delivers requests in
        order; as a parallel flow, a seed read a window ahead of all its readers.
        """
        before = Extent(extent.first - 1, extent.first)
        for flow in host.feeds.values():
            same = flow.key == key and flow.number == number and flow.lane != ASIDE
            if same and flow.wanted.covers(before):
                return flow
        return None

    def _asked_again(self, host: Host, extent: Extent, again: int) -> None:
        reported = host.session.progress().pieces_verified if host.session else 0
        if reported >= host.have.count:  # every one of them was reported to the session
            self.disk.violations.append(f"{host.name} asked again for {again} pieces of {extent}")

    def _open(self, host: Host, source: Source, number: int, lane: int) -> Flow:
        far = self.origin if source.kind == "origin" else self.hosts[source.worker_id or ""]
        if far is None:
            raise AssertionError("there is no origin")
        flow = self.runs.open(host, far, source.key, number, lane)
        if not far.alive:
            self._later_failed(flow, PeerLost("connection refused", where=source.key))
        else:
            self.clock.after(self._timing.connect_s, lambda: self._opened(flow))
        return flow

    def _opened(self, flow: Flow) -> None:
        if not flow.closed and flow.source.alive:
            flow.open = True
            self.runs.start_soon(flow)

    def _later_failed(self, flow: Flow, error: PacelineError) -> None:
        session = flow.reader.session

        def failed() -> None:
            if not flow.closed and flow.reader.session is session:
                self.deliver(flow.reader, SourceFailed(flow.key, flow.number, error))

        self.clock.after(self._timing.latency_s, failed)

    def _silence(self, host: Host) -> None:
        """Stop all flows from and to a host, and report what has arrived by now."""
        flows = [*host.readers, *host.feeds.values()]
        # Report every lane first: otherwise a reader of several lanes would take those reported
        # last as stalled, and request pieces elsewhere that it already has.
        self.runs.flush(flows)
        for flow in flows:
            self.runs.halt(flow)
            self.keepalives.silence(flow)
        host.waiting.clear()
