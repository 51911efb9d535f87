"""Search a training's settings: an Optuna study whose trials are jobs of the queue."""

from __future__ import annotations

from typing import Annotated, Any

from paceline.jobs import Search, Sweep, stored_run_id, studies_of
from paceline.schemas import SweepShown
from paceline.tasks._support.declaring import (
    CodeRef,
    GangResources,
    JobSettings,
    ModelId,
    Priority,
    Project,
    Purpose,
    SnapshotUrl,
    SweepBudget,
    Team,
    Version,
    about,
    declared,
)
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.sweep import run_trials

SPACE: dict[str, Any] = {
    "training.learning_rate": {"kind": "float", "low": 1e-5, "high": 1e-2, "log": True},
    "training.schedule": {"kind": "categorical", "choices": ["linear", "cosine"]},
}


@declared("sweep", "sweep {name} of {model_id} {version}")
def sweep(
    name: Annotated[str, about("Sweep", "Its name; the same sweep again goes on.", "lr")],
    model_id: ModelId,
    version: Version,
    snapshot_url: SnapshotUrl,
    search: Annotated[
        Search,
        about(
            "What to search",  # not "Search": pydantic leaves out a title that is the record's
            "The settings to search, how, and for which metric.",
            {"space": SPACE, "trials": 16, "parallel": 4, "pruner": "asha"},
        ),
    ],
    resources: GangResources = None,
    settings: JobSettings = None,
    team: Team = "",
    project: Project = "",
    purpose: Purpose = "",
    priority: Priority = 0,
    code_ref: CodeRef = "",
    budget: SweepBudget = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> SweepShown:
    """Submit the trials' jobs, follow them, prune bad ones, and report the best.

    The study is in the installation's store ([sweeps] storage of its profile): the same sweep again
    goes on with it, on whichever host the flow runs, and keeps the run id that it began with. A
    cancel in Prefect cancels the jobs of trials that run; a flow that is lost leaves them running.
    """
    given = Sweep.of(
        {"name": name, "model_id": model_id, "version": version, "snapshot_url": snapshot_url,
         "resources": resources, "settings": settings, "team": team, "project": project,
         "purpose": purpose, "priority": priority, "code_ref": code_ref, "budget": budget,
         **search.model_dump()}
    )  # fmt: skip
    run = Run.open(state_dir, run_id)
    storage = studies_of(run.runtime)
    run = Run.open(run.state_dir, stored_run_id(storage, name, given.identity) or run.run_id)
    with recorded(run, "sweep"):
        return run_trials(run, given, storage)
