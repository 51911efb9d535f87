"""What teams get from the queue: waits, starts, goodput, losses and free slots, for the metrics.

Changes are counted as the leader stores them, from the beginning of its term: a job that is deleted
takes nothing away. What stands is read from the table at each scrape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import get_args

from paceline.jobs.placement import Host
from paceline.jobs.usage import is_held, lost_s
from paceline.schemas import JobReport, JobState, LossCause, TrainingJob
from paceline.telemetry import Histogram, JobValues

MOST_TEAMS = 100  # with series of their own; the teams after them are "other"
MOST_HOSTS = 1000  # the same of hosts whose ranks failed
MOST_JOBS = 100  # of open jobs that have failed
Labels = tuple[str, ...]
Failures = Mapping[str, Mapping[str, int]]  # host → kind → times


class JobTotals:
    """Counts what happens to jobs from ``began_s`` on, in this process."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._teams: set[str] = set()
        self._counts: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[Labels, Histogram]] = defaultdict(
            lambda: defaultdict(Histogram)
        )

    def change(self, before: TrainingJob | None, after: TrainingJob) -> None:
        """Count a change of a job that was stored; ``before`` has its last report."""
        team = self._team(after)
        if before is None or before.state is after.state:
            return
        if before.state.waits and after.state is JobState.ADMITTED:
            self._observe("queue_wait", _queue(after, team), after.updated_at - before.updated_at)
        if before.state is JobState.STARTING and after.state is JobState.RUNNING and after.usage:
            self._observe("first_step", (team,), after.updated_at - after.usage[-1].since)
        if is_held(before) and not is_held(after):
            self._counts["job_held_slot_seconds"][team,] += self._held(before, after.updated_at)
        cause = after.history[-1].cause if after.history else ""
        if cause:
            self._counts["job_losses"][team, cause] += 1
            if cause != "preempted" and before.usage:
                lost = lost_s(before) * before.usage[-1].slots
                self._counts["job_lost_slot_seconds"][team,] += lost
        if after.state.is_final:
            self._counts["jobs_ended"][team, after.state.value] += 1

    def report(self, job: TrainingJob, before: JobReport | None, after: JobReport) -> None:
        """Count the useful time between two reports of one flow run, and failures by host."""
        if before is not None and before.flow_run_id != after.flow_run_id:
            before = None
        if after.failures:
            self._count_failures({} if before is None else before.failures, after.failures)
        if before is not None and is_held(job):
            more = after.seconds.get("useful", 0.0) - before.seconds.get("useful", 0.0)
            useful = self._counts["job_useful_slot_seconds"]
            useful[self._team(job),] += max(0.0, more) * job.usage[-1].slots

    def _count_failures(self, before: Failures, after: Failures) -> None:
        counts = self._counts["job_host_failures"]
        known = {host for host, _ in counts}
        for host, kinds in after.items():
            label = host if host in known or len(known) < MOST_HOSTS else "other"
            for kind, times in kinds.items():
                counts[label, kind] += max(0, times - before.get(host, {}).get(kind, 0))

    def values(self, jobs: Iterable[TrainingJob], hosts: Sequence[Host], now: float) -> JobValues:
        """Return the value of each metric; ``jobs`` and ``hosts`` are those of ``now``."""
        found: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        taken: Counter[str] = Counter()  # host → slots that jobs hold
        jobs = list(jobs)
        found["job_open_losses"] = _of_jobs(jobs, lambda job: job.losses)
        found["job_quarantined_shards"] = _of_jobs(
            jobs, lambda job: job.report.quarantined if job.report else 0
        )
        for job in jobs:
            team, state = self._team(job), job.state
            found["jobs"][state.value, team] += 1
            if state.waits:
                _raise_to(found["job_queue_oldest_seconds"], _queue(job, team), now, job.updated_at)
            if state is JobState.RUNNING:
                saved = [each.created_at for each in job.report.checkpoints] if job.report else []
                since = max([job.updated_at, *saved])
                _raise_to(found["job_checkpoint_age_seconds"], (team,), now, since)
            if is_held(job):
                found["job_held_slot_seconds"][team,] += self._held(job, now)
            taken.update(job.placement.hosts if job.placement is not None else ())
        for host in hosts:
            found["pool_slots"][host.kind,] += host.slots
            found["pool_held_slots"][host.kind,] += min(host.slots, taken[host.name])
        for team in self._teams:
            for each in JobState:
                found["jobs"][each.value, team] += 0
        for name, counts in self._counts.items():
            for labels, count in counts.items():
                found[name][labels] += count
        return {**found, **{name: dict(each) for name, each in self._histograms.items()}}

    def _held(self, job: TrainingJob, now: float) -> float:
        """Return the slot-seconds of the job's present attempt since the counts began."""
        last = job.usage[-1]
        return max(0.0, now - max(last.since, self._began_s)) * last.slots

    def _observe(self, name: str, labels: Labels, seconds: float) -> None:
        self._histograms[f"job_{name}_seconds"][labels].observe(max(0.0, seconds))

    def _team(self, job: TrainingJob) -> str:
        """Return the label of the job's team; each count of a team begins at 0."""
        team = job.spec.team
        if team not in self._teams and len(self._teams) >= MOST_TEAMS:
            return "other"
        if team not in self._teams:
            self._teams.add(team)
            for name in ("held", "useful", "lost"):
                self._counts[f"job_{name}_slot_seconds"][team,] = 0.0
            for cause in filter(None, get_args(LossCause)):
                self._counts["job_losses"][team, cause] = 0.0
            for state in filter(lambda each: each.is_final, JobState):
                self._counts["jobs_ended"][team, state.value] = 0.0
        return team


def _queue(job: TrainingJob, team: str) -> Labels:
    priority = job.spec.priority
    return team, "normal" if priority == 0 else "high" if priority > 0 else "low"


def _of_jobs(
    jobs: Iterable[TrainingJob], count: Callable[[TrainingJob], int]
) -> dict[Labels, float]:
    """Return the MOST_JOBS highest counts above 0 of open jobs, by job."""
    failed = [each for each in jobs if not each.state.is_final and count(each)]
    return {(each.job_id,): count(each) for each in nlargest(MOST_JOBS, failed, key=count)}


def _raise_to(ages: dict[Labels, float], labels: Labels, now: float, since: float) -> None:
    ages[labels] = max(ages[labels], now - since)
