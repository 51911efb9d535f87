"""What a deployment does next as time passes: judges, plans again, takes a new status, tells.

Functions from one deployment's facts and the fleet to effects, called at each tick. Who may change
the facts, and when, is the state machine's; what the facts amount to is ``verdict``'s.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.membership import Membership
from paceline.coordinator.messages import Effect, KeepDeployment, KeepPlan, Observed
from paceline.coordinator.parts import Tally
from paceline.coordinator.planning import next_plan
from paceline.coordinator.settings import Patience
from paceline.coordinator.verdict import assess, everybody_here, free_tails, rescue
from paceline.errors import InvalidPlan
from paceline.plan import Standing
from paceline.wire.events import EventName
from paceline.wire.records import DeploymentStatus, Failure

TOLD = {
    Standing.TAIL: EventName.WORKER_SLOW,
    Standing.QUARANTINED: EventName.WORKER_QUARANTINED,
}


def advance(
    run: DeploymentRun, fleet: Membership, patience: Patience, at: float, now_s: float
) -> list[Effect]:
    """Judge and replan where that is called for, then let the facts decide the status."""
    tally = run.tally(fleet.alive)
    effects: list[Effect] = list(_judge(run, fleet, at, now_s))
    rescue(run, tally, now_s, patience)
    free_tails(run, tally)
    try:
        effects += _replan(run, tally, fleet, patience, at, now_s)
        status, failure = assess(run, tally, now_s, patience)
    except InvalidPlan as error:
        status = DeploymentStatus.FAILED
        failure = Failure(code=error.code, message=error.one_line()[:2000])
    if (status, failure) != (run.deployment.status, run.deployment.failure):
        return [*effects, *turn(run, status, failure, at)]
    if effects or run.unkept:
        run.deployment, run.unkept = run.shown(), False
        effects.append(KeepDeployment(run.deployment, run.memo))
    return effects


def turn(
    run: DeploymentRun, status: DeploymentStatus, failure: Failure | None, at: float
) -> list[Effect]:
    """Change the deployment's status, and tell."""
    before = run.deployment.status
    run.turn(status, failure, at)
    deployment = run.deployment
    data: dict[str, object] = {"from": before.value, "to": status.value}
    if failure is not None:
        data |= {"code": failure.code, "message": failure.message}
    name = EventName.DEPLOYMENT_STATUS_CHANGED
    told = Observed(name, at, deployment.deployment_id, None, data)
    return [KeepDeployment(deployment, run.memo), told]


def _judge(run: DeploymentRun, fleet: Membership, at: float, now_s: float) -> list[Observed]:
    """Take new verdicts on who is slow or corrupts, and tell of them."""
    verdicts = run.standings.judge(now_s)
    if not verdicts:
        return []
    run.unkept = True
    # Who is only forgiven (the source was slow, not its reader) is fed where it is; it takes its
    # place in the line when something else asks for a plan.
    run.replan = run.replan or any(each.standing in TOLD for each in verdicts)
    demoted = {name: standing.value for name, standing in run.standings.demoted().items()}
    run.memo = replace(run.memo, demoted=demoted)
    told = []
    for each in verdicts:
        if each.standing not in TOLD:
            continue  # forgiven: the source that is named instead was it
        times = fleet.offend(each.worker_id)
        identity = run.deployment.deployment_id
        data = {**each.data, "deployments": times}
        told.append(Observed(TOLD[each.standing], at, identity, each.worker_id, data))
    return told


def _replan(
    run: DeploymentRun,
    tally: Tally,
    fleet: Membership,
    patience: Patience,
    at: float,
    now_s: float,
) -> list[Effect]:
    first = run.plan is None
    if first and not everybody_here(run, tally, now_s, patience):
        return []
    if not tally.pending or not (first or run.replan) or run.unheard:
        return []
    if run.replanned_s is not None:
        stands_s = patience.replan_interval_s(len(run.parts))
        if now_s - run.replanned_s < stands_s - 1e-9:
            return []  # deaths come in bursts, and recovery does not wait for a plan
    plan, late = next_plan(run, tally, fleet, patience)
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
    return [KeepPlan(plan), Observed(name, at, plan.deployment_id, None, data)]
