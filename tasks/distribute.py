"""Bring a published model to every node: relay, verify, activate.

Prefect sees one task a stage. The bytes travel between the nodes' agents; this process only asks
the coordinator for a deployment and watches it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from prefect.runtime import flow_run

from paceline.client import movement
from paceline.cluster import by_number
from paceline.errors import CorruptData, NotFound, NotReady, StorageFull, TemporaryError, WorkerLost
from paceline.manifest import Manifest
from paceline.plan import select_workers
from paceline.registry import resolve_source
from paceline.relay.store import has_published, missing_bytes_on_node, verify_copy
from paceline.schemas import (
    Activated,
    CreateDeployment,
    DeploymentView,
    Moved,
    Topology,
    Verified,
    WorkerProgress,
)
from paceline.storage import is_remote
from paceline.tasks import publish
from paceline.tasks._support import artifacts, deployment
from paceline.tasks._support.cancelling import stop_if_cancelled
from paceline.tasks._support.lineage import log_relay
from paceline.tasks._support.run import RESTART_WAIT_S, Run
from paceline.tasks._support.stages import stage
from paceline.units import counted, size

POLL_S = 0.2
READ_BYTES_S = 100e6  # of a node's copy, at the least
SWITCH_S = 60.0  # how long the fleet may take to switch


def locate(run: Run, source_url: str) -> str:
    """Return where the model that ``source_url`` names lies: a registry's version or alias is
    resolved now, and what is at a hub or in a registry of images is imported."""
    if is_remote(source_url):
        return str(publish.import_remote(run, source_url).output["url"])
    if source_url.startswith("models:/"):
        return run.retry(lambda: resolve_source(source_url, run.runtime, run.store)[0])
    return source_url


@stage("fetch-manifest", retries=2)
def fetch_model_manifest(run: Run, url: str) -> Manifest:
    """Return the manifest published at ``url``; a page shows its sizes."""
    manifest = run.manifest(url)
    artifacts.table(
        f"manifest {manifest.model_id}",
        [{"file": each.path, "bytes": each.size, "sha256": each.sha256} for each in manifest.files],
        f"{manifest.model_id} v{manifest.version}: {size(manifest.total_size)} in "
        f"{len(manifest.chunks)} chunks, {manifest.piece_count} pieces; "
        f"manifest {manifest.digest[:12]}",
    )
    return manifest


@stage("start-agents")
def start_agents(
    run: Run,
    nodes: Sequence[str] | None = None,
    deadline_s: float = 60.0,
    *,
    selector: str | None = None,
) -> list[str]:
    """Return ``nodes``, or those that ``selector`` selects (default: all, see ``Run.nodes``), once
    their agents run and have registered; start what is missing. An agent that is resident is taken
    as it is, whether Dask reaches its node or not.

    Raises NotFound for a node that neither Dask nor the coordinator knows, InvalidInput for an
    unknown label, NotReady where there is none or agents do not register in time.
    """
    if nodes is None and selector:
        dask = run.reachable(run.retry(run.nodes, RESTART_WAIT_S))
        if dask and "=" in selector:
            start_agents.fn(run, dask, deadline_s)  # their labels are known once they registered
        nodes = _selected(run, selector, dask)
    wanted = set(run.retry(run.nodes, RESTART_WAIT_S) if nodes is None else nodes)
    if not wanted:
        raise NotReady(
            "no node is there",
            got="no worker and no agent has registered",
            where=run.runtime.endpoints.coordinator_url,
            do="Start them on the nodes (`paceline agent`, `paceline worker`).",
        )
    ours = run.reachable(sorted(wanted, key=by_number))
    if resident := wanted - set(ours):
        known = {each.worker_id for each in run.retry(run.coordinator.workers, RESTART_WAIT_S)}
        if strangers := sorted(resident - known, key=by_number):
            raise NotFound(
                "no such node",
                got=", ".join(strangers),
                wanted="a node whose worker or resident agent has registered",
                do="Start them (`paceline worker`, `paceline agent`).",
            )
    if ours:
        with run.fleet() as fleet:
            fleet.ensure_agents(ours)
    deadline = time.monotonic() + deadline_s
    while True:
        alive = {each.worker_id for each in run.coordinator.workers() if each.alive}
        if wanted <= alive:
            return sorted(wanted, key=by_number)
        if time.monotonic() > deadline:
            raise NotReady(
                "agents did not register",
                got=f"{', '.join(sorted(wanted & alive)) or 'none'}",
                wanted=", ".join(sorted(wanted)),
                where=run.runtime.endpoints.coordinator_url,
                do="Read agent.log in the node's state directory.",
            )
        time.sleep(POLL_S)


def _selected(run: Run, selector: str, dask: list[str]) -> list[str]:
    """Return the selected nodes; one of Dask's may be named before its agent has registered."""
    parts = [part for each in selector.split(";") for part in each.split(",")]
    if all("=" not in part for part in parts):
        names = [part.strip() for part in parts if part.strip()]
        if set(names) <= set(dask):
            return names
    return list(select_workers(selector, run.retry(run.coordinator.workers, RESTART_WAIT_S)))


