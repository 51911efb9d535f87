"""Train a distributed model on a validated snapshot."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from paceline.tasks import distribute
from paceline.tasks.cancelling import cancellable
from paceline.tasks.lineage import recorded
from paceline.tasks.prepare import published_url, snapshot_reference, validate_data
from paceline.tasks.run import Run
from paceline.tasks.train import train


@flow(name="train-model")
@cancellable
def train_model(
    model_id: str,
    version: str,
    snapshot_url: str,
    labels: Literal["true", "shuffled"] = "true",
    steps: int | None = None,
    continue_from: str | None = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Validate the snapshot, then fine-tune the version that the nodes hold on it.

    The nodes must hold the version (run distribute-model first); each rank starts from the weights
    on its own node's disk. With ``continue_from`` (the id of a finished job) they go on from its
    last checkpoint instead.
    """
    run = Run.open(state_dir, run_id)
    with recorded(run, "train-model"):
        manifest = distribute.fetch_model_manifest(run, published_url(run, model_id, version))
        snapshot = snapshot_reference(run, snapshot_url)
        validate_data(run, snapshot)
        nodes = distribute.start_agents(run)
        return train(
            run, manifest, snapshot, nodes, labels=labels, steps=steps, continue_from=continue_from
        ).output
