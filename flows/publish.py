"""Publish a directory of model files, or the demo's own inputs, to the object store."""

from __future__ import annotations

from typing import Any

from prefect import flow

from paceline.storage import is_remote
from paceline.tasks.cancelling import cancellable
from paceline.tasks.lineage import recorded
from paceline.tasks.prepare import (
    build_data_snapshot,
    import_remote,
    publish_base_model,
    publish_directory,
)
from paceline.tasks.run import Run


@flow(name="publish-model")
@cancellable
def publish_model(
    directory: str,
    model_id: str = "",
    version: str = "",
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Digest ``directory`` and upload it with its manifest as ``version`` of ``model_id``; or
    import what hf://org/name@revision or oci://host/repository:tag names, under its own name."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "publish-model"):
        if is_remote(directory):
            return import_remote(run, directory).output
        return publish_directory(run, directory, model_id, version).output


@flow(name="build-snapshot")
@cancellable
def build_snapshot(
    data: str | None = None,
    reading: dict[str, Any] | None = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Make an immutable snapshot of the samples at ``data`` (a directory, a file, s3://…).

    ``reading`` changes the profile's data settings: format (text, jsonl, parquet, tar), text_field,
    key_field, features, tokenizer, purpose, project, max_bytes, shard_bytes…
    """
    run = Run.open(state_dir, run_id)
    with recorded(run, "build-snapshot"):
        return build_data_snapshot(run, data, reading).output


@flow(name="prepare-inputs")
@cancellable
def prepare_inputs(
    data: str | None = None, state_dir: str | None = None, run_id: str | None = None
) -> dict[str, Any]:
    """Build the data snapshot from ``data`` and publish a base model trained on it."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "prepare-inputs"):
        snapshot = build_data_snapshot(run, data).output
        base = publish_base_model(run, snapshot).output
        return {"snapshot": snapshot, "base": base}
