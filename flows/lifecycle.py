"""The whole life of a model, from a bucket to a promoted version on every node."""

from __future__ import annotations

from typing import Any

from paceline.config import with_job_settings
from paceline.flows.distribute import distribute_model
from paceline.flows.evaluate import evaluate_model
from paceline.flows.promote import promote_model
from paceline.flows.publish import prepare_inputs
from paceline.flows.train import train_model
from paceline.schemas import RunSummary
from paceline.tasks._support.artifacts import own_log
from paceline.tasks._support.declaring import (
    Approver,
    Base,
    Data,
    JobSettings,
    Project,
    Team,
    declared,
)
from paceline.tasks._support.lineage import recorded, tag_model
from paceline.tasks._support.run import Run, listening, log_stages_to
from paceline.tasks._support.scores import require_one_process
from paceline.tasks._support.summary import summarise
from paceline.tasks.evaluate import published_tasks, require_judgeable
from paceline.tasks.promote import has_champion
from paceline.tasks.publish import published_url
from paceline.tasks.train import export_changes, exporting, require_base


@declared("lifecycle", "lifecycle {model} {data}")
def run_lifecycle(
    data: Data = None,
    model: Base = None,
    approver: Approver = None,
    settings: JobSettings = None,
    team: Team = "",
    project: Project = "",
    state_dir: str | None = None,
    run_id: str | None = None,
) -> RunSummary:
    """Relay the base model to every node, train it there, judge it, promote it, roll it out.

    Every stage is idempotent: run again, it goes on from where it was, and a finished run finds
    everything done and says so. ``data`` is a directory of text files (default: the profile's);
    ``model`` is the base (default: the profile's): MODEL_ID/VERSION as published, hf://…, oci://…,
    or a directory. ``settings`` are the training's own, as of ``train_model``; ``team`` and
    ``project`` are whose job it is.
    """
    run = Run.open(state_dir, run_id)
    here: dict[str, Any] = {"state_dir": run.state_dir, "run_id": run.run_id}
    owner: dict[str, Any] = {"team": team, "project": project}
    with recorded(run, "lifecycle"), listening(log_stages_to(own_log())):
        published_tasks(run)  # refused, where they are, before any node is busy
        profile = with_job_settings(run.runtime.profile, settings or {})  # this too
        inputs = prepare_inputs(data, model, **owner, **here)
        base_url = published_url(run, inputs.model_id, inputs.version)
        named = inputs.model_id, inputs.version
        tag_model(*named)
        asked, profile = profile, exporting(run, profile, settings or {}, *named)
        settings = (settings or {}) | export_changes(run, asked, profile)
        require_judgeable(run, profile, inputs.snapshot_url, base_url)
        require_one_process(run, run.manifest(base_url))
        require_base(run, profile, *named, inputs.snapshot_url)
        # Where there is a champion the nodes go on running it until it is replaced.
        first = not has_champion(run, inputs.model_id)
        relayed = distribute_model(inputs.model_id, inputs.version, activate=first, **here)
        model_id, version = relayed.model_id, relayed.version
        trained = train_model(
            model_id,
            version,
            inputs.snapshot_url,
            settings=settings,
            evaluate_on="",
            **owner,
            **here,
        )
        report = evaluate_model(
            model_id, version, str(trained.training_digest), inputs.snapshot_url, **here
        )
        promoted = promote_model(model_id, report.report_digest, approver=approver, **here)
        rolled_out = distribute_model(
            promoted.model_id, promoted.version, stage_prefix="rollout-", **here
        )
        return summarise(run, inputs, relayed, trained, report, promoted, rolled_out)
