"""The deployments on one node, from lanes through files and publication to cancellation.

All of it runs on the owner thread, except long disk work: threads of their own open and publish the
files and post the result. ``node`` moves the bytes; the session decides which pieces are wanted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from paceline.errors import Conflict, DeploymentFailed, PacelineError, StorageFailed, StorageFull
from paceline.manifest import Manifest, parse_manifest
from paceline.relay.active_deployment import ActiveDeployment
from paceline.relay.protocol.events import Cancelled, HeldPiecesCorrupt, LanesAssigned, SessionEvent
from paceline.relay.protocol.extents import Extent
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.protocol.session import RelaySession, as_failure
from paceline.relay.store.group_commit import Committer
from paceline.relay.store.library import OpenModels
from paceline.relay.store.origin_reads import OriginReadCounts
from paceline.relay.store.staging import Staging
from paceline.relay.store.store import Store
from paceline.relay.transport.contract import TransferCounters
from paceline.schemas.plan import WorkerLanes
from paceline.schemas.records import WorkerStatus
from paceline.system.files import write_durably

log = logging.getLogger(__name__)

MOST_AHEAD = 1024 * 1024  # at most, of the count written ahead, where lanes set none
AHEAD_PARTS = 512
FINISHED_KEPT = 8  # ended deployments that stay open for peers and in the heartbeats

Work = Callable[[float], None]


class Deployments:
    """The deployments of one node. ``post`` queues work for the owner thread; ``tell`` passes an
    event to a session; ``report_of`` returns the callback with which byte threads report;
    ``changed`` is called when there is something new to report.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        store: Store,
        limits: SessionLimits,
        seed: int,
        incarnation: int,
        sent_bytes: Callable[[], int],
        readings: OriginReadCounts,
        post: Callable[[Work], None],
        tell: Callable[[ActiveDeployment, SessionEvent, float], None],
        report_of: Callable[[ActiveDeployment], Callable[[SessionEvent], None]],
        changed: Callable[[], None],
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.library = OpenModels(store)
        self._store = store
        self._limits = limits
        self._seed = seed
        self._sent_bytes = sent_bytes
        self._readings = readings
        self._post, self._tell, self._report_of = post, tell, report_of
        self._changed = changed
        self._shares: dict[str, ActiveDeployment] = {}
        self.withdrawals = 0  # published versions withdrawn because a piece no longer matched

    def __iter__(self) -> Iterator[ActiveDeployment]:
        return iter(list(self._shares.values()))

    def close(self) -> None:
        """Close all deployments; verified pieces become durable first."""
        for share in self:
            share.close_streams()
            if share.committer:
                share.committer.stop(wait=True)
            if share.staging and not share.staging.published:
                try:
                    share.staging.commit()
                except (PacelineError, OSError) as error:
                    log.warning("%s is not all durable: %s", share.deployment_id, error)
        self.library.close()
        self._readings.close()

    def refresh(self, share: ActiveDeployment, now_s: float) -> None:
        """Update the reported state of ``share``."""
        share.refresh(now_s)
        self._changed()

    def deploy(self, lanes: WorkerLanes, manifest: Manifest, now_s: float) -> None:
        """Join a deployment, or apply its newer lanes."""
        known = self._shares.get(lanes.deployment_id)
        if known is not None and lanes.epoch <= known.lanes.epoch:
            return
        if known is not None and (known.session is not None or known.ended_s is None):
            known.lanes = lanes  # a deployment still being prepared applies these when it is ready
            self._tell(known, LanesAssigned(lanes, known.counters.origin_bytes), now_s)
            if known.session and known.session.progress().status is WorkerStatus.RECEIVING:
                known.status, known.failure, known.ended_s = WorkerStatus.RECEIVING, None, None
                if known.staging is not None:
                    known.staging.give_up(False)
            self.refresh(known, now_s)
            return
        self._forget_old()
        share = ActiveDeployment(lanes, manifest, now_s, self._sent_bytes())
        self._shares[lanes.deployment_id] = share
        try:
            share.reading = self._readings.of(share.deployment_id)
        except (PacelineError, OSError) as error:  # before a byte is read that would not be counted
            self.fail(share, as_error(error))
            return
        share.counters = _counters(share)
        self.refresh(share, now_s)
        busy = [s for s in self._shares.values() if s.manifest.digest == manifest.digest]
        if any(s is not share and s.ended_s is None for s in busy):
            other = next(s.deployment_id for s in busy if s is not share)
            self.fail(share, Conflict("this version is arriving here already", got=other))
            return
        _thread("prepare", lambda: self._prepare(share))

    def refuse(
        self, lanes: WorkerLanes, manifest: Manifest, error: PacelineError, now_s: float
    ) -> None:
        """Report that this node does not join a deployment, and why."""
        if lanes.deployment_id in self._shares:
            return
        share = ActiveDeployment(lanes, manifest, now_s, self._sent_bytes())
        self._shares[lanes.deployment_id] = share
        self.fail(share, error)

    def _prepare(self, share: ActiveDeployment) -> None:
        """Open the files and copy what this disk already has; not on the owner thread."""
        try:
            staging = self.library.open(share.manifest)
        except Exception as error:  # noqa: BLE001 - otherwise the failure is never reported
            failure = as_error(error)
            self._post(lambda _now: self.fail(share, failure))
        else:
            self._post(lambda now: self._prepared(share, staging, now))

    def _prepared(self, share: ActiveDeployment, staging: Staging, now_s: float) -> None:
        if self._shares.get(share.deployment_id) is not share:
            self.library.discard(staging)  # cancelled meanwhile
            return
        share.staging = staging
        staging.give_up(False)
        share.session = RelaySession(
            worker_id=self.worker_id,
            manifest=staging.manifest,
            held=staging.durable,
            limits=self._limits,
            seed=self._seed,
        )
        self._commit_on(share)
        self._tell(share, LanesAssigned(share.lanes, share.counters.origin_bytes), now_s)
        self.refresh(share, now_s)

    def _commit_on(self, share: ActiveDeployment) -> None:
        if share.staging is not None and not share.staging.published:
            share.committer = Committer(share.staging, self._report_of(share))
            share.committer.start()

    def publish(self, share: ActiveDeployment) -> None:
        """Publish the complete version at its final path, on a thread of its own."""
        _thread("publish", lambda: self._publish(share))

    def _publish(self, share: ActiveDeployment) -> None:
        staging = share.staging
        if staging is None:
            return
        if share.committer is not None:
            share.committer.stop(wait=True)
        try:
            path = self._store.publish(staging)
        except Exception as error:  # noqa: BLE001 - as in _prepare
            failure = as_error(error)
            if isinstance(failure, Conflict) and not staging.all_verified:
                self._post(lambda _now: self._commit_on(share))  # a piece became corrupt meanwhile
            else:
                self._post(lambda _now: self.fail(share, failure, verification=True))
            return

        def done(now_s: float) -> None:
            if self._shares.get(share.deployment_id) is share:
                share.completed(
                    path,
                    now_s,
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    sent_bytes=self._sent_bytes(),
                )
                self.refresh(share, now_s)
                log.info("complete path=%s", path)

        self._post(done)

    def fail(
        self, share: ActiveDeployment, error: PacelineError, *, verification: bool = False
    ) -> None:
        """Fail a deployment and report why; lanes of a newer epoch may revive it."""
        if share.ended_s is not None:
            return
        log.error("deployment %s failed here: %s", share.deployment_id, error)
        share.status = WorkerStatus.VERIFICATION_FAILED if verification else WorkerStatus.FAILED
        share.failure = as_failure(error)
        share.ended_s = time.monotonic()
        share.close_streams()
        share.refresh(share.ended_s)  # before the session goes: it has the last counts
        if verification or isinstance(error, StorageFull | StorageFailed | DeploymentFailed):
            # this data may neither be trusted nor take up disk space any more
            try:
                self._drop(share)
            except (PacelineError, OSError):  # it failed all the same, and is reported as failed
                log.exception("cannot drop what arrived of %s", share.deployment_id)
        if share.staging is not None:
            share.staging.give_up(True)
        self.library.refuse(share.manifest.digest)
        self._changed()

    def _drop(self, share: ActiveDeployment) -> None:
        """Discard what the disk has of a deployment, unless it is published."""
        if share.committer is not None:
            share.committer.stop()
        if share.staging is not None and not share.staging.published:
            self.library.discard(share.staging)
        share.session = share.staging = share.committer = None

    def cancel(self, deployment_id: str, now_s: float) -> None:
        """Cancel a deployment and discard its data, unless it is published."""
        share = self._shares.get(deployment_id)
        if share is None:
            return
        self._tell(share, Cancelled(), now_s)
        share.close_streams()
        self._drop(share)
        del self._shares[deployment_id]
        self._changed()

    def forget(self, digest: str) -> None:
        """Discard a version that an earlier process began, unless a deployment here uses it."""
        if all(share.manifest.digest != digest for share in self):
            self._store.forget(digest)

    def activate(self, deployment_id: str, now_s: float) -> None:
        """Activate a deployment's version, if it is complete here."""
        share = self._shares.get(deployment_id)
        if share is None or share.receipt is None:
            return
        try:
            self._store.activate(share.receipt.model_id, share.receipt.version)
        except (PacelineError, OSError) as error:
            log.warning("cannot activate %s: %s", share.deployment_id, error)
            share.failure = as_failure(as_error(error))
        else:
            for other in self:
                if other.activated and other.manifest.model_id == share.receipt.model_id:
                    other.activated = False  # a heartbeat reports what is active, not what once was
                    self.refresh(other, now_s)
            share.activated, share.failure = True, None
        self.refresh(share, now_s)

    def rotten(self, digest: str, piece: int, now_s: float) -> None:
        """Fetch a piece again that no longer matches its digest on this disk.

        A version that is published already is withdrawn at once, and its deployments end here: the
        worker registers as a new incarnation, is planned in again, and fetches what is missing.
        """
        mine = [share for share in self if share.manifest.digest == digest]
        try:
            withdrawn = self.library.withdraw(digest)
        except (PacelineError, OSError) as error:
            log.exception("cannot withdraw what rotted digest=%s", digest)
            for share in mine:
                share.ended_s = None
                self.fail(share, as_error(error))
            return
        for share in mine:
            if withdrawn:
                share.close_streams()
                del self._shares[share.deployment_id]
            else:
                self._tell(share, HeldPiecesCorrupt(Extent(piece, piece + 1)), now_s)
        if withdrawn:
            log.error("withdrew digest=%s piece=%d: it rotted on this disk", digest, piece)
            self.withdrawals += 1
            self._changed()

    def _forget_old(self) -> None:
        """Close the oldest ended deployments beyond the ``FINISHED_KEPT`` newest."""
        ended = [share for share in self._shares.values() if share.ended_s is not None]
        for share in sorted(ended, key=lambda each: each.ended_s or 0.0)[:-FINISHED_KEPT]:
            del self._shares[share.deployment_id]
            if all(share.staging is not other.staging for other in self._shares.values()):
                self.library.release(share.staging)


