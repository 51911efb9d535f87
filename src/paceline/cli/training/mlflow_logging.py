"""Logs a `paceline train` to an MLflow server, file or database.

It logs the same parameters, metrics, tags and artifacts as an installation's run, from rank 0's
events, under the run of the training's own run id. That run is found by its tag, so a training that
is resumed, here or on another machine, continues the same run. An unreachable server does not stop
training: figures are queued, and the next start of the same command sends those that did not arrive
(``metrics.jsonl`` has each step).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from paceline.cli.training.output import METRICS_FILE, figures_in
from paceline.errors import Cancelled, InvalidInput, PacelineError, TemporaryError
from paceline.tasks._support.figures import Figures, points_of, record_job, record_result

if TYPE_CHECKING:
    from paceline.registry import MetricPoint, Registry, RunStatus
    from paceline.schemas import RankEvent, TrainJob, TrainResult

_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "")


def location(uri: str) -> tuple[str, str]:
    """Return ``uri`` without credentials, and the credentials ("user:password" or "").

    Raises InvalidInput for an address that cannot be MLflow's.
    """
    parts = urlsplit(uri)
    if parts.scheme.partition("+")[0] not in _SCHEMES:
        raise InvalidInput(
            "not where an MLflow could be",
            got=uri.rpartition("@")[2],
            wanted="http://host:port, sqlite:///file, or a directory",
            where="--mlflow or $MLFLOW_TRACKING_URI",
        )
    if parts.scheme not in ("http", "https") or parts.username is None:
        return uri, ""
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)), f"{parts.username}:{parts.password or ''}"


class TrainingLog:
    """Logs one training; use it in a ``with``, whose end sends queued figures and closes the run.

    Opening raises errors that a retry cannot resolve (AccessDenied, InvalidInput); where a server
    does not answer, each delivery tries again. ``tell`` prints a line.
    """

    def __init__(
        self,
        uri: str,
        job: TrainJob,
        *,
        experiment: str,
        record: Path,
        tell: Callable[[str], None],
        registry: Registry | None = None,
    ) -> None:
        """``record`` is the directory of the job's metrics.jsonl."""
        from paceline.registry import Registry

        self.uri, auth = location(uri)
        self.run_id = ""  # MLflow's own id; empty until the run is open
        self._job, self._experiment, self._record, self._tell = job, experiment, record, tell
        self._registry = registry or Registry(self.uri, auth)
        self._opening = threading.Lock()
        self._is_away = False
        self._result: TrainResult | None = None
        self._figures = Figures(self._send, lambda _: None)

    def __enter__(self) -> TrainingLog:
        try:
            self._open()
            self._tell(f"  figures go to MLflow at {self.uri}, run {self.run_id}")
        except TemporaryError:
            self._away()
        # Figures would log each failed delivery; this class prints the failure once instead.
        logging.getLogger(Figures.__module__).addHandler(logging.NullHandler())
        self._figures.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._figures.__exit__(None, None, None)
        try:
            self._close(kind)
        except PacelineError as caught:
            self._tell(
                f"! MLflow at {self.uri} does not have all of this run: {caught.what}; the same "
                f"command sends what is missing, from {self._record}"
            )

    def __call__(self, event: RankEvent) -> None:
        """Queue the figures of one event; never blocks."""
        if event.event == "step" and event.rank == 0:
            self._figures.take(points_of(event), event.step / max(1, self._job.settings.steps))

    def done(self, result: TrainResult) -> None:
        """Store the result, which is logged at the end."""
        self._result = result

    def _send(self, points: Sequence[MetricPoint]) -> None:
        try:
            self._open()
            self._registry.log_metrics(self.run_id, points)
        except TemporaryError:
            self._away()
            raise
        except PacelineError as error:
            self._tell(f"! MLflow takes no figures: {error.one_line()}")
            raise

    def _away(self) -> None:
        if not self._is_away:
            self._is_away = True
            self._tell(f"! MLflow at {self.uri} does not answer: training goes on, figures wait")

    def _open(self) -> None:
        """Find or create the run and log its parameters and tags; only once."""
        with self._opening:
            if self.run_id:
                return
            job = self._job
            try:
                # Hides messages about tables.
                logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
                run = self._registry.ensure_run(
                    job.run_id, experiment=self._experiment, name=job.job_id
                )
                self._registry.resume_run(run)
                record_job(self._registry, run, job)
                self._catch_up(run)
            finally:
                _enable_loggers()
            self.run_id = run

    def _catch_up(self, run: str) -> None:
        """Send the figures of steps that metrics.jsonl has and the run lacks."""
        from paceline.registry import MetricPoint, lineage

        there = self._registry.history(run, lineage.LOSS)
        points: dict[tuple[int, str], MetricPoint] = {}
        for step, figures in figures_in(self._record / METRICS_FILE):
            for key, value in figures.items():
                if key != "attempt" and isinstance(value, int | float) and step not in there:
                    points[step, key] = MetricPoint(f"train/{key}", float(value), step)
        if points:
            self._registry.log_metrics(run, points.values())
            self._tell(f"  MLflow was sent {len({step for step, _ in points})} steps it had missed")

    def _close(self, kind: type[BaseException] | None) -> None:
        self._open()
        result = self._result
        if result is not None:
            record_result(self._registry, self.run_id, result)
        stopped = kind is not None and issubclass(kind, Cancelled | KeyboardInterrupt)
        status: RunStatus = "FINISHED" if result else "KILLED" if stopped else "FAILED"
        self._catch_up(self.run_id)  # figures dropped while the server was unreachable
        self._registry.finish_run(self.run_id, status)


def _enable_loggers() -> None:
    """Enable Paceline's loggers again, which MLflow's database migrations disable."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "paceline":
            logging.getLogger(name).disabled = False
