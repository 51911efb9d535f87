"""The whole life of a model, from a bucket to a promoted version on every node."""

from __future__ import annotations

from typing import Any

from paceline.config import with_job_settings
from paceline.flows.distribute import distribute_model
from paceline.flows.evaluate import evaluate_model
from paceline.flows.promote import promote_model
from paceline.flows.publish import prepare_inputs
from paceline.flows.train import train_model
from paceline.tasks.declaring import Approver, Base, Data, JobSettings, declared
from paceline.tasks.evaluate import published_tasks
from paceline.tasks.lineage import recorded
from paceline.tasks.promote import has_champion
from paceline.tasks.run import Run
from paceline.tasks.summary import summarise


@declared("lifecycle", "lifecycle {model} {data}")
def run_lifecycle(
    data: Data = None,
    model: Base = None,
    approver: Approver = None,
    settings: JobSettings = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Relay the base model to every node, train it there, judge it, promote it, roll it out.

    Every stage is idempotent: run again, it goes on from where it was, and a finished run finds
    everything done and says so. ``data`` is a directory of text files (default: the profile's);
    ``model`` is the base (default: the profile's): MODEL_ID/VERSION as published, hf://…, oci://…,
    or a directory. ``settings`` are the training's own, as of ``train_model``.
    """
    run = Run.open(state_dir, run_id)
    here: dict[str, Any] = {"state_dir": run.state_dir, "run_id": run.run_id}
    with recorded(run, "lifecycle"):
        published_tasks(run)  # refused, where they are, before any node is busy
        with_job_settings(run.runtime.profile, settings or {})  # this too
        inputs = prepare_inputs(data, model, **here)
        base, snapshot_url = inputs["base"], inputs["snapshot"]["url"]
        model_id, version = base["model_id"], base["version"]
        # Where there is a champion the nodes go on running it until it is replaced.
        first = not has_champion(run, model_id)
        relayed = distribute_model(model_id, version, activate=first, **here)
        trained = train_model(model_id, version, snapshot_url, settings=settings, **here)
        digest = trained["training_digest"]
        report = evaluate_model(digest, model_id, version, snapshot_url, **here)
        promoted = promote_model(report["report_digest"], model_id, approver=approver, **here)
        rolled_out = distribute_model(
            model_id, promoted["published"]["version"], stage_prefix="rollout-", **here
        )
        return summarise(run, inputs, relayed, trained, report, promoted, rolled_out)