def _counters(share: ActiveDeployment) -> TransferCounters:
    """Return counters that continue from what earlier processes read for this deployment."""
    reading = share.reading
    least = min(MOST_AHEAD, share.manifest.total_size // AHEAD_PARTS)

    def cover(read: int) -> None:
        reading.cover(read, max(share.lanes.origin_tell_bytes, least))

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


# The lanes of a node, stored on its disk: a restarted agent resumes while the coordinator is away.
#
# Other nodes may wait for what this one forwards. Lanes are stored with their manifest until their
# deployment has ended here. Stored lanes may be out of date; newer lanes replace them as always.

MOST = 8  # deployments at once; a node takes part in one or two
_LANES, _MANIFEST = ".lanes.json", ".manifest.json"


class StoredLanes:
    """Lanes stored below ``directory``; used by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._epochs: dict[str, int] = {}  # of the lanes that this process stored
        directory.mkdir(parents=True, exist_ok=True)

    def keep(self, lanes: WorkerLanes, manifest: Manifest) -> None:
        """Store ``lanes`` in place of the deployment's older ones; lanes of the same epoch are not
        stored again.
        """
        if self._epochs.get(lanes.deployment_id) == lanes.epoch:
            return
        manifest_path = self._directory / f"{manifest.digest}{_MANIFEST}"
        if not manifest_path.exists():
            write_durably(manifest_path, manifest.to_bytes())
        path = self._directory / f"{lanes.deployment_id}{_LANES}"
        write_durably(path, lanes.model_dump_json().encode())
        self._epochs[lanes.deployment_id] = lanes.epoch

    def drop(self, deployment_ids: Collection[str]) -> None:
        """Delete the lanes of deployments that have ended here."""
        for each in deployment_ids:
            self._epochs.pop(each, None)
        gone = [self._directory / f"{each}{_LANES}" for each in deployment_ids]
        gone = [path for path in gone if path.exists()]
        for path in gone:
            path.unlink()
        if gone:
            self._drop_manifests()

    def load(self) -> Iterator[tuple[WorkerLanes, Manifest]]:
        """Yield the stored lanes, newest first; unreadable files are removed with a warning."""
        paths = sorted(
            self._directory.glob(f"*{_LANES}"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for number, path in enumerate(paths):
            try:
                if number >= MOST:
                    raise ValueError("too many deployments")
                lanes = WorkerLanes.model_validate_json(path.read_bytes())
                kept = self._directory / f"{lanes.manifest_digest}{_MANIFEST}"
                manifest = parse_manifest(kept.read_bytes())
            except (OSError, ValueError, ValidationError, PacelineError) as error:
                log.warning("lanes forgotten: %s: %s", path.name, error)
                path.unlink(missing_ok=True)
            else:
                yield lanes, manifest
        self._drop_manifests()

    def _drop_manifests(self) -> None:
        lanes = [path.read_bytes() for path in self._directory.glob(f"*{_LANES}")]
        for path in self._directory.glob(f"*{_MANIFEST}"):
            digest = path.name.removesuffix(_MANIFEST).encode()
            if not any(digest in each for each in lanes):
                path.unlink()
