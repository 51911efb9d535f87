"""Runs sessions on threads, sockets and disks: the data plane of one node.

One owner thread takes ``(event, time)`` from a bounded inbox, feeds the sessions and starts what
they ask for; byte threads only report into the inbox and never touch a session (checked). What
agents report is a snapshot that the owner replaces whole. It knows no coordinator and no HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import (
    Conflict,
    DeploymentFailed,
    PacelineError,
    StorageFailed,
    StorageFull,
)
from paceline.manifest import Manifest
from paceline.relay.committer import Committer
from paceline.relay.events import (
    Abandon,
    Cancelled,
    Complete,
    Fail,
    Fetch,
    LanesAssigned,
    PiecesRotten,
    PieceVerified,
    ReportCorrupt,
    ReportSourceLost,
    SessionAction,
    SessionEvent,
    Tick,
)
from paceline.relay.extents import Extent, Extents
from paceline.relay.library import Library
from paceline.relay.limits import SessionLimits
from paceline.relay.origin import LazyReader, OriginStream, RangeReader
from paceline.relay.pacing import Pacer
from paceline.relay.session import RelaySession, as_failure
from paceline.relay.share import Share
from paceline.relay.staging import Staging
from paceline.relay.store import Store
from paceline.relay.transport import PullStream, Transport
from paceline.wire.calls import DeploymentBeat
from paceline.wire.plan import Source, WorkerLanes
from paceline.wire.records import WorkerStatus

log = logging.getLogger(__name__)

INBOX = 8192
LONGEST_WAIT_S = 1.0
REFRESH_S = 0.1  # how old a reported count may be
FINISHED_KEPT = 8  # deployments that stay open for others, and in the beats, after they ended


class RelayDriver:
    """The data plane of one node. ``open_source(url)`` gives a reader for an origin."""

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
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.store = store
        self.nic_in = Pacer(link_mbit)
        self.nic_out = Pacer(link_mbit)
        self._transport = transport
        self._open_source = open_source
        self._limits = limits or SessionLimits()
        self._seed = seed
        self._inbox: queue.Queue[tuple[Callable[[float], None], float]] = queue.Queue(INBOX)
        self._shares: dict[str, Share] = {}
        self._library = Library(store)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self.server = transport.serve(
            host=host,
            port=port,
            worker_id=worker_id,
            find=self._library.find,
            pacer=self.nic_out,
            on_rotten=lambda digest, piece: self._post(
                lambda now: self._rotten(digest, piece, now)
            ),
        )
        self._owner = threading.Thread(target=self._run, name="relay-owner", daemon=True)

    # ── what the agent calls, from any thread ────────────────────────────────────────────────────

    def start(self) -> None:
        """Listen and work until ``stop``."""
        self.server.start()
        self._owner.start()

    def stop(self) -> None:
        """Stop serving and fetching; what is verified becomes durable first."""
        self._stop.set()
        self._post(lambda _now: None)
        self._owner.join(10.0)
        self.server.stop()
        for share in self._shares.values():
            share.close_streams()
            if share.committer:
                share.committer.stop(wait=True)
            if share.staging and not share.staging.published:
                with suppress(PacelineError, OSError):
                    share.staging.commit()
        self._library.close()
        self.store.close()

    def deploy(self, lanes: WorkerLanes, manifest: Manifest) -> None:
        """Take part in a deployment, or take its newer lanes."""
        self._post(lambda now: self._deploy(lanes, manifest, now))

    def activate(self, deployment_id: str) -> None:
        """Switch to the deployment's version, if it is complete here."""
        self._post(lambda now: self._activate(deployment_id, now))

    def cancel(self, deployment_id: str) -> None:
        """Drop the deployment and what arrived of it; once its beat is gone it cannot publish."""
        self._post(lambda now: self._cancel(deployment_id, now))

    def beats(self) -> list[DeploymentBeat]:
        """Return what to report about each deployment."""
        return [beat for share in list(self._shares.values()) if (beat := share.beat)]

    def wait(self, condition: Callable[[list[DeploymentBeat]], bool], timeout_s: float) -> bool:
        """Wait until ``condition(beats)`` holds; return whether it did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.beats()), timeout_s)

    # ── the owner thread ─────────────────────────────────────────────────────────────────────────

    def _post(self, work: Callable[[float], None]) -> None:
        self._inbox.put((work, time.monotonic()))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                work, at = self._inbox.get(timeout=self._wait_s())
            except queue.Empty:
                at = time.monotonic()
                for share in list(self._shares.values()):
                    self._tell(share, Tick(), at)
            else:
                try:
                    work(at)
                except Exception:
                    log.exception("an event could not be handled")

    def _wait_s(self) -> float:
        sessions = [share.session for share in self._shares.values() if share.session]
        deadlines = [at for each in sessions if (at := each.deadline_s()) is not None]
        wait_s = min(deadlines, default=float("inf")) - time.monotonic()
        return min(LONGEST_WAIT_S, max(wait_s, 0.001))

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
            self._fail(share, DeploymentFailed("the relay session broke", got=repr(error)))
            return
        if actions or now_s - share.refreshed_s >= REFRESH_S:
            self._refresh(share, now_s)

    def _refresh(self, share: Share, now_s: float) -> None:
        share.refresh(now_s)
        with self._changed:
            self._changed.notify_all()

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
                self._thread("publish", lambda: self._publish(share))
            case Fail(error):
                self._fail(share, error)
            case ReportSourceLost(key, reason):
                log.warning("source lost source=%s reason=%s", key, reason)
            case ReportCorrupt(key, piece):
                log.warning("corrupt piece source=%s piece=%d", key, piece)

    def _open_stream(self, share: Share, source: Source, stream: int) -> PullStream:
        if share.staging is None:
            raise RuntimeError("a session fetched before its files were open")
        if source.kind == "worker":
            return self._transport.pull(
                source=source,
                stream=stream,
                worker_id=self.worker_id,
                staging=share.staging,
                pacer=self.nic_in,
                counters=share.counters,
                keepalive_s=share.lanes.piece_deadline_s / 4,
                report=self._reporter(share),
            )
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
        )

    def _reporter(self, share: Share) -> Callable[[SessionEvent], None]:
        """Return what byte threads report with; verified pieces wait together for the owner, so
        that small pieces cost it one event a look and not one each.
        """
        lock = threading.Lock()
        waiting: dict[tuple[str, int], Extents] = {}

        def deliver(now_s: float) -> None:
            with lock:
                taken = list(waiting.items())
                waiting.clear()
            for (key, stream), extents in taken:
                for run in extents:
                    self._tell(share, PieceVerified(key, stream, run), now_s)

        def report(event: SessionEvent) -> None:
            if self._stop.is_set():
                return
            if isinstance(event, PieceVerified):
                with lock:
                    first = not waiting
                    mine = waiting.setdefault((event.source_key, event.stream), Extents())
                    mine.add(event.extent)
                if first:
                    self._post(deliver)
                if share.committer is not None:
                    share.committer.look()
            else:
                self._post(lambda now: self._tell(share, event, now))

        return report

    # ── deployments ──────────────────────────────────────────────────────────────────────────────

    def _deploy(self, lanes: WorkerLanes, manifest: Manifest, now_s: float) -> None:
        known = self._shares.get(lanes.deployment_id)
        if known is not None and lanes.epoch <= known.lanes.epoch:
            return
        if known is not None and (known.session is not None or known.ended_s is None):
            known.lanes = lanes  # one that is still being prepared takes these when it is ready
            self._tell(known, LanesAssigned(lanes), now_s)
            if known.session and known.session.progress().status is WorkerStatus.RECEIVING:
                known.status, known.failure, known.ended_s = WorkerStatus.RECEIVING, None, None
                if known.staging is not None:
                    known.staging.give_up(False)
            self._refresh(known, now_s)
            return
        self._forget_old()
        share = Share(lanes, manifest, now_s, self.nic_out.total_bytes)
        self._shares[lanes.deployment_id] = share
        self._refresh(share, now_s)
        busy = [s for s in self._shares.values() if s.manifest.digest == manifest.digest]
        if any(s is not share and s.ended_s is None for s in busy):
            other = next(s.deployment_id for s in busy if s is not share)
            self._fail(share, Conflict("this version is arriving here already", got=other))
            return
        self._thread("prepare", lambda: self._prepare(share))

    def _prepare(self, share: Share) -> None:
        """Open the files and copy what this disk already has; not on the owner thread."""
        try:
            staging = self._library.open(share.manifest)
        except (PacelineError, OSError) as error:
            failure = _as_error(error)
            self._post(lambda _now: self._fail(share, failure))
        else:
            self._post(lambda now: self._prepared(share, staging, now))

    def _prepared(self, share: Share, staging: Staging, now_s: float) -> None:
        if self._shares.get(share.deployment_id) is not share:
            self._library.discard(staging)  # cancelled meanwhile
            return
        share.staging = staging
        staging.give_up(False)
        share.session = RelaySession(
            worker_id=self.worker_id,
            manifest=staging.manifest,
            held=staging.durable.pieces(),
            limits=self._limits,
            seed=self._seed,
        )
        if not staging.published:
            share.committer = Committer(staging, self._reporter(share))
            share.committer.start()
        self._tell(share, LanesAssigned(share.lanes), now_s)
        self._refresh(share, now_s)

    def _publish(self, share: Share) -> None:
        """Show the complete version at its final path; not on the owner thread."""
        staging = share.staging
        if staging is None:
            return
        if share.committer is not None:
            share.committer.stop(wait=True)
        try:
            path = self.store.publish(staging)
        except (PacelineError, OSError) as error:
            failure = _as_error(error)
            self._post(lambda _now: self._fail(share, failure, verification=True))
            return

        def done(now_s: float) -> None:
            if self._shares.get(share.deployment_id) is share:
                share.completed(
                    path,
                    now_s,
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    sent_bytes=self.nic_out.total_bytes,
                )
                self._refresh(share, now_s)
                log.info("complete path=%s", path)

        self._post(done)

    def _fail(self, share: Share, error: PacelineError, *, verification: bool = False) -> None:
        if share.ended_s is not None:
            return
        log.error("deployment %s failed here: %s", share.deployment_id, error)
        share.status = WorkerStatus.VERIFICATION_FAILED if verification else WorkerStatus.FAILED
        share.failure = as_failure(error)
        share.ended_s = time.monotonic()
        share.close_streams()
        share.refresh(share.ended_s)  # before the session goes: what was held is still reported
        if verification or isinstance(error, StorageFull | StorageFailed | DeploymentFailed):
            self._drop(share)  # nothing on this disk may be trusted or take up room any more
        if share.staging is not None:
            share.staging.give_up(True)
        self._library.refuse(share.manifest.digest)
        with self._changed:
            self._changed.notify_all()

    def _drop(self, share: Share) -> None:
        """Discard what the disk has of a deployment, unless it is published."""
        if share.committer is not None:
            share.committer.stop()
        if share.staging is not None and not share.staging.published:
            self._library.discard(share.staging)
        share.session = share.staging = share.committer = None

    def _cancel(self, deployment_id: str, now_s: float) -> None:
        share = self._shares.get(deployment_id)
        if share is None:
            return
        self._tell(share, Cancelled(), now_s)
        share.close_streams()
        self._drop(share)
        del self._shares[deployment_id]
        with self._changed:
            self._changed.notify_all()

    def _activate(self, deployment_id: str, now_s: float) -> None:
        share = self._shares.get(deployment_id)
        if share is None or share.receipt is None:
            return
        try:
            self.store.activate(share.receipt.model_id, share.receipt.version)
        except (PacelineError, OSError) as error:
            log.warning("cannot activate %s: %s", share.deployment_id, error)
            share.failure = as_failure(_as_error(error))
        else:
            share.activated, share.failure = True, None
        self._refresh(share, now_s)

    def _rotten(self, digest: str, piece: int, now_s: float) -> None:
        for share in self._shares.values():
            if share.manifest.digest == digest:
                self._tell(share, PiecesRotten(Extent(piece, piece + 1)), now_s)

    def _forget_old(self) -> None:
        """Close the oldest ended deployments beyond those worth keeping open."""
        ended = [share for share in self._shares.values() if share.ended_s is not None]
        for share in sorted(ended, key=lambda each: each.ended_s or 0.0)[:-FINISHED_KEPT]:
            del self._shares[share.deployment_id]
            if all(share.staging is not other.staging for other in self._shares.values()):
                self._library.release(share.staging)

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()


def _as_error(error: PacelineError | OSError) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    return StorageFailed("the disk failed", got=error, do="See this agent's log.")
