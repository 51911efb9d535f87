"""``distribute``: the coordinator's state machine and the drivers of its workers, in one process.

The planner, the state machine, sessions, sockets and disks are those of a fleet; only the calls
between nodes and coordinator are function calls, made by one loop. Workers share one interpreter,
so many of them on a fast link are slower than as many machines would be. A call repeated after a
crash resumes from the disks, under the origin budget of the first one.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import errors
from paceline.coordinator.state import Create, RaiseBudget
from paceline.errors import (
    Conflict,
    DeploymentFailed,
    NotReady,
    OriginBudgetExceeded,
    PermanentError,
    kind_named,
)
from paceline.manifest import Manifest, TrustPolicy, version_key
from paceline.plan import origin_cap_bytes, topology_of
from paceline.relay import RangeReader, process as descriptors
from paceline.relay.store import StorePolicy
from paceline.schemas import (
    CreateDeployment,
    Deployment,
    DeploymentStatus,
    Distribution,
    Failure,
    Record,
    Topology,
    WorkerProgress,
)
from paceline.standalone.request import (
    DistributeRequest,
    check_disk_space,
    is_s3,
    remove_new_directories,
    resolve_manifest,
    source_opener,
    worker_names,
)
from paceline.standalone.worker import LocalCoordinator, Worker

if TYPE_CHECKING:
    from paceline.storage import ObjectStore

POLL_S = 0.25
STALL_S = 120.0  # without a verified piece on any worker for so long: something hangs
MAX_NOTICES = 100


def distribute(
    source: Path | str,
    into: Path | str,
    workers: int | Sequence[str] = 4,
    *,
    targets: Sequence[str] | None = None,
    topology: Topology | str = Topology.AUTO,
    racks: int = 1,
    link_mbit: float | None = None,
    objects: ObjectStore | None = None,
    digest: str = "",
    model_id: str = "",
    version: str = "",
    trust: TrustPolicy | None = None,
    allow_older: bool = False,
    activate: bool = False,
    max_failed: float = 0.05,
    first_port: int = 0,
    extra_origin_bytes: int = 0,
    policy: StorePolicy | None = None,
    on_progress: Callable[[int, int], None] = lambda _held, _all: None,
    on_notice: Callable[[str], None] = lambda _said: None,
) -> Distribution:
    """Bring the model at ``source`` (a directory or ``s3://bucket/prefix``) to ``workers`` below
    ``into`` and return their receipts and measurements.

    ``workers`` is their number or their names; ``targets`` picks some of them. A directory without
    a manifest gets one (``model_id`` and ``version`` name it); where there is one they, and
    ``digest``, must agree with it. ``link_mbit`` limits each worker, both ways. ``on_progress``
    receives pieces held and wanted, over all workers; ``on_notice`` receives, from threads,
    messages about servers that stopped answering (the result has them as ``notices``). Everything
    is checked before a byte moves; a call that cannot succeed leaves nothing behind. A call that
    was killed and is repeated resumes from the disks, and what both read from the source stays
    under one budget, unless ``extra_origin_bytes`` allow more. Raises InvalidInput, InvalidPlan,
    SourceMissing, ServiceUnavailable, UntrustedManifest, CorruptData (another digest), Conflict (a
    newer version is there), StorageFull, PortInUse, StateLocked, OriginBudgetExceeded (what arrived
    is kept), and DeploymentFailed, or the workers' own error where all failed with the same one.
    """
    names = worker_names(workers, targets)
    request = DistributeRequest(
        into=Path(into).absolute(),  # receipts contain the paths of the copies
        names=names,
        racks=racks,
        topology=topology_of(topology),
        link_mbit=link_mbit,
        activate=activate,
        max_failed=max_failed,
        first_port=first_port,
        extra_origin_bytes=extra_origin_bytes,
        policy=policy or StorePolicy(),
        on_progress=on_progress,
        on_notice=on_notice,
    )
    notices: dict[str, None] = {}  # each once: several workers read the same server

    def notice(said: str) -> None:
        if said not in notices and len(notices) < MAX_NOTICES:
            notices[said] = None
            request.on_notice(said)

    manifest = resolve_manifest(source, objects, model_id, version, trust, notice)
    manifest.require_digest(digest, source)
    open_source = source_opener(objects, notice)
    url = str(source) if is_s3(source) else str(Path(source).resolve())
    new = [name for name in names if not (request.into / name).exists()]
    whole = not request.into.exists()
    try:
        check_disk_space(request, manifest)
        descriptors.require_file_limit(manifest, len(names))
        with Fleet(request, manifest, url, open_source) as fleet:
            if not allow_older:
                fleet.refuse_older()
            return fleet.run().model_copy(update={"notices": tuple(notices)})
    except BaseException as error:
        goes_on = KeyboardInterrupt | errors.TemporaryError | OriginBudgetExceeded
        if not isinstance(error, goes_on):
            remove_new_directories(request.into, new, whole=whole)
        raise


class Fleet:
    """The coordinator and the workers of one call; use it as a context manager."""

    def __init__(
        self,
        request: DistributeRequest,
        manifest: Manifest,
        url: str,
        open_source: Callable[[str], RangeReader],
    ) -> None:
        self.request, self.manifest, self.open_source = request, manifest, open_source
        self.coordinator = LocalCoordinator()
        self.news = threading.Event()
        self.token = secrets.token_hex(16)
        named = "\0".join((manifest.digest, url, *sorted(request.names)))
        self.deployment_id = f"local-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
        self.resumes = any(
            (request.into / name / "store" / "staging" / manifest.digest / "data").exists()
            for name in request.names
        )
        self._url = url
        self._workers: dict[str, Worker] = {}
        self._before_bytes = 0  # read from the source by the calls that this one resumes

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            stack.callback(self._stop)
            for number, name in enumerate(self.request.names):
                self._workers[name] = Worker(self, number)
            stack.pop_all()
        self._before_bytes = self._read_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        with ExitStack() as stack:  # each of them, whatever fails at another
            for worker in self._workers.values():
                stack.callback(worker.driver.stop)

    def refuse_older(self) -> None:
        """Raise Conflict where a worker already holds a newer version of the model."""
        there = [
            (version_key(stored.version), stored, worker.name)
            for worker in self._workers.values()
            for stored in worker.store.versions(self.manifest.model_id)
        ]
        if not there:
            return
        newest, stored, name = max(there, key=lambda each: each[0])
        if newest > version_key(self.manifest.version):
            raise Conflict(
                "a newer version is there already",
                got=self.manifest.version,
                wanted=f"{stored.version} or later",
                where=f"{name}: {stored.path}",
                do="Distribute a later version, or ask for the older one (--allow-older).",
            )

    def run(self) -> Distribution:
        """Create the deployment, exchange heartbeats until it has ended, and return the result."""
        began_s = moved_s = time.monotonic()
        self._create()
        held_before = -1
        while True:
            self.news.clear()
            for worker in self._workers.values():
                if worker.due_s <= time.monotonic():
                    worker.exchange()
            parts = self.coordinator.state.progress(self.deployment_id)
            failed = {
                part.worker_id: part.failure
                for part in parts
                if part.failure and part.receipt is None and part.status.is_final
            }
            if self.coordinator.tick():
                for worker in self._workers.values():  # each may have new lanes to fetch
                    worker.due_s = 0.0
                continue
            held = sum(part.pieces_held for part in parts)
            wanted = self.manifest.piece_count * (len(parts) - len(failed))
            self.request.on_progress(held, wanted)
            if held != held_before:
                moved_s, held_before = time.monotonic(), held
            deployment = self.coordinator.state.deployment_state(self.deployment_id).deployment
            if deployment.status.is_final:
                break
            if deployment.status is DeploymentStatus.STALLED:
                raise self._budget_exceeded(parts)
            if time.monotonic() - moved_s > STALL_S:
                raise self._stalled(held, parts)
            self.news.wait(POLL_S)
        if deployment.status is not DeploymentStatus.COMPLETE:
            raise self._failed(deployment, failed)
        seconds = time.monotonic() - began_s
        if self.request.activate:
            for name in self._workers.keys() - failed.keys():
                self._workers[name].store.activate(self.manifest.model_id, self.manifest.version)
        done = self._result(deployment, failed, seconds)
        for worker in self._workers.values():
            worker.forget_reads()
        return done

    # ── the control loop ─────────────────────────────────────────────────────────────────────────

    def _create(self) -> None:
        """Create the deployment before its workers register, so that its first plan counts what
        they hold and what they read already.
        """
        request, coordinator = self.request, self.coordinator
        call = CreateDeployment(
            model_id=self.manifest.model_id,
            version=self.manifest.version,
            source_url=self._url,
            target_workers=request.names,
            topology=request.topology,
            max_failed=request.max_failed,
            allow_older=True,  # ``refuse_older`` looks at the disks
        )
        event = Create(
            deployment_id=self.deployment_id, call=call, manifest=self.manifest, at=time.time()
        )
        coordinator.decide(event, Record)
        if request.extra_origin_bytes and request.topology is not Topology.DIRECT:
            extra = RaiseBudget(
                deployment_id=self.deployment_id, extra_bytes=request.extra_origin_bytes
            )
            coordinator.decide(extra, Record)
        for worker in self._workers.values():
            worker.exchange()
            worker.report_disk()

    # ── errors ───────────────────────────────────────────────────────────────────────────────────

    def _stalled(self, held: int, parts: Sequence[WorkerProgress]) -> NotReady:
        why = {part.failure.message: part.worker_id for part in parts if part.failure}
        reasons = "".join(f"; {name}: {message}" for message, name in why.items())
        return NotReady(
            "nothing moves any more",
            got=f"{held} pieces{reasons}"[:2000],
            wanted=f"{self.manifest.piece_count} on each of {len(parts)} workers",
            where=self.request.into,
            do="Run it again: it goes on from the disks.",
        )

    def _budget_exceeded(self, parts: Sequence[WorkerProgress]) -> OriginBudgetExceeded:
        code = OriginBudgetExceeded.__name__
        short = [part.worker_id for part in parts if part.failure and part.failure.code == code]
        cap = origin_cap_bytes(self.manifest.total_size) + self.request.extra_origin_bytes
        return OriginBudgetExceeded(
            "only the source has the missing pieces, and the origin budget is spent",
            got=f"{self._read_bytes()} bytes read, of that {self._before_bytes} by calls that this "
            f"one goes on from; {', '.join(short)} would read more",
            wanted=f"at most {cap} bytes",
            where=self._url,
            do="What arrived is kept: allow more with --extra-origin, as much as is missing.",
        )

    def _failed(
        self, deployment: Deployment, failed: Mapping[str, Failure]
    ) -> errors.PacelineError:
        """Return the error of a failed deployment: the workers' own where all have the same."""
        if failed and all(map(_is_permanent, failed.values())):
            for worker in self._workers.values():  # cannot succeed: nothing is kept
                worker.driver.cancel(self.deployment_id)
                worker.driver.wait(lambda _: worker.beat() is None, 5.0)  # noqa: B023
                worker.forget_reads()
        causes = failed.values() or [deployment.failure or Failure(code="", message="no reason")]
        first, kinds = next(iter(causes)), {failure.code for failure in causes}
        if len(kinds) == 1 and len(failed) in (0, len(self._workers)):
            everywhere = f"on every one of {len(failed)} workers: " if len(failed) > 1 else ""
            return getattr(errors, first.code, DeploymentFailed)(everywhere + first.message)
        return DeploymentFailed(
            "workers failed",
            got="; ".join(f"{name}: {each.message}" for name, each in failed.items())[:2000],
            wanted=f"at most {self.request.max_failed:.0%} of {len(self._workers)}",
            where=self.request.into,
            do="Mend the cause and run it again; what arrived is kept.",
        )

    # ── the result ───────────────────────────────────────────────────────────────────────────────

    def _read_bytes(self) -> int:
        return sum(worker.read_bytes for worker in self._workers.values())

    def _result(
        self, deployment: Deployment, failed: Mapping[str, Failure], seconds: float
    ) -> Distribution:
        request, total = self.request, self.manifest.total_size
        racks = {name: request.rack(number) for number, name in enumerate(request.names)}
        beats = [beat for worker in self._workers.values() if (beat := worker.beat())]
        receipts = tuple(beat.receipt for beat in beats if beat.receipt)
        crossing: dict[tuple[str, str], int] = {}
        corrupt: Counter[str] = Counter()
        for edge in (edge for beat in beats for edge in beat.edges):
            corrupt[edge.source] += edge.corrupt
            if edge.bytes and edge.source in racks and racks[edge.source] != racks[edge.reader]:
                crossing[edge.source, edge.reader] = edge.bytes
        bound = total / (request.link_mbit * 1e6 / 8) if request.link_mbit else None
        origin = self._read_bytes()  # failed workers included
        return Distribution(
            deployment_id=self.deployment_id,
            model_id=self.manifest.model_id,
            version=self.manifest.version,
            manifest_digest=self.manifest.digest,
            source_url=self._url,
            topology=deployment.topology,
            epochs=deployment.epoch,
            workers=len(racks),
            workers_complete=len(receipts),
            workers_failed=dict(failed),
            racks=len(set(racks.values())),
            total_bytes=total,
            seconds=seconds,
            predicted_seconds=deployment.predicted_seconds if bound else None,
            bound_seconds=bound,
            ratio=seconds / bound if bound else None,
            origin_bytes=origin,
            origin_before_bytes=self._before_bytes,
            origin_ratio=origin / total,
            received_bytes=sum(receipt.received_bytes for receipt in receipts),
            reused_bytes=sum(receipt.reused_bytes for receipt in receipts),
            refetched_bytes=sum(receipt.refetched_bytes for receipt in receipts),
            corrupt_from=dict(+corrupt),
            cross_rack_bytes=sum(crossing.values()),
            activated=request.activate,
            receipts=receipts,
        )


def _is_permanent(failure: Failure) -> bool:
    kind = kind_named(failure.code)
    return kind is not None and issubclass(kind, PermanentError)
