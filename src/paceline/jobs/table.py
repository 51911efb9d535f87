"""The table of training jobs: records in the coordinator's store, and reports in memory.

The leader is the only writer; each change is one fenced write. A standby reads the store. Reports
of flows come every few seconds and are kept in memory: they are stored with the next change of the
job's state, and sent again to the next leader. A flow's last report is stored at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client.core import Metric

from paceline.coordinator import Coordinator
from paceline.errors import Conflict, NotFound
from paceline.jobs.placement import Host
from paceline.jobs.service_levels import JobTotals
from paceline.schemas import JobReport, TrainingJob

MOST_OPEN = 10_000  # jobs that have not ended, of all teams
MOST_OPEN_OF_TEAM = 2_000
MOST_ENDED = 10_000  # kept; the one that ended first is deleted when another ends


class JobTable:
    """Every job of an installation; threads may share it."""

    def __init__(
        self,
        coordinator: Coordinator,
        wall: Callable[[], float] = time.time,
        on_change: Callable[[TrainingJob], None] = lambda _job: None,
    ) -> None:
        """``on_change`` takes each job that was stored in another state, and must not wait."""
        self._coordinator, self._wall, self._on_change = coordinator, wall, on_change
        self.totals = JobTotals(wall())  # of this term
        self._lock = threading.RLock()
        self._epoch: int | None = None  # of the term whose records are in memory
        self._jobs: dict[str, TrainingJob] = {}
        self._reports: dict[str, JobReport] = {}

    def jobs(self) -> list[TrainingJob]:
        """Return every job, oldest first, each with its newest report."""
        with self._lock:
            return self._listed(self._known().values())

    def open_jobs(self) -> list[TrainingJob]:
        """Return the jobs that have not ended, as ``jobs`` does."""
        with self._lock:
            return self._listed(e for e in self._known().values() if not e.state.is_final)

    def job(self, job_id: str) -> TrainingJob:
        """Return one job; raises NotFound."""
        with self._lock:
            known = self._known().get(job_id)
            if known is None:
                raise NotFound("no such training job", got=job_id, do="See `paceline jobs list`.")
            return self._with_report(known)

    def add(self, job: TrainingJob) -> TrainingJob:
        """Store a new job, or return the one that has its id already.

        Raises Conflict where that one was submitted otherwise, or too many jobs are open.
        """
        with self._lock:
            known = self._known()
            if (earlier := known.get(job.job_id)) is not None:
                if earlier.submission_id != job.submission_id:
                    raise Conflict(
                        "the idempotency key belongs to another submission", where=job.job_id
                    )
                return earlier
            open_jobs = [each for each in known.values() if not each.state.is_final]
            team = job.spec.team
            of_team = sum(each.spec.team == team for each in open_jobs)
            if len(open_jobs) >= MOST_OPEN or of_team >= MOST_OPEN_OF_TEAM:
                raise Conflict(
                    "too many jobs are open",
                    got=f"{of_team} of team {team}, {len(open_jobs)} of all",
                    wanted=f"fewer than {MOST_OPEN_OF_TEAM} of a team, {MOST_OPEN} of all",
                    do="Cancel some, or wait until some have ended.",
                )
            return self._save(job)

    def change(self, job_id: str, make: Callable[[TrainingJob], TrainingJob]) -> TrainingJob:
        """Store what ``make`` returns for the job, and return it; raises what ``make`` raises."""
        with self._lock:
            before = self.job(job_id)
            after = make(before)
            return before if after == before else self._save(after)

    def note(self, job_id: str, reason: str | None, *, stored: bool = False, **fields: Any) -> None:
        """Show why a job still waits; stored with its next change only, because it changes from
        second to second, unless it is to be ``stored`` now. None: as it is."""
        with self._lock:
            job = self._known().get(job_id)
            if job is not None and not job.state.is_final:
                made = fields if reason is None else {"reason": reason[:500], **fields}
                self._jobs[job_id] = job.model_copy(update=made)
                if stored:
                    self._save(self._jobs[job_id])

    def report(self, job_id: str, report: JobReport) -> TrainingJob:
        """Take a flow's report in; one of an earlier flow run of the job is left out. Until a flow
        run saves its first checkpoint, the earlier ones stay: it goes on from them.

        The last one, of how the flow ended, is stored: no flow sends it again to the next leader.
        """
        with self._lock:
            job = self.job(job_id)
            if report.flow_run_id == (job.flow_run_id or "") and not job.state.is_final:
                if job.report is not None and not report.checkpoints:
                    kept = {"checkpoints": job.report.checkpoints}
                    report = report.model_copy(update=kept)
                self.totals.report(job, self._reports.get(job_id), report)
                self._reports[job_id] = report
                job = self._with_report(job)
                if report.outcome is not None:
                    self._save(job)
            return job

    def metrics(self, hosts: Sequence[Host]) -> list[Metric]:
        """Return the metrics of jobs; ``hosts`` are the living ones."""
        with self._lock:
            return self.totals.metrics(self.jobs(), hosts, self._wall())

    def _listed(self, jobs: Iterable[TrainingJob]) -> list[TrainingJob]:
        found = map(self._with_report, jobs)
        return sorted(found, key=lambda each: (each.created_at, each.job_id))

    def _with_report(self, job: TrainingJob) -> TrainingJob:
        report = self._reports.get(job.job_id)
        return job if report is None else job.model_copy(update={"report": report})

    def _known(self) -> dict[str, TrainingJob]:
        term = self._coordinator.term
        if term is None or term.epoch != self._epoch:
            self._jobs = {each.job_id: each for each in self._coordinator.jobs()}
            self.totals = JobTotals(self._wall())
            self._reports = {}  # of an earlier term: the store has later ones
            self._epoch = None if term is None else term.epoch
        return self._jobs

    def _save(self, job: TrainingJob) -> TrainingJob:
        dropped = self._too_old() if job.state.is_final else []
        self._coordinator.save_job(job, dropped)
        before = self._jobs.get(job.job_id)
        reported = None if before is None else self._with_report(before)
        for each in dropped:
            del self._jobs[each]
        self._jobs[job.job_id] = job
        self.totals.change(reported, job)
        if job.state.is_final:
            self._reports.pop(job.job_id, None)
        if before is None or before.state is not job.state:
            self._on_change(job)
        return job

    def _too_old(self) -> list[str]:
        """Return the jobs to delete before another one ends."""
        ended = [each for each in self._jobs.values() if each.state.is_final]
        if len(ended) < MOST_ENDED:
            return []
        ended.sort(key=lambda each: each.ended_at or each.updated_at)
        return [each.job_id for each in ended[: len(ended) - MOST_ENDED + 1]]
