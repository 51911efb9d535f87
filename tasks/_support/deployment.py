"""The deployment that a flow drives: taken up or begun, watched to its end, ended with the flow.

One deployment has one record at the coordinator, whatever asked for it. A flow that the coordinator
started receives its id; a flow that a person started makes its own and names itself in it. Either
way a flow that crashed and runs again finds the record under way and goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import time

from prefect.runtime import flow_run

from paceline.coordinator import CoordinatorSettings
from paceline.errors import (
    Cancelled,
    Conflict,
    DeploymentFailed,
    OriginBudgetExceeded,
    PacelineError,
    SourceChanged,
    TemporaryError,
)
from paceline.manifest import Manifest
from paceline.schemas import (
    CreateDeployment,
    Deployment,
    DeploymentStatus,
    DeploymentView,
    Event,
    EventName,
    digest_of,
)
from paceline.tasks._support import artifacts
from paceline.tasks._support.cancelling import cancelled_flow_run
from paceline.tasks._support.run import RESTART_WAIT_S, Run
from paceline.text import shortened
from paceline.units import described, size

logger = logging.getLogger(__name__)

POLL_S = 0.2
PLANNED_NAMED = 32  # workers that the line of a plan names
OUTAGE_S = 60.0  # how long the coordinator may be away: the data flows on without it

# What of a deployment's events a person wants to read in the end.
NOTEWORTHY = {
    EventName.WORKER_LOST: "lost",
    EventName.WORKER_RETURNED: "returned",
    EventName.PIECE_CORRUPT: "received a corrupt piece",
    EventName.SOURCE_LOST: "closed the gap: its source was lost",
    EventName.WORKER_SLOW: "is slow, and fed at the tail",
    EventName.WORKER_QUARANTINED: "sends corrupt pieces, and is asked no more",
    EventName.DEPLOYMENT_REPLANNED: "re-planned",
}


def take_up(run: Run, deployment_id: str, manifest: Manifest) -> Deployment:
    """Return the record that this flow is to drive.

    Raises SourceChanged where the source holds something else by now, and what it ended with where
    it has ended without a model on its targets.
    """
    view = run.retry(lambda: run.coordinator.deployment(deployment_id), RESTART_WAIT_S)
    if view.deployment.manifest_digest != manifest.digest:
        raise SourceChanged(
            "the source holds another manifest than when the deployment was asked for",
            got=manifest.digest,
            wanted=view.deployment.manifest_digest,
            where=view.deployment.source_url,
            do="Cancel the deployment and ask for another.",
        )
    if view.status.is_final and view.status != DeploymentStatus.COMPLETE:
        raise why_not(view)
    return view.deployment


def begin(run: Run, call: CreateDeployment, manifest_digest: str, stage: str) -> str:
    """Return the deployment to watch: the one that is under way for the same, else a new one.

    One that has ended is never taken up again: it failed, was cancelled, or its nodes have lost
    since what it brought. The same attempt asked for twice is one deployment.
    """

    def is_same(each: Deployment) -> bool:
        return (
            each.manifest_digest == manifest_digest
            and each.source_url == call.source_url
            and set(each.target_workers) == set(call.target_workers)
        )

    earlier = [each for each in run.retry(run.coordinator.deployments) if is_same(each)]
    under_way = [each for each in earlier if not each.status.is_final]
    if under_way:
        logger.info("deployment %s is under way, following it", under_way[-1].deployment_id)
        return under_way[-1].deployment_id
    # Not the flow run's id: who runs again is another flow run, and asks for the same.
    asked = call.model_dump(mode="json", exclude={"flow_run_id"})
    attempt = digest_of({"call": asked, "after": len(earlier)})
    key = f"{run.run_id}-{stage}-{attempt[:16]}"
    return run.retry(lambda: run.coordinator.create(call, idempotency_key=key)).deployment_id


def watch(
    run: Run, deployment_id: str, stage: str, page: artifacts.Progress, seen: int
) -> DeploymentView:
    """Return the deployment once it is complete, showing how far it is.

    Raises DeploymentFailed, OriginBudgetExceeded, Cancelled; a coordinator that is away for a
    moment is waited for. A flow that is cancelled in Prefect ends the deployment with it.
    """
    run.driving.append(deployment_id)
    try:
        view = _watch(run, deployment_id, stage, page, seen)
    except Exception:
        run.driving.remove(deployment_id)
        _cancel_with_us(run, deployment_id)
        raise
    except BaseException:  # a signal: the process that started this one decides
        _cancel_with_us(run, deployment_id)
        raise
    run.driving.remove(deployment_id)
    return view


def last_event(run: Run) -> int:
    """Return the number of the newest event: where to begin to read."""
    return run.coordinator.events(2**62, 0).last


def why_not(view: DeploymentView) -> PacelineError:
    """Return what a deployment that is not complete ended with."""
    failure = view.deployment.failure
    kinds: dict[DeploymentStatus, type[PacelineError]] = {
        DeploymentStatus.CANCELLED: Cancelled,
        DeploymentStatus.STALLED: OriginBudgetExceeded,
    }
    return kinds.get(view.status, DeploymentFailed)(
        f"the deployment is {view.status}",
        got=failure.message if failure else f"failed workers: {', '.join(view.workers_failed)}",
        wanted="every target complete",
        where=f"deployment {view.deployment_id}",
        do="Mend what is named, then run the same command again: it resumes from what is on disk.",
    )


def _watch(
    run: Run, deployment_id: str, stage: str, page: artifacts.Progress, seen: int
) -> DeploymentView:
    began = time.monotonic()
    outage_since: float | None = None
    planned = False
    while True:
        try:
            view = run.coordinator.deployment(deployment_id)
            if not planned and view.status is not DeploymentStatus.INIT:
                _show_plan(run, view, stage)
                planned = True
            seen = _read_events(run, deployment_id, seen)
            outage_since = None
        except PacelineError as error:
            if error.exit_code != 75:
                raise
            outage_since = outage_since or time.monotonic()
            if time.monotonic() - outage_since > OUTAGE_S:
                raise
            time.sleep(1.0)
            continue
        done = len(view.workers_complete)
        targets = len(view.deployment.target_workers)
        run.report(stage, view.progress, f"{view.status}: {done} of {targets} workers complete")
        page.show(view.progress)
        if view.status == DeploymentStatus.COMPLETE:
            page.show(1.0)
            return view
        if view.status.is_final or view.status == DeploymentStatus.STALLED:
            raise why_not(view)
        # As the coordinator counts: a large model may take longer than the profile's deadline.
        patience = CoordinatorSettings.of(run.runtime.profile)
        deadline_s = patience.deadline_of(view.deployment.predicted_seconds)
        if time.monotonic() - began > deadline_s:
            with contextlib.suppress(TemporaryError):  # decided, if not yet confirmed by all
                run.coordinator.cancel(deployment_id)
            raise DeploymentFailed(
                "the relay missed its deadline",
                got=f"{view.progress:.0%} after {deadline_s:.0f} s",
                wanted=f"complete (bound {view.deployment.bound_seconds:.1f} s)",
                where=f"deployment {deployment_id}",
                do="Read the agents' logs; raise relay.deadline_s if the link is that slow.",
            )
        time.sleep(POLL_S)


def _show_plan(run: Run, view: DeploymentView, stage: str) -> None:
    plan = run.coordinator.plan(view.deployment_id)
    line = shortened([each.worker_id for each in plan.workers], PLANNED_NAMED)
    seconds = f"predicted {plan.predicted_seconds:.2f} s, bound {plan.bound_seconds:.2f} s"
    run.report(stage, view.progress, f"{plan.topology} {line}: {seconds}")
    artifacts.markdown(
        f"plan {view.deployment.model_id}",
        f"**{plan.topology}** over {len(plan.workers)} workers: {line}\n\n{seconds}, "
        f"{size(plan.cross_rack_bytes)} cross racks, "
        f"{size(plan.origin_bytes)} from the source",
        "Who feeds whom",
    )


def _cancel_with_us(run: Run, deployment_id: str) -> None:
    """Cancel the deployment where our flow run was cancelled in Prefect; a mere interruption
    leaves it for the next run. Never raises: something else ended the relay."""
    try:
        ended = cancelled_flow_run()
        if ended is None:
            return
        record = run.coordinator.deployment(deployment_id).deployment
        ours = {flow_run.get_id(), ended}
        if record.run_id == run.run_id or record.flow_run_id in ours:
            with contextlib.suppress(Conflict):  # it was complete before
                run.coordinator.cancel(deployment_id)
    except Exception as error:  # noqa: BLE001 - what ended the relay is what must be reported
        logger.warning("deployment %s could not be cancelled: %s", deployment_id, error)


def _read_events(run: Run, deployment_id: str, seen: int) -> int:
    news = run.coordinator.events(seen, 0)
    for event in news.events:
        if event.name in NOTEWORTHY and event.deployment_id in (None, deployment_id):
            run.warn(_sentence(event))
    return news.last


def _sentence(event: Event) -> str:
    detail = described(event.data)
    who = event.worker_id or f"deployment {event.deployment_id}"
    return f"{who} {NOTEWORTHY[event.name]}" + (f" ({detail})" if detail else "")
