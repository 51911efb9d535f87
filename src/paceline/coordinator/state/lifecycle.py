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
    state: DeploymentState, tally: TargetGroups, now_s: float
) -> tuple[DeploymentStatus, Failure | None]:
    """Return the status that follows from the facts, with its reason where there is one."""
    stall = _stall(state, tally, now_s)
    deadline_s = state.settings.deadline_of(state.deployment.predicted_seconds)
    if now_s - state.persisted.created_s > deadline_s:
        waiting = _named([*tally.pending, *tally.dead, *tally.failed], ", ")
        message = f"not complete within {deadline_s:g} s; waiting for {waiting}"
        late = Failure(code="DeploymentFailed", message=message[:2000])
        return DeploymentStatus.FAILED, stall or late
    if not tally.pending or state.plan is None:
        allowed = state.allowed_dead()
        missing = len(tally.dead) + len(tally.failed)
        if not tally.pending and tally.done and missing <= allowed:
            return DeploymentStatus.COMPLETE, None
        expired = [each for each in tally.dead if _expired(state, each, now_s)]
        if len(expired) + len(tally.failed) > allowed:
            return DeploymentStatus.FAILED, _too_many(state, expired, tally.failed, allowed)
    if state.plan is None:
        return DeploymentStatus.INIT, None
    if state.unconfirmed:
        # As the previous coordinator left it.
        return state.deployment.status, state.deployment.failure
    if stall is not None:
        return DeploymentStatus.STALLED, stall
    if state.stage is None:
        state.stage = _stage(state, tally)
    return state.stage, None


def ready_to_plan(state: DeploymentState, tally: TargetGroups, now_s: float) -> bool:
    """Return whether to make the first plan: no dead target is within its time to return, and
    the dead and the failed together are at most ``max_failed``.
    """
    if any(not _expired(state, each, now_s) for each in tally.dead):
        return False
    return len(tally.dead) + len(tally.failed) <= state.allowed_dead()


def request_origin_replan(state: DeploymentState, tally: TargetGroups, now_s: float) -> None:
    """Request a new plan where a worker needs the origin and its budget does not allow it.

    For a moment this is normal: the first worker of the line was lost, and its successor has a
    small budget until the loss is detected. A new plan then distributes the rest of the origin
    budget. A seeder of the current plan gets it sooner: the others have more than they need.
    """
    if state.unconfirmed:
        return
    if _short(state, tally) is None:
        state.out_of_budget_since_s = None
    elif state.out_of_budget_since_s is None:
        state.out_of_budget_since_s = now_s
        if state.origin_bytes - state.replanned_origin_bytes > origin_report_bytes(
            state.deployment.total_bytes
        ):
            state.origin_replans = 0  # the last plan helped
    elif state.origin_replans < MAX_ORIGIN_REPLANS:
        at_once = not state.origin_replans and _seed_is_short(state)
        wait_s = state.settings.beat_s if at_once else state.settings.lost_s
        if now_s - state.out_of_budget_since_s > wait_s:
            state.origin_replans += 1
            state.replanned_origin_bytes = state.origin_bytes
            state.replan = True


def _seed_is_short(state: DeploymentState) -> bool:
    """Return whether a seeder that follows its current lanes is out of origin budget."""
    return any(
        state.parts[each].epoch >= state.lanes[each].epoch and state.lanes[each].origin_lanes
        for each in state.short & state.lanes.keys()
    )


def request_tail_replan(state: DeploymentState, tally: TargetGroups) -> None:
    """Request one new plan when only the tail is left: behind a complete line, each tail worker
    can read from a worker of its own, where before they read from each other.
    """
    if state.tail_replanned or not tally.done or not 1 < len(tally.pending) <= len(tally.done):
        return
    if all(state.standing_of(each) is Standing.TAIL for each in tally.pending):
        state.tail_replanned = state.replan = True


def _stage(state: DeploymentState, tally: TargetGroups) -> DeploymentStatus:
    is_new = state.deployment.status is DeploymentStatus.INIT
    if is_new and not all(state.parts[each].ready for each in tally.pending):
        return DeploymentStatus.INIT
    total = state.deployment.total_pieces
    held = [state.parts[worker_id] for worker_id in tally.living]
    if held and all(part.pieces_held >= total for part in held):
        return DeploymentStatus.VERIFYING
    if any(part.pieces_held >= total for part in held):
        return DeploymentStatus.DISTRIBUTING
    # No worker has all pieces, but together they may: then too the origin is read.
    return DeploymentStatus.DISTRIBUTING if state.origin_read else DeploymentStatus.DOWNLOADING


def _stall(state: DeploymentState, tally: TargetGroups, now_s: float) -> Failure | None:
    cap_bytes = origin_cap_bytes(state.deployment.total_bytes) + state.persisted.extra_bytes
    read = state.origin_bytes
    if state.has_origin_budget and read > cap_bytes:
        message = f"the origin budget is exceeded: {read} bytes read, {cap_bytes} are allowed"
        return Failure(code=OUT_OF_BUDGET, message=message)
    since_s = state.out_of_budget_since_s
    stalls = since_s is not None and now_s - since_s > 2 * state.settings.lost_s
    return _short(state, tally) if stalls else None


def _short(state: DeploymentState, tally: TargetGroups) -> Failure | None:
    """Return why a pending target cannot continue without the origin, where one reports it."""
    if not state.short:
        return None
    for worker_id in sorted(state.short.intersection(tally.pending)):
        failure = state.parts[worker_id].failure
        if failure is not None:
            message = f"{worker_id}: {failure.message}"[:2000]
            return Failure(code=OUT_OF_BUDGET, message=message)
    return None


