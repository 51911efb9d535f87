"""Each target's reported progress in a deployment, targets by state, and heartbeat validation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidInput
from paceline.schemas import (
    MIN_BEAT_INTERVAL_S,
    Deployment,
    DeploymentBeat,
    Failure,
    Receipt,
    WorkerLanes,
    WorkerStatus,
)


@dataclass(slots=True)
class TargetProgress:
    """One target's progress, as its newest incarnation reported it."""

    incarnation: int = 0
    epoch: int = 0  # of the lanes that it reports to follow
    ready: bool = False  # it acknowledged the manifest: it fetched or follows lanes
    status: WorkerStatus = WorkerStatus.IDLE
    pieces_held: int = 0
    bytes_held: int = 0
    held_before: int = 0  # pieces that an earlier incarnation reported: they are on its disk
    chunks: tuple[int, ...] = ()
    failure: Failure | None = None
    receipt: Receipt | None = None
    activated: bool = False
    reported_complete: bool = False  # its newest report: the version is on its disk
    lanes_s: float | None = None  # when this incarnation first fetched lanes
    dead_since_s: float | None = None
    reported_sources: frozenset[str] = frozenset()  # lost or corrupt ones that are in the audit log
    command_sent: bool = False  # the current cancel or activate was part of an answer already
    stopped: bool = False  # it confirmed a cancel
    process: str = ""  # the process that last reported origin reads
    processes: list[str] = field(default_factory=list)  # that read from the origin, oldest first
    spent_bytes: int = 0  # read from the origin, by all its processes
    spent_before: int | None = None  # of these, before it got its present budget, where known

    def reset_for(self, incarnation: int) -> None:
        """Reset for a new incarnation; its receipt stays valid until contradicted."""
        self.incarnation, self.epoch, self.status = incarnation, 0, WorkerStatus.IDLE
        self.ready, self.process = False, ""
        self.held_before = max(self.held_before, self.pieces_held)
        self.pieces_held = self.bytes_held = 0
        self.chunks, self.failure, self.lanes_s = (), None, None
        self.reported_complete, self.reported_sources, self.command_sent = False, frozenset(), False

    @property
    def pieces_known(self) -> int:
        """Return the most pieces that it ever reported to have on its disk."""
        return max(self.pieces_held, self.held_before)


def remaining_budget_bytes(lanes: WorkerLanes | None, part: TargetProgress) -> int:
    """Return the most bytes that a worker may still read from the origin under ``lanes``.

    A worker planned by an earlier coordinator may have its whole budget left: when the budget was
    granted is unknown.
    """
    if lanes is None or part.receipt is not None:
        return 0  # a complete worker reads nothing
    spent = 0 if part.spent_before is None else part.spent_bytes - part.spent_before
    return max(0, lanes.origin_budget_bytes - spent)


def unreported_bytes(lanes: WorkerLanes | None, part: TargetProgress) -> int:
    """Return the most bytes that a worker has read from the origin since its last report.

    A seeder reports every ``origin_tell_bytes`` at once, except within ``MIN_BEAT_INTERVAL_S`` of
    its last report. During longer silence it may read more, which is not counted. The budget of a
    worker that is no seeder is ignored: it is small, and for the last resort.
    """
    if lanes is None or not lanes.origin_lanes:
        return 0
    rate = sum(lane.expected_bytes_s for lane in lanes.origin_lanes)
    unreported = lanes.origin_tell_bytes + round(rate * MIN_BEAT_INTERVAL_S)
    return min(remaining_budget_bytes(lanes, part), unreported)


@dataclass(slots=True)
class TargetGroups:
    """The targets of one deployment, grouped by state."""

    living: list[str] = field(default_factory=list)  # alive and able to finish
    pending: list[str] = field(default_factory=list)  # of these, without a receipt
    done: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)  # lost and without a receipt
    failed: list[str] = field(default_factory=list)  # reported a failure


def group_targets(
    parts: Mapping[str, TargetProgress], failed: Collection[str], alive: Callable[[str], bool]
) -> TargetGroups:
    tally = TargetGroups()
    for worker_id, part in parts.items():
        if part.receipt is not None:
            tally.done.append(worker_id)
            if alive(worker_id):
                tally.living.append(worker_id)
        elif worker_id in failed:
            tally.failed.append(worker_id)
        elif alive(worker_id):
            tally.living.append(worker_id)
            tally.pending.append(worker_id)
        else:
            tally.dead.append(worker_id)
    return tally


# Validation of heartbeats, before any value is used: otherwise one worker's impossible number would
# reach plans, figures and metrics. Pure and cheap, because it runs for each heartbeat: the list of
# chunks is checked only where it changed. Edges are not validated, because a reader chooses the
# name that it sends to its source, and a wrong name must not cost the source its heartbeat; unknown
# ones are skipped (``is_participant``).


def validate_heartbeat(
    deployment: Deployment, targets: Container[str], part: TargetProgress, beat: DeploymentBeat
) -> None:
    """Raise InvalidInput where ``beat`` exceeds the totals or names a worker that is no target."""
    if beat.pieces_held > deployment.total_pieces:
        raise _impossible(deployment, "pieces", beat.pieces_held, deployment.total_pieces)
    if beat.bytes_held > deployment.total_bytes:
        raise _impossible(deployment, "bytes", beat.bytes_held, deployment.total_bytes)
    chunks = beat.chunks_received
    if chunks and chunks != part.chunks:
        last = deployment.total_chunks - 1
        if min(chunks) < 0 or max(chunks) > last or len(set(chunks)) < len(chunks):
            raise InvalidInput(
                "there are no such chunks",
                got=f"{len(chunks)} from {min(chunks)} to {max(chunks)}",
                wanted=f"each once, from 0 to {last}",
                where=deployment.deployment_id,
            )
    for key in (*beat.lost_sources, *beat.corrupt_sources):
        if not is_participant(deployment, targets, key):
            raise InvalidInput(
                "it has no part in this deployment",
                got=key[:200],
                wanted="a target worker, or the origin",
                where=deployment.deployment_id,
            )


def is_participant(deployment: Deployment, targets: Container[str], key: str) -> bool:
    """Return whether ``key`` is a target of the deployment or its origin."""
    return key in targets or key == f"origin:{deployment.source_url}"


def _impossible(deployment: Deployment, what: str, got: int, total: int) -> InvalidInput:
    return InvalidInput(
        f"the worker reports more {what} than the deployment has",
        got=got,
        wanted=f"at most {total}",
        where=deployment.deployment_id,
    )
