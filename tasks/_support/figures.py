"""A training job, and a sweep of jobs, in MLflow: parameters, figures and results. No Prefect.

The thread that follows the ranks must read every node within its lease (30 s), and a server that
hangs can block a caller for as long. So it only queues figures here: they are sent by a thread of
their own, the queue is bounded, and the oldest are lost first, with a warning.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import threading
from collections.abc import Callable, Sequence

from paceline.client import Client
from paceline.config import PriceSettings
from paceline.errors import NotFound, PacelineError, TemporaryError
from paceline.jobs import cost_of, page_of
from paceline.registry import (
    TAG_ACCELERATORS,
    TAG_SWEEP,
    MetricPoint,
    Registry,
    cost_metrics,
    lineage,
)
from paceline.schemas import (
    JobUsage,
    RankEvent,
    SweepShown,
    TrainingUsage,
    TrainJob,
    TrainResult,
    digest_of,
)

logger = logging.getLogger(__name__)

METRICS_A_REQUEST = 200  # a request to MLflow costs more than a step
METRICS_KEPT = 20_000  # while MLflow is away; older ones are lost
SEND_EVERY_S = 5.0
CLOSE_S = 45.0  # for what waits at the end: longer than one call to MLflow may take


class Figures:
    """Takes figures at once and sends them later; use it in a ``with``, whose end sends the rest.

    ``send`` gives points to MLflow; ``show`` a fraction to a page, which must not raise.
    """

    def __init__(
        self, send: Callable[[Sequence[MetricPoint]], None], show: Callable[[float], None]
    ) -> None:
        self._send, self._show = send, show
        self._changed = threading.Condition()
        self._points: list[MetricPoint] = []
        self._fraction: float | None = None
        self._lost = 0
        self._refused = ""
        self._closing = False
        context = contextvars.copy_context()  # Prefect's, of the run whose page it is
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="figures", daemon=True
        )

    def __enter__(self) -> Figures:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        with self._changed:
            left = len(self._points) + self._lost
        if left or self._refused:
            logger.warning("figures did not reach MLflow count=%d why=%s", left, self._refused)

    def take(self, points: Sequence[MetricPoint], fraction: float) -> None:
        """Leave figures to be sent, and how far training is."""
        with self._changed:
            self._fraction = fraction
            if not self._refused:
                self._points += points
            if (over := len(self._points) - METRICS_KEPT) > 0:
                del self._points[:over]
                self._lost += over
            if len(self._points) >= METRICS_A_REQUEST:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closing:
                    self._changed.wait(SEND_EVERY_S)
                closing, points, fraction = self._closing, self._points, self._fraction
                self._points, self._fraction = [], None
            if fraction is not None:
                self._show(fraction)
            if points:
                self._deliver(points)
            if closing:
                return

    def _deliver(self, points: list[MetricPoint]) -> None:
        try:
            self._send(points)
        except TemporaryError as error:  # the ranks go on, and the figures come later
            logger.warning("metrics wait for MLflow: %s", error)
            with self._changed:
                self._points = points + self._points
        except PacelineError as error:  # no ranks are stopped for it, but it is reported
            logger.warning("MLflow takes no metrics: %s", error)
            with self._changed:
                self._refused = error.one_line()
                self._lost += len(points)


def points_of(event: RankEvent) -> list[MetricPoint]:
    """Return the figures of one step."""
    return [
        MetricPoint(f"train/{key}", float(value), event.step)
        for key, value in event.data.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def record_job(registry: Registry, mlflow_run: str, job: TrainJob) -> None:
    """Log what ``job`` trains, from what, with which code and environment."""
    from paceline.training import code_version, config_digest, reproducibility

    registry.log_params(mlflow_run, lineage.training_params(job))
    registry.log_artifact_text(mlflow_run, job.model_dump_json(), lineage.JOB_FILE)
    environment = reproducibility.current_environment(job.settings.threads_per_rank)
    tags = lineage.training_tags(
        job,
        config_digest=config_digest(job),
        code_version=code_version(),
        environment_digest=digest_of(environment),
    )
    registry.log_tags(mlflow_run, tags)
    registry.log_dataset(
        mlflow_run, name=job.data.project, url=job.snapshot_url, digest=job.snapshot_digest
    )


def record_result(
    registry: Registry,
    mlflow_run: str,
    result: TrainResult,
    prices: PriceSettings = PriceSettings(),  # noqa: B008 (frozen)
    held: JobUsage | None = None,
) -> None:
    """Log how ``result``'s training ended, and what it cost; ``held`` is what its job held."""
    usage = TrainingUsage.of(result)
    if held is not None:
        shares = {"node_share": held.node_share, "spot_share": held.spot_share}
        usage = usage.model_copy(update=shares)
    points = lineage.training_metrics(result) + cost_metrics(cost_of(usage, prices))
    registry.log_metrics(mlflow_run, points)
    if result.accelerators:
        registry.log_tags(mlflow_run, {TAG_ACCELERATORS: json.dumps(result.accelerators)})
    registry.log_artifact_text(mlflow_run, result.model_dump_json(), lineage.RESULT_FILE)


def record_sweep(registry: Registry, mlflow_run: str, found: SweepShown, client: Client) -> None:
    """Log each trial's value, the settings and metrics of the best trial, and the sweep's page.

    The best trial of a sweep that went on may be another one: MLflow shows the first one's settings
    as params, and the newest as tags ``now.…`` (``Registry.log_params``).
    """
    name = f"trial/{found.metric}"
    points = [MetricPoint(name, e.value, e.number) for e in found.trials if e.value is not None]
    if (best := found.best) is not None:
        metrics = {found.metric: best.value or 0.0}
        with contextlib.suppress(NotFound):  # a job that ended long ago is deleted
            report = client.job(best.job_id).report
            metrics |= report.metrics if report is not None else {}
        points += [MetricPoint(f"best/{key}", value) for key, value in metrics.items()]
        params = {"trial": best.number, "job": best.job_id} | best.parameters
        registry.log_params(mlflow_run, {f"best.{key}": value for key, value in params.items()})
    registry.log_metrics(mlflow_run, points)
    registry.log_artifact_text(mlflow_run, page_of(found), "sweep.html")
    registry.log_tags(mlflow_run, {TAG_SWEEP: found.name, "mlflow.runName": f"sweep {found.name}"})
