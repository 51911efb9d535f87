"""The states of a training job and the changes that are allowed. Pure."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Literal

from paceline.client import raised
from paceline.config import PriceSettings
from paceline.errors import Conflict, TemporaryError, WorkerLost
from paceline.jobs.usage import budget_reason, end_usage, is_held
from paceline.schemas import KEPT_CHANGES, JobChange, JobState, LossCause, TrainingJob

_S = JobState
_ENDS = {_S.SUCCEEDED, _S.NEEDS_REVIEW, _S.FAILED, _S.CANCELLED}
_WAITING = {_S.ADMITTED, _S.PAUSED, *_ENDS}  # an adopted one's flow may end meanwhile
_FLOW_IS_OVER = {*_ENDS, _S.RECOVERING, _S.PREEMPTED, _S.PAUSED}
NEXT: dict[JobState, set[JobState]] = {
    _S.QUEUED: _WAITING,
    _S.PREEMPTED: _WAITING,
    _S.RECOVERING: _WAITING,
    _S.ADMITTED: {_S.STARTING, _S.PAUSING, _S.CANCELLING, *_FLOW_IS_OVER},
    _S.STARTING: {_S.RUNNING, _S.PAUSING, _S.CANCELLING, *_FLOW_IS_OVER},
    _S.RUNNING: {_S.PAUSING, _S.CANCELLING, *_FLOW_IS_OVER},
    _S.PAUSING: {_S.CANCELLING, *_FLOW_IS_OVER},
    _S.CANCELLING: _ENDS,
    _S.PAUSED: {_S.QUEUED, *_ENDS},  # as above
    _S.NEEDS_REVIEW: {_S.SUCCEEDED, _S.FAILED},
    _S.SUCCEEDED: set(),
    _S.FAILED: set(),
    _S.CANCELLED: set(),
}


def with_state(
    job: TrainingJob,
    state: JobState,
    at: float,
    reason: str = "",
    by: str = "",
    cause: LossCause = "",
    no_worker: bool = False,
    **fields: Any,
) -> TrainingJob:
    """Return ``job`` in ``state``, with the change in its history; raises Conflict where it may not
    follow the present one.

    A job that no longer holds hosts has no placement, and one that waits no flow run; the time of
    its attempt is then in its usage. ``cause``: why the attempt was lost; ``no_worker``: no Prefect
    worker took its flow run.
    """
    if state not in NEXT[job.state]:
        raise Conflict(
            f"a job that is {job.state} cannot become {state}",
            got=job.state,
            wanted=", ".join(sorted(s for s, to in NEXT.items() if state in to)),
            where=job.job_id,
        )
    # A flow run that is ended in Prefect where that is still to be done.
    lost = (job.flow_run_id or "") if cause == "lost-flow" or no_worker else ""
    change = JobChange(
        state=state, at=at, reason=reason[:500], by=by, cause=cause, flow_run_id=lost
    )
    update: dict[str, Any] = {
        "state": state,
        "reason": reason[:500],
        "updated_at": at,
        "history": _history(job, change),
    }
    if not state.holds_hosts:
        update["placement"] = None
        if is_held(job):
            update["usage"] = end_usage(job, state, at, cause)
    if state.waits or state is JobState.PAUSED:
        update["wanted"] = "run"
        if not job.state.waits:  # its flow run has ended; an adopted one that waits goes on
            update |= {"flow_run_id": None, "adopted": False}
    if state is JobState.PAUSED:
        update["allocation"] = None  # it is released: a later end of it says nothing of the job
    if state.is_final or state is JobState.NEEDS_REVIEW:
        update["ended_at"] = at
    return job.model_copy(update=update | fields)


def with_abandoned_run(job: TrainingJob, flow_run_id: str, at: float) -> TrainingJob:
    """Return ``job``, which was paused or cancelled while this flow run was made for it, with the
    flow run in its history as one to end in Prefect, and as an attempt: the next one is another.
    """
    reason = "the flow run that was made for it meanwhile is cancelled"
    change = JobChange(state=job.state, at=at, reason=reason, flow_run_id=flow_run_id)
    update = {"history": _history(job, change), "attempt": job.attempt + 1}
    return job.model_copy(update=update)


def end_requested(
    job: TrainingJob, wanted: Literal["pause", "cancel"], *, by: str, at: float
) -> TrainingJob:
    """Return ``job`` paused or cancelled by a person: at once where no flow runs for it."""
    ended, ending = {
        "pause": (_S.PAUSED, _S.PAUSING),
        "cancel": (_S.CANCELLED, _S.CANCELLING),
    }[wanted]
    reason = f"{wanted} requested by {by}"
    if job.state.waits or job.state is _S.PAUSED:
        return with_state(job, ended, at, reason, by)
    if job.state is _S.ADMITTED and not job.adopted:
        return with_state(job, ended, at, reason, by)
    if job.state is ending:  # it yields, and must not start again
        return job.model_copy(update={"wanted": wanted, "reason": reason})
    return with_state(job, ending, at, reason, by, wanted=wanted)


def resumed(
    job: TrainingJob, budget: float | None, prices: PriceSettings, *, by: str, at: float
) -> TrainingJob:
    """Return ``job`` queued again, with the new ``budget`` if there is one; unchanged where it was
    resumed already. Raises Conflict where it is not paused, or has spent its budget."""
    job = job if budget is None else _with_budget(job, budget)
    if budget is not None and (job.state.waits or job.state.holds_hosts):
        return job
    if _is_resumed(job):
        return job
    if job.state is not JobState.PAUSED:
        raise Conflict(
            "nothing to resume: the job is not paused",
            got=job.state,
            wanted=JobState.PAUSED,
            where=job.job_id,
        )
    is_spent, why = budget_reason(job, prices, at)
    if is_spent:
        raise Conflict(
            "nothing is left of the job's budget",
            got=why,
            wanted="a higher budget",
            where=job.job_id,
            do=f"`paceline jobs resume {job.job_id} --budget AMOUNT`, 0 for none.",
        )
    return with_state(job, JobState.QUEUED, at, "resumed", by)


def _is_resumed(job: TrainingJob) -> bool:
    """Return whether a person has resumed the job just now: since then the queue has started it at
    most, and its caller repeats the request, perhaps for want of an answer."""
    begins = (JobState.QUEUED, JobState.ADMITTED, JobState.STARTING)
    since = takewhile(lambda each: each.state in begins, reversed(job.history))
    return any(each.reason == "resumed" for each in since)


def _with_budget(job: TrainingJob, budget: float) -> TrainingJob:
    spec = job.spec.model_copy(update={"budget": budget or None})
    return job.model_copy(update={"spec": spec, "budget_warned": False})


def losses_since_checkpoint(job: TrainingJob) -> int:
    """Return how often the job was lost, and started again, since its newest checkpoint."""
    saved = job.report.checkpoints if job.report is not None else ()
    saved_at = max((each.created_at for each in saved), default=0.0)
    lost = [e for e in job.history if e.state is _S.RECOVERING and e.cause]
    return sum(each.at > saved_at for each in lost)


def require_open(job: TrainingJob, what: str) -> None:
    """Raise Conflict where ``job`` has ended, and there is nothing to ``what``."""
    if job.state.is_final or job.state is JobState.NEEDS_REVIEW:
        raise Conflict(
            f"nothing to {what}: the job has ended",
            got=job.state,
            wanted="a job that waits or runs",
            where=job.job_id,
        )


def is_passing(message: str) -> bool:
    """Return whether a flow's failure is of a kind that may pass (``TemporaryError``)."""
    kind, _ = raised(message)
    return kind is not None and issubclass(kind, TemporaryError)


def cause_of(message: str) -> LossCause:
    """Return why a job was lost: by the error that its flow's message names, if it names one."""
    kind, _ = raised(message)
    if kind is None:
        return "lost-flow"
    return "node" if issubclass(kind, WorkerLost) else "passing-failure"


def with_budget_warning(job: TrainingJob, why: str, at: float) -> TrainingJob:
    """Return ``job`` with a warning that its budget is nearly spent, or cannot be counted."""
    change = JobChange(state=job.state, at=at, reason=why[:500])
    update = {"reason": why[:500], "history": _history(job, change), "budget_warned": True}
    return job.model_copy(update=update)


def _history(job: TrainingJob, change: JobChange) -> tuple[JobChange, ...]:
    """Return the changes to keep; the first has the number of those that are not."""
    made = (*job.history, change)
    kept = made[-KEPT_CHANGES:]
    earlier = made[0].earlier + len(made) - len(kept)
    return (kept[0].model_copy(update={"earlier": earlier}), *kept[1:])
