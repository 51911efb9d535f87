"""Prometheus metrics of training jobs: what users wait for, and what they lose.

Counts are kept from the beginning of the leader's term, so a job that is deleted takes nothing
away from them. Labels are bounded (teams, three classes of priority, states, causes, kinds): no
series is a job's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from paceline.schemas import JobState

MOST_TEAMS = 100  # with series of their own; the teams after them are "other"
CAUSES = ("lost-flow", "passing-failure", "node", "preempted")
_WAIT_S = (10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0)
_START_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
Labels = tuple[str, ...]


@dataclass
class Histogram:
    """Counts of observations in seconds, by upper bound."""

    bounds: tuple[float, ...]
    total_s: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no observation."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds


@dataclass(kw_only=True)
class JobCounts:
    """What has happened to jobs in this term of the leader."""

    waits: dict[Labels, Histogram] = field(  # team, priority → wait for nodes
        default_factory=lambda: defaultdict(lambda: Histogram(_WAIT_S))
    )
    first_steps: dict[Labels, Histogram] = field(  # team → from the nodes to the first step
        default_factory=lambda: defaultdict(lambda: Histogram(_START_S))
    )
    held: dict[Labels, float] = field(default_factory=lambda: defaultdict(float))  # slot-seconds
    useful: dict[Labels, float] = field(default_factory=lambda: defaultdict(float))
    lost: dict[Labels, float] = field(default_factory=lambda: defaultdict(float))
    losses: dict[Labels, float] = field(default_factory=lambda: defaultdict(float))  # team, cause
    ended: dict[Labels, float] = field(default_factory=lambda: defaultdict(float))  # team, state
    teams: set[str] = field(default_factory=set)

    def team(self, name: str) -> str:
        """Return the label of a team; its counts begin at 0."""
        if name in self.teams:
            return name
        if len(self.teams) >= MOST_TEAMS:
            return "other"
        self.teams.add(name)
        self.touch(name)
        return name

    def touch(self, team: str) -> None:
        """Have every counter of the team there, so that a first loss is an increase."""
        for each in (self.held, self.useful, self.lost):
            each[team,] += 0.0
        for cause in CAUSES:
            self.losses[team, cause] += 0.0
        for state in JobState:
            if state.is_final:
                self.ended[team, state.value] += 0.0


@dataclass(frozen=True, kw_only=True)
class JobLevels:
    """The jobs of an installation at one scrape."""

    counts: JobCounts
    held: Mapping[Labels, float] = field(default_factory=dict)  # team; with what is held now
    states: Mapping[Labels, float] = field(default_factory=dict)  # state, team
    oldest_wait_s: Mapping[Labels, float] = field(default_factory=dict)  # team, priority
    checkpoint_age_s: Mapping[Labels, float] = field(default_factory=dict)  # team
    slots: Mapping[Labels, float] = field(default_factory=dict)  # accelerator
    slots_held: Mapping[Labels, float] = field(default_factory=dict)


def job_metrics(levels: JobLevels) -> Iterator[Metric]:
    """Yield the metrics of jobs, their teams and the pools."""
    counts = levels.counts
    yield _gauge("paceline_jobs", "Training jobs.", ("state", "team"), levels.states)
    yield _histogram(
        "paceline_job_queue_wait_seconds",
        "Time that a gang waited for its nodes; priority is low, normal (0) or high.",
        ("team", "priority"),
        counts.waits,
    )
    yield _gauge(
        "paceline_job_queue_oldest_seconds",
        "Time that the gang which waits longest has waited so far.",
        ("team", "priority"),
        levels.oldest_wait_s,
    )
    yield _histogram(
        "paceline_job_first_step_seconds",
        "Time from a gang's nodes to its first step.",
        ("team",),
        counts.first_steps,
    )
    for name, help_text, values in (
        ("held", "Seconds for which jobs held slots, times slots.", levels.held),
        ("useful", "Of these in new steps, before what was lost.", counts.useful),
        ("lost", "Of these in steps that no checkpoint had when the job was lost.", counts.lost),
    ):
        yield _counter(f"paceline_job_{name}_slot_seconds", help_text, ("team",), values)
    yield _counter(
        "paceline_job_losses",
        "Attempts of jobs that ended early, by cause.",
        ("team", "cause"),
        counts.losses,
    )
    yield _counter("paceline_jobs_ended", "Jobs that ended.", ("team", "state"), counts.ended)
    yield _gauge(
        "paceline_job_checkpoint_age_seconds",
        "Age of the newest checkpoint, or of the start, of the running job where it is highest.",
        ("team",),
        levels.checkpoint_age_s,
    )
    kinds = ("accelerator",)
    yield _gauge("paceline_pool_slots", "Slots of living nodes.", kinds, levels.slots)
    yield _gauge("paceline_pool_held_slots", "Slots that jobs hold.", kinds, levels.slots_held)


def _gauge(name: str, text: str, labels: Iterable[str], values: Mapping[Labels, float]) -> Metric:
    made = GaugeMetricFamily(name, text, labels=list(labels))
    for each, value in values.items():
        made.add_metric(each, value)
    return made


def _counter(name: str, text: str, labels: Iterable[str], values: Mapping[Labels, float]) -> Metric:
    made = CounterMetricFamily(name, text, labels=list(labels))
    for each, value in values.items():
        made.add_metric(each, value)
    return made


def _histogram(
    name: str, text: str, labels: Iterable[str], values: Mapping[Labels, Histogram]
) -> Metric:
    made = HistogramMetricFamily(name, text, labels=list(labels))
    for each, found in values.items():
        bounds = [*map(str, found.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        made.add_metric(each, buckets, found.total_s)
    return made
