"""Publish a directory of model files, or the demo's own inputs, to the object store."""

from __future__ import annotations

from typing import Annotated

from paceline.schemas import Inputs, PublishedModel, SnapshotMade
from paceline.storage import is_remote
from paceline.tasks._support.declaring import (
    AnyModelId,
    AnyVersion,
    Base,
    Data,
    Project,
    Reading,
    Team,
    about,
    declared,
)
from paceline.tasks._support.lineage import recorded, tag_model
from paceline.tasks._support.run import Run
from paceline.tasks.prepare import (
    build_data_snapshot,
    permitted_snapshot,
    publish_base_model,
    reading_for,
)
from paceline.tasks.publish import import_remote, publish_directory, publish_given_base


@declared("publish-model", "publish {model_id} {version} {directory}")
def publish_model(
    directory: Annotated[
        str,
        about("Directory", "A directory on the flows' machine; or hf://…, oci://…", "/models/tiny"),
    ],
    model_id: AnyModelId = "",
    version: AnyVersion = "",
    state_dir: str | None = None,
    run_id: str | None = None,
) -> PublishedModel:
    """Digest ``directory`` and upload it with its manifest as ``version`` of ``model_id``; or
    import what hf://org/name@revision or oci://host/repository:tag names, under its own name."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "publish-model"):
        if is_remote(directory):
            imported = PublishedModel(**import_remote(run, directory).output)
            tag_model(imported.model_id, imported.version)
            return imported
        return PublishedModel(**publish_directory(run, directory, model_id, version).output)


@declared("build-snapshot", "snapshot {data}")
def build_snapshot(
    data: Data = None,
    reading: Annotated[
        Reading | None, about("Reading", "How the samples are read; default: the profile's.")
    ] = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> SnapshotMade:
    """Make an immutable snapshot of the samples at ``data`` (a directory, a file, s3://…)."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "build-snapshot"):
        given = reading.given() if reading else None
        return SnapshotMade(**build_data_snapshot(run, data, given).output)


@declared("prepare-inputs", "prepare the inputs {model} {data}")
def prepare_inputs(
    data: Data = None,
    model: Base = None,
    team: Team = "",
    project: Project = "",
    state_dir: str | None = None,
    run_id: str | None = None,
) -> Inputs:
    """Publish the base ``model`` and build the data snapshot from ``data`` with its tokenizer; or,
    where the profile names no base either, publish a new, untrained one for the snapshot.

    Raises AccessDenied or InvalidSnapshot where ``team`` and ``project`` may not use the snapshot
    for the profile's purpose."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "prepare-inputs"):
        named = model or run.runtime.profile.model.base
        base = publish_given_base(run, named).output if named else None
        snapshot = build_data_snapshot(run, data, base and reading_for(run, base)).output
        users = [(team or "default", project)]
        permitted_snapshot(run, snapshot["url"], users=users)  # before a node is busy
        base = base or publish_base_model(run, snapshot).output
        tag_model(base["model_id"], base["version"])
        return Inputs(
            snapshot=SnapshotMade(**snapshot),
            base=PublishedModel(**base),
            model_id=base["model_id"],
            version=base["version"],
            snapshot_url=snapshot["url"],
        )
