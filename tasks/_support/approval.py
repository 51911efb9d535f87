"""What a promotion needs a person for: a review of bad data that were passed over, and an approval.

A training that passed bad data over needs a job of it that was accepted (`paceline jobs review`).
An approval is requested, awaited by a suspended flow, and looked up.

A promotion whose policy demands approval ends as AwaitingApproval; a flow run of approve-promotion
then waits, suspended, and holds no process. The decision is what the coordinator recorded for the
owner of a token (``POST /approvals/RUN``); the answer in Prefect's form only ends the wait.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from pydantic import Field

from paceline.api import PrefectStarter
from paceline.errors import AwaitingApproval, GateRefused, InvalidInput
from paceline.registry import TAG_APPROVAL
from paceline.schemas import (
    APPROVAL,
    APPROVAL_REQUEST,
    Approval,
    ApprovalRequest,
    Evidence,
    JobState,
    StageRecord,
    TrainingJob,
    TrainResult,
    digest_of,
)
from paceline.tasks._support import sealed_records
from paceline.tasks._support.run import Run
from paceline.tasks.prepare import permitted_snapshot

FLOW = "approve-promotion"
MAX_ANSWERS = 1000  # in Prefect's form, without a decision by a token
CONTINUED = ("promote-model", "lifecycle")


class Decision(RunInput):
    """The form on Prefect's page. Who approves logs in with a token, in the fleet page."""

    decision: Literal["approve", "reject"]
    reason: str = Field(default="", max_length=500)


def require_reviewed(run: Run, digest: str, training: TrainResult) -> tuple[str, ...]:
    """Return who accepted the bad data that ``training``, recorded under ``digest``, and those that
    it went on from passed over; the newest decision on a training counts.

    Raises GateRefused for a rejected one, and for one that passed bad data over without a review.
    """
    accepted = []
    while True:
        if (line := _accepted(run, digest, training)) is not None:
            accepted.append(line)
        if training.continues is None:
            return tuple(accepted)
        digest = sealed_records.resolve(run, training.continues, "training")
        training = sealed_records.load(run, digest, "training", TrainResult)


def _accepted(run: Run, digest: str, training: TrainResult) -> str | None:
    jobs = _jobs_of(run, digest)
    where = f"training {training.job_id}"
    decided = [(each.decision, each) for each in jobs if each.decision is not None]
    if decided:
        decision, job = max(decided, key=lambda each: each[0].at)
        if decision.state is not JobState.SUCCEEDED:
            raise GateRefused(
                "the training was rejected: it passed bad data over",
                got=f"{training.passed_over}; {decision.reason}",
                where=f"{where}, job {job.job_id}",
                do="Train on data without them.",
            )
        return f"{job.job_id}: {training.passed_over}, {decision.reason}"
    waiting = [each.job_id for each in jobs if each.state is JobState.NEEDS_REVIEW]
    if not training.passed_over and not waiting:
        return None
    ends = [each.job_id for each in jobs if not each.state.is_final]  # its flow still runs
    review = [f"paceline jobs review {each}" for each in (*waiting, *ends)[:1]]
    raise GateRefused(
        "the training passed bad data over, and no review accepted that",
        got=training.passed_over or "a job that needs review",
        wanted="an accepted review of its job",
        where=where,
        do=f"With a token of scope approve: {review[0]}"
        if review
        else "Submit it as a job (`paceline jobs submit`): it finds this training, for a review.",
    )


def require_still_permitted(run: Run, digest: str, training: TrainResult) -> None:
    """Raise AccessDenied where the table of purposes does not allow (any more) what ``training``
    used its data for; without a table the training itself has checked it."""
    if run.retry(run.coordinator.data_purposes):
        snapshot_for(run, digest, training, training.snapshot_url or "")


def snapshot_for(run: Run, digest: str, training: TrainResult, url: str) -> dict[str, Any]:
    """Return ``snapshot_reference`` of the snapshot at ``url`` where those who trained, with the
    purpose that they trained for, may use it; raises AccessDenied or InvalidSnapshot."""
    users = set()
    if run.retry(run.coordinator.data_purposes):
        users = {(each.spec.team, each.spec.project) for each in _jobs_of(run, digest)}
    return permitted_snapshot(run, url, training.purpose or "", users or {("default", "")})


def _jobs_of(run: Run, digest: str) -> list[TrainingJob]:
    """Return the newest jobs of the training that is recorded under ``digest``."""
    found = run.retry(lambda: run.coordinator.jobs(training=digest))
    return [run.retry(partial(run.coordinator.job, each.job_id)).job for each in found.jobs]


def require_approved(run: Run, evidence: Evidence, version: str) -> Evidence:
    """Return ``evidence`` with the approval that its policy demands.

    What is champion already needs no second one: its own evidence is returned. Raises
    AwaitingApproval where no decision is recorded, and starts the flow run that waits; GateRefused
    for a rejection or past the deadline.
    """
    policy = run.runtime.profile.gate.policy(evidence.model_id)
    if policy.approval == "none":
        return evidence
    champion = run.registry.champion(evidence.model_id)
    if champion is not None and champion.manifest_digest == evidence.manifest_digest:
        assert champion.evidence is not None  # champion() reads it
        return champion.evidence
    if evidence.approver is not None:
        raise InvalidInput(
            "this model's approver is the owner of a token, not a name",
            got=f"--approver {evidence.approver}",
            wanted=f"paceline approve {run.run_id}",
            do="Leave --approver out.",
        )
    request = _request(run, evidence, version, policy.approval_hours * 3600)
    approval = decided(run, request)
    if approval is None:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(request.expires_at))
        run.registry.log_tags(run.mlflow_run, {TAG_APPROVAL: f"waits until {until}"})
        raise AwaitingApproval(
            "the promotion waits for an approval by a token of scope approve",
            got=f"evidence {request.evidence_digest}",
            wanted=f"approval until {until}",
            where=_page_of(run),
            do=f"paceline approve {run.run_id}",
        )
    return evidence.model_copy(update={"approver": approval.approver, "approval": approval})


