"""Judge a trained candidate against the base, the champion and simple baselines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.schemas import Evaluated, TrainResult
from paceline.tasks import distribute
from paceline.tasks._support import sealed_records
from paceline.tasks._support.approval import snapshot_for
from paceline.tasks._support.declaring import (
    ModelId,
    SnapshotUrl,
    Training,
    Version,
    about,
    declared,
)
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.evaluate import evaluate, trained_on
from paceline.tasks.promote import champion_reference, node_copy
from paceline.tasks.publish import published_url


@declared("evaluate-model", "evaluate a candidate of {model_id} {base_version}")
def evaluate_model(
    model_id: ModelId,
    base_version: Version,
    trained: Training,
    snapshot_url: SnapshotUrl,
    ranks: Annotated[
        Annotated[int, Field(ge=1)] | None,
        about(
            "Ranks",
            "Processes that hold and score each model together; 1: one process. "
            "Default: the profile's, or as many as the model needs.",
            4,
        ),
    ] = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> Evaluated:
    """Score the weights of the training ``trained`` (its job, run or ``training_digest``) on the
    snapshot's held-out split, and record the report, which promote-model takes by the same ids or
    by its ``report_digest``."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "evaluate-model"):
        digest = sealed_records.resolve(run, trained, "training")
        return judge(run, model_id, base_version, digest, snapshot_url, ranks=ranks)


def judge(
    run: Run,
    model_id: str,
    base_version: str,
    training_digest: str,
    snapshot_url: str,
    hosts: list[str] | None = None,
    ranks: int | None = None,
) -> Evaluated:
    """Score a recorded training's weights within a flow's run, on ``hosts`` (default: every
    node)."""
    result = sealed_records.load(run, training_digest, "training", TrainResult)
    agents = distribute.start_agents.submit(run, hosts)
    base = distribute.fetch_model_manifest(run, published_url(run, model_id, base_version))
    data = trained_on(run, base, result)
    models = {
        "candidate": {"url": result.export_url, "digest": result.weights_digest},
        "base": node_copy(base),
    } | champion_reference(run, base, result.weights_digest)
    evaluated = evaluate(
        run,
        models,
        snapshot_for(run, training_digest, result, snapshot_url),
        run.trainers(agents.result()),
        base=base,
        training_digest=training_digest,
        trained_on=data,
        ranks=ranks,
    )
    sealed_records.add_references(run, "evaluation", evaluated.report_digest, result.job_id)
    return evaluated
