"""A deployment's next step on a tick: judge peers, replan, change the status; and its view.

Functions from one deployment's facts and the fleet to effects. The state machine calls them at
each tick and owns the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paceline.coordinator.state.deployment import OUT_OF_BUDGET, DeploymentState
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.messages import Effect, EmitEvent, SaveDeployment, SavePlan
from paceline.coordinator.state.planning import next_plan, origin_report_bytes
from paceline.coordinator.state.targets import TargetGroups, TargetProgress
from paceline.errors import InvalidPlan
from paceline.plan import Standing, origin_cap_bytes
from paceline.schemas import (
    DeploymentStatus,
    DeploymentView,
    EventName,
    Failure,
    WorkerProgress,
    WorkerStatus,
)

# The status and the need for another plan are pure functions of the reports and of which workers
# are alive: the same facts give the same result before and after a restart of the coordinator.
# Survivors finish first: while one of them still transfers, no lost worker is given up for good.

MAX_ORIGIN_REPLANS = 3  # then it is stalled until an operator or the deadline ends it
MAX_NAMED_WORKERS = 20  # workers named in one message; the rest is counted


def derive_status(
    run: DeploymentState, tally: TargetGroups, now_s: float
) -> tuple[DeploymentStatus, Failure | None]:
    """Return the status that follows from the facts, with its reason where there is one."""
    stall = _stall(run, tally, now_s)
    deadline_s = run.settings.deadline_of(run.deployment.predicted_seconds)
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
        expired = [each for each in tally.dead if _expired(run, each, now_s)]
        if len(expired) + len(tally.failed) > allowed:
            return DeploymentStatus.FAILED, _too_many(run, expired, tally.failed, allowed)
    if run.plan is None:
        return DeploymentStatus.INIT, None
    if run.unheard:
        return run.deployment.status, run.deployment.failure  # as the previous coordinator left it
    if stall is not None:
        return DeploymentStatus.STALLED, stall
    if run.stage is None:
        run.stage = _stage(run, tally)
    return run.stage, None


def ready_to_plan(run: DeploymentState, tally: TargetGroups, now_s: float) -> bool:
    """Return whether to plan: all targets are here, or enough and the rest had its grace."""
    if any(not _expired(run, each, now_s) for each in tally.dead):
        return False
    return len(tally.dead) + len(tally.failed) <= run.allowed_dead()


def request_origin_replan(run: DeploymentState, tally: TargetGroups, now_s: float) -> None:
    """Request a new plan where a worker needs the origin and its budget does not allow it.

    For a moment this is normal: the first worker of the line was lost, and its successor has a
    small budget until the loss is detected. A new plan then distributes the rest of the origin
    budget. A seeder of the current plan gets it sooner: the others have more than they need.
    """
    if run.unheard:
        return
    if _short(run, tally) is None:
        run.out_of_budget_since_s = None
    elif run.out_of_budget_since_s is None:
        run.out_of_budget_since_s = now_s
        if run.origin_bytes - run.replanned_origin_bytes > origin_report_bytes(
            run.deployment.total_bytes
        ):
            run.origin_replans = 0  # the last plan helped
    elif run.origin_replans < MAX_ORIGIN_REPLANS:
        at_once = not run.origin_replans and _seed_is_short(run)
        if now_s - run.out_of_budget_since_s > (
            run.settings.beat_s if at_once else run.settings.lost_s
        ):
            run.origin_replans, run.replanned_origin_bytes = (
                run.origin_replans + 1,
                run.origin_bytes,
            )
            run.replan = True


def _seed_is_short(run: DeploymentState) -> bool:
    """Return whether a seeder that follows its current lanes is out of origin budget."""
    for worker_id in run.short & run.lanes.keys():
        lanes = run.lanes[worker_id]
        if run.parts[worker_id].epoch < lanes.epoch:
            continue
        if lanes.origin_lanes:
            return True
    return False


def request_tail_replan(run: DeploymentState, tally: TargetGroups) -> None:
    """Request one new plan when only the tail is left: behind a complete line, each tail worker
    can read from a worker of its own, where before they read from each other.
    """
    if run.tail_replanned or not tally.done or not 1 < len(tally.pending) <= len(tally.done):
        return
    if all(run.standing_of(each) is Standing.TAIL for each in tally.pending):
        run.tail_replanned = run.replan = True


def _stage(run: DeploymentState, tally: TargetGroups) -> DeploymentStatus:
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
    # No worker has all pieces, but together they may: then too the origin is read.
    return DeploymentStatus.DISTRIBUTING if run.origin_read else DeploymentStatus.DOWNLOADING


def _stall(run: DeploymentState, tally: TargetGroups, now_s: float) -> Failure | None:
    fuse = origin_cap_bytes(run.deployment.total_bytes) + run.memo.extra_bytes
    read = run.origin_bytes
    if run.has_origin_budget and read > fuse:
        message = f"the origin fuse: got {read} bytes read, wanted at most {fuse}"
        return Failure(code=OUT_OF_BUDGET, message=message)
    if (
        run.out_of_budget_since_s is not None
        and now_s - run.out_of_budget_since_s > 2 * run.settings.lost_s
    ):
        return _short(run, tally)
    return None


def _short(run: DeploymentState, tally: TargetGroups) -> Failure | None:
    """Return why a pending target cannot continue without the origin, where one reports it."""
    if not run.short:
        return None
    for worker_id in sorted(run.short.intersection(tally.pending)):
        failure = run.parts[worker_id].failure
        if failure is not None:
            message = f"{worker_id}: {failure.message}"[:2000]
            return Failure(code=OUT_OF_BUDGET, message=message)
    return None


def _expired(run: DeploymentState, worker_id: str, now_s: float) -> bool:
    since_s = run.parts[worker_id].dead_since_s
    return since_s is not None and now_s - since_s >= run.settings.return_grace_s


def _too_many(run: DeploymentState, dead: list[str], failed: list[str], allowed: int) -> Failure:
    reasons = [f"{worker_id} did not come back" for worker_id in dead]
    for worker_id in failed:
        failure = run.memo.failures[worker_id]
        reasons.append(f"{worker_id} {failure.code}: {failure.message[:400]}")
    lost = f"{len(reasons)} of {len(run.parts)} workers lost, at most {allowed} may be: "
    return Failure(code="DeploymentFailed", message=(lost + _named(reasons, "; "))[:2000])


def _named(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - MAX_NAMED_WORKERS} more" if len(texts) > MAX_NAMED_WORKERS else ""
    return separator.join(texts[:MAX_NAMED_WORKERS]) + more


STANDING_EVENTS = {
    Standing.TAIL: EventName.WORKER_SLOW,
    Standing.QUARANTINED: EventName.WORKER_QUARANTINED,
}


def advance(run: DeploymentState, fleet: Membership, at: float, now_s: float) -> list[Effect]:
    """Judge peers, replan where needed, then update the status; return the effects."""
    tally = run.tally(fleet.alive)
    effects: list[Effect] = list(_judge(run, at, now_s))
    request_origin_replan(run, tally, now_s)
    request_tail_replan(run, tally)
    try:
        effects += _replan(run, tally, fleet, at, now_s)
        status, failure = derive_status(run, tally, now_s)
    except InvalidPlan as error:
        status = DeploymentStatus.FAILED
        failure = Failure(code=error.code, message=error.one_line()[:2000])
    if (status, failure) != (run.deployment.status, run.deployment.failure):
        return [*effects, *change_status(run, status, failure, at)]
    if effects or run.memo_changed:
        run.deployment, run.memo_changed = run.shown(), False
        effects.append(SaveDeployment(run.deployment, run.memo))
    return effects


def change_status(
    run: DeploymentState, status: DeploymentStatus, failure: Failure | None, at: float
) -> list[Effect]:
    """Change the deployment's status; return the effects."""
    before = run.deployment.status
    run.set_status(status, failure, at)
    deployment = run.deployment
    data: dict[str, object] = {"from": before.value, "to": status.value}
    if failure is not None:
        data |= {"code": failure.code, "message": failure.message}
    name = EventName.DEPLOYMENT_STATUS_CHANGED
    events = EmitEvent(name, at, deployment.deployment_id, None, data)
    return [SaveDeployment(deployment, run.memo), events]


