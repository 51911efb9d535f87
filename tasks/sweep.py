"""Run a sweep's trials, and keep what they found where people and clients look."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from paceline.client import Client
from paceline.errors import Cancelled, PacelineError
from paceline.jobs import COLUMNS, Sweep, page_of, report_sweep, run_sweep, trial_row
from paceline.schemas import SWEEP, StageRecord, SweepShown, sweep_key
from paceline.tasks._support import artifacts, cancelling
from paceline.tasks._support.figures import record_sweep
from paceline.tasks._support.run import Run
from paceline.tasks._support.stages import stage

logger = logging.getLogger(__name__)

KEPT_TRIALS = 100  # in a record: the ledger takes 64 KiB


@stage("trials")
def run_trials(run: Run, sweep: Sweep, storage: str) -> SweepShown:
    """Run the sweep of the study in ``storage`` to its end, and return it with its best trials.

    What it has found is recorded whenever a trial ends: in the ledger (`paceline sweep report`), on
    Prefect's page, and at the end in MLflow. Raises Cancelled for a cancel in Prefect, and as
    ``run_sweep`` does.
    """
    run.registry.resume_run(run.mlflow_run)  # of a sweep that goes on
    with (
        Client.of(run.runtime) as client,
        artifacts.Progress("trials", f"{sweep.trials} trials") as page,
        cancelling.noticed() as cancelled,
    ):

        def sleep(seconds: float) -> None:
            if cancelled.wait(seconds):
                raise Cancelled("the sweep was cancelled", where=sweep.name,
                                do="Start it again: it goes on.")  # fmt: skip

        def show(found: SweepShown) -> None:
            _record(run, found)
            ended = sum(each.state not in ("running", "waiting") for each in found.trials)
            page.show(min(1.0, ended / sweep.trials))

        try:
            found = run_sweep(
                sweep, client, storage, run_id=run.run_id, on_line=logger.info, on_change=show,
                sleep=sleep, cancels=lambda: cancelling.cancelled_flow_run() is not None,
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(PacelineError):  # what went wrong first is what people read
                _record(run, report_sweep(sweep.name, storage))
            raise
        _record(run, found)
        record_sweep(run.registry, run.mlflow_run, found, client)
    names = ("trial", "state", found.metric, *COLUMNS)
    rows: list[dict[str, Any]] = [
        dict(zip(names, trial_row(each), strict=True)) for each in found.trials
    ]
    artifacts.table("sweep", rows, f"Sweep {found.name}")
    return _brief(found)


def _record(run: Run, found: SweepShown) -> None:
    """Keep what was found in the ledger and in MLflow; while one is away, the next record will."""
    output = _brief(found).model_dump(mode="json")
    record = StageRecord.of(SWEEP, sweep_key(found.name), output, run.run_id)
    try:
        run.coordinator.ledger_put(record)
        run.registry.log_artifact_text(run.mlflow_run, page_of(found), "sweep.html")
    except PacelineError as error:
        logger.warning("what the sweep has found is not recorded: %s", error)


def _brief(found: SweepShown) -> SweepShown:
    """Return ``found`` with its best trials, those that run, and as many others as a record takes.

    Trials without a value come last.
    """
    sign = -1 if found.maximize else 1
    order = {"complete": 0, "running": 1, "waiting": 1, "pruned": 2, "fail": 3}
    best = sorted(found.trials, key=lambda e: (order[e.state], sign * (e.value or 0.0)))
    kept = sorted(best[:KEPT_TRIALS], key=lambda each: each.number)
    return found.model_copy(
        update={"trials": tuple(kept), "left_out": len(found.trials) - len(kept)}
    )
