"""The relay driver: runs the sessions of one node on threads, sockets and disks.

One owner thread takes ``(work, time)`` from a bounded inbox, passes events to the sessions and
performs the actions that they return; byte threads only report into the inbox and never touch a
session (checked). What agents report is a snapshot that the owner replaces whole. ``deployments``
begins and ends deployments; this module does not depend on coordinators or HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import DeploymentFailed, PacelineError
from paceline.manifest import Manifest
from paceline.relay.deployments import ActiveDeployment, Deployments
from paceline.relay.origin import OriginStream
from paceline.relay.protocol import (
    REPLACED_AFTER_S,
    Abandon,
    Complete,
    Fail,
    Fetch,
    LanesConfirmed,
    PieceVerified,
    ReportCorrupt,
    ReportSourceLost,
    Resumed,
    SessionAction,
    SessionEvent,
    SessionLimits,
    Tick,
)
from paceline.relay.sources import LazyReader, RangeReader
from paceline.relay.store import GROUP_BYTES, OriginReadCounts, Store
from paceline.relay.transport import Pacer, PullSpec, PullStream, ServeSpec, Transport
from paceline.schemas import DeploymentBeat, Source, WorkerLanes

log = logging.getLogger(__name__)

INBOX_SIZE = 8192
LONGEST_WAIT_S = 1.0
# How long a verified piece may wait for others before its session receives it, and how many bytes:
# an eighth of the largest window. Waking the owner takes about 0.1 ms.
DELIVER_INTERVAL_S = 0.1
DELIVER_BYTES = 4 * 1024 * 1024
REFRESH_S = 0.3  # the largest age of a reported count
SUSPENSION_S = 0.3  # a wake-up that is so much late means that the process was suspended
DRAIN_S = 0.5  # at a stop, for the pieces that are in flight
DRAIN_LOOK_S = 0.02
# Without an answer, or three heartbeats: about when a coordinator expires a node.
COORDINATOR_TIMEOUT_S = 3.0
COORDINATOR_TIMEOUT_BEATS = 3.0


class RelayDriver:
    """The data plane of one node. ``open_source(url)`` returns a reader for an origin;
    ``on_change()`` is called when something should be reported before the next heartbeat.
    ``coordinated``: a coordinator assigns the lanes, and may reassign them while this process is
    suspended or cut off. ``origin_reads`` stores the counts of origin reads across processes.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        store: Store,
        transport: Transport,
        open_source: Callable[[str], RangeReader],
        incarnation: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        link_mbit: float | None = None,
        limits: SessionLimits | None = None,
        seed: int = 0,
        coordinated: bool = False,
        origin_reads: OriginReadCounts | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker_id = worker_id
        self.store = store
        self.received_bytes = 0  # of pieces that match their digests
        self.nic_in = Pacer(link_mbit)
        self.nic_out = Pacer(link_mbit)
        self._transport = transport
        self._open_source = open_source
        self.origin_reads = origin_reads or OriginReadCounts()
        self._inbox: queue.Queue[tuple[Callable[[float], None], float]] = queue.Queue(INBOX_SIZE)
        self.incarnation = incarnation  # that this node reports for its worker
        self.withdrawals = 0  # published versions that became corrupt on this disk
        self._deployments = Deployments(self, limits=limits or SessionLimits(), seed=seed)
        self._reported: dict[str, tuple[object, ...]] = {}  # by deployment: last reported at once
        self._on_change = on_change
        self._coordinated = coordinated
        self._woke_s = float("inf")  # end of a suspension, until lanes are confirmed
        # Until then the coordinator counts as reachable.
        self._coordinator_valid_until_s = float("-inf")
        self._stopping = False
        self._condition = threading.Condition()
        self.server = transport.serve(
            ServeSpec(
                host=host,
                port=port,
                worker_id=worker_id,
                find=self._deployments.library.find,
                pacer=self.nic_out,
                on_disk_corruption=lambda digest, piece: self.post(
                    lambda now: self._deployments.rotten(digest, piece, now)
                ),
            )
        )
        self._owner = threading.Thread(target=self._run, name="relay-owner", daemon=True)

    # ── what the agent calls, from any thread ────────────────────────────────────────────────────

    def start(self) -> None:
        """Listen and work until ``stop``."""
        self.server.start()
        self._owner.start()

    def stop(self) -> None:
        """Stop serving and fetching; pieces in flight arrive first, within DRAIN_S, and verified
        pieces become durable.
        """
        self._drain()
        self._stopping = True
        self.post(lambda _now: None)
        self._owner.join(10.0)
        self.server.stop()
        self._deployments.close()
        self.store.close()

    def _drain(self) -> None:
        """Wait until each stream has delivered one more piece, or has nothing to deliver."""
        busy = [
            (deployment.staging, len(deployment.streams) + deployment.staging.verified.count)
            for deployment in self._deployments
            if deployment.ended_s is None and deployment.staging is not None and deployment.streams
        ]
        until_s = time.monotonic() + DRAIN_S
        while time.monotonic() < until_s and any(
            staging.verified.count < wanted and not staging.all_verified for staging, wanted in busy
        ):
            time.sleep(DRAIN_LOOK_S)

    def deploy(self, lanes: WorkerLanes, manifest: Manifest) -> None:
        self.post(lambda now: self._deployments.deploy(lanes, manifest, now))

    def coordinator_answered(self, since_s: float, next_s: float = 0.0) -> None:
        """Record that the coordinator answered a request sent at ``since_s`` or later and that its
        commands were passed on: the lanes in force are confirmed. The next request follows in
        ``next_s``.
        """
        until_s = since_s + max(COORDINATOR_TIMEOUT_S, COORDINATOR_TIMEOUT_BEATS * next_s)
        awake = since_s > self._woke_s
        if awake:
            self._woke_s = float("inf")
        self.post(lambda now_s: self._confirm(until_s, awake, now_s))

    def _confirm(self, until_s: float, awake: bool, now_s: float) -> None:
        self._coordinator_valid_until_s = until_s
        for deployment in self._deployments:
            if awake or (deployment.is_cut_off and self._woke_s == float("inf")):
                deployment.is_cut_off = False
                self.handle(deployment, LanesConfirmed(), now_s)

    def _stop_reassigned_reads(self, deployment: ActiveDeployment, now_s: float) -> None:
        """Stop origin reads where the coordinator may have reassigned them: it is not reachable
        from here and no peer reads from this node any more. While the coordinator is down for all
        nodes, the peers keep reading, and so does this node.
        """
        session, staging = deployment.session, deployment.staging
        if not self._coordinated or session is None or staging is None:
            return
        if staging.readers and not deployment.reading.has_served_peers:
            deployment.reading.served()
        alone = (
            now_s > self._coordinator_valid_until_s
            and not staging.readers
            and deployment.may_be_reassigned
        )
        if alone and not deployment.is_cut_off:
            log.warning("cut off: reads the origin no more deployment=%s", deployment.deployment_id)
            deployment.is_cut_off = True
            self.handle(deployment, Resumed(0.0, replaced=True), now_s)
        elif deployment.is_cut_off and not alone and self._woke_s == float("inf"):
            deployment.is_cut_off = False
            self.handle(deployment, LanesConfirmed(), now_s)

    def refuse(self, lanes: WorkerLanes, manifest: Manifest, error: PacelineError) -> None:
        self.post(lambda now: self._deployments.refuse(lanes, manifest, error, now))

    def activate(self, deployment_id: str) -> None:
        self.post(lambda now: self._deployments.activate(deployment_id, now))

    def cancel(self, deployment_id: str) -> None:
        """Discard a deployment and its data; once gone from the heartbeats it cannot publish."""
        self.post(lambda now: self._deployments.cancel(deployment_id, now))

    def forget(self, digest: str) -> None:
        self.post(lambda _now: self._deployments.forget(digest))

    def beats(self) -> list[DeploymentBeat]:
        return [beat for deployment in self._deployments if (beat := deployment.beat)]

    def wait(self, condition: Callable[[list[DeploymentBeat]], bool], timeout_s: float) -> bool:
        """Wait until ``condition(beats)`` holds; return whether it did in time."""
        with self._condition:
            return self._condition.wait_for(lambda: condition(self.beats()), timeout_s)

    # ── the owner thread ─────────────────────────────────────────────────────────────────────────

    def post(self, work: Callable[[float], None]) -> None:
        """Queue work for the owner thread."""
        self._inbox.put((work, time.monotonic()))

    def _run(self) -> None:
        due_s = time.monotonic()  # the latest time of this loop's next check of the clock
        while not self._stopping:
            due_s = self._check_suspension(due_s, "an event")  # in the middle of work counts too
            wait_s = self._tick()
            due_s = self._check_suspension(due_s, "the sessions") + wait_s
            found = None
            with suppress(queue.Empty):
                found = self._inbox.get(timeout=wait_s)
            due_s = self._check_suspension(due_s, "the inbox")
            if found is not None:
                work, at = found
                try:
                    work(at)
                except Exception:
                    log.exception("an event could not be handled")

    def _check_suspension(self, due_s: float, at: str) -> float:
        """Report to the sessions that this process was suspended (stopped, swapped out, its machine
        paused) since ``due_s``, before any other event; return the current time. ``at`` is what the
        owner did meanwhile, for the log.
        """
        now_s = time.monotonic()
        late_s = now_s - due_s
        if late_s >= SUSPENSION_S:
            replaced = self._coordinated and late_s >= REPLACED_AFTER_S
            if replaced:
                self._woke_s = now_s
            level = logging.WARNING if replaced else logging.DEBUG
            log.log(level, "stood still for %.1f s at %s", late_s, at)
            for deployment in self._deployments:
                self.handle(deployment, Resumed(late_s, replaced), now_s)
        return now_s

    def _tick(self) -> float:
        """Tick the sessions that are due; return how long to wait for an event."""
        next_s = time.monotonic() + LONGEST_WAIT_S
        for deployment in self._deployments:
            self._deliver(deployment, time.monotonic())
            if deployment.streams:
                next_s = min(next_s, time.monotonic() + DELIVER_INTERVAL_S)
            self._stop_reassigned_reads(deployment, time.monotonic())
            deployment.report_stall(time.monotonic())
            due_s = deployment.session.deadline_s() if deployment.session else None
            old_s = deployment.refreshed_s + LONGEST_WAIT_S  # a stall is reported without an event
            if due_s is not None and min(due_s, old_s) <= time.monotonic():
                self.handle(deployment, Tick(), time.monotonic())
                due_s = deployment.session.deadline_s() if deployment.session else None
            next_s = min(next_s, next_s if due_s is None else due_s)
        return max(next_s - time.monotonic(), 0.001)

    def handle(self, deployment: ActiveDeployment, event: SessionEvent, now_s: float) -> None:
        """Pass an event to the session and perform its actions; owner thread only."""
        if threading.current_thread() is not self._owner:
            raise RuntimeError("a session was touched outside its owner thread")
        if deployment.session is None:
            return
        try:
            actions = deployment.session.handle(event, now_s)
            for action in actions:
                self._do(deployment, action)
        except Exception as error:
            log.exception("session failed")
            self._deployments.fail(
                deployment, DeploymentFailed("the relay session broke", got=repr(error))
            )
            return
        report_now = any(not isinstance(each, Fetch | Abandon) for each in actions)
        report_now = report_now or deployment.origin_report_due
        if deployment.session and (report_now or now_s - deployment.refreshed_s >= REFRESH_S):
            self._deployments.refresh(deployment, now_s)

    def changed(self) -> None:
        """Report at once what should not wait for the next heartbeat."""
        with self._condition:
            self._condition.notify_all()
        reported_at_once = {
            deployment.deployment_id: deployment.reported_at_once()
            for deployment in self._deployments
            if deployment.beat
        }
        if reported_at_once != self._reported:
            self._reported = reported_at_once
            self._on_change()

    def _do(self, deployment: ActiveDeployment, action: SessionAction) -> None:
        match action:
            case Fetch(source, stream, extent):
                running = deployment.streams.get(source.key)
                if running is None or running[0] != stream:
                    running = (stream, self._open_stream(deployment, source, stream))
                    deployment.streams[source.key] = running
                running[1].request(extent)
            case Abandon(key, stream):
                running = deployment.streams.get(key)
                if running is not None and running[0] == stream:
                    running[1].close()
                    del deployment.streams[key]
            case Complete():
                self._deployments.publish(deployment)
            case Fail(error):
                self._deployments.fail(deployment, error)
            case ReportSourceLost(key, reason):
                log.warning("source lost source=%s reason=%s", key, reason)
            case ReportCorrupt(key, piece, pieces):
                log.warning("corrupt piece source=%s piece=%d pieces=%d", key, piece, pieces)
                if deployment.staging is not None:
                    deployment.staging.edges.judged(key, self.worker_id, corrupt=pieces)

    def _open_stream(self, deployment: ActiveDeployment, source: Source, stream: int) -> PullStream:
        if deployment.staging is None:
            raise RuntimeError("a session fetched before its files were open")
        pull = PullSpec(
            source=source,
            stream=stream,
            worker_id=self.worker_id,
            staging=deployment.staging,
            pacer=self.nic_in,
            counters=deployment.counters,
            keepalive_s=deployment.lanes.piece_deadline_s / 4,
            report=self.reporter(deployment),
            planned_rate=lambda: deployment.planned_rate(source),
        )
        if source.kind == "worker":
            return self._transport.pull(pull)
        # One reader per deployment and URL: it keeps the ETags, so that versions never mix.
        reader = deployment.readers.setdefault(
            source.url, LazyReader(self._open_source, source.url)
        )
        return OriginStream(pull, reader, deployment.expected_rate(source))

    def reporter(self, deployment: ActiveDeployment) -> Callable[[SessionEvent], None]:
        """Return the callback with which byte threads report. Verified pieces are batched, so that
        small ones do not wake the owner one by one: it takes them at an interval, or when enough
        wait.
        """

        def deliver(now_s: float) -> None:
            self._deliver(deployment, now_s)

        assert deployment.staging is not None
        arrivals, staging = deployment.arrivals, deployment.staging
        pieces = deployment.manifest.piece_count
        enough = max(1, DELIVER_BYTES // deployment.manifest.piece_bytes)

        def report(event: SessionEvent) -> None:
            if self._stopping:
                return
            if isinstance(event, PieceVerified):
                arrivals.append(event)
                waiting = staging.verified.count - deployment.delivered_pieces
                if waiting >= enough and not deployment.delivery_posted:
                    deployment.delivery_posted = True
                    self.post(deliver)
                full = staging.pending_bytes >= GROUP_BYTES or staging.verified.count == pieces
                if full and deployment.committer is not None:
                    deployment.committer.wake()
            else:

                def handle(now_s: float) -> None:
                    deliver(now_s)  # keeps the order of events
                    self.handle(deployment, event, now_s)

                self.post(handle)

        return report

    def _deliver(self, deployment: ActiveDeployment, now_s: float) -> None:
        """Count the arrived pieces, here once a run, and pass them to the session."""
        for event in deployment.take_arrivals():
            if deployment.staging is not None and deployment.session is not None:
                run = event.extent
                deployment.staging.edges.judged(event.source_key, self.worker_id, matched=run.size)
                self.received_bytes += deployment.session.pieces.bytes_of(run)
            self.handle(deployment, event, now_s)
