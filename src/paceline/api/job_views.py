"""REST routes that read training jobs: list them, look at one, its changes and its log.

How a job is shown, with its links; what changes a job is in ``api.jobs``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Annotated

from fastapi import APIRouter, Path as PathParameter, Query

from paceline.api.flow_starter import ENDED, LINES, PrefectStarter
from paceline.api.routes import JOBS
from paceline.config import Runtime
from paceline.coordinator import current_caller, may_see, require_owner
from paceline.errors import AccessDenied, NotFound, PacelineError
from paceline.jobs import JobTable, flow_runs, used
from paceline.registry import Registry
from paceline.schemas import (
    QUEUED_JOB_ID,
    JobChange,
    JobList,
    JobLog,
    JobReport,
    JobState,
    JobView,
    TrainingJob,
)

JobId = Annotated[str, PathParameter(pattern=QUEUED_JOB_ID)]
LONGEST_PAGE = 500
MLFLOW_S = 3  # seconds of a call of MLflow
MLFLOW_RETRY_S = 10.0


def require_job_owner(job: TrainingJob) -> None:
    """Raise AccessDenied where the caller's token is bound to another team or project."""
    require_owner(job.spec.team, job.spec.project)


def own_training(given: str, table: JobTable) -> str:
    """Return the id of the training that ``given`` is or begins, as far as the caller may go on
    with it: any for a token that is bound to no team or project, else one of a job of its own.

    Raises AccessDenied for another.
    """
    if not given or not current_caller().is_bound:
        return given
    own = [each for each in table.jobs() if may_see(each.spec.team, each.spec.project)]
    reported = {each.report.training_id for each in own if each.report}
    found = {each for each in reported if each.startswith(given)}
    if given in found:
        return given
    if len(found) != 1:
        raise AccessDenied(
            "no training of this token's to continue from",
            got=f"{given}, which {len(found)} trainings of its jobs begin with",
            wanted="the id of the training of a job of its team and project",
            do="`paceline jobs list` shows the jobs, `paceline jobs show` one's training.",
        )
    return found.pop()


class ShownJob:
    """Makes the view of a job: with its links, and identical jobs."""

    def __init__(self, runtime: Runtime, table: JobTable, flows: PrefectStarter | None) -> None:
        self._prices = runtime.profile.prices
        known = runtime.endpoints
        self._coordinator, self._mlflow = known.coordinator_url, known.mlflow_url
        auth = runtime.secrets.mlflow_auth
        self._log = Registry(self._mlflow, auth, timeout_s=MLFLOW_S) if self._mlflow else None
        self._runs: dict[str, str] = {}  # run → its page in MLflow
        self._versions: dict[str, str] = {}  # run → that of the version made of its training
        self._due: dict[str, float] = {}  # run → when MLflow is asked for it again
        self._asking = threading.Lock()
        self._table, self.flows = table, flows

    def __call__(self, job: TrainingJob) -> JobView:
        same = [
            each.job_id
            for each in self._table.jobs()
            if each.submission_id == job.submission_id and each.job_id != job.job_id
        ]
        pages = dict(job.report.pages) if job.report else {}
        if self._coordinator:
            pages["fleet"] = f"{self._coordinator}/fleet#job={job.job_id}"
        if self.flows is not None and job.flow_run_id:
            pages["prefect"] = self.flows.page_of(job.flow_run_id)
        pages |= self._mlflow_pages(job)
        hours, energy, price = used(job, self._prices, time.time())
        return JobView(
            job=job,
            same_submission=tuple(same[-20:]),
            pages=pages,
            spent=price if job.usage else None,
            currency=self._prices.currency,
            estimate=job.estimate,
            hours=hours,
            energy_kwh=energy,
        )

    def _mlflow_pages(self, job: TrainingJob) -> dict[str, str]:
        """Return the pages in MLflow of the job's run (the server's own before it is known) and of
        the newest version that was registered of its training, if there is one.

        One reader at a time asks MLflow, for a job at most every MLFLOW_RETRY_S.
        """
        run_id, now_s = job.run_id, time.monotonic()
        training = job.report.training_id if job.report else ""  # it has a result
        if self._log is None:
            return {}
        asks = training or (job.started_at is not None and run_id not in self._runs)
        if asks and now_s >= self._due.get(run_id, 0.0) and self._asking.acquire(blocking=False):
            try:
                self._due[run_id] = now_s + MLFLOW_RETRY_S
                with contextlib.suppress(PacelineError):
                    if run_id not in self._runs:
                        self._runs |= self._log.pages_of_runs(run_id)
                    if training:
                        page = self._log.page_of_training(job.spec.model_id, training)
                        self._versions[run_id] = page
            finally:
                self._asking.release()
        found = {
            "mlflow": self._runs.get(run_id, self._mlflow),
            "version": self._versions.get(run_id, ""),
        }
        return {name: page for name, page in found.items() if page}


