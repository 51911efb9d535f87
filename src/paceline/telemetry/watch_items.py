"""Moments of the event stream from snapshots of the state: rates, ETA and differences.

Pure computation without clock, socket or lock; it does not depend on the watchers. A snapshot is
plain data that is copied quickly under the coordinator's lock; the expensive part (runs of chunks,
rates, records) happens here, outside the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paceline.schemas import (
    ChunkRun,
    Deployment,
    DeploymentMoment,
    DeploymentStatus,
    Failure,
    LeaderView,
    Moment,
    PartMoment,
    Worker,
    WorkerMoment,
    WorkerStatus,
    chunk_runs,
)

RATE_OVER_S = 5.0  # averaging window of rates; three heartbeat intervals if those are longer
FAILED = (WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
Activation = Literal["none", "switching", "active"]


class PartSnapshot(NamedTuple):
    """One target's part of a deployment, as the state has it."""

    status: WorkerStatus
    alive: bool
    chunks: tuple[int, ...]
    bytes_held: int
    upstream: str | None
    standing: str
    verified: bool
    activated: bool
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """One deployment with its parts, as the state has it."""

    deployment: Deployment
    parts: Mapping[str, PartSnapshot]
    activation: Activation = "none"


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Snapshot of the state that watchers are shown."""

    at: float  # seconds since the Unix epoch
    now_s: float  # monotonic
    leader: LeaderView
    deployments: Sequence[DeploymentSnapshot]
    workers: Sequence[Worker]
    beat_s: float = 1.0


@dataclass(slots=True)
class _Part:
    seen: PartSnapshot
    shown: PartMoment
    runs: tuple[ChunkRun, ...]
    held: deque[tuple[float, int]] = field(default_factory=deque)


@dataclass(slots=True)
class _Kept:
    shown: DeploymentMoment  # without its parts
    seen: DeploymentSnapshot
    parts: dict[str, _Part] = field(default_factory=dict)


class MomentBuilder:
    """Turns snapshots into Moments: the changes since the previous snapshot, or everything."""

    def __init__(self) -> None:
        self._deployments: dict[str, _Kept] = {}
        self._workers: dict[str, WorkerMoment] = {}
        self._last: StateSnapshot | None = None

    def take(self, shot: StateSnapshot) -> Moment:
        """Return the changes since the previous snapshot."""
        found = [self._deployment(each, shot) for each in shot.deployments]
        present = {each.deployment.deployment_id for each in shot.deployments}
        gone = tuple(each for each in self._deployments if each not in present)
        for deployment_id in gone:
            del self._deployments[deployment_id]
        workers = []
        for worker in shot.workers:
            shown = _worker(worker)
            if self._workers.get(worker.worker_id) != shown:
                self._workers[worker.worker_id] = shown
                workers.append(shown)
        self._last = shot
        return Moment(
            at=shot.at,
            full=False,
            leader=shot.leader,
            deployments=tuple(each for each in found if each is not None),
            workers=tuple(workers),
            gone=gone,
        )

    def whole(self) -> Moment:
        """Return everything as of the last snapshot; requires an earlier ``take``."""
        assert self._last is not None
        return Moment(
            at=self._last.at,
            full=True,
            leader=self._last.leader,
            deployments=tuple(
                kept.shown.model_copy(
                    update={"parts": tuple(each.shown for each in kept.parts.values())}
                )
                for kept in self._deployments.values()
            ),
            workers=tuple(self._workers.values()),
        )

    def _deployment(self, seen: DeploymentSnapshot, shot: StateSnapshot) -> DeploymentMoment | None:
        identity = seen.deployment.deployment_id
        kept = self._deployments.get(identity)
        if kept is not None and kept.seen is seen:
            return None  # finished: the same object as in the previous snapshot
        parts = kept.parts if kept else {}
        changed = []
        for worker_id, part in seen.parts.items():
            moment = _part(parts, worker_id, part, shot, final=seen.deployment.status.is_final)
            if moment is not None:
                changed.append(moment)
        shown = _figures(seen, parts)
        if kept is None:
            self._deployments[identity] = _Kept(shown, seen, parts)
        else:
            same = shown == kept.shown and not changed
            kept.shown, kept.seen = shown, seen
            if same:
                return None
        return shown.model_copy(update={"parts": tuple(changed)})


def of_deployment(moment: Moment, deployment_id: str, targets: frozenset[str]) -> Moment:
    """Return ``moment`` limited to one deployment and its target workers."""
    return moment.model_copy(
        update={
            "deployments": tuple(
                each for each in moment.deployments if each.deployment_id == deployment_id
            ),
            "workers": tuple(each for each in moment.workers if each.worker_id in targets),
            "gone": tuple(each for each in moment.gone if each == deployment_id),
        }
    )


def _part(
    parts: dict[str, _Part],
    worker_id: str,
    seen: PartSnapshot,
    shot: StateSnapshot,
    *,
    final: bool,
) -> PartMoment | None:
    """Store the part; return it if it changed, else None."""
    kept = parts.get(worker_id)
    if kept is not None and final and kept.seen == seen and not kept.shown.rate_bytes_s:
        return None
    runs = kept.runs if kept and kept.seen.chunks == seen.chunks else chunk_runs(seen.chunks)
    held = kept.held if kept else deque[tuple[float, int]]()
    rate = 0.0 if final or seen.verified else _rate(held, seen.bytes_held, shot)
    shown = PartMoment(
        worker_id=worker_id,
        status=seen.status,
        alive=seen.alive,
        chunks=runs,
        bytes_held=seen.bytes_held,
        rate_bytes_s=round(rate),
        upstream_worker=seen.upstream,
        standing=seen.standing,
        verified=seen.verified,
        activated=seen.activated,
        failure=seen.failure,
    )
    if kept is None:
        parts[worker_id] = _Part(seen, shown, runs, held)
        return shown
    changed = shown != kept.shown
    kept.seen, kept.shown, kept.runs = seen, shown, runs
    return shown if changed else None


def _rate(held: deque[tuple[float, int]], now_held: int, shot: StateSnapshot) -> float:
    """Record the bytes held now; return the rate (bytes per second) over the last seconds."""
    if held and now_held < held[-1][1]:
        held.clear()  # it returned with fewer bytes: earlier values are meaningless
    held.append((shot.now_s, now_held))
    over_s = max(RATE_OVER_S, 3 * shot.beat_s)
    while len(held) > 2 and held[1][0] <= shot.now_s - over_s:
        held.popleft()
    took_s = held[-1][0] - held[0][0]
    return (held[-1][1] - held[0][1]) / took_s if took_s > 0 else 0.0


def _figures(seen: DeploymentSnapshot, parts: Mapping[str, _Part]) -> DeploymentMoment:
    deployment = seen.deployment
    total = deployment.total_bytes
    shown = [each.shown for each in parts.values()]
    failed = [each for each in shown if not each.verified and each.status in FAILED]
    living = [each for each in shown if each.alive and (each.verified or each.status not in FAILED)]
    pending = [each for each in living if not each.verified]
    wanted = total * len(living)
    share = sum(min(each.bytes_held, total) for each in living) / wanted if wanted else 0.0
    if deployment.status is DeploymentStatus.COMPLETE:
        share = 1.0
    rates = [each.rate_bytes_s for each in pending]
    return DeploymentMoment(
        deployment_id=deployment.deployment_id,
        model_id=deployment.model_id,
        version=deployment.version,
        status=deployment.status,
        topology=deployment.topology,
        epoch=deployment.epoch,
        progress=share,
        rate_bytes_s=sum(rates),
        eta_s=None if deployment.status.is_final else _eta_s(pending, total),
        workers=len(parts),
        workers_complete=sum(each.verified for each in shown),
        workers_failed=tuple(each.worker_id for each in failed),
        activation=seen.activation,
        total_bytes=total,
        total_chunks=deployment.total_chunks,
        origin_bytes=deployment.origin_bytes,
        predicted_seconds=deployment.predicted_seconds,
        bound_seconds=deployment.bound_seconds,
        started_at=deployment.started_at,
        completed_at=deployment.completed_at,
        seconds=deployment.seconds,
        failure=deployment.failure,
        flow_run_id=deployment.flow_run_id,
        flow_wanted=deployment.flow_wanted,
    )


def _eta_s(pending: list[PartMoment], total: int) -> float | None:
    """Return the seconds until the last one is complete at current rates; None: all rates are 0."""
    ends = [
        (total - each.bytes_held) / each.rate_bytes_s for each in pending if each.rate_bytes_s > 0
    ]
    return round(max(0.0, *ends), 1) if ends else None


def _worker(worker: Worker) -> WorkerMoment:
    return WorkerMoment(
        worker_id=worker.worker_id,
        hostname=worker.hostname,
        rack=worker.labels.rack,
        zone=worker.labels.zone,
        alive=worker.alive,
        bandwidth_in=round(worker.bandwidth_in) if worker.alive else 0,
        bandwidth_out=round(worker.bandwidth_out) if worker.alive else 0,
        available_storage=worker.available_storage,
        findings=worker.findings,
        inventory=worker.inventory,
    )
