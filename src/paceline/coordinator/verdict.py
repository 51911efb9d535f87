"""From a deployment's facts to its status, and to whether it needs another plan.

Pure functions of what was reported and who is alive: the same facts give the same verdict before
and after a restart of the coordinator. Survivors finish first: while one of them still moves,
nobody is given up for good.
"""

from __future__ import annotations

from paceline.coordinator.deployment import OUT_OF_BUDGET, DeploymentRun
from paceline.coordinator.grants import told_at_once
from paceline.coordinator.parts import Tally
from paceline.coordinator.settings import Patience
from paceline.plan import Standing, origin_cap_bytes
from paceline.wire.records import DeploymentStatus, Failure

RESCUES = 3  # then it is stalled until an operator or the deadline ends it
NAMED = 20  # workers named in one message; the rest is counted


def assess(
    run: DeploymentRun, tally: Tally, now_s: float, patience: Patience
) -> tuple[DeploymentStatus, Failure | None]:
    """Return the status that the facts amount to, with its reason where there is one."""
    stall = _stall(run, tally, now_s, patience)
    deadline_s = patience.deadline_of(run.deployment.predicted_seconds)
    if now_s - run.memo.created_s > deadline_s:
        waiting = _named([*tally.pending, *tally.dead, *tally.failed], ", ")
        message = f"not complete within {deadline_s:g} s; waiting for {waiting}"
        late = Failure(code="DeploymentFailed", message=message[:2000])
        return DeploymentStatus.FAILED, stall or late
    if not tally.pending or run.plan is None:
        allowed = run.allowed_dead()
        missing = len(tally.dead) + len(tally.failed)
        if not tally.pending and tally.done and missing <= allowed:
            return DeploymentStatus.COMPLETE, None
        expired = [each for each in tally.dead if _expired(run, each, now_s, patience)]
        if len(expired) + len(tally.failed) > allowed:
            return DeploymentStatus.FAILED, _too_many(run, expired, tally.failed, allowed)
    if run.plan is None:
        return DeploymentStatus.INIT, None
    if run.unheard:
        return run.deployment.status, run.deployment.failure  # as the coordinator before left it
    if stall is not None:
        return DeploymentStatus.STALLED, stall
    if run.stage is None:
        run.stage = _stage(run, tally)
    return run.stage, None


def everybody_here(run: DeploymentRun, tally: Tally, now_s: float, patience: Patience) -> bool:
    """Return whether to plan: all targets are here, or enough, and the rest had their time."""
    if any(not _expired(run, each, now_s, patience) for each in tally.dead):
        return False
    return len(tally.dead) + len(tally.failed) <= run.allowed_dead()


def rescue(run: DeploymentRun, tally: Tally, now_s: float, patience: Patience) -> None:
    """Ask for a new plan where somebody may not read what only the origin has.

    For a moment that is normal: the head died, and its heir has a small share until the loss is
    noticed. Then a new plan shares out what the fuse still allows. A seed of the plan in force is
    not waited for: others have more than they need.
    """
    if run.unheard:
        return
    if _short(run, tally) is None:
        run.short_since_s = None
    elif run.short_since_s is None:
        run.short_since_s = now_s
        if run.origin_bytes - run.rescued_bytes > told_at_once(run.deployment.total_bytes):
            run.rescues = 0  # the last plan helped
    elif run.rescues < RESCUES:
        at_once = not run.rescues and _seed_is_short(run)
        if now_s - run.short_since_s > (patience.beat_s if at_once else patience.lost_s):
            run.rescues, run.rescued_bytes = run.rescues + 1, run.origin_bytes
            run.replan = True


def _seed_is_short(run: DeploymentRun) -> bool:
    """Return whether one that follows the lanes in force begins something, and may not."""
    for worker_id in run.short & run.lanes.keys():
        lanes = run.lanes[worker_id]
        if run.parts[worker_id].epoch < lanes.epoch:
            continue
        if lanes.origin_lanes:
            return True
    return False


def free_tails(run: DeploymentRun, tally: Tally) -> None:
    """Ask once for a new plan when only the tail is left: behind a line that is complete, each may
    hang on a worker of its own, where before they hung on each other.
    """
    if run.tails_freed or not tally.done or not 1 < len(tally.pending) <= len(tally.done):
        return
    if all(run.standing_of(each) is Standing.TAIL for each in tally.pending):
        run.tails_freed = run.replan = True


def _stage(run: DeploymentRun, tally: Tally) -> DeploymentStatus:
    if run.deployment.status is DeploymentStatus.INIT and any(
        not run.parts[each].ready for each in tally.pending
    ):
        return DeploymentStatus.INIT
    total = run.deployment.total_pieces
    held = [run.parts[worker_id] for worker_id in tally.living]
    if held and all(part.pieces_held >= total for part in held):
        return DeploymentStatus.VERIFYING
    if any(part.pieces_held >= total for part in held):
        return DeploymentStatus.DISTRIBUTING
    # Nobody holds everything, but among them they may: then too the origin is read.
    return DeploymentStatus.DISTRIBUTING if run.origin_read else DeploymentStatus.DOWNLOADING


def _stall(run: DeploymentRun, tally: Tally, now_s: float, patience: Patience) -> Failure | None:
    fuse = origin_cap_bytes(run.deployment.total_bytes) + run.memo.extra_bytes
    read = run.origin_bytes
    if run.fused and read > fuse:
        message = f"the origin fuse: got {read} bytes read, wanted at most {fuse}"
        return Failure(code=OUT_OF_BUDGET, message=message)
    if run.short_since_s is not None and now_s - run.short_since_s > 2 * patience.lost_s:
        return _short(run, tally)
    return None


def _short(run: DeploymentRun, tally: Tally) -> Failure | None:
    """Return why a target cannot go on without the origin, where one says so."""
    if not run.short:
        return None
    for worker_id in sorted(run.short.intersection(tally.pending)):
        failure = run.parts[worker_id].failure
        if failure is not None:
            message = f"{worker_id}: {failure.message}"[:2000]
            return Failure(code=OUT_OF_BUDGET, message=message)
    return None


def _expired(run: DeploymentRun, worker_id: str, now_s: float, patience: Patience) -> bool:
    since_s = run.parts[worker_id].dead_since_s
    return since_s is not None and now_s - since_s >= patience.return_grace_s


def _too_many(run: DeploymentRun, dead: list[str], failed: list[str], allowed: int) -> Failure:
    reasons = [f"{worker_id} did not come back" for worker_id in dead]
    for worker_id in failed:
        failure = run.memo.failures[worker_id]
        reasons.append(f"{worker_id} {failure.code}: {failure.message[:400]}")
    lost = f"{len(reasons)} of {len(run.parts)} workers lost, at most {allowed} may be: "
    return Failure(code="DeploymentFailed", message=(lost + _named(reasons, "; "))[:2000])


def _named(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return separator.join(texts[:NAMED]) + more
