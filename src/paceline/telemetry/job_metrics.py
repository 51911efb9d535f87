"""Prometheus metrics of training jobs: what teams wait for, and what they lose.

Labels are bounded (teams, hosts, three classes of priority, states, causes, kinds). A job has a
series only while it is open and has failed: at most 100 jobs of each metric, those with the most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)


class Histogram:
    """Counts of seconds by upper bound, from 5 s to 3 days."""

    bounds = (5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 14_400, 43_200, 86_400, 259_200)

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts as Prometheus has them."""
        bounds = [*(f"{each}.0" for each in self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


JobValues = Mapping[str, Mapping[tuple[str, ...], float | Histogram]]  # name → labels → value
_GAUGE, _COUNTER, _HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
# name without "paceline_" → kind, labels and meaning
METRICS: dict[str, tuple[type[Metric], tuple[str, ...], str]] = {
    "jobs": (_GAUGE, ("state", "team"), "Training jobs."),
    "job_queue_wait_seconds": (_HISTOGRAM, ("team", "priority"),
        "Time that a gang waited for its nodes; priority is low, normal (0) or high."),
    "job_queue_oldest_seconds": (_GAUGE, ("team", "priority"),
        "Time for which the gang that waits longest has waited."),
    "job_first_step_seconds": (_HISTOGRAM, ("team",),
        "Time from a gang's nodes to its first step."),
    "job_held_slot_seconds": (_COUNTER, ("team",),
        "Seconds for which jobs held slots, times slots."),
    "job_useful_slot_seconds": (_COUNTER, ("team",),
        "Of these in new steps, before what was lost."),
    "job_lost_slot_seconds": (_COUNTER, ("team",),
        "Of these in steps that no checkpoint had when the job was lost."),
    "job_losses": (_COUNTER, ("team", "cause"), "Attempts of jobs that ended early, by cause."),
    "job_host_failures": (_COUNTER, ("host", "kind"),
        "Ends of gangs by a rank of the host, or by the loss of the host: failed, hung, lost, "
        "bad-step."),
    "job_open_losses": (_GAUGE, ("job",), "Flow runs that an open job has lost; of 100 jobs."),
    "job_quarantined_shards": (_GAUGE, ("job",),
        "Shards and samples that the training of an open job passed over; of 100 jobs."),
    "jobs_ended": (_COUNTER, ("team", "state"), "Jobs that ended."),
    "job_checkpoint_age_seconds": (_GAUGE, ("team",),
        "Age of the newest checkpoint, or of the start, of the running job where it is highest."),
    "pool_slots": (_GAUGE, ("accelerator",), "Slots of living nodes."),
    "pool_held_slots": (_GAUGE, ("accelerator",), "Slots that jobs hold."),
}  # fmt: skip


def job_metrics(values: JobValues) -> Iterator[Metric]:
    """Yield the metrics of jobs, their teams and the pools."""
    for name, (kind, labels, text) in METRICS.items():
        made: Metric = kind(f"paceline_{name}", text, labels=list(labels))  # type: ignore[call-arg]
        for each, value in values.get(name, {}).items():
            if isinstance(value, Histogram):
                made.add_metric(each, value.buckets(), value.total_s)  # type: ignore[attr-defined]
            else:
                made.add_metric(each, value)  # type: ignore[attr-defined]
        yield made
