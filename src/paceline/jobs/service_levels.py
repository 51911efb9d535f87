"""What users of the queue get: waits, starts, goodput, losses and free slots, for the metrics.

Changes are counted as the leader stores them; what stands is read from the table at each scrape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from paceline.jobs.placement import Host
from paceline.jobs.usage import is_held, lost_s, slots_of
from paceline.schemas import JobReport, JobState, TrainingJob
from paceline.telemetry import JobCounts, JobLevels


def priority_class(priority: int) -> str:
    """Return the label of a priority: low, normal or high."""
    return "normal" if priority == 0 else "high" if priority > 0 else "low"


class JobTotals:
    """Counts what happens to jobs from ``began_s`` on, in this process."""

    def __init__(self, began_s: float) -> None:
        self.counts = JobCounts()
        self._began_s = began_s

    def change(self, before: TrainingJob | None, after: TrainingJob) -> None:
        """Count a change of a job that was stored; ``before`` has its last report."""
        team = self.counts.team(after.spec.team)
        if before is None or before.state is after.state:
            return
        since_s = after.updated_at - before.updated_at
        if before.state.waits and after.state is JobState.ADMITTED:
            key = (team, priority_class(after.spec.priority))
            self.counts.waits[key].observe(max(0.0, since_s))
        if before.state is JobState.STARTING and after.state is JobState.RUNNING and after.usage:
            start_s = after.updated_at - after.usage[-1].since
            self.counts.first_steps[team,].observe(max(0.0, start_s))
        if is_held(before) and not is_held(after):
            self.counts.held[team,] += self.held(before, after.updated_at)
        cause = after.history[-1].cause if after.history else ""
        if cause:
            self.counts.losses[team, cause] += 1
            if cause != "preempted" and before.usage:
                slots = slots_of(before.usage[-1].accelerators)
                self.counts.lost[team,] += lost_s(before) * slots
        if after.state.is_final:
            self.counts.ended[team, after.state.value] += 1

    def report(self, job: TrainingJob, before: JobReport | None, after: JobReport) -> None:
        """Count the useful time between two reports of one flow run."""
        if before is not None and before.flow_run_id == after.flow_run_id and is_held(job):
            more = after.seconds.get("useful", 0.0) - before.seconds.get("useful", 0.0)
            slots = slots_of(job.usage[-1].accelerators)
            self.counts.useful[self.counts.team(job.spec.team),] += max(0.0, more) * slots

    def held(self, job: TrainingJob, now: float) -> float:
        """Return the slot-seconds of the job's present attempt since the counts began."""
        last = job.usage[-1]
        return max(0.0, now - max(last.since, self._began_s)) * slots_of(last.accelerators)

    def levels(self, jobs: Iterable[TrainingJob], hosts: Sequence[Host], now: float) -> JobLevels:
        """Return how ``jobs`` and ``hosts`` stand at ``now``."""
        states: dict[tuple[str, ...], float] = defaultdict(float)
        oldest: dict[tuple[str, ...], float] = defaultdict(float)
        ages: dict[tuple[str, ...], float] = defaultdict(float)
        taken: Counter[str] = Counter()  # host → slots that jobs hold
        held = dict(self.counts.held)
        for job in jobs:
            team = self.counts.team(job.spec.team)
            states[job.state.value, team] += 1
            if job.state.waits:
                key = (team, priority_class(job.spec.priority))
                oldest[key] = max(oldest[key], now - job.updated_at)
            if job.state is JobState.RUNNING:
                saved = [each.created_at for each in job.report.checkpoints] if job.report else []
                ages[team,] = max(ages[team,], now - max([job.updated_at, *saved]))
            if is_held(job):
                held[team,] = held.get((team,), 0.0) + self.held(job, now)
            if job.placement is not None:
                taken.update(job.placement.hosts)
        slots: dict[tuple[str, ...], float] = defaultdict(float)
        for host in hosts:
            slots[host.kind,] += host.slots
        slots_held = dict.fromkeys(slots, 0.0)
        for host in hosts:
            slots_held[host.kind,] += min(host.slots, taken[host.name])
        for team in self.counts.teams:
            for state in JobState:
                states[state.value, team] += 0
        return JobLevels(
            counts=self.counts,
            held=held,
            states=states,
            oldest_wait_s=oldest,
            checkpoint_age_s=ages,
            slots=slots,
            slots_held=slots_held,
        )