@stage("relay")
def relay(
    run: Run,
    manifest: Manifest,
    url: str,
    targets: Sequence[str],
    stage: str = "relay",
    *,
    deployment_id: str | None = None,
    allow_older: bool = False,
) -> Moved:
    """Have the agents relay the model to every target, and return what moved.

    With ``deployment_id`` it drives that record, and no other is made. Raises DeploymentFailed,
    OriginBudgetExceeded, Cancelled; a coordinator that is away for a moment is waited for, because
    the data keeps flowing without it.
    """
    profile = run.runtime.profile

    def work() -> dict[str, Any]:
        said = f"{stage} {manifest.model_id} to {counted(len(targets), 'node')}"
        with artifacts.Progress(f"{stage} {manifest.model_id}", said) as page:
            return moved(page)

    def moved(page: artifacts.Progress) -> dict[str, Any]:
        stop_if_cancelled()
        _require_space(run, manifest, targets)
        seen = run.retry(lambda: deployment.last_event(run), RESTART_WAIT_S)
        if deployment_id is not None:
            driven = deployment.take_up(run, deployment_id, manifest).deployment_id
        else:
            call = CreateDeployment(
                model_id=manifest.model_id,
                version=manifest.version,
                source_url=url,
                target_workers=tuple(targets),
                topology=Topology(profile.relay.topology),
                max_failed=profile.relay.max_failed,
                allow_older=allow_older,
                flow_run_id=flow_run.get_id() or None,
                run_id=run.run_id,
            )
            driven = deployment.begin(run, call, manifest.digest, stage)
        view = deployment.watch(run, driven, stage, page, seen)
        report = run.retry(lambda: _relay_report(run, view))
        log_relay(run, stage, report)
        return report

    result = run.stage(
        stage,
        {"manifest": manifest.digest, "targets": sorted(targets), "url": url}
        | ({} if deployment_id is None else {"deployment": deployment_id}),
        work,
        still_true=lambda _output: holds_everywhere(run, manifest, targets),
        describe=lambda o: (
            f"{counted(o['workers'], 'worker')} in {o['seconds']:.2f} s "
            f"(bound {o['bound_seconds']:.2f} s, {size(o['total_bytes'])} each), "
            f"{o['pieces_reused']} pieces reused"
        ),
    )
    holders = [each for each in targets if each not in result.output["workers_failed"]]
    return Moved(**result.output, reused_result=bool(result.reused), holders=tuple(holders))


@stage("verify")
def verify_on_nodes(
    run: Run, manifest: Manifest, nodes: Sequence[str], stage: str = "verify", full: bool = False
) -> Verified:
    """Have every node read its own copy again and check every byte against the manifest; ``full``
    also by the SHA-256 of files and chunks.

    A node that Dask does not reach is vouched for by its resident agent, which checked every byte
    before it showed the model.
    """
    began = time.monotonic()
    targets = run.reachable(nodes)
    resident = [each for each in nodes if each not in targets]
    answers = run.map_nodes(
        verify_copy,
        targets,
        manifest.model_id,
        manifest.version,
        manifest.digest,
        full,
        timeout_s=run.runtime.profile.relay.deadline_s + manifest.total_size / READ_BYTES_S,
    )
    wrong = {node: answer for node, answer in answers.items() if isinstance(answer, BaseException)}
    away = {node: error for node, error in wrong.items() if isinstance(error, TemporaryError)}
    rows = [
        {"worker_id": node, "verified": node not in wrong, "detail": str(wrong.get(node, ""))}
        for node in targets
    ]
    rows += [
        {"worker_id": node, "verified": True, "detail": "by its resident agent, as it arrived"}
        for node in resident
    ]
    artifacts.table(f"verified {manifest.model_id}", rows, "Every byte read again on its node")
    if wrong and wrong.keys() == away.keys():
        node = next(iter(away))
        raise WorkerLost(
            f"{len(away)} of {len(targets)} nodes could not be asked",
            got=str(away[node]),
            wanted="every node reads its copy again",
            where=node,
            do="Run the same command again: what travelled stays where it is.",
        )
    if wrong:
        node, error = next((node, error) for node, error in wrong.items() if node not in away)
        raise CorruptData(
            f"{len(wrong) - len(away)} of {len(targets)} nodes hold a copy that is not the model",
            got=str(error),
            wanted=f"manifest {manifest.digest}",
            where=node,
            do=(
                "A copy with wrong bytes was set aside: run "
                f"`paceline distribute {manifest.model_id} {manifest.version}` to bring another."
            ),
        )
    message = f"{counted(len(targets), 'node')} verified {size(manifest.total_size)} each"
    seconds = run.finish(stage, began, message + (f", {len(resident)} vouched" if resident else ""))
    return Verified(
        verified=len(targets),
        vouched=len(resident),
        nodes=tuple(nodes),
        seconds=seconds,
        manifest_digest=manifest.digest,
    )