def _expired(state: DeploymentState, worker_id: str, now_s: float) -> bool:
    since_s = state.parts[worker_id].dead_since_s
    return since_s is not None and now_s - since_s >= state.settings.return_grace_s


def _too_many(state: DeploymentState, dead: list[str], failed: list[str], allowed: int) -> Failure:
    reasons = [f"{worker_id} did not come back" for worker_id in dead]
    for worker_id in failed:
        failure = state.persisted.failures[worker_id]
        reasons.append(f"{worker_id} {failure.code}: {failure.message[:400]}")
    lost = f"{len(reasons)} of {len(state.parts)} workers lost, at most {allowed} may be: "
    return Failure(code="DeploymentFailed", message=(lost + _named(reasons, "; "))[:2000])


def _named(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - MAX_NAMED_WORKERS} more" if len(texts) > MAX_NAMED_WORKERS else ""
    return separator.join(texts[:MAX_NAMED_WORKERS]) + more


STANDING_EVENTS = {
    Standing.TAIL: EventName.WORKER_SLOW,
    Standing.QUARANTINED: EventName.WORKER_QUARANTINED,
}


def advance(state: DeploymentState, fleet: Membership, at: float, now_s: float) -> list[Effect]:
    """Judge peers, replan where needed, then update the status; return the effects."""
    tally = state.tally(fleet.alive)
    effects: list[Effect] = list(_judge(state, at, now_s))
    request_origin_replan(state, tally, now_s)
    request_tail_replan(state, tally)
    try:
        effects += _replan(state, tally, fleet, at, now_s)
        status, failure = derive_status(state, tally, now_s)
    except InvalidPlan as error:
        status = DeploymentStatus.FAILED
        failure = Failure(code=error.code, message=error.one_line()[:2000])
    if (status, failure) != (state.deployment.status, state.deployment.failure):
        return [*effects, *change_status(state, status, failure, at)]
    if effects or state.persisted_changed:
        state.deployment, state.persisted_changed = state.shown(), False
        effects.append(SaveDeployment(state.deployment, state.persisted))
    return effects


def change_status(
    state: DeploymentState, status: DeploymentStatus, failure: Failure | None, at: float
) -> list[Effect]:
    before = state.deployment.status
    state.set_status(status, failure, at)
    deployment = state.deployment
    data: dict[str, object] = {"from": before.value, "to": status.value}
    if failure is not None:
        data |= {"code": failure.code, "message": failure.message}
    name = EventName.DEPLOYMENT_STATUS_CHANGED
    events = EmitEvent(name, at, deployment.deployment_id, None, data)
    return [SaveDeployment(deployment, state.persisted), events]


def _judge(state: DeploymentState, at: float, now_s: float) -> list[EmitEvent]:
    """Apply new verdicts on slow and corrupting workers; return their audit events."""
    verdicts = state.standings.judge(now_s)
    if not verdicts:
        return []
    state.persisted_changed = True
    # A worker cleared because its source was slow keeps its place; it returns to the line with
    # the next plan made for another reason.
    state.replan = state.replan or any(each.standing in STANDING_EVENTS for each in verdicts)
    demoted = {name: standing.value for name, standing in state.standings.demoted().items()}
    state.persisted = replace(state.persisted, demoted=demoted)
    events = []
    for each in verdicts:
        if each.standing not in STANDING_EVENTS:
            continue  # cleared: the named source was slow
        identity, name = state.deployment.deployment_id, STANDING_EVENTS[each.standing]
        events.append(EmitEvent(name, at, identity, each.worker_id, each.data))
    return events


def _replan(
    state: DeploymentState, tally: TargetGroups, fleet: Membership, at: float, now_s: float
) -> list[Effect]:
    first = state.plan is None
    if first and not ready_to_plan(state, tally, now_s):
        return []
    if not tally.pending or not (first or state.replan) or state.unconfirmed:
        return []
    if state.replanned_s is not None:
        stands_s = state.settings.replan_interval_s(len(state.parts))
        if now_s - state.replanned_s < stands_s - 1e-9:
            return []  # losses come in bursts, and recovery does not wait for a plan
    plan, late = next_plan(state, tally, fleet)
    if late:
        state.persisted = replace(state.persisted, late=state.persisted.late | late)
    state.adopt(plan, now_s)
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


def deployment_view(state: DeploymentState, tally: TargetGroups) -> DeploymentView:
    deployment = state.shown()
    total = deployment.total_bytes
    held = sum(min(state.parts[each].bytes_held, total) for each in tally.living)
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


def target_progress(
    state: DeploymentState, alive: Callable[[str], bool]
) -> Iterator[WorkerProgress]:
    """Yield each target's progress, with its neighbours in the newest plan."""
    upstream: dict[str, str] = {}
    downstream: dict[str, str] = {}
    for lanes in state.plan.workers if state.plan else ():
        source = lanes.lanes[0].source if lanes.lanes else None
        if source is not None:
            upstream[lanes.worker_id] = source.key
            if source.worker_id is not None:
                downstream.setdefault(source.worker_id, lanes.worker_id)
    everything = tuple(range(state.deployment.total_chunks))
    for worker_id, part in state.parts.items():
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
            standing=state.standing_of(worker_id).value,
        )


def _lost(part: TargetProgress) -> Failure:
    message = "its agent is silent" if part.incarnation else "its agent has not registered"
    return Failure(code="WorkerLost", message=message)
