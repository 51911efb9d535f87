"""Train a distributed model on a validated snapshot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config import with_job_settings
from paceline.tasks import distribute
from paceline.tasks._support.declaring import JobSettings, ModelId, SnapshotUrl, Version, declared
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.prepare import snapshot_reference, validate_data
from paceline.tasks.publish import published_url
from paceline.tasks.train import train


@declared("train-model", "train {model_id} {version}")
def train_model(
    model_id: ModelId,
    version: Version,
    snapshot_url: SnapshotUrl,
    labels: Annotated[
        Literal["true", "shuffled"],
        Field(description="shuffled: a control, which has to fail in the evaluation."),
    ] = "true",
    steps: Annotated[
        int | None, Field(ge=0, description="Optimizer steps; default: the profile's.")
    ] = None,
    ranks: Annotated[
        int | None, Field(ge=1, description="Processes of the gang; default: the profile's.")
    ] = None,
    learning_rate: Annotated[
        float | None, Field(gt=0, description="At its peak; default: the profile's.")
    ] = None,
    settings: JobSettings = None,
    continue_from: Annotated[
        str | None, Field(description="Go on from the last checkpoint of this job: job-…")
    ] = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Validate the snapshot, then fine-tune the version that the nodes hold on it.

    The nodes must hold the version (run distribute-model first); each rank starts from the weights
    on its own node's disk. With ``continue_from`` (the id of a finished job) they go on from its
    last checkpoint instead, with its settings but for what is given here.

    ``settings`` are settings of the profile for this training alone, such as
    ``{"training.lora.r": 8}``; what runs on the nodes, and the gate, stay the profile's.
    """
    run = Run.open(state_dir, run_id)
    named = {"steps": steps, "ranks": ranks, "learning_rate": learning_rate}
    given = {f"training.{key}": value for key, value in named.items() if value is not None}
    given = (settings or {}) | given
    with_job_settings(run.runtime.profile, given)  # refused before anything is done
    with recorded(run, "train-model"):
        manifest = distribute.fetch_model_manifest(run, published_url(run, model_id, version))
        snapshot = snapshot_reference(run, snapshot_url)
        validate_data(run, snapshot)
        nodes = distribute.start_agents(run)
        return train(
            run, manifest, snapshot, nodes, given, labels=labels, continue_from=continue_from
        ).output
