"""The simulated control plane: the production coordinator, and agents that register and heartbeat.

Calls are messages to ``CoordinatorState`` under the virtual clock; agents do only what it answers.
It alone decides on lanes, losses and replans.
"""

from __future__ import annotations

from math import inf
from random import Random

from paceline.coordinator import CoordinatorState
from paceline.coordinator.state import (
    Answer,
    Create,
    Event,
    FetchLanes,
    HeartbeatReceived,
    Register,
    Tick,
)
from paceline.errors import PacelineError, StaleEpoch
from paceline.manifest import Manifest
from paceline.relay.protocol import as_failure
from paceline.schemas import (
    MIN_BEAT_INTERVAL_S,
    CreateDeployment,
    Deployment,
    DeploymentBeat,
    Heartbeat,
    HeartbeatAnswer,
    Receipt,
    Record,
    RegisterWorker,
    WorkerLanes,
    WorkerStatus,
)
from paceline.simulation.hosts import Host, tallies_of
from paceline.simulation.scenario import Scenario
from paceline.simulation.streams import Streams

DEPLOYMENT = "simulated"
SOURCE_URL = "s3://simulated/model"
# The largest fleet whose beats list chunks: at 10,000 they cost more than the rest.
MAX_REPORTED_CHUNKS = 1_000