def _judge(run: DeploymentState, at: float, now_s: float) -> list[EmitEvent]:
    """Apply new verdicts on slow and corrupting workers; return their audit events."""
    verdicts = run.standings.judge(now_s)
    if not verdicts:
        return []
    run.memo_changed = True
    # A worker cleared because its source was slow keeps its place; it returns to the line with
    # the next plan made for another reason.
    run.replan = run.replan or any(each.standing in STANDING_EVENTS for each in verdicts)
    demoted = {name: standing.value for name, standing in run.standings.demoted().items()}
    run.memo = replace(run.memo, demoted=demoted)
    events = []
    for each in verdicts:
        if each.standing not in STANDING_EVENTS:
            continue  # cleared: the named source was slow
        identity, name = run.deployment.deployment_id, STANDING_EVENTS[each.standing]
        events.append(EmitEvent(name, at, identity, each.worker_id, each.data))
    return events


def _replan(
    run: DeploymentState, tally: TargetGroups, fleet: Membership, at: float, now_s: float
) -> list[Effect]:
    first = run.plan is None
    if first and not ready_to_plan(run, tally, now_s):
        return []
    if not tally.pending or not (first or run.replan) or run.unheard:
        return []
    if run.replanned_s is not None:
        stands_s = run.settings.replan_interval_s(len(run.parts))
        if now_s - run.replanned_s < stands_s - 1e-9:
            return []  # losses come in bursts, and recovery does not wait for a plan
    plan, late = next_plan(run, tally, fleet)
    if late:
        run.memo = replace(run.memo, late=run.memo.late | late)
    run.adopt(plan, now_s)
    name = EventName.DEPLOYMENT_PLANNED if first else EventName.DEPLOYMENT_REPLANNED
    changed = sum(each.epoch == plan.epoch for each in plan.workers)
    data: dict[str, object] = {
        "epoch": plan.epoch,
        "workers": len(plan.workers),
        "topology": plan.topology.value,
        "changed": changed,
    }
    return [SavePlan(plan), EmitEvent(name, at, plan.deployment_id, None, data)]