@stage("activate")
def activate(
    run: Run,
    deployment_id: str,
    manifest: Manifest,
    targets: Sequence[str],
    stage: str = "activate",
    deadline_s: float = SWITCH_S,
    *,
    allow_older: bool = False,
) -> Activated:
    """Switch every node of a complete deployment to its version, and wait until each has."""
    began = time.monotonic()
    stop_if_cancelled()
    client = run.coordinator
    run.retry(lambda: client.activate(deployment_id, allow_older=allow_older), RESTART_WAIT_S)
    client.await_switch(deployment_id, deadline_s, list(targets))
    seconds = run.finish(
        stage, began, f"{manifest.version} is active on {counted(len(targets), 'node')}"
    )
    return Activated(activated=tuple(targets), seconds=seconds, deployment_id=deployment_id)


def _require_space(run: Run, manifest: Manifest, targets: Sequence[str]) -> None:
    """Raise StorageFull before a byte moves where a target's disk cannot hold the model; a resident
    agent reports that itself."""
    answers = run.map_nodes(
        missing_bytes_on_node,
        run.reachable(targets),
        manifest.digest,
        [replace(file, pieces=()) for file in manifest.files],
        timeout_s=60.0,
    )
    short = {node: lacking for node, lacking in answers.items() if isinstance(lacking, int)}
    if full := [f"{node} lacks {lacking} bytes" for node, lacking in short.items() if lacking]:
        raise StorageFull(
            "the model does not fit on every target",
            got=", ".join(full),
            wanted=f"{manifest.total_size} free bytes on each",
            where=f"{manifest.model_id} v{manifest.version}",
            do="Free space there, or leave the node out with --to.",
        )


def _relay_report(run: Run, view: DeploymentView) -> dict[str, Any]:
    progress = run.coordinator.workers_of(view.deployment_id)
    frame = receipts_frame(progress)
    artifacts.table(
        f"receipts {view.deployment.model_id}",
        frame.to_dict(orient="records"),
        "What each node received, reused, sent and confirmed",
    )
    return movement(view, progress, run.coordinator.plan(view.deployment_id))


def receipts_frame(progress: list[WorkerProgress]) -> pd.DataFrame:
    """Return one row a receipt; no receipts give an empty frame with the same columns."""
    columns = [
        "worker_id", "received_bytes", "origin_bytes", "reused_bytes", "reused_pieces",
        "refetched_bytes", "sent_bytes", "corrupt_pieces", "seconds", "manifest_digest",
    ]  # fmt: skip
    rows = [each.receipt.model_dump(mode="json") for each in progress if each.receipt]
    return pd.DataFrame(rows, columns=columns)


def holds_everywhere(run: Run, manifest: Manifest, targets: Sequence[str]) -> bool:
    """Return whether each node still shows this very model at its final path (names, not bytes).

    A resident agent is asked by way of another deployment, which moves nothing where all is there.
    """
    if run.reachable(targets) != list(targets):
        return False
    answers = run.map_nodes(
        has_published,
        list(targets),
        manifest.model_id,
        manifest.version,
        manifest.digest,
        timeout_s=60.0,
    )
    return all(answers.get(node) is True for node in targets)