class Control:
    """One coordinator and every host's agent."""

    def __init__(self, scenario: Scenario, manifest: Manifest, streams: Streams) -> None:
        self.state = CoordinatorState(scenario.coordinator)
        self._scenario = scenario
        self._manifest = manifest
        self._streams = streams
        self._random = Random(f"{scenario.seed}/beats")
        self._numbers = {name: number for number, name in enumerate(streams.hosts)}
        self._receipts: dict[str, Receipt] = {}
        self._rounds: dict[str, int] = {}  # generation of each agent's loop; older loops end
        self._beaten: dict[str, float] = {}  # time of each agent's last heartbeat
        self.calls = 0
        streams.disk.on_published = self._published
        streams.on_change = self._news

    @property
    def deployment(self) -> Deployment:
        return self.state.deployment_state(DEPLOYMENT).deployment

    def start(self) -> None:
        """Register all workers, create the deployment, and start the heartbeats."""
        scenario, hosts = self._scenario, self._streams.hosts
        for host in hosts.values():
            self._register(host)
        for host in hosts.values():  # they have run for a while: the whole fleet has reported
            self._ask(HeartbeatReceived(beat=self._beat_of(host)))
        deaths = round(scenario.fail * scenario.workers) + len(scenario.faults)
        call = CreateDeployment(
            model_id=self._manifest.model_id,
            version=self._manifest.version,
            source_url=SOURCE_URL,
            target_workers=tuple(hosts),
            topology=scenario.topology,
            max_failed=min(1.0, max(0.05, deaths / scenario.workers)),  # what dies here is expected
            seed=scenario.seed,
        )
        self._ask(Create(deployment_id=DEPLOYMENT, call=call, manifest=self._manifest))
        # Every agent is idle with an open long poll, so all get the plan at once; the coordinator
        # answers them one after the other.
        order = list(hosts.values())
        self._random.shuffle(order)
        for turn, host in enumerate(order):
            serving_s = turn / scenario.timing.calls_per_second
            self.resume(host, scenario.timing.call_s + serving_s)
        # A tick of a large fleet's coordinator is more work, so it ticks less often.
        self._tick_s = max(scenario.timing.tick_s, len(hosts) / 10_000)
        self._streams.clock.after(self._tick_s, self._tick)

    def resume(self, host: Host, delay_s: float = 0.0) -> None:
        this = self._rounds[host.name] = self._rounds.get(host.name, 0) + 1
        self._streams.clock.after(delay_s, lambda: self._beat(host, this))

    def restart(self, host: Host) -> None:
        host.alive, host.frozen = True, False
        host.lanes, host.published_s = None, None
        self._receipts.pop(host.name, None)
        host.incarnation += 1
        self._register(host)
        self.resume(host)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, event: Event) -> Record:
        self.calls += 1
        effects = self.state.handle(event, self._streams.clock.now_s)
        record = next(each.record for each in effects if isinstance(each, Answer))
        assert isinstance(record, Record)
        return record

    def _tick(self) -> None:
        self.state.handle(Tick(), self._streams.clock.now_s)
        self._streams.clock.after(self._tick_s, self._tick)

    def _register(self, host: Host) -> None:
        labels = self._scenario.labels(self._numbers[host.name])
        self._ask(
            Register(
                call=RegisterWorker(
                    worker_id=host.name,
                    hostname=labels.host,
                    rack=labels.rack,
                    available_storage=1 << 60,
                    labels=labels,
                    address=f"{host.name}:1",
                    link_mbit=self._scenario.link_mbit,
                    incarnation=host.incarnation,
                    pid=host.incarnation,
                )
            )
        )

    def _beat(self, host: Host, this: int) -> None:
        if not host.serves or self._rounds[host.name] != this:
            return
        self._beaten[host.name] = self._streams.clock.now_s
        answer = self._ask(HeartbeatReceived(beat=self._beat_of(host)))
        assert isinstance(answer, HeartbeatAnswer)
        wait_s = answer.next_beat_s
        if not answer.go_on:  # the coordinator counts it as lost: it registers as a new incarnation
            host.incarnation += 1
            try:
                self._register(host)
            except StaleEpoch:
                host.incarnation += 1
            wait_s = self._scenario.timing.call_s
        for command in answer.commands:
            if command.kind == "fetch_lanes":
                self._streams.clock.after(
                    self._scenario.timing.call_s, lambda: self._fetch_lanes(host, this)
                )
        if answer.go_on and not any(each.kind == "fetch_lanes" for each in answer.commands):
            self._streams.confirm(host)
        wait_s = min(wait_s, self._telling_s(host))
        self._streams.clock.after(wait_s, lambda: self._beat(host, this))

    def _tell_soon(self, host: Host, this: int) -> None:
        """Move a seed's heartbeat forward to when it has enough origin bytes to report."""
        soon_s = self._telling_s(host)
        if soon_s < self._scenario.coordinator.beat_s and self._rounds[host.name] == this:
            self.resume(host, soon_s)

    def _news(self, host: Host) -> None:
        """Send a heartbeat soon: the agent lost a source, failed or has the whole version."""
        if host.serves and host.name in self._rounds:
            now_s = self._streams.clock.now_s
            due_s = self._beaten.get(host.name, now_s) + MIN_BEAT_INTERVAL_S
            self.resume(host, max(0.0, due_s - now_s))

    def _telling_s(self, host: Host) -> float:
        """Return in how many seconds a seed will have read ``origin_tell_bytes``; inf for never."""
        lanes = host.lanes
        if lanes is None or not lanes.origin_tell_bytes or host.complete:
            return inf
        rate = sum(each.expected_bytes_s for each in lanes.origin_lanes)
        return max(MIN_BEAT_INTERVAL_S, lanes.origin_tell_bytes / rate) if rate > 0 else inf

    def _beat_of(self, host: Host) -> Heartbeat:
        reports = (self._report(host),) if host.lanes is not None else ()
        return Heartbeat(
            worker_id=host.name,
            status=reports[0].status if reports else WorkerStatus.IDLE,
            incarnation=host.incarnation,
            available_storage=1 << 60,
            deployments=reports,
        )

    def _fetch_lanes(self, host: Host, this: int) -> None:
        if not host.serves or self._rounds[host.name] != this:
            return
        try:
            lanes = self._ask(FetchLanes(deployment_id=DEPLOYMENT, worker_id=host.name))
        except PacelineError:  # cancelled, failed or not planned for: see the next beat's answer
            return
        assert isinstance(lanes, WorkerLanes)
        if host.session is not None:
            lost = host.session.progress().lost_sources
            self._streams.assign(host, lanes)
            self._tell_soon(host, this)
            if lost:  # with the new lanes no source is lost
                self._news(host)
            return
        host.lanes = lanes  # preparation begins

        def prepared() -> None:
            if host.serves and self._rounds[host.name] == this and host.session is None:
                self._streams.begin(host)
                newest = host.lanes
                assert newest is not None
                self._streams.assign(host, newest)
                self._tell_soon(host, this)

        self._streams.clock.after(self._scenario.timing.prepare_s, prepared)

    # ── what agents report ───────────────────────────────────────────────────────────────────────

    def _report(self, host: Host) -> DeploymentBeat:
        receipt = self._receipts.get(host.name)
        session = host.session
        if session is None:
            assert host.lanes is not None
            return DeploymentBeat(
                deployment_id=DEPLOYMENT,
                epoch=0,
                status=WorkerStatus.RECEIVING,
                pieces_held=host.durable.count,
                bytes_held=0,
            )
        progress = session.progress()
        status = progress.status
        if status is WorkerStatus.COMPLETE and receipt is None:
            status = WorkerStatus.RECEIVING  # still publishing
        failure = progress.failure
        if failure is None and host.error is not None and status is WorkerStatus.FAILED:
            failure = as_failure(host.error)
        reported = len(self._numbers) <= MAX_REPORTED_CHUNKS
        return DeploymentBeat(
            deployment_id=DEPLOYMENT,
            epoch=progress.epoch,
            status=status,
            pieces_held=progress.pieces_held,
            bytes_held=progress.bytes_held,
            chunks_received=progress.chunks_received if reported else (),
            origin_bytes=self._streams.origin_bytes(host),
            lost_sources=progress.lost_sources,
            corrupt_sources=progress.corrupt_sources,
            edges=tallies_of(host, self._streams.running(host)),
            failure=failure,
            receipt=receipt,
        )

    def _published(self, host: Host) -> None:
        self._receipts[host.name] = Receipt(
            deployment_id=DEPLOYMENT,
            worker_id=host.name,
            incarnation=host.incarnation,
            model_id=self._manifest.model_id,
            version=self._manifest.version,
            manifest_digest=self._manifest.digest,
            path=f"/models/{self._manifest.model_id}",
            total_bytes=self._manifest.total_size,
            received_bytes=0,
            origin_bytes=round(host.origin_bytes),
            reused_bytes=0,
            reused_pieces=0,
            refetched_bytes=0,
            sent_bytes=0,
            corrupt_pieces=host.corrupt_pieces,
            seconds=self._streams.clock.now_s - host.begun_s,
        )
        self._news(host)