# A deployment as callers see it: its progress, and each worker's. Changes nothing.


def deployment_view(run: DeploymentState, tally: TargetGroups) -> DeploymentView:
    """Return the deployment's progress."""
    deployment = run.shown()
    total = deployment.total_bytes
    held = sum(min(run.parts[each].bytes_held, total) for each in tally.living)
    wanted = total * len(tally.living)
    finished = deployment.status is DeploymentStatus.COMPLETE
    return DeploymentView(
        deployment_id=deployment.deployment_id,
        status=deployment.status,
        progress=1.0 if finished else held / wanted if wanted else 0.0,
        workers_complete=tuple(tally.done),
        workers_failed=(*tally.failed, *tally.dead),
        deployment=deployment,
    )


def target_progress(run: DeploymentState, alive: Callable[[str], bool]) -> Iterator[WorkerProgress]:
    """Yield each target's progress, with its neighbours in the newest plan."""
    upstream: dict[str, str] = {}
    downstream: dict[str, str] = {}
    for lanes in run.plan.workers if run.plan else ():
        source = lanes.lanes[0].source if lanes.lanes else None
        if source is not None:
            upstream[lanes.worker_id] = source.key
            if source.worker_id is not None:
                downstream.setdefault(source.worker_id, lanes.worker_id)
    everything = tuple(range(run.deployment.total_chunks))
    for worker_id, part in run.parts.items():
        status, failure = part.status, part.failure
        if part.receipt is None and failure is None and not alive(worker_id):
            status, failure = WorkerStatus.FAILED, _lost(part)
        # These values were validated on receipt; with 500 chunks each, validating them again costs
        # 1,000 workers 15 ms under the lock.
        yield WorkerProgress.model_construct(
            worker_id=worker_id,
            status=status,
            chunks_received=everything if part.receipt else part.chunks,
            pieces_held=part.pieces_held,
            bytes_held=part.bytes_held,
            upstream_worker=upstream.get(worker_id),
            downstream_worker=downstream.get(worker_id),
            failure=failure,
            receipt=part.receipt,
            activated=part.activated,
            standing=run.standing_of(worker_id).value,
        )


def _lost(part: TargetProgress) -> Failure:
    message = "its agent is silent" if part.incarnation else "its agent has not registered"
    return Failure(code="WorkerLost", message=message)
