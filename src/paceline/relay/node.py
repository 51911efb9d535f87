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
from paceline.relay.active_deployment import ActiveDeployment
from paceline.relay.deployments import Deployments
from paceline.relay.origin import OriginStream
from paceline.relay.protocol.events import (
    SLEPT_S,
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
    Tick,
)
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.sources import LazyReader, RangeReader
from paceline.relay.store.origin_reads import OriginReadCounts
from paceline.relay.store.store import Store
from paceline.relay.transport.contract import PullSpec, PullStream, Transport
from paceline.relay.transport.pacing import Pacer
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.plan import Source, WorkerLanes

log = logging.getLogger(__name__)

INBOX = 8192
LONGEST_WAIT_S = 1.0
LOOK_S = 0.03  # how long a verified piece may wait for others before its session receives it,
# and how many bytes may wait: an eighth of the largest window. Waking the owner takes about 0.1 ms.
DELIVER_BYTES = 4 * 1024 * 1024
REFRESH_S = 0.1  # the largest age of a reported count
NAP_S = 0.3  # a wake-up that is so much late means that the process was suspended
DRAIN_S = 0.5  # at a stop, for the pieces that are in flight
DRAIN_LOOK_S = 0.02
UNHEARD_S = 3.0  # without an answer, or three heartbeats: about when a coordinator expires a node
UNHEARD_BEATS = 3.0


