"""Bring one published version of a model to every node, verified, and switch to it when asked."""

from __future__ import annotations

from typing import Annotated

from paceline.schemas import Distributed, Verified
from paceline.tasks import distribute as stages
from paceline.tasks._support.declaring import (
    AnyModelId,
    AnyVersion,
    ModelId,
    Version,
    about,
    declared,
)
from paceline.tasks._support.lineage import recorded, tag_model
from paceline.tasks._support.run import Run
from paceline.tasks.publish import published_url


@declared("distribute-model", "distribute {model_id} {version} {source_url}")
def distribute_model(
    model_id: AnyModelId = "",
    version: AnyVersion = "",
    source_url: Annotated[
        str | None,
        about(
            "Source",
            "Instead of a published version: s3://…, models:/name@alias, hf://org/name@revision "
            "or oci://…",
            "models:/tiny@champion",
            "hf://org/name@main",
        ),
    ] = None,
    target_workers: Annotated[
        list[str] | None, about("Nodes", "These nodes; default: every node.", ["node-0", "node-1"])
    ] = None,
    activate: Annotated[
        bool, about("Activate", "Switch each node to it once it is verified everywhere.")
    ] = True,
    stage_prefix: str = "",
    state_dir: str | None = None,
    run_id: str | None = None,
    deployment_id: str | None = None,
    allow_older: Annotated[
        bool, about("Allow older", "Also where it is older than what is active.")
    ] = False,
    selector: Annotated[
        str | None, about("Selector", "Nodes by label or by name.", "rack=r1,pool=a100")
    ] = None,
    manifest_digest: Annotated[
        str | None, about("Digest", "SHA-256 that the manifest must have.", "5c1f…")
    ] = None,
) -> Distributed:
    """Fetch the manifest, relay to ``target_workers`` or those that ``selector`` selects (default:
    every node), verify on every node, and activate. Run twice, it moves nothing twice.

    ``source_url`` is s3://bucket/prefix, models:/name@alias, hf://org/name@revision or
    oci://host/repository:tag; without one it is where ``version`` of ``model_id`` was published.

    The coordinator starts it with the ``deployment_id`` of the record that it is to drive; without
    one it makes its own. ``allow_older`` lets it bring what is older than the active version.
    """
    run = Run.open(state_dir, run_id)
    with recorded(run, "distribute-model"):
        agents = stages.start_agents.submit(run, target_workers or None, selector=selector)
        url = stages.locate(run, source_url or published_url(run, model_id, version))
        manifest = stages.fetch_model_manifest(run, url)
        manifest.require_digest(manifest_digest, url)
        tag_model(manifest.model_id, manifest.version)
        targets = agents.result()
        relayed = stages.relay(
            run,
            manifest,
            url,
            targets,
            stage=f"{stage_prefix}relay",
            deployment_id=deployment_id,
            allow_older=allow_older or not activate,  # held and not active: it changes nothing
        )
        verified = stages.verify_on_nodes(
            run, manifest, relayed.holders, stage=f"{stage_prefix}verify"
        )
        activated = (
            stages.activate(
                run,
                relayed.deployment_id,
                manifest,
                verified.nodes,
                stage=f"{stage_prefix}activate",
                allow_older=allow_older,
            )
            if activate
            else None
        )
        return Distributed(
            model_id=manifest.model_id,
            version=manifest.version,
            manifest_digest=manifest.digest,
            url=url,
            targets=tuple(targets),
            plan=relayed.plan,
            relay=relayed,
            verify=verified,
            activate=activated,
        )


@declared("verify-model", "verify {model_id} {version}")
def verify_model(
    model_id: ModelId,
    version: Version,
    full: Annotated[bool, about("Full", "Also by the SHA-256 of files and chunks.")] = False,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> Verified:
    """Have every node read its copy again and check every byte against the published manifest;
    ``full`` also by the SHA-256 of files and chunks."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "verify-model"):
        manifest = stages.fetch_model_manifest(run, published_url(run, model_id, version))
        return stages.verify_on_nodes(run, manifest, stages.start_agents(run), full=full)
