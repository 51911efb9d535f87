"""The deployments on one node, from lanes through files and publication to cancellation.

All of it runs on the owner thread, except long disk work: threads of their own open and publish the
files and post the result. ``node`` moves the bytes; the session decides which pieces are wanted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.errors import Conflict, DeploymentFailed, PacelineError, StorageFailed, StorageFull
from paceline.manifest import Manifest
from paceline.relay.protocol import (
    Cancelled,
    Extent,
    Extents,
    HeldPiecesCorrupt,
    LanesAssigned,
    PieceVerified,
    RelaySession,
    SessionEvent,
    SessionLimits,
    as_failure,
)
from paceline.relay.sources import RangeReader
from paceline.relay.store import (
    Committer,
    OpenModels,
    OriginReadCount,
    OriginReadCounts,
    Staging,
    Store,
)
from paceline.relay.transport import Pacer, PullStream, TransferCounters
from paceline.schemas import DeploymentBeat, Failure, Receipt, Source, WorkerLanes, WorkerStatus

log = logging.getLogger(__name__)

MAX_WRITE_AHEAD_BYTES = 1024 * 1024  # at most, of the count written ahead, where lanes set none
WRITE_AHEAD_PARTS = 512
STALL_REPORT_S = 3.0  # without a new piece, after which the log says what is waited for
MAX_ENDED_DEPLOYMENTS = 8  # ended deployments that stay open for peers and in the heartbeats


@dataclass(eq=False)
class ActiveDeployment:
    """State of one deployment on one node: session, files, streams, counters, reported status.

    Owned by the driver's owner thread; other threads only read ``beat``, which is replaced whole.
    """

    lanes: WorkerLanes
    manifest: Manifest
    started_s: float
    sent_before: int  # bytes this node had sent when the deployment began
    session: RelaySession | None = None
    staging: Staging | None = None
    committer: Committer | None = None
    counters: TransferCounters = field(default_factory=TransferCounters)
    reading: OriginReadCount = field(default_factory=OriginReadCount)
    is_cut_off: bool = False  # without readers and without a coordinator: see ``node``
    # Verified pieces that the session has not processed yet: byte threads append, the owner takes.
    arrivals: deque[PieceVerified] = field(default_factory=deque)
    delivery_posted: bool = False  # the owner has been woken for them
    delivered_pieces: int = 0  # verified ones when the owner last took them
    streams: dict[str, tuple[int, PullStream]] = field(default_factory=dict)
    readers: dict[str, RangeReader] = field(default_factory=dict)
    status: WorkerStatus = WorkerStatus.RECEIVING
    failure: Failure | None = None
    receipt: Receipt | None = None
    activated: bool = False
    ended_s: float | None = None
    beat: DeploymentBeat | None = None
    refreshed_s: float = 0.0
    stall_reported: bool = False  # the log says what it waits for
    moved_s: float = 0.0  # when ``moved_pieces`` last changed; 0: not looked at yet
    moved_pieces: int = 0  # verified ones

    @property
    def deployment_id(self) -> str:
        return self.lanes.deployment_id

    def take_arrivals(self) -> list[PieceVerified]:
        """Return the verified pieces that arrived since the last call, as runs."""
        if not self.arrivals:
            return []
        self.delivery_posted = False
        self.delivered_pieces = self.staging.verified.count if self.staging else 0
        taken: dict[tuple[str, int], Extents] = {}
        while self.arrivals:
            event = self.arrivals.popleft()
            taken.setdefault((event.source_key, event.stream), Extents()).add(event.extent)
        return [
            PieceVerified(key, stream, run)
            for (key, stream), extents in taken.items()
            for run in extents
        ]

    def expected_rate(self, source: Source) -> float:
        """Return the bytes/s that the lanes expect from ``source`` (0: unknown)."""
        return sum(each.expected_bytes_s for each in self.lanes.lanes if each.source == source)

    def planned_rate(self, source: Source) -> float:
        """Return the expected rate where the lanes use several sources, which share this node's
        link; 0 where ``source`` may use all of it.
        """
        several = len({each.source.key for each in self.lanes.lanes}) > 1
        return self.expected_rate(source) if several else 0.0

    @property
    def may_be_reassigned(self) -> bool:
        """Return whether the coordinator may assign this node's origin reads to another node."""
        named = any(each.source.kind == "worker" or each.spares for each in self.lanes.lanes)
        seeds = bool(self.lanes.origin_lanes) and self.lanes.origin_tell_bytes > 0
        return seeds and (named or self.reading.has_served_peers) and self.ended_s is None

    def report_stall(self, now_s: float) -> None:
        """Log once what is waited for after STALL_REPORT_S without a piece, and when it goes on."""
        pieces = self.staging.verified.count if self.staging else 0
        goes_on = pieces != self.moved_pieces or self.ended_s is not None
        still_s = now_s - (self.moved_s or self.started_s)
        if goes_on or not self.moved_s:
            if self.stall_reported:
                log.warning("goes on after %.1f s deployment=%s", still_s, self.deployment_id)
            self.stall_reported, self.moved_s, self.moved_pieces = False, now_s, pieces
        elif still_s >= STALL_REPORT_S and not self.stall_reported:
            self.stall_reported = True
            waits_for = self.session.waits_for(now_s) if self.session else "its files to be opened"
            log.warning(
                "no piece for %.1f s deployment=%s waits for %s",
                *(still_s, self.deployment_id, waits_for),
            )

    def close_streams(self) -> None:
        for _, stream in self.streams.values():
            stream.close()
        self.streams.clear()

    def reported_at_once(self) -> tuple[object, ...]:
        """Return the fields of ``beat`` whose change does not wait for the next heartbeat."""
        beat, much = self.beat, self.lanes.origin_tell_bytes
        if beat is None:
            return ()
        read = beat.origin_bytes // much if much else 0
        return beat.status, beat.activated, beat.lost_sources, beat.failure, read

    @property
    def origin_report_due(self) -> bool:
        """Return whether enough was read from the origin since ``beat`` to report it at once."""
        much = self.lanes.origin_tell_bytes
        reported = self.beat.origin_bytes if self.beat else 0
        return 0 < much <= self.counters.origin_bytes - reported

    def refresh(self, now_s: float) -> None:
        """Replace ``beat`` by the current state."""
        self.refreshed_s = now_s
        progress = self.session.progress() if self.session else None
        failure = self.failure
        if progress is not None and failure is None and self.status is WorkerStatus.RECEIVING:
            failure = progress.failure  # stalled: still receiving, and why nothing arrives
        self.beat = DeploymentBeat(
            deployment_id=self.deployment_id,
            epoch=progress.epoch if progress else self.lanes.epoch,
            status=self.status,
            pieces_held=progress.pieces_held if progress else 0,
            bytes_held=progress.bytes_held if progress else 0,
            chunks_received=progress.chunks_received if progress else (),
            origin_bytes=self.counters.origin_bytes,
            lost_sources=progress.lost_sources if progress else (),
            corrupt_sources=progress.corrupt_sources if progress else (),
            edges=self.staging.edges.tallies() if self.staging else (),
            failure=failure,
            receipt=self.receipt,
            activated=self.activated,
        )

    def completed(self, path: Path, now_s: float, driver: Driver) -> None:
        """Record that the version is visible at ``path``, and create the receipt."""
        self.ended_s = now_s
        self.status = WorkerStatus.COMPLETE
        self.failure = None
        counters, staging = self.counters, self.staging
        self.receipt = Receipt(
            deployment_id=self.deployment_id,
            worker_id=driver.worker_id,
            incarnation=driver.incarnation,
            model_id=self.manifest.model_id,
            version=self.manifest.version,
            manifest_digest=self.manifest.digest,
            path=str(path),
            total_bytes=self.manifest.total_size,
            received_bytes=counters.received_bytes,
            origin_bytes=counters.origin_bytes,
            reused_bytes=staging.reused_bytes if staging else 0,
            reused_pieces=staging.reused_pieces if staging else 0,
            refetched_bytes=counters.refetched_bytes,
            sent_bytes=driver.nic_out.total_bytes - self.sent_before,
            corrupt_pieces=self.session.progress().corrupt_pieces if self.session else 0,
            seconds=now_s - self.started_s,
        )


