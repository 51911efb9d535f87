"""Prometheus metrics of the control plane; those of jobs are in ``jobs.service_levels``.

They are computed from one snapshot at each scrape, so nothing is counted twice and no series of a
removed worker remains. The registry is separate: no process metrics of other libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.schemas import Deployment, DeploymentStatus, Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_SERIES = 2_000  # most workers and deployments with series; the oldest are left out


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of deployments, workers and coordinator for one scrape."""

    deployments: list[Deployment]
    progress: dict[str, float]  # share of bytes held, by id of a running deployment
    workers: list[Worker]
    beats: int
    beats_refused: int
    leader_epoch: int
    jobs: Sequence[Metric] = ()  # none where this replica does not lead


class FleetMetrics(Collector):
    """Prometheus collector that turns snapshots into metrics."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not take a snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one snapshot."""
        shot = self._snapshot()
        yield from _of_deployments(shot)
        yield from _of_workers(shot)
        yield from shot.jobs
        beats = CounterMetricFamily(
            "paceline_coordinator_beats", "Heartbeats taken.", labels=["taken"]
        )
        beats.add_metric(["yes"], shot.beats)
        beats.add_metric(["no"], shot.beats_refused)
        yield beats
        yield GaugeMetricFamily(
            "paceline_coordinator_epoch", "Epoch of this leader.", value=shot.leader_epoch
        )


def _of_deployments(shot: Snapshot) -> Iterator[Metric]:
    statuses = Counter(each.status for each in shot.deployments)
    count = GaugeMetricFamily("paceline_deployments", "Deployments by status.", labels=["status"])
    for status in DeploymentStatus:
        count.add_metric([status.value], statuses[status])
    yield count
    newest = shot.deployments[-MOST_SERIES:]
    labels = ["deployment_id", "model_id", "version"]
    size = GaugeMetricFamily("paceline_deployment_bytes", "Size of the model.", labels=labels)
    origin = GaugeMetricFamily(
        "paceline_deployment_origin_bytes", "Read from the source so far.", labels=labels
    )
    share = GaugeMetricFamily(
        "paceline_deployment_progress_ratio",
        "Share of bytes held by living targets.",
        labels=labels,
    )
    seconds = GaugeMetricFamily(
        "paceline_deployment_seconds", "Accepted plan to last verified rename.", labels=labels
    )
    for each in newest:
        names = [each.deployment_id, each.model_id, each.version]
        size.add_metric(names, each.total_bytes)
        origin.add_metric(names, each.origin_bytes)
        if each.deployment_id in shot.progress:
            share.add_metric(names, shot.progress[each.deployment_id])
        if each.seconds is not None:
            seconds.add_metric(names, each.seconds)
    yield from (size, origin, share, seconds)


def _of_workers(shot: Snapshot) -> Iterator[Metric]:
    alive = sum(worker.alive for worker in shot.workers)
    yield GaugeMetricFamily("paceline_workers_alive", "Workers that send heartbeats.", value=alive)
    yield GaugeMetricFamily(
        "paceline_workers_lost",
        "Workers that send none.",
        value=len(shot.workers) - alive,
    )
    rate = GaugeMetricFamily(
        "paceline_worker_bytes_per_second",
        "Rate that the worker last reported.",
        labels=["worker_id", "rack", "direction"],
    )
    storage = GaugeMetricFamily(
        "paceline_worker_available_bytes", "Room on its disk.", labels=["worker_id", "rack"]
    )
    for worker in shot.workers[-MOST_SERIES:]:
        names = [worker.worker_id, worker.labels.rack]
        rate.add_metric([*names, "in"], worker.bandwidth_in)
        rate.add_metric([*names, "out"], worker.bandwidth_out)
        storage.add_metric(names, worker.available_storage)
    yield from (rate, storage)
