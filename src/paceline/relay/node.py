"""Runs sessions on threads, sockets and disks: the data plane of one node.

One owner thread takes ``(event, time)`` from a bounded inbox, feeds the sessions and starts what
they ask for; byte threads only report into the inbox and never touch a session (checked). What
agents report is a snapshot that the owner replaces whole. How a deployment begins and ends is in
``deployments``; coordinators and HTTP are not known here.
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
from paceline.relay.active_deployment import Share
from paceline.relay.deployments import Deployments
from paceline.relay.origin import OriginStream
from paceline.relay.protocol.events import (
    SLEPT_S,
    Abandon,
    Complete,
    Confirmed,
    Fail,
    Fetch,
    PieceVerified,
    ReportCorrupt,
    ReportSourceLost,
    SessionAction,
    SessionEvent,
    Tick,
    Woke,
)
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.sources import LazyReader, RangeReader
from paceline.relay.store.origin_reads import Readings
from paceline.relay.store.store import Store
from paceline.relay.transport.contract import Pull, PullStream, Transport
from paceline.relay.transport.pacing import Pacer
from paceline.schemas.calls import DeploymentBeat
from paceline.schemas.plan import Source, WorkerLanes

log = logging.getLogger(__name__)

INBOX = 8192
LONGEST_WAIT_S = 1.0
LOOK_S = 0.03  # how long a verified piece may wait for others before the session hears of it,
# and how many may wait: an eighth of the largest window. A call wakes the owner, for about 0.1 ms.
DELIVER_BYTES = 4 * 1024 * 1024
REFRESH_S = 0.1  # how old a reported count may be
NAP_S = 0.3  # the owner came so much later than it wanted to: the process stood still
DRAIN_S = 0.5  # at a stop, for the pieces that are on their way
DRAIN_LOOK_S = 0.02
UNHEARD_S = 3.0  # without an answer, or three beats: about then a coordinator loses this node
UNHEARD_BEATS = 3.0


class RelayDriver:
    """The data plane of one node. ``open_source(url)`` gives a reader for an origin; ``on_news()``
    is called where something should be reported now, not at the next beat. ``coordinated``: lanes
    come from a coordinator, who may give them to others while this process stands still, or is cut
    off from it. ``readings`` are where what was read from the origin outlives the process.
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
        readings: Readings | None = None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker_id = worker_id
        self.store = store
        self.nic_in = Pacer(link_mbit)
        self.nic_out = Pacer(link_mbit)
        self._transport = transport
        self._open_source = open_source
        self.readings = readings or Readings()
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
        self._news: dict[str, tuple[object, ...]] = {}  # by deployment: what was last told at once
        self._on_news = on_news
        self._coordinated = coordinated
        self._woke_s = float("inf")  # when this process had stood still last, until it was heard of
        self._heard_until_s = float("-inf")  # until then the coordinator counts as heard
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
        """Return which life of its worker this node says it is."""
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
        """Stop serving and fetching; what is on its way arrives first, within DRAIN_S, and what is
        verified becomes durable.
        """
        self._drain()
        self._stop.set()
        self._post(lambda _now: None)
        self._owner.join(10.0)
        self.server.stop()
        self._deployments.close()
        self.store.close()

    def _drain(self) -> None:
        """Wait until each stream has brought a piece more, or has nothing to bring."""
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
        """Take part in a deployment, or take its newer lanes."""
        self._post(lambda now: self._deployments.deploy(lanes, manifest, now))

    def heard(self, since_s: float, next_s: float = 0.0) -> None:
        """Take note that the coordinator answered what was asked at ``since_s`` or later, and that
        what it commanded was passed on: lanes that are in force stand. It is asked again in
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
                self._tell(share, Confirmed(), now_s)

    def _look_around(self, share: Share, now_s: float) -> None:
        """Stop reading the origin where others may have been told to: this node does not hear the
        coordinator, and nobody reads here any more. While it is away from all, readers stay.
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
            self._tell(share, Woke(0.0, replaced=True), now_s)
        elif share.is_cut_off and not alone and self._woke_s == float("inf"):
            share.is_cut_off = False
            self._tell(share, Confirmed(), now_s)

    def refuse(self, lanes: WorkerLanes, manifest: Manifest, error: PacelineError) -> None:
        """Take no part in a deployment, and report why."""
        self._post(lambda now: self._deployments.refuse(lanes, manifest, error, now))

    def activate(self, deployment_id: str) -> None:
        """Switch to the deployment's version, if it is complete here."""
        self._post(lambda now: self._deployments.activate(deployment_id, now))

    def cancel(self, deployment_id: str) -> None:
        """Drop the deployment and what arrived of it; once its beat is gone it cannot publish."""
        self._post(lambda now: self._deployments.cancel(deployment_id, now))

    def forget(self, digest: str) -> None:
        """Drop what an earlier process began of a version, unless a deployment has it here."""
        self._post(lambda _now: self._deployments.forget(digest))

    @property
    def withdrawals(self) -> int:
        """Return how many published versions rotted on this disk and were taken out of sight."""
        return self._deployments.withdrawals

    def beats(self) -> list[DeploymentBeat]:
        """Return what to report about each deployment."""
        return [beat for share in self._deployments if (beat := share.beat)]

    def wait(self, condition: Callable[[list[DeploymentBeat]], bool], timeout_s: float) -> bool:
        """Wait until ``condition(beats)`` holds; return whether it did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.beats()), timeout_s)

    # ── the owner thread ─────────────────────────────────────────────────────────────────────────

    def _post(self, work: Callable[[float], None]) -> None:
        self._inbox.put((work, time.monotonic()))

    def _run(self) -> None:
        due_s = time.monotonic()  # when this loop wants to look at the clock again at the latest
        while not self._stop.is_set():
            due_s = self._look_at_clock(due_s)  # it may stand still in the middle of its work, too
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
        """Tell the sessions where this process stood still (stopped, swapped out, its machine
        paused) since ``due_s``, before they hear of anything else; return what time it is.
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
                self._tell(share, Woke(late_s, replaced), now_s)
        return now_s

    def _tick(self) -> float:
        """Tell the sessions whose time has come, however busy the others are; return how long to
        wait for an event.
        """
        next_s = time.monotonic() + LONGEST_WAIT_S
        for share in self._deployments:
            self._deliver(share, time.monotonic())
            if share.streams:
                next_s = min(next_s, time.monotonic() + LOOK_S)
            self._look_around(share, time.monotonic())
            due_s = share.session.deadline_s() if share.session else None
            old_s = share.refreshed_s + LONGEST_WAIT_S  # a stall is an event too, and makes none
            if due_s is not None and min(due_s, old_s) <= time.monotonic():
                self._tell(share, Tick(), time.monotonic())
                due_s = share.session.deadline_s() if share.session else None
            next_s = min(next_s, next_s if due_s is None else due_s)
        return max(next_s - time.monotonic(), 0.001)

    def _tell(self, share: Share, event: SessionEvent, now_s: float) -> None:
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

    def _do(self, share: Share, action: SessionAction) -> None:
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

    def _open_stream(self, share: Share, source: Source, stream: int) -> PullStream:
        if share.staging is None:
            raise RuntimeError("a session fetched before its files were open")
        if source.kind == "worker":
            pull = Pull(
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
        # One reader a deployment and URL: it remembers the ETags, so that versions never mix.
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

    def _reporter(self, share: Share) -> Callable[[SessionEvent], None]:
        """Return what byte threads report with. Verified pieces wait for each other, so that small
        ones do not wake the owner one by one: it looks at LOOK_S, or when enough are there.
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
                    deliver(now_s)  # in the order in which it happened
                    self._tell(share, event, now_s)

                self._post(tell)

        return report

    def _deliver(self, share: Share, now_s: float) -> None:
        for event in share.arrivals.take():
            self._tell(share, event, now_s)
