"""What a ``Client`` does with training jobs: submit, follow, pause, resume, cancel and review."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from paceline.client.calls import CoordinatorClient
from paceline.client.failover import OUTAGE_S, POLL_S, OnLine, drop, retry
from paceline.errors import Cancelled, InvalidInput, TrainingFailed
from paceline.schemas import JobState, JobView, ReviewJob, SubmitJob, TrainingJob


class JobMethods:
    """The part of ``Client`` for training jobs."""

    coordinator: CoordinatorClient

    def submit(
        self,
        model_id: str,
        version: str,
        snapshot: str,
        *,
        resources: Mapping[str, Any] | None = None,
        key: str | None = None,
        **more: Any,
    ) -> TrainingJob:
        """Queue a training of a published version on a snapshot (its URL), and return the job.

        ``resources``: ranks, ranks_per_node, accelerator, memory_bytes, capacity, within,
        node_labels.
        ``more``: parameters (settings by their keys in a profile), code_ref, optimizer_ref,
        checkpoint_policy, seed, continue_from, name, team, project, purpose, budget, priority. The
        same ``key`` and job again are the same job. Raises InvalidInput for what can never run
        here.
        """
        return self.submit_view(
            model_id, version, snapshot, resources=resources, key=key, **more
        ).job

    def submit_view(
        self,
        model_id: str,
        version: str,
        snapshot: str,
        *,
        resources: Mapping[str, Any] | None = None,
        key: str | None = None,
        **more: Any,
    ) -> JobView:
        """Do what ``submit`` does, and return the job with its links and, where earlier trainings
        or the model of a step say something, the estimate of its hours, energy and price.
        """
        given = {"model_id": model_id, "version": version, "data_snapshot": snapshot, **more}
        return self.coordinator.submit_job(job_spec(given | {"resources": resources or {}}), key)

    def jobs(self, *states: str, limit: int = 500, **wanted: Any) -> list[TrainingJob]:
        """Return the newest jobs of these states, newest first, each with its progress.

        ``wanted``: team, project, name (a part of it), submitter, model (its id), offset.
        """
        return list(self.coordinator.jobs(states, limit=limit, **wanted).jobs)

    def job(self, job_id: str) -> TrainingJob:
        """Return a job: its state and why, and its last report (step, metrics, checkpoints)."""
        return self.job_view(job_id).job

    def job_view(self, job_id: str) -> JobView:
        """Return a job with its pages, identical jobs, and what it has cost so far."""
        return self.coordinator.job(job_id)

    def wait_for_job(self, job_id: str, on_notice: OnLine = drop) -> TrainingJob:
        """Return the job once it has succeeded or needs a review.

        Raises TrainingFailed, Cancelled, and TemporaryError as ``FlowRun.wait`` says.
        """
        while True:
            job = retry(partial(self.job, job_id), OUTAGE_S, on_notice)
            if job.state.is_final or job.state is JobState.NEEDS_REVIEW:
                require_success(job)
                return job
            time.sleep(POLL_S)

    def pause_job(self, job_id: str) -> TrainingJob:
        """Save the job's state on every rank and end them; it keeps its place in the queue.

        Raises Conflict for a job that has ended, AccessDenied for one of another team.
        """
        return self.coordinator.change_job(job_id, "pause").job

    def resume_job(self, job_id: str, *, budget: float | None = None) -> TrainingJob:
        """Queue a paused job again; it goes on from its newest checkpoint.

        ``budget``: a new one for the whole job, in the currency of the profile's prices, 0 for no
        limit; also for a job that waits or runs. Raises as pause_job, and Conflict where nothing is
        left of the budget.
        """
        return self.coordinator.change_job(job_id, "resume", budget=budget).job

    def cancel_job(self, job_id: str) -> TrainingJob:
        """End the job for good; its checkpoints stay. Raises as pause_job."""
        return self.coordinator.change_job(job_id, "cancel").job

    def review_job(self, job_id: str, *, accepted: bool, reason: str = "") -> TrainingJob:
        """Accept or reject a job that passed bad data over; needs a token of scope approve."""
        call = ReviewJob(accepted=accepted, reason=reason)
        return self.coordinator.review_job(job_id, call).job

    def job_log(self, job_id: str, *, attempt: int = 0, tail: int = 0) -> Iterator[str]:
        """Yield the lines of the log of an attempt's flow run, as many as there are now, or the
        last ``tail`` (at most 200); of the newest attempt that has one, where ``attempt`` is 0.

        Raises NotFound for an attempt that the job has not made.
        """
        after = 0
        while (found := self.coordinator.job_log(job_id, after, attempt=attempt, tail=tail)).lines:
            yield from found.lines
            after = found.after
            if tail:
                return


def job_spec(given: Mapping[str, Any]) -> SubmitJob:
    try:
        return SubmitJob.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput("this job cannot be submitted", got=first["msg"], where=where) from error


def require_success(job: TrainingJob) -> None:
    if job.state is JobState.CANCELLED:
        raise Cancelled("the job was cancelled", got=job.reason, where=job.job_id)
    if job.state is JobState.FAILED:
        raise TrainingFailed("the job failed", got=job.reason, where=job.job_id)
