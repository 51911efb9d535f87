"""What teams get from the queue: waits, starts, goodput, losses and free slots, for Prometheus.

Changes are counted as the leader stores them, from the beginning of its term: a job that is deleted
takes nothing away. What stands is read from the table at each scrape. Labels are bounded (teams,
hosts, three classes of priority, states, causes, kinds). A job has a series only while it is open
and has failed: at most 100 jobs of each metric, those with the most.
"""

from __future__ import annotations

from collections import Counter as Tally, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.jobs.placement import Host
from paceline.jobs.usage import is_held, lost_s
from paceline.schemas import JobReport, JobState, LossCause, TrainingJob

MOST_TEAMS = 100  # with series of their own; the teams after them are "other"
MOST_HOSTS = 1000  # the same of hosts whose ranks failed
MOST_JOBS = 100  # of open jobs that have failed
BOUNDS_S = (5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 14_400, 43_200, 86_400, 259_200)
Labels = tuple[str, ...]
Failures = Mapping[str, Mapping[str, int]]  # host → kind → times
# Metrics that are read at each scrape: name without "paceline_" → labels and meaning.
READ = {
    "jobs": (("state", "team"), "Training jobs."),
    "job_queue_oldest_seconds": (("team", "priority"),
        "Time for which the gang that waits longest has waited."),
    "job_held_slot_seconds": (("team", "priority"),
        "Seconds for which jobs held slots, times slots; priority is low, normal (0) or high."),
    "job_open_losses": (("job",), "Flow runs that an open job has lost; of 100 jobs."),
    "job_quarantined_shards": (("job",),
        "Shards and samples that the training of an open job passed over; of 100 jobs."),
    "job_checkpoint_age_seconds": (("team",),
        "Age of the newest checkpoint, or of the start, of the running job where it is highest."),
    "pool_slots": (("accelerator", "capacity"),
        "Slots of living nodes; capacity is on-demand or spot."),
    "pool_held_slots": (("accelerator", "capacity"), "Slots that jobs hold."),
}  # fmt: skip

disable_created_metrics()  # type: ignore[no-untyped-call] # of this process: none beside these


