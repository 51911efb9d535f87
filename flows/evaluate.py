"""Judge a trained candidate against the base, the champion and simple baselines."""

from __future__ import annotations

from typing import Any

from paceline.schemas import TrainResult, is_run_id
from paceline.tasks import distribute, sealed
from paceline.tasks.declaring import ModelId, SnapshotUrl, Training, Version, declared
from paceline.tasks.evaluate import evaluate, trained_on
from paceline.tasks.lineage import recorded
from paceline.tasks.prepare import snapshot_reference
from paceline.tasks.promote import champion_reference, node_copy
from paceline.tasks.publish import published_url
from paceline.tasks.run import Run


@declared("evaluate-model", "evaluate a candidate of {model_id} {base_version}")
def evaluate_model(
    trained: Training,
    model_id: ModelId = "",
    base_version: Version = "",
    snapshot_url: SnapshotUrl = "",
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Score the weights of the training ``trained`` (a run's id, or a ``training_digest``) on the
    snapshot's held-out split, and record the report; its ``report_digest``, or the run's id, is
    what promote-model asks for. Of a run, model, base and snapshot are those of its training."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "evaluate-model"):
        if is_run_id(trained):
            made = sealed.of_run(run, trained, "training")
            trained, model_id = made.digest, model_id or made.model_id
            base_version = base_version or made.base_version
            snapshot_url = snapshot_url or made.snapshot_url
        result = sealed.find(run, trained, "training", TrainResult)
        base = distribute.fetch_model_manifest(run, published_url(run, model_id, base_version))
        data = trained_on(run, base, result)
        nodes = [each.worker_id for each in run.trainers(distribute.start_agents(run))]
        models = {
            "candidate": {"url": result.export_url, "digest": result.weights_digest},
            "base": node_copy(base),
        } | champion_reference(run, base, result.weights_digest)
        return evaluate(
            run,
            models,
            snapshot_reference(run, snapshot_url),
            nodes,
            base=base,
            training_digest=trained,
            trained_on=data,
        ).output