class RelayDriver:
    """The data plane of one node. ``open_source(url)`` returns a reader for an origin;
    ``on_news()`` is called when something should be reported before the next heartbeat.
    ``coordinated``: a coordinator assigns the lanes, and may reassign them while this process is
    suspended or cut off. ``readings`` stores the counts of origin reads across processes.
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
        readings: OriginReadCounts | None = None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker_id = worker_id
        self.store = store
        self.nic_in = Pacer(link_mbit)
        self.nic_out = Pacer(link_mbit)
        self._transport = transport
        self._open_source = open_source
        self.readings = readings or OriginReadCounts()
        self._inbox: queue.Queue[tuple[Callable[[float], None], float]] = queue.Queue(INBOX)
        self._deployments = Deployments(
            worker_id=worker_id,
            store=store,
            limits=limits or SessionLimits(),
            seed=seed,
            incarnation=incarnation,
            sent_bytes=lambda: self.nic_out.total_bytes,
            readings=self.readings,
            post=self._post,
            tell=self._tell,
            report_of=self._reporter,
            changed=self._tell_waiting,
        )
        self._news: dict[str, tuple[object, ...]] = {}  # by deployment: last reported at once
        self._on_news = on_news
        self._coordinated = coordinated
        self._woke_s = float("inf")  # end of a suspension, until lanes are confirmed
        self._heard_until_s = float("-inf")  # until then the coordinator counts as reachable
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self.server = transport.serve(
            host=host,
            port=port,
            worker_id=worker_id,
            find=self._deployments.library.find,
            pacer=self.nic_out,
            on_rotten=lambda digest, piece: self._post(
                lambda now: self._deployments.rotten(digest, piece, now)
            ),
        )
        self._owner = threading.Thread(target=self._run, name="relay-owner", daemon=True)

    @property
    def incarnation(self) -> int:
        """Return the incarnation that this node reports for its worker."""
        return self._deployments.incarnation

    @incarnation.setter
    def incarnation(self, number: int) -> None:
        self._deployments.incarnation = number

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
        self._stop.set()
        self._post(lambda _now: None)
        self._owner.join(10.0)
        self.server.stop()
        self._deployments.close()
        self.store.close()

    def _drain(self) -> None:
        """Wait until each stream has delivered one more piece, or has nothing to deliver."""
        busy = [
            (share.staging, len(share.streams) + share.staging.verified.count)
            for share in self._deployments
            if share.ended_s is None and share.staging is not None and share.streams
        ]
        until_s = time.monotonic() + DRAIN_S
        while time.monotonic() < until_s and any(
            staging.verified.count < wanted and not staging.all_verified for staging, wanted in busy
        ):
            time.sleep(DRAIN_LOOK_S)

    def deploy(self, lanes: WorkerLanes, manifest: Manifest) -> None:
        """Join a deployment, or apply its newer lanes."""
        self._post(lambda now: self._deployments.deploy(lanes, manifest, now))

    def heard(self, since_s: float, next_s: float = 0.0) -> None:
        """Record that the coordinator answered a request sent at ``since_s`` or later and that its
        commands were passed on: the lanes in force are confirmed. The next request follows in
        ``next_s``.
        """
        until_s = since_s + max(UNHEARD_S, UNHEARD_BEATS * next_s)
        awake = since_s > self._woke_s
        if awake:
            self._woke_s = float("inf")
        self._post(lambda now_s: self._confirm(until_s, awake, now_s))

    def _confirm(self, until_s: float, awake: bool, now_s: float) -> None:
        self._heard_until_s = until_s
        for share in self._deployments:
            if awake or (share.is_cut_off and self._woke_s == float("inf")):
                share.is_cut_off = False
                self._tell(share, LanesConfirmed(), now_s)

    def _look_around(self, share: ActiveDeployment, now_s: float) -> None:
        """Stop origin reads where the coordinator may have reassigned them: it is not reachable
        from here and no peer reads from this node any more. While the coordinator is down for all
        nodes, the peers keep reading, and so does this node.
        """
        session, staging = share.session, share.staging
        if not self._coordinated or session is None or staging is None:
            return
        if staging.readers and not share.reading.had_readers:
            share.reading.served()
        alone = now_s > self._heard_until_s and not staging.readers and share.may_be_replaced
        if alone and not share.is_cut_off:
            log.warning("cut off: reads the origin no more deployment=%s", share.deployment_id)
            share.is_cut_off = True
            self._tell(share, Resumed(0.0, replaced=True), now_s)
        elif share.is_cut_off and not alone and self._woke_s == float("inf"):
            share.is_cut_off = False
            self._tell(share, LanesConfirmed(), now_s)

    def refuse(self, lanes: WorkerLanes, manifest: Manifest, error: PacelineError) -> None:
        """Do not join a deployment, and report why."""
        self._post(lambda now: self._deployments.refuse(lanes, manifest, error, now))

    def activate(self, deployment_id: str) -> None:
        """Activate the deployment's version, if it is complete here."""
        self._post(lambda now: self._deployments.activate(deployment_id, now))

    def cancel(self, deployment_id: str) -> None:
        """Discard the deployment and its data; once it is gone from the heartbeats it cannot
        publish.
        """
        self._post(lambda now: self._deployments.cancel(deployment_id, now))

    def forget(self, digest: str) -> None:
        """Discard a version that an earlier process began, unless a deployment here uses it."""
        self._post(lambda _now: self._deployments.forget(digest))

    @property
    def withdrawals(self) -> int:
        """Return how many published versions became corrupt on this disk and were withdrawn."""
        return self._deployments.withdrawals

    def beats(self) -> list[DeploymentBeat]:
        """Return the reported state of each deployment."""
        return [beat for share in self._deployments if (beat := share.beat)]

    def wait(self, condition: Callable[[list[DeploymentBeat]], bool], timeout_s: float) -> bool:
        """Wait until ``condition(beats)`` holds; return whether it did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.beats()), timeout_s)

    # ── the owner thread ─────────────────────────────────────────────────────────────────────────

    def _post(self, work: Callable[[float], None]) -> None:
        self._inbox.put((work, time.monotonic()))

    def _run(self) -> None:
        due_s = time.monotonic()  # the latest time of this loop's next check of the clock
        while not self._stop.is_set():
            due_s = self._look_at_clock(due_s)  # a suspension in the middle of its work counts
            wait_s = self._tick()
            due_s = self._look_at_clock(due_s) + wait_s
            found = None
            with suppress(queue.Empty):
                found = self._inbox.get(timeout=wait_s)
            due_s = self._look_at_clock(due_s)
            if found is not None:
                work, at = found
                try:
                    work(at)
                except Exception:
                    log.exception("an event could not be handled")

    def _look_at_clock(self, due_s: float) -> float:
        """Report to the sessions that this process was suspended (stopped, swapped out, its machine
        paused) since ``due_s``, before any other event; return the current time.
        """
        now_s = time.monotonic()
        late_s = now_s - due_s
        if late_s >= NAP_S:
            replaced = self._coordinated and late_s >= SLEPT_S
            if replaced:
                self._woke_s = now_s
            level = logging.WARNING if replaced else logging.DEBUG
            log.log(level, "stood still for %.1f s", late_s)
            for share in self._deployments:
                self._tell(share, Resumed(late_s, replaced), now_s)
        return now_s

    def _tick(self) -> float:
        """Tick the sessions that are due, however busy the others are; return how long to wait for
        an event.
        """
        next_s = time.monotonic() + LONGEST_WAIT_S
        for share in self._deployments:
            self._deliver(share, time.monotonic())
            if share.streams:
                next_s = min(next_s, time.monotonic() + LOOK_S)
            self._look_around(share, time.monotonic())
            due_s = share.session.deadline_s() if share.session else None
            old_s = share.refreshed_s + LONGEST_WAIT_S  # a stall is reported too, without an event
            if due_s is not None and min(due_s, old_s) <= time.monotonic():
                self._tell(share, Tick(), time.monotonic())
                due_s = share.session.deadline_s() if share.session else None
            next_s = min(next_s, next_s if due_s is None else due_s)
        return max(next_s - time.monotonic(), 0.001)

    def _tell(self, share: ActiveDeployment, event: SessionEvent, now_s: float) -> None:
        if threading.current_thread() is not self._owner:
            raise RuntimeError("a session was touched outside its owner thread")
        if share.session is None:
            return
        try:
            actions = share.session.handle(event, now_s)
            for action in actions:
                self._do(share, action)
        except Exception as error:
            log.exception("session failed")
            self._deployments.fail(
                share, DeploymentFailed("the relay session broke", got=repr(error))
            )
            return
        telling = any(not isinstance(each, Fetch | Abandon) for each in actions)
        telling = telling or share.has_much_to_tell
        if share.session and (telling or now_s - share.refreshed_s >= REFRESH_S):
            self._deployments.refresh(share, now_s)

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()
        news = {share.deployment_id: share.news() for share in self._deployments if share.beat}
        if news != self._news:
            self._news = news
            self._on_news()

    def _do(self, share: ActiveDeployment, action: SessionAction) -> None:
        match action:
            case Fetch(source, stream, extent):
                running = share.streams.get(source.key)
                if running is None or running[0] != stream:
                    running = (stream, self._open_stream(share, source, stream))
                    share.streams[source.key] = running
                running[1].request(extent)
            case Abandon(key, stream):
                running = share.streams.get(key)
                if running is not None and running[0] == stream:
                    running[1].close()
                    del share.streams[key]
            case Complete():
                self._deployments.publish(share)
            case Fail(error):
                self._deployments.fail(share, error)
            case ReportSourceLost(key, reason):
                log.warning("source lost source=%s reason=%s", key, reason)
            case ReportCorrupt(key, piece, pieces):
                log.warning("corrupt piece source=%s piece=%d pieces=%d", key, piece, pieces)

    def _open_stream(self, share: ActiveDeployment, source: Source, stream: int) -> PullStream:
        if share.staging is None:
            raise RuntimeError("a session fetched before its files were open")
        if source.kind == "worker":
            pull = PullSpec(
                source=source,
                stream=stream,
                worker_id=self.worker_id,
                staging=share.staging,
                pacer=self.nic_in,
                counters=share.counters,
                keepalive_s=share.lanes.piece_deadline_s / 4,
                report=self._reporter(share),
                portion=lambda: share.portion(source),
            )
            return self._transport.pull(pull)
        # One reader per deployment and URL: it keeps the ETags, so that versions never mix.
        reader = share.readers.setdefault(source.url, LazyReader(self._open_source, source.url))
        return OriginStream(
            source=source,
            stream=stream,
            worker_id=self.worker_id,
            reader=reader,
            staging=share.staging,
            pacer=self.nic_in,
            counters=share.counters,
            report=self._reporter(share),
            deadline=lambda: share.lanes.piece_deadline_s,
            expected_rate=lambda: share.expected_rate(source),
            portion=lambda: share.portion(source),
        )

    def _reporter(self, share: ActiveDeployment) -> Callable[[SessionEvent], None]:
        """Return the callback with which byte threads report. Verified pieces are batched, so that
        small ones do not wake the owner one by one: it takes them at an interval, or when enough
        wait.
        """

        def deliver(now_s: float) -> None:
            self._deliver(share, now_s)

        def report(event: SessionEvent) -> None:
            if self._stop.is_set():
                return
            if isinstance(event, PieceVerified):
                if share.arrivals.add(event, DELIVER_BYTES / share.manifest.piece_bytes):
                    self._post(deliver)
                if share.committer is not None:
                    share.committer.look()
            else:

                def tell(now_s: float) -> None:
                    deliver(now_s)  # keeps the order of events
                    self._tell(share, event, now_s)

                self._post(tell)

        return report

    def _deliver(self, share: ActiveDeployment, now_s: float) -> None:
        for event in share.arrivals.take():
            self._tell(share, event, now_s)