class Driver(Protocol):
    """What the deployments use of ``node.RelayDriver``."""

    worker_id: str
    incarnation: int
    withdrawals: int
    store: Store
    origin_reads: OriginReadCounts
    nic_out: Pacer

    def post(self, work: Callable[[float], None]) -> None: ...
    def handle(self, deployment: ActiveDeployment, event: SessionEvent, now_s: float) -> None: ...
    def reporter(self, deployment: ActiveDeployment) -> Callable[[SessionEvent], None]: ...
    def changed(self) -> None: ...


class Deployments:
    """The deployments of one node, whose threads are those of ``driver``."""

    def __init__(self, driver: Driver, *, limits: SessionLimits, seed: int) -> None:
        self._driver = driver
        self._store, self._readings = driver.store, driver.origin_reads
        self.library = OpenModels(driver.store)
        self._limits = limits
        self._seed = seed
        self._active: dict[str, ActiveDeployment] = {}

    def __iter__(self) -> Iterator[ActiveDeployment]:
        return iter(list(self._active.values()))

    def close(self) -> None:
        """Close all deployments; verified pieces become durable first."""
        for deployment in self:
            deployment.close_streams()
            if deployment.committer:
                deployment.committer.stop(wait=True)
            if deployment.staging and not deployment.staging.published:
                try:
                    deployment.staging.commit()
                except (PacelineError, OSError) as error:
                    log.warning("%s is not all durable: %s", deployment.deployment_id, error)
        self.library.close()
        self._readings.close()

    def refresh(self, deployment: ActiveDeployment, now_s: float) -> None:
        """Update the reported state of ``deployment``."""
        deployment.refresh(now_s)
        self._driver.changed()

    def deploy(self, lanes: WorkerLanes, manifest: Manifest, now_s: float) -> None:
        """Join a deployment, or apply its newer lanes."""
        known = self._active.get(lanes.deployment_id)
        if known is not None and lanes.epoch <= known.lanes.epoch:
            return
        if known is not None and (known.session is not None or known.ended_s is None):
            known.lanes = lanes  # a deployment still being prepared applies these when it is ready
            self._driver.handle(known, LanesAssigned(lanes, known.counters.origin_bytes), now_s)
            if known.session and known.session.progress().status is WorkerStatus.RECEIVING:
                known.status, known.failure, known.ended_s = WorkerStatus.RECEIVING, None, None
                if known.staging is not None:
                    known.staging.give_up(False)
            self.refresh(known, now_s)
            return
        self._close_oldest_ended()
        deployment = ActiveDeployment(lanes, manifest, now_s, self._driver.nic_out.total_bytes)
        self._active[lanes.deployment_id] = deployment
        try:
            deployment.reading = self._readings.of(deployment.deployment_id)
        except (PacelineError, OSError) as error:  # before a byte is read that would not be counted
            self.fail(deployment, as_error(error))
            return
        deployment.counters = _counters(deployment)
        self.refresh(deployment, now_s)
        busy = [s for s in self._active.values() if s.manifest.digest == manifest.digest]
        if any(s is not deployment and s.ended_s is None for s in busy):
            other = next(s.deployment_id for s in busy if s is not deployment)
            self.fail(deployment, Conflict("this version is arriving here already", got=other))
            return
        _thread("prepare", lambda: self._prepare(deployment))

    def refuse(
        self, lanes: WorkerLanes, manifest: Manifest, error: PacelineError, now_s: float
    ) -> None:
        """Report that this node does not join a deployment, and why."""
        if lanes.deployment_id in self._active:
            return
        deployment = ActiveDeployment(lanes, manifest, now_s, self._driver.nic_out.total_bytes)
        self._active[lanes.deployment_id] = deployment
        self.fail(deployment, error)

    def _prepare(self, deployment: ActiveDeployment) -> None:
        """Open the files and copy what this disk already has; not on the owner thread."""
        try:
            staging = self.library.open(deployment.manifest)
        except Exception as error:  # noqa: BLE001 - otherwise the failure is never reported
            failure = as_error(error)
            self._driver.post(lambda _now: self.fail(deployment, failure))
        else:
            self._driver.post(lambda now: self._prepared(deployment, staging, now))

    def _prepared(self, deployment: ActiveDeployment, staging: Staging, now_s: float) -> None:
        if self._active.get(deployment.deployment_id) is not deployment:
            self.library.discard(staging)  # cancelled meanwhile
            return
        deployment.staging = staging
        staging.give_up(False)
        deployment.session = RelaySession(
            worker_id=self._driver.worker_id,
            manifest=staging.manifest,
            held=staging.durable,
            limits=self._limits,
            seed=self._seed,
        )
        self._commit_on(deployment)
        self._driver.handle(
            deployment, LanesAssigned(deployment.lanes, deployment.counters.origin_bytes), now_s
        )
        self.refresh(deployment, now_s)

    def _commit_on(self, deployment: ActiveDeployment) -> None:
        if deployment.staging is not None and not deployment.staging.published:
            deployment.committer = Committer(deployment.staging, self._driver.reporter(deployment))
            deployment.committer.start()

    def publish(self, deployment: ActiveDeployment) -> None:
        """Publish the complete version at its final path, on a thread of its own."""
        _thread("publish", lambda: self._publish(deployment))

    def _publish(self, deployment: ActiveDeployment) -> None:
        staging = deployment.staging
        if staging is None:
            return
        if deployment.committer is not None:
            deployment.committer.stop(wait=True)
        try:
            path = self._store.publish(staging)
        except Exception as error:  # noqa: BLE001 - as in _prepare
            failure = as_error(error)
            if isinstance(failure, Conflict) and not staging.all_verified:
                # A piece became corrupt meanwhile.
                self._driver.post(lambda _now: self._commit_on(deployment))
            else:
                self._driver.post(lambda _now: self.fail(deployment, failure, verification=True))
            return

        def done(now_s: float) -> None:
            if self._active.get(deployment.deployment_id) is deployment:
                deployment.completed(path, now_s, self._driver)
                self.refresh(deployment, now_s)
                log.info("complete path=%s", path)

        self._driver.post(done)

    def fail(
        self, deployment: ActiveDeployment, error: PacelineError, *, verification: bool = False
    ) -> None:
        """Fail a deployment and report why; lanes of a newer epoch may revive it."""
        if deployment.ended_s is not None:
            return
        log.error("deployment %s failed here: %s", deployment.deployment_id, error)
        failed = WorkerStatus.VERIFICATION_FAILED if verification else WorkerStatus.FAILED
        deployment.status = failed
        deployment.failure = as_failure(error)
        deployment.ended_s = time.monotonic()
        deployment.close_streams()
        deployment.refresh(deployment.ended_s)  # before the session goes: it has the last counts
        if verification or isinstance(error, StorageFull | StorageFailed | DeploymentFailed):
            # this data may neither be trusted nor take up disk space any more
            try:
                self._drop(deployment)
            except (PacelineError, OSError):  # it failed all the same, and is reported as failed
                log.exception("cannot drop what arrived of %s", deployment.deployment_id)
        if deployment.staging is not None:
            deployment.staging.give_up(True)
        self.library.refuse(deployment.manifest.digest)
        self._driver.changed()

    def _drop(self, deployment: ActiveDeployment) -> None:
        """Discard what the disk has of a deployment, unless it is published."""
        if deployment.committer is not None:
            deployment.committer.stop()
        if deployment.staging is not None and not deployment.staging.published:
            self.library.discard(deployment.staging)
        deployment.session = deployment.staging = deployment.committer = None

    def cancel(self, deployment_id: str, now_s: float) -> None:
        """Cancel a deployment and discard its data, unless it is published."""
        deployment = self._active.get(deployment_id)
        if deployment is None:
            return
        self._driver.handle(deployment, Cancelled(), now_s)
        deployment.close_streams()
        self._drop(deployment)
        del self._active[deployment_id]
        self._driver.changed()

    def forget(self, digest: str) -> None:
        """Discard a version that an earlier process began, unless a deployment here uses it."""
        if all(deployment.manifest.digest != digest for deployment in self):
            self._store.forget(digest)

    def activate(self, deployment_id: str, now_s: float) -> None:
        """Activate a deployment's version, if it is complete here."""
        deployment = self._active.get(deployment_id)
        if deployment is None or deployment.receipt is None:
            return
        try:
            self._store.activate(deployment.receipt.model_id, deployment.receipt.version)
        except (PacelineError, OSError) as error:
            log.warning("cannot activate %s: %s", deployment.deployment_id, error)
            deployment.failure = as_failure(as_error(error))
        else:
            for other in self:
                if other.activated and other.manifest.model_id == deployment.receipt.model_id:
                    other.activated = False  # a heartbeat reports what is active, not what once was
                    self.refresh(other, now_s)
            deployment.activated, deployment.failure = True, None
        self.refresh(deployment, now_s)

    def rotten(self, digest: str, piece: int, now_s: float) -> None:
        """Fetch a piece again that no longer matches its digest on this disk.

        A version that is published already is withdrawn at once, and its deployments end here: the
        worker registers as a new incarnation, is planned in again, and fetches what is missing.
        """
        mine = [deployment for deployment in self if deployment.manifest.digest == digest]
        try:
            withdrawn = self.library.withdraw(digest)
        except (PacelineError, OSError) as error:
            log.exception("cannot withdraw what rotted digest=%s", digest)
            for deployment in mine:
                deployment.ended_s = None
                self.fail(deployment, as_error(error))
            return
        for deployment in mine:
            if withdrawn:
                deployment.close_streams()
                del self._active[deployment.deployment_id]
            else:
                self._driver.handle(deployment, HeldPiecesCorrupt(Extent(piece, piece + 1)), now_s)
        if withdrawn:
            log.error("withdrew digest=%s piece=%d: it rotted on this disk", digest, piece)
            self._driver.withdrawals += 1
            self._driver.changed()

    def _close_oldest_ended(self) -> None:
        """Close the oldest ended deployments beyond the ``MAX_ENDED_DEPLOYMENTS`` newest."""
        ended = sorted(
            (each.ended_s, each.deployment_id) for each in self if each.ended_s is not None
        )
        for deployment in [self._active[name] for _, name in ended[:-MAX_ENDED_DEPLOYMENTS]]:
            del self._active[deployment.deployment_id]
            if all(deployment.staging is not other.staging for other in self._active.values()):
                self.library.release(deployment.staging)


def _counters(deployment: ActiveDeployment) -> TransferCounters:
    """Return counters that continue from what earlier processes read for this deployment."""
    reading = deployment.reading
    least = min(MAX_WRITE_AHEAD_BYTES, deployment.manifest.total_size // WRITE_AHEAD_PARTS)

    def cover(read: int) -> None:
        reading.cover(read, max(deployment.lanes.origin_tell_bytes, least))

    return TransferCounters(reading.read_bytes, cover)


def _thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def as_error(error: Exception) -> PacelineError:
    """Return ``error``, which ended a deployment here, as the PacelineError to report."""
    if isinstance(error, PacelineError):
        return error
    if not isinstance(error, OSError):
        log.error("a defect", exc_info=error)
        return DeploymentFailed("this node broke", got=repr(error), do="See this agent's log.")
    return StorageFailed("the disk failed", got=error, do="See this agent's log.")