def decided(run: Run, request: ApprovalRequest) -> Approval | None:
    """Return the recorded approval of ``request``, None where there was no decision in time.

    Raises GateRefused for a rejection, and where the deadline is over without a decision.
    """
    record = run.retry(lambda: run.coordinator.ledger_get(APPROVAL, request.key))
    do = f"Submit it again as a new run; the decision on {run.run_id} stays."
    if record is None:
        if time.time() > request.expires_at:
            raise GateRefused(
                "nobody approved the promotion in time",
                where=f"run {run.run_id}",
                do="Submit it again, as a new run.",
            )
        return None
    approval = Approval.model_validate(record.output)
    word = "approved" if approval.approved else "rejected"
    why = f": {approval.reason}" if approval.reason else ""
    run.registry.log_tags(run.mlflow_run, {TAG_APPROVAL: f"{word} by {approval.approver}{why}"})
    if not approval.approved:
        raise GateRefused(
            f"{approval.approver} rejected the promotion",
            got=approval.reason or "no reason",
            where=f"run {run.run_id}",
            do=do,
        )
    return approval


def _page_of(run: Run) -> str:
    """Return the address where a token decides; Prefect's form cannot."""
    return f"{run.runtime.endpoints.coordinator_url}/fleet#approval={run.run_id}"


def wait(run: Run, request: dict[str, Any]) -> None:
    """Suspend this flow run until ``request`` is decided by a token, or rejected in the form.

    Each time that it is resumed it starts again from the beginning, in a process of its own.
    """
    asked = ApprovalRequest.model_validate(request)
    form = Decision.with_initial_data(
        description=f"**{asked.model_id} {asked.version}**, run `{asked.run_id}`: evidence "
        f"`{asked.evidence_digest}`, policy `{asked.policy_digest}`. To approve, open "
        f"{_page_of(run)} or run `paceline approve {asked.run_id}`, with a token of scope approve: "
        "approved here alone, it goes on waiting. Rejected here, it ends.",
        decision="reject",
    )
    for answer in range(MAX_ANSWERS):
        if decided(run, asked) is not None:
            return
        seconds = max(1, int(asked.expires_at - time.time()))
        given = suspend_flow_run(wait_for_input=form, timeout=seconds, key=f"approval-{answer}")
        if decided(run, asked) is None and given.decision == "reject":
            raise GateRefused(
                "the promotion was rejected on Prefect's page",
                got=given.reason or "no reason",
                where=f"run {run.run_id}",
            )
    raise GateRefused("answered too often without a decision", got=MAX_ANSWERS)


def _request(run: Run, evidence: Evidence, version: str, seconds: float) -> ApprovalRequest:
    """Return the recorded request for exactly this evidence; where there is none, start the flow
    run that waits, and record it."""
    claim = sealed_records.save(
        run, evidence, "evidence"
    )  # the coordinator shows it to the approver
    key = digest_of(run.run_id)
    record = run.retry(lambda: run.coordinator.ledger_get(APPROVAL_REQUEST, key))
    known = None if record is None else ApprovalRequest.model_validate(record.output)
    if known is not None and known.evidence_digest == claim:
        if time.time() > known.expires_at or run.coordinator.ledger_get(APPROVAL, known.key):
            return known
        expires_at = known.expires_at
    else:
        expires_at = time.time() + seconds
    request = ApprovalRequest(
        run_id=run.run_id,
        model_id=evidence.model_id,
        version=version,
        evidence_digest=claim,
        report_digest=str(evidence.report_digest),
        policy_digest=str(evidence.gate.policy_digest),
        expires_at=expires_at,
        flow_run_id="",
        page="",
    )
    flow, parameters = _outermost()
    given = {"flow": flow, "parameters": parameters, "request": request.model_dump(mode="json")}
    starter = PrefectStarter.of(run.runtime)
    # Prefect refuses while its database is busy; the same start twice is one flow run.
    waiting = run.retry(lambda: starter.run(FLOW, run.run_id, given))
    request = request.model_copy(update={"flow_run_id": waiting.flow_run_id, "page": waiting.page})
    output = request.model_dump(mode="json")
    kept = StageRecord.of(APPROVAL_REQUEST, key, output, run.run_id)
    run.retry(lambda: run.coordinator.ledger_put(kept))
    return request


def _outermost() -> tuple[str, dict[str, Any]]:
    """Return the flow that goes on after the approval, and its parameters: the outermost one."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(UUID(str(flow_run.get_root_flow_run_id())))
        name, given = client.read_flow(found.flow_id).name, dict(found.parameters)
    if name == FLOW:  # the evidence changed while it waited
        name, given = str(given["flow"]), dict(given["parameters"])
    assert name in CONTINUED
    return name, {key: value for key, value in given.items() if key not in ("state_dir", "run_id")}
