"""Simulates one deployment, from the accepted plan to the last survivor's rename.

``simulate(scenario)`` returns the same report for the same scenario, to the byte. Invariants are
checked during the run and at its end; the report lists violations.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from random import Random

from paceline.manifest import Manifest
from paceline.plan import SHARING_OVERHEAD, origin_cap_bytes
from paceline.relay.protocol import Extent, Extents, SessionLimits
from paceline.schemas import DeploymentStatus, SimulationReport, Topology
from paceline.simulation.control import Control
from paceline.simulation.hosts import ON_SPARE_EXTENTS, ORIGIN_RACK, Host
from paceline.simulation.scenario import MBIT, STRAGGLERS_RATE, Fault, Scenario, seeded_deaths
from paceline.simulation.streams import Streams

EXACT_EVENTS = 60_000  # up to this many arrivals, pieces are simulated one by one
REPORTS_PER_WORKER = 64  # otherwise: reports of arrivals to each session; fewer in a large fleet,
LEAST_REPORTS = 24
MANY_REPORTS = 120_000  # where this is the total of all sessions
COMMITS = 100  # group commits over the whole transfer, where pieces are coalesced
EXACT_WORKERS = 40  # up to this many, every change of rates is followed at once
# Beyond: the network's time step as a share of the bound, per worker, with its least and greatest
# value. At 500 GB and 10 Gbps that is 10 ms for 100 workers, 50 ms for 1,000 and 0.24 s for 10,000.
STEP_SHARE = 1.25e-7
LEAST_STEP_SHARE, MOST_STEP_SHARE = 2.5e-5, 6e-4
SETTLED_WORKERS = 256  # up to this many, the run waits for the coordinator's final status
FINISHING_S = 120.0  # I7: after the last fault, in addition to the transfer's own time
MOST_VIOLATIONS = 50


def simulate(scenario: Scenario) -> SimulationReport:
    """Return the report of simulating ``scenario``."""
    return Simulation(scenario).run()


class Simulation:
    """One simulation of a scenario; tests inspect its state."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.manifest: Manifest = scenario.manifest()
        coalesce = scenario.coalesce_pieces or self._coalesce()
        step_s = scenario.step_s
        if step_s < 0:
            share = min(MOST_STEP_SHARE, max(LEAST_STEP_SHARE, STEP_SHARE * scenario.workers))
            step_s = 0.0 if scenario.workers <= EXACT_WORKERS else share * scenario.bound_s
        timing = scenario.timing
        if coalesce > 1:
            timing = replace(timing, group_s=max(timing.group_s, scenario.bound_s / COMMITS))
        self.streams = Streams(
            self.manifest,
            limits=self._limits(coalesce),
            timing=timing,
            coalesce=coalesce,
            corrupt=scenario.corrupt,
            step_s=step_s,
            lag_bytes=scenario.timing.hop_s * min(scenario.link_bytes_s, scenario.external_bytes_s),
            seed=scenario.seed,
        )
        self._build_hosts()
        self.control = Control(scenario, self.manifest, self.streams)
        self.faults = self._schedule()
        self._gone: set[str] = set()  # for good
        self._left = scenario.workers
        self._kept = 1.0  # share of every NIC's rate that is left after the reductions below
        if coalesce > 1 and scenario.corrupt > 0:
            self._reserve_for_repairs()
        self._published_of = self.streams.disk.on_published
        self.streams.disk.on_published = self._published

    def run(self) -> SimulationReport:
        collecting = gc.isenabled()
        # Garbage collection took a third of the time, and there are no cycles (a test checks this).
        gc.disable()
        try:
            return self._run()
        finally:
            if collecting:
                gc.enable()

    # ── setting up ───────────────────────────────────────────────────────────────────────────────

    def _coalesce(self) -> int:
        pieces = self.manifest.piece_count
        if pieces * self.scenario.workers <= EXACT_EVENTS:
            return 1
        each = min(REPORTS_PER_WORKER, max(LEAST_REPORTS, MANY_REPORTS // self.scenario.workers))
        power = 1
        while power * each < pieces:
            power *= 2
        return power

    @staticmethod
    def _limits(coalesce: int) -> SessionLimits:
        """Return the production limits, with a window of a few extents where these are longer."""
        usual = SessionLimits()
        if coalesce == 1:
            return usual
        return SessionLimits(
            window_pieces=max(usual.window_pieces, 3 * coalesce),
            on_spare_pieces=max(usual.on_spare_pieces, 3 * coalesce // ON_SPARE_EXTENTS),
            window_bytes=1 << 60,
            window_s=1e9,
        )

    def _build_hosts(self) -> None:
        scenario, network = self.scenario, self.streams.network
        link = scenario.link_bytes_s
        into = min(link, scenario.disk_mbit * MBIT) if scenario.disk_mbit else link
        uplinks: dict[str, tuple[int, int]] = {}
        random = Random(f"{scenario.seed}/stragglers")
        names = scenario.names()
        slow = set(random.sample(names, round(scenario.straggle * len(names))))
        for number, name in enumerate(names):
            rack = scenario.labels(number).rack
            if rack and rack not in uplinks:
                hosts = -(-scenario.workers // scenario.rack_count)
                carries = hosts * link / scenario.oversubscription
                uplinks[rack] = network.resource(carries), network.resource(carries)
            up_in, up_out = uplinks.get(rack, (0, 0))
            share = STRAGGLERS_RATE if name in slow else 1.0
            self.streams.hosts[name] = Host(
                name,
                rack,
                network.resource(min(into, link * share)),
                network.resource(link * share),
                up_in,
                up_out,
            )
        everything = Extents([Extent(0, self.manifest.piece_count)])
        self.streams.origin = Host(
            "origin",
            ORIGIN_RACK,
            0,
            network.resource(scenario.external_bytes_s),
            have=everything,
            durable=everything.copy(),
        )

    def _schedule(self) -> list[Fault]:
        scenario = self.scenario
        deaths = seeded_deaths(
            scenario.names(),
            share=scenario.fail,
            within_s=scenario.bound_s,
            random=Random(f"{scenario.seed}/deaths"),
        )
        return sorted([*scenario.faults, *deaths], key=lambda fault: (fault.at_s, fault.worker))

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> SimulationReport:
        streams, control = self.streams, self.control
        control.start()
        for fault in self.faults:
            streams.clock.at(fault.at_s, partial(self._do, fault))
        streams.clock.after(0.0, streams.keepalives.watch)
        streams.clock.after(0.0, streams.keepalives.assure)
        plan = control.state.deployment_state("simulated").plan
        if plan is not None and any(len(part.lanes) > 1 for part in plan.workers):
            self._share_links(plan.topology)
        predicted_s = plan.predicted_seconds if plan is not None else 0.0
        last_fault_s = max((fault.at_s + fault.for_s for fault in self.faults), default=0.0)
        limit_s = last_fault_s + FINISHING_S + 4 * max(predicted_s, self.scenario.bound_s)
        streams.run(limit_s, lambda: self._left <= 0)
        seconds = max((h.published_s or 0.0 for h in self._survivors()), default=0.0)
        if self._left > 0:
            seconds = streams.clock.now_s
        violations = [*self._fuse(), *streams.disk.violations, *self._broken()]
        if self._left <= 0 and self.scenario.workers <= SETTLED_WORKERS:
            violations += self._unfinished()
        size = self.manifest.total_size
        origin = round(sum(host.origin_bytes for host in streams.hosts.values()))
        topology = plan.topology.value if plan is not None else self.scenario.topology.value
        survivors = self._survivors()
        bound_s = self.scenario.bound_s
        return SimulationReport(
            seconds=seconds,
            bound_seconds=bound_s,
            predicted_seconds=predicted_s,
            ratio=seconds / bound_s if bound_s else 0.0,
            survivors_complete=all(host.published_s is not None for host in survivors),
            workers=self.scenario.workers,
            survivors=len(survivors),
            topology=topology,
            seed=self.scenario.seed,
            origin_bytes=origin,
            origin_ratio=origin / size,
            cross_rack_bytes=round(streams.runs.cross_rack_bytes),
            corrupt_pieces=sum(host.corrupt_pieces for host in streams.hosts.values()),
            killed=tuple(sorted(self._gone)),
            violations=tuple(violations[:MOST_VIOLATIONS]),
            events=streams.events,
        )

    def _share_links(self, topology: Topology) -> None:
        """Reduce every NIC's rate by the measured cost of sharing a link.

        The fluid model divides a link without loss; real hosts do not.
        """
        kept = 1 / (1 + SHARING_OVERHEAD.get(topology, 0.0))
        self._kept *= kept
        if kept < 1:
            for host in self.streams.hosts.values():
                self.streams.slow_down(host, kept)

    def _reserve_for_repairs(self) -> None:
        """Reduce every NIC's rate by the corrupt pieces, which are sent once more."""
        streams, share = self.streams, 1 - self.scenario.corrupt
        self._kept = share
        for host in streams.hosts.values():
            streams.slow_down(host, share)
        if (origin := streams.origin) is not None:
            streams.network.limit(origin.nic_out, streams.network.capacity(origin.nic_out) * share)

    def _published(self, host: Host) -> None:
        self._published_of(host)
        if host.name not in self._gone:
            self._left -= 1

    def _do(self, fault: Fault) -> None:
        streams, host = self.streams, self.streams.hosts[fault.worker]
        if fault.kind == "rate":
            for nic in (host.nic_in, host.nic_out):
                streams.network.limit(nic, fault.value * MBIT * self._kept)
        elif fault.kind == "corrupt":
            host.corrupts = fault.value
        elif not host.serves:
            return
        elif fault.kind == "kill":
            streams.kill(host)
            if fault.restart_s is None:
                self._lose(host)
            else:
                if host.published_s is not None:
                    self._left += 1
                streams.clock.after(fault.restart_s, lambda: self.control.restart(host))
        else:
            streams.freeze(host)
            if fault.kind == "freeze" and fault.for_s > 0:
                streams.clock.after(fault.for_s, lambda: self._thaw(host))
            else:
                self._lose(host)

    def _thaw(self, host: Host) -> None:
        if host.alive and host.frozen:
            self.streams.thaw(host)
            self.control.resume(host)

    def _lose(self, host: Host) -> None:
        self._gone.add(host.name)
        if host.published_s is None:
            self._left -= 1

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    def _survivors(self) -> list[Host]:
        return [host for host in self.streams.hosts.values() if host.name not in self._gone]

    def _broken(self) -> list[str]:
        """Return the invariants that are violated at the end."""
        found = []
        pieces = self.manifest.piece_count
        for host in self._survivors():
            if host.published_s is None:
                why = f", {host.error.one_line()}" if host.error else ""
                found.append(
                    f"I7 {host.name} has {host.have.count} of {pieces} pieces "
                    f"after {self.streams.clock.now_s:.1f} s{why}"
                )
            elif host.have.count != pieces or host.durable.count != pieces:
                found.append(f"I2 {host.name} is complete with {host.durable.count} durable pieces")
        return found

    def _fuse(self) -> list[str]:
        """Return a violation where the origin was read too much.

        It is listed first, because a report may not have room for all violations.
        """
        read = sum(host.origin_bytes for host in self.streams.hosts.values())
        cap_bytes = origin_cap_bytes(self.manifest.total_size)
        if read <= cap_bytes or self.scenario.topology is Topology.DIRECT:
            return []
        return [f"I6 {read:.0f} bytes read from the origin, at most {cap_bytes} may be"]

    def _unfinished(self) -> list[str]:
        """Wait for the coordinator's final status; return a violation where it is not complete."""
        settings = self.scenario.coordinator
        late_s = self.streams.clock.now_s + 2 * settings.lost_s + settings.return_grace_s + 10.0
        self.streams.run(late_s, lambda: self.control.deployment.status.is_final)
        status = self.control.deployment.status
        if status is DeploymentStatus.COMPLETE:
            return []
        return [f"I7 every survivor is complete and the deployment is {status.value}"]