class JobTotals:
    """Counts what happens to jobs from ``began_s`` on, in this process."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._teams: set[str] = set()
        self._queues: set[tuple[str, str]] = set()  # team and class of priority
        self._hosts: set[str] = set()
        self._held_s: dict[Labels, float] = defaultdict(float)  # slot-seconds of ended attempts
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            registry = self._registry
            return Histogram(f"paceline_{name}", text, labels, registry=registry, buckets=BOUNDS_S)

        self._waits = histogram(
            "job_queue_wait_seconds",
            "Time that a gang waited for its nodes; priority is low, normal (0) or high.",
            *("team", "priority"),
        )
        self._first_steps = histogram(
            "job_first_step_seconds", "Time from a gang's nodes to its first step.", "team"
        )
        self._useful = counter(
            "job_useful_slot_seconds",
            "Of these in new steps, before what was lost.",
            *("team", "priority"),
        )
        self._lost = counter(
            "job_lost_slot_seconds",
            "Of these in steps that no checkpoint had when the job was lost.",
            *("team", "priority"),
        )
        self._losses = counter(
            "job_losses", "Attempts of jobs that ended early, by cause.", "team", "cause"
        )
        self._host_failures = counter(
            "job_host_failures",
            "Ends of gangs by a rank of the host, or by the loss of the host: failed, hung, lost, "
            "bad-step.",
            *("host", "kind"),
        )
        self._ended = counter("jobs_ended", "Jobs that ended.", "team", "state")

    def change(self, before: TrainingJob | None, after: TrainingJob) -> None:
        """Count a change of a job that was stored; ``before`` has its last report."""
        queue = team, _ = self._queue(after)
        if before is None or before.state is after.state:
            return
        if before.state.waits and after.state is JobState.ADMITTED:
            waited_s = after.updated_at - before.updated_at
            self._waits.labels(*queue).observe(max(0.0, waited_s))
        if before.state is JobState.STARTING and after.state is JobState.RUNNING and after.usage:
            started_s = after.updated_at - after.usage[-1].since
            self._first_steps.labels(team).observe(max(0.0, started_s))
        if is_held(before) and not is_held(after):
            self._held_s[queue] += self._held(before, after.updated_at)
        cause = after.history[-1].cause if after.history else ""
        if cause:
            self._losses.labels(team, cause).inc()
            if cause != "preempted" and before.usage:
                self._lost.labels(*queue).inc(max(0.0, lost_s(before)) * before.usage[-1].slots)
        if after.state.is_final:
            self._ended.labels(team, after.state.value).inc()

    def report(self, job: TrainingJob, before: JobReport | None, after: JobReport) -> None:
        """Count the useful time between two reports of one flow run, and failures by host."""
        if before is not None and before.flow_run_id != after.flow_run_id:
            before = None
        if after.failures:
            self._count_failures({} if before is None else before.failures, after.failures)
        if before is not None and is_held(job):
            more = after.seconds.get("useful", 0.0) - before.seconds.get("useful", 0.0)
            self._useful.labels(*self._queue(job)).inc(max(0.0, more) * job.usage[-1].slots)

    def _count_failures(self, before: Failures, after: Failures) -> None:
        for host, kinds in after.items():
            if len(self._hosts) < MOST_HOSTS:
                self._hosts.add(host)
            label = host if host in self._hosts else "other"
            for kind, times in kinds.items():
                more = max(0, times - before.get(host, {}).get(kind, 0))
                self._host_failures.labels(label, kind).inc(more)

    def metrics(
        self, jobs: Iterable[TrainingJob], hosts: Sequence[Host], now: float
    ) -> list[Metric]:
        """Return each metric with its values; ``jobs`` and ``hosts`` are those of ``now``."""
        found: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        taken: Tally[str] = Tally()  # host → slots that jobs hold
        jobs = list(jobs)
        found["job_open_losses"] = _of_jobs(jobs, lambda job: job.losses)
        found["job_quarantined_shards"] = _of_jobs(
            jobs, lambda job: job.report.quarantined if job.report else 0
        )
        for job in jobs:
            queue, state = self._queue(job), job.state
            team = queue[0]
            found["jobs"][state.value, team] += 1
            if state.waits:
                _raise_to(found["job_queue_oldest_seconds"], queue, now, job.updated_at)
            if state is JobState.RUNNING:
                saved = [each.created_at for each in job.report.checkpoints] if job.report else []
                since = max([job.updated_at, *saved])
                _raise_to(found["job_checkpoint_age_seconds"], (team,), now, since)
            if is_held(job):
                found["job_held_slot_seconds"][queue] += self._held(job, now)
            taken.update(job.placement.hosts if job.placement is not None else ())
        for host in hosts:
            found["pool_slots"][host.kind, host.pool] += host.slots
            found["pool_held_slots"][host.kind, host.pool] += min(host.slots, taken[host.name])
        for team in self._teams:
            for each in JobState:
                found["jobs"][each.value, team] += 0
        for queue in self._queues:
            found["job_held_slot_seconds"][queue] += self._held_s[queue]
        made = []
        for name, (labels, text) in READ.items():
            kind = CounterMetricFamily if name == "job_held_slot_seconds" else GaugeMetricFamily
            family = kind(f"paceline_{name}", text, labels=labels)
            for values, value in found[name].items():
                family.add_metric(values, value)
            made.append(family)
        return [*made, *self._registry.collect()]

    def _held(self, job: TrainingJob, now: float) -> float:
        """Return the slot-seconds of the job's present attempt since the counts began."""
        last = job.usage[-1]
        return max(0.0, now - max(last.since, self._began_s)) * last.slots

    def _queue(self, job: TrainingJob) -> tuple[str, str]:
        """Return the labels of the job's team and priority; each of their counts begins at 0."""
        priority = job.spec.priority
        level = "normal" if priority == 0 else "high" if priority > 0 else "low"
        queue = self._team(job), level
        if queue not in self._queues:
            self._queues.add(queue)
            for counter in (self._useful, self._lost):
                counter.labels(*queue)
        return queue

    def _team(self, job: TrainingJob) -> str:
        """Return the label of the job's team; each count of a team begins at 0."""
        team = job.spec.team
        if team not in self._teams and len(self._teams) >= MOST_TEAMS:
            return "other"
        if team not in self._teams:
            self._teams.add(team)
            for cause in filter(None, get_args(LossCause)):
                self._losses.labels(team, cause)
            for state in filter(lambda each: each.is_final, JobState):
                self._ended.labels(team, state.value)
        return team


def _of_jobs(
    jobs: Iterable[TrainingJob], count: Callable[[TrainingJob], int]
) -> dict[Labels, float]:
    """Return the MOST_JOBS highest counts above 0 of open jobs, by job."""
    failed = [each for each in jobs if not each.state.is_final and count(each)]
    return {(each.job_id,): count(each) for each in nlargest(MOST_JOBS, failed, key=count)}


def _raise_to(ages: dict[Labels, float], labels: Labels, now: float, since: float) -> None:
    ages[labels] = max(ages[labels], now - since)