def add_reading(
    router: APIRouter, table: JobTable, shown: ShownJob, flows: PrefectStarter | None
) -> None:
    def job_of_caller(job_id: str) -> TrainingJob:
        job = table.job(job_id)
        require_job_owner(job)
        return job

    @router.get(JOBS)
    def list_jobs(
        state: Annotated[list[JobState], Query()] = [],  # noqa: B006 (FastAPI copies it)
        team: Annotated[str, Query(max_length=63)] = "",
        project: Annotated[str, Query(max_length=100)] = "",
        name: Annotated[str, Query(max_length=100)] = "",
        submitter: Annotated[str, Query(max_length=128)] = "",
        model: Annotated[str, Query(max_length=128)] = "",
        training: Annotated[str, Query(max_length=128)] = "",
        offset: Annotated[int, Query(ge=0, le=10**6)] = 0,
        limit: Annotated[int, Query(ge=1, le=LONGEST_PAGE)] = 100,
    ) -> JobList:
        """List jobs that the token may see, the newest first: of these states, this team, project,
        submitter and model id.

        ``name`` is a part of the job's name, or the beginning of its id. Each has a brief report:
        its training's id, step, steps and loss. ``training`` is the beginning of a training's id
        (job-…), or of the digest of its recorded result.
        """
        found = [
            each
            for each in reversed(table.jobs())
            if may_see(each.spec.team, each.spec.project)
            and (not state or each.state in state)
            and team in ("", each.spec.team)
            and project in ("", each.spec.project)
            and (not training or any(known.startswith(training) for known in _trainings(each)))
            and submitter in ("", each.submitted_by)
            and model in ("", each.spec.model_id)
            and (name.lower() in each.spec.name.lower() or each.job_id.startswith(name))
        ]
        page = found[offset : offset + limit]
        return JobList(jobs=tuple(map(_brief, page)), total=len(found))

    @router.get(f"{JOBS}/{{job_id}}")
    def get_job(job_id: JobId) -> JobView:
        """Return a job: its state and why, metrics, checkpoints, ranks, history and links."""
        return shown(job_of_caller(job_id))

    @router.get(f"{JOBS}/{{job_id}}/events")
    def get_job_events(job_id: JobId) -> list[JobChange]:
        """Return the last 100 changes of the job's state, oldest first; ``earlier`` of the first is
        the number of those before it, which the audit history has (`job.state_changed`)."""
        return list(job_of_caller(job_id).history)

    @router.get(f"{JOBS}/{{job_id}}/logs")
    def get_job_log(
        job_id: JobId,
        after: Annotated[int, Query(ge=0, le=2**31)] = 0,
        attempt: Annotated[int, Query(ge=0, le=2**31)] = 0,
        tail: Annotated[int, Query(ge=0, le=LINES)] = 0,
    ) -> JobLog:
        """Return lines of the log of an attempt's flow run, after the first ``after``, or its last
        ``tail`` lines; of the newest attempt that has a flow run, where ``attempt`` is 0."""
        job = job_of_caller(job_id)
        if attempt > job.attempt:
            wanted = f"1 to {job.attempt}" if job.attempt else "none: it has not begun"
            raise NotFound("the job has no such attempt", got=attempt, wanted=wanted, where=job_id)
        runs = flow_runs(job)
        flow_run_id = runs.get(attempt or max(runs, default=0))
        if flows is None or not flow_run_id:
            return JobLog(lines=(), after=after, is_over=job.state.is_final)
        found = flows.view(flow_run_id, after, tail)
        over = found.state in ENDED and (tail > 0 or not found.lines)
        after = 0 if tail else after + len(found.lines)  # how many lie before the last is not known
        return JobLog(lines=found.lines, after=after, is_over=over)


def _trainings(job: TrainingJob) -> tuple[str, ...]:
    return (job.report.training_id, job.report.training_digest or "") if job.report else ()


def _brief(job: TrainingJob) -> TrainingJob:
    """Return ``job`` as lists show it: without its history, and of its report the progress."""
    report = job.report
    if report is not None:
        report = JobReport(
            at=report.at,
            training_id=report.training_id,
            step=report.step,
            steps=report.steps,
            metrics={key: report.metrics[key] for key in ("loss",) if key in report.metrics},
        )
    return job.model_copy(update={"history": (), "usage": (), "report": report})
