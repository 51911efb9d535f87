"""Publish a directory of model files, or the demo's own inputs, to the object store."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.storage import is_remote
from paceline.tasks._support.declaring import Base, Data, ModelId, Version, declared
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.prepare import build_data_snapshot, publish_base_model, reading_for
from paceline.tasks.publish import import_remote, publish_directory, publish_given_base


@declared("publish-model", "publish {model_id} {version} {directory}")
def publish_model(
    directory: Annotated[
        str, Field(description="A directory on the flows' machine; or hf://…, oci://…")
    ],
    model_id: ModelId = "",
    version: Version = "",
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


@declared("build-snapshot", "snapshot of {data}")
def build_snapshot(
    data: Data = None,
    reading: Annotated[
        dict[str, Any] | None,
        Field(
            description="Other than the profile's [data]: format, text_field, tokenizer, purpose…"
        ),
    ] = None,
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


@declared("prepare-inputs", "prepare the inputs {model} {data}")
def prepare_inputs(
    data: Data = None,
    model: Base = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Publish the base ``model`` and build the data snapshot from ``data`` with its tokenizer; or,
    where the profile names no base either, train a new one on the snapshot and publish it."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "prepare-inputs"):
        if named := model or run.runtime.profile.model.base:
            base = publish_given_base(run, named).output
            snapshot = build_data_snapshot(run, data, reading_for(run, base)).output
        else:
            snapshot = build_data_snapshot(run, data).output
            base = publish_base_model(run, snapshot).output
        return {"snapshot": snapshot, "base": base}
