"""Bring a published model to every node: plan, relay, verify, activate.

Prefect sees one task a stage. The bytes travel between the nodes' agents; this process only asks
the coordinator for a deployment and watches it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from paceline.coordinator import Patience
from paceline.errors import (
    Cancelled,
    CorruptData,
    DeploymentFailed,
    NotReady,
    OriginBudgetExceeded,
    PacelineError,
    StorageFull,
    TemporaryError,
    WorkerLost,
)
from paceline.manifest import Manifest, TrustPolicy, fetch_manifest
from paceline.plan import PlanWorker, make_plan
from paceline.relay.disk.inspection import (
    active_version,
    missing_room,
    shows_version,
    verify_copy,
)
from paceline.wire import digest_of
from paceline.wire.calls import CreateDeployment, DeploymentView
from paceline.wire.events import Event, EventName
from paceline.wire.plan import Topology
from paceline.wire.records import Deployment, DeploymentStatus, WorkerProgress
from tasks import artifacts
from tasks.cancelling import cancelled_flow_run, stop_if_cancelled
from tasks.lineage import log_relay
from tasks.run import BRIEFLY_S, Run, StageResult

logger = logging.getLogger(__name__)

POLL_S = 0.2

# What of a deployment's events a person wants to read in the end.
NAMED = 32  # workers that a sentence names
NOTEWORTHY = {
    EventName.WORKER_LOST: "lost",
    EventName.WORKER_RETURNED: "returned",
    EventName.PIECE_CORRUPT: "received a corrupt piece",
    EventName.SOURCE_LOST: "closed the gap: its source was lost",
    EventName.WORKER_SLOW: "is slow, and fed at the tail",
    EventName.WORKER_QUARANTINED: "sends corrupt pieces, and is asked no more",
    EventName.DEPLOYMENT_REPLANNED: "re-planned",
}


@task(name="fetch-manifest", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=1)
def fetch_model_manifest(run: Run, url: str) -> Manifest:
    """Return the manifest published at ``url``; a page shows its sizes."""
    security = run.runtime.profile.security
    trust = TrustPolicy.of(security.trusted_publishers, required=security.require_signature)
    manifest = fetch_manifest(url, run.store, trust)
    artifacts.table(
        f"manifest {manifest.model_id}",
        [{"file": each.path, "bytes": each.size, "sha256": each.sha256} for each in manifest.files],
        f"{manifest.model_id} v{manifest.version}: {manifest.total_size} bytes in "
        f"{len(manifest.chunks)} chunks, {manifest.piece_count} pieces; {manifest.digest}",
    )
    return manifest


@task(name="start-agents", cache_policy=NO_CACHE)
def start_agents(run: Run, nodes: list[str] | None = None, deadline_s: float = 60.0) -> list[str]:
    """Return ``nodes`` (default: all) once their agents run and have registered; start what is
    missing. Raises NotFound for a node that the fleet does not have."""
    with run.fleet() as fleet:
        wanted = set(fleet.ensure_agents(None if nodes is None else list(dict.fromkeys(nodes))))
    deadline = time.monotonic() + deadline_s
    while True:
        alive = {each.worker_id for each in run.coordinator.workers() if each.alive}
        if wanted <= alive:
            return sorted(wanted, key=_natural)
        if time.monotonic() > deadline:
            raise NotReady(
                "agents did not register",
                got=f"{', '.join(sorted(wanted & alive)) or 'none'}",
                wanted=", ".join(sorted(wanted)),
                where=run.runtime.endpoints.coordinator_url,
                do=f"Read agent.log under {run.runtime.state_dir / 'nodes'}.",
            )
        time.sleep(POLL_S)


@task(name="plan", cache_policy=NO_CACHE)
def plan_relay(run: Run, manifest: Manifest, url: str, targets: list[str]) -> dict[str, Any]:
    """Say before a byte moves who would feed whom, how long it takes, and what the bound is."""
    began = time.monotonic()
    profile = run.runtime.profile
    _require_room(run, manifest, targets)
    workers = [each for each in run.coordinator.workers() if each.worker_id in targets]
    plan = make_plan(
        Topology(profile.relay.topology),
        deployment_id="preview",
        epoch=1,
        manifest=manifest,
        workers=[
            PlanWorker(
                worker_id=each.worker_id,
                labels=each.labels,
                address=each.address,
                link_mbit=each.link_mbit,
            )
            for each in workers
        ],
        source_url=url,
        seed=0,
        external_mbit=profile.cluster.external_mbit,
        oversubscription=profile.cluster.oversubscription,
    )
    shown = [each.worker_id for each in plan.workers[:NAMED]]
    more = len(plan.workers) - len(shown)
    line = " → ".join(shown) + (f" and {more} more" if more else "")
    artifacts.markdown(
        f"plan {manifest.model_id}",
        f"**{plan.topology}** over {len(plan.workers)} workers: {line}\n\n"
        f"predicted {plan.predicted_seconds:.2f} s, bound {plan.bound_seconds:.2f} s, "
        f"{plan.cross_rack_bytes} bytes cross racks, {plan.origin_bytes} bytes from the source",
        "Who feeds whom",
    )
    message = (
        f"{plan.topology} {line}: predicted {plan.predicted_seconds:.2f} s, "
        f"bound {plan.bound_seconds:.2f} s"
    )
    run.did("plan", began, message)
    return {
        "topology": str(plan.topology),
        "line": [each.worker_id for each in plan.workers],
        "predicted_seconds": plan.predicted_seconds,
        "bound_seconds": plan.bound_seconds,
        "cross_rack_bytes": plan.cross_rack_bytes,
        "origin_bytes": plan.origin_bytes,
        "depth": plan.depth,
    }


@task(name="relay", cache_policy=NO_CACHE)
def relay(
    run: Run, manifest: Manifest, url: str, targets: list[str], stage: str = "relay"
) -> StageResult:
    """Have the agents relay the model to every target, and return what moved.

    Raises DeploymentFailed, OriginBudgetExceeded, Cancelled; a coordinator that is away for a
    moment is waited for, because the data keeps flowing without it.
    """
    profile = run.runtime.profile

    def work() -> dict[str, Any]:
        page = artifacts.Progress(
            f"{stage} {manifest.model_id}", f"{stage} to {len(targets)} nodes"
        )
        stop_if_cancelled()
        seen = run.patiently(lambda: _last_event(run), BRIEFLY_S)
        call = CreateDeployment(
            model_id=manifest.model_id,
            version=manifest.version,
            source_url=url,
            target_workers=tuple(targets),
            topology=Topology(profile.relay.topology),
            max_failed=profile.relay.max_failed,
            run_id=run.run_id,
        )
        deployment_id = _begin(run, call, manifest.digest, stage)
        try:
            view = _watch(run, deployment_id, stage, page, seen)
        except BaseException:
            _cancel_with_us(run, deployment_id)
            raise
        report = run.patiently(lambda: _relay_report(run, view))
        log_relay(run, stage, report)
        return report

    return run.stage(
        stage,
        {"manifest": manifest.digest, "targets": sorted(targets), "url": url},
        work,
        still_true=lambda _output: _holds_everywhere(run, manifest, targets),
        describe=lambda o: (
            f"{o['workers']} workers in {o['seconds']:.2f} s "
            f"(bound {o['bound_seconds']:.2f} s), {o['pieces_reused']} pieces reused"
        ),
    )


@task(name="verify", cache_policy=NO_CACHE)
def verify_on_nodes(
    run: Run, manifest: Manifest, targets: list[str], stage: str = "verify"
) -> dict[str, Any]:
    """Have every node read its own copy again and check every byte against the manifest."""
    began = time.monotonic()
    with run.fleet() as fleet:
        answers = fleet.map_nodes(
            verify_copy,
            targets,
            run.state_dir,
            manifest.model_id,
            manifest.version,
            manifest.digest,
            timeout_s=run.runtime.profile.relay.deadline_s,
        )
    wrong = {node: answer for node, answer in answers.items() if isinstance(answer, BaseException)}
    away = {node: error for node, error in wrong.items() if isinstance(error, TemporaryError)}
    rows = [
        {"worker_id": node, "verified": node not in wrong, "detail": str(wrong.get(node, ""))}
        for node in targets
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
    message = f"{len(targets)} nodes verified {manifest.total_size} bytes each"
    seconds = run.did(stage, began, message)
    return {"verified": len(targets), "seconds": seconds, "manifest_digest": manifest.digest}


@task(name="activate", cache_policy=NO_CACHE)
def activate(
    run: Run,
    deployment_id: str,
    manifest: Manifest,
    targets: list[str],
    stage: str = "activate",
    deadline_s: float = 60.0,
) -> dict[str, Any]:
    """Switch every node of a complete deployment to its version, and wait until each node's own
    disk says so."""
    began = time.monotonic()
    stop_if_cancelled()
    run.patiently(lambda: run.coordinator.activate(deployment_id), BRIEFLY_S)
    deadline = began + deadline_s
    with run.fleet() as fleet:
        while True:
            answers = fleet.map_nodes(
                active_version, targets, run.state_dir, manifest.model_id, timeout_s=30.0
            )
            waiting = [node for node in targets if answers.get(node) != manifest.version]
            if not waiting:
                break
            if time.monotonic() > deadline:
                raise WorkerLost(
                    "not every node switched to the new version",
                    got=", ".join(f"{node} on {answers.get(node)}" for node in waiting),
                    wanted=f"version {manifest.version}",
                    where=f"deployment {deployment_id}",
                    do="Run the same command again: activation is safe to repeat.",
                )
            time.sleep(POLL_S)
    seconds = run.did(stage, began, f"v{manifest.version} is active on {len(targets)} nodes")
    return {"activated": targets, "seconds": seconds, "deployment_id": deployment_id}


def _require_room(run: Run, manifest: Manifest, targets: list[str]) -> None:
    """Raise StorageFull before a byte moves where a target's disk cannot hold the model."""
    with run.fleet() as fleet:
        answers = fleet.map_nodes(
            missing_room,
            targets,
            run.state_dir,
            manifest.model_id,
            manifest.version,
            manifest.digest,
            manifest.total_size,
            {file.sha256: file.size for file in manifest.files},
            timeout_s=60.0,
        )
    short = {node: lacking for node, lacking in answers.items() if isinstance(lacking, int)}
    if full := [f"{node} lacks {lacking} bytes" for node, lacking in short.items() if lacking]:
        raise StorageFull(
            "the model does not fit on every target",
            got=", ".join(full),
            wanted=f"{manifest.total_size} bytes of room on each",
            where=f"{manifest.model_id} v{manifest.version}",
            do="Free room there, or leave the node out with --to.",
        )


def _begin(run: Run, call: CreateDeployment, manifest_digest: str, stage: str) -> str:
    """Return the deployment to watch: the one that is under way for the same, else a new one.

    One that has ended is never taken up again: it failed, was cancelled, or its nodes have lost
    since what it brought. The same attempt asked for twice is one deployment.
    """

    def is_same(each: Deployment) -> bool:
        return (
            each.manifest_digest == manifest_digest
            and each.source_url == call.source_url
            and set(each.target_workers) == set(call.target_workers)
        )

    earlier = [each for each in run.patiently(run.coordinator.deployments) if is_same(each)]
    under_way = [each for each in earlier if not each.status.is_final]
    if under_way:
        logger.info("deployment %s is under way, following it", under_way[-1].deployment_id)
        return under_way[-1].deployment_id
    attempt = digest_of({"call": call.model_dump(mode="json"), "after": len(earlier)})
    key = f"{run.run_id}-{stage}-{attempt[:16]}"
    return run.patiently(lambda: run.coordinator.create(call, idempotency_key=key)).deployment_id


def _cancel_with_us(run: Run, deployment_id: str) -> None:
    """Cancel the deployment where our flow run was cancelled in Prefect; a mere interruption
    leaves it to whoever goes on. Never raises: something else ended the relay."""
    try:
        ours = run.coordinator.deployment(deployment_id).deployment.run_id == run.run_id
        if ours and cancelled_flow_run() is not None:
            run.coordinator.cancel(deployment_id)
    except Exception as error:  # noqa: BLE001 - what ended the relay is what must be told
        logger.warning("deployment %s could not be cancelled: %s", deployment_id, error)


def _watch(
    run: Run, deployment_id: str, stage: str, page: artifacts.Progress, seen: int
) -> DeploymentView:
    began = time.monotonic()
    away_since: float | None = None
    while True:
        try:
            view = run.coordinator.deployment(deployment_id)
            seen = _read_events(run, deployment_id, seen)
            away_since = None
        except PacelineError as error:
            if error.exit_code != 75:
                raise
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > 60:
                raise
            time.sleep(1.0)
            continue
        done = len(view.workers_complete)
        targets = len(view.deployment.target_workers)
        run.tell(stage, view.progress, f"{view.status}: {done} of {targets} workers complete")
        page.show(view.progress)
        if view.status == DeploymentStatus.COMPLETE:
            page.show(1.0)
            return view
        if view.status.is_final or view.status == DeploymentStatus.STALLED:
            raise _why_not(view)
        # As the coordinator counts: a large model may take longer than the profile's deadline.
        patience = Patience.of(run.runtime.profile)
        deadline_s = patience.deadline_of(view.deployment.predicted_seconds)
        if time.monotonic() - began > deadline_s:
            with contextlib.suppress(TemporaryError):  # decided, if not yet confirmed by all
                run.coordinator.cancel(deployment_id)
            raise DeploymentFailed(
                "the relay missed its deadline",
                got=f"{view.progress:.0%} after {deadline_s:.0f} s",
                wanted=f"complete (bound {view.deployment.bound_seconds:.1f} s)",
                where=f"deployment {deployment_id}",
                do="Read the agents' logs; raise relay.deadline_s if the link is that slow.",
            )
        time.sleep(POLL_S)


def _why_not(view: DeploymentView) -> PacelineError:
    failure = view.deployment.failure
    kinds: dict[DeploymentStatus, type[PacelineError]] = {
        DeploymentStatus.CANCELLED: Cancelled,
        DeploymentStatus.STALLED: OriginBudgetExceeded,
    }
    return kinds.get(view.status, DeploymentFailed)(
        f"the deployment is {view.status}",
        got=failure.message if failure else f"failed workers: {', '.join(view.workers_failed)}",
        wanted="every target complete",
        where=f"deployment {view.deployment_id}",
        do="Mend what is named, then run the same command again: it resumes from what is on disk.",
    )


def _relay_report(run: Run, view: DeploymentView) -> dict[str, Any]:
    progress = run.coordinator.workers_of(view.deployment_id)
    frame = receipts_frame(progress)
    artifacts.table(
        f"receipts {view.deployment.model_id}",
        frame.to_dict(orient="records"),
        "What each node received, reused, sent and confirmed",
    )
    plan = run.coordinator.plan(view.deployment_id)
    deployment = view.deployment
    return {
        "deployment_id": view.deployment_id,
        "workers": len(view.workers_complete),
        "workers_failed": list(view.workers_failed),
        "topology": str(deployment.topology),
        "slow": [each.worker_id for each in progress if each.standing == "tail"],
        "quarantined": [each.worker_id for each in progress if each.standing == "quarantined"],
        "epoch": deployment.epoch,
        "seconds": float(deployment.seconds or 0.0),
        "predicted_seconds": deployment.predicted_seconds,
        "bound_seconds": deployment.bound_seconds,
        "total_bytes": deployment.total_bytes,
        "origin_bytes": int(frame["origin_bytes"].sum()),
        "received_bytes": int(frame["received_bytes"].sum()),
        "refetched_bytes": int(frame["refetched_bytes"].sum()),
        "pieces_reused": int(frame["reused_pieces"].sum()),
        "bytes_reused": int(frame["reused_bytes"].sum()),
        "cross_rack_bytes": plan.cross_rack_bytes,
        "receipts_digest": digest_of(
            [each.receipt.model_dump(mode="json") for each in progress if each.receipt]
        ),
    }


def receipts_frame(progress: list[WorkerProgress]) -> pd.DataFrame:
    """Return one row a receipt; no receipts give an empty frame with the same columns."""
    columns = [
        "worker_id", "received_bytes", "origin_bytes", "reused_bytes", "reused_pieces",
        "refetched_bytes", "sent_bytes", "corrupt_pieces", "seconds", "manifest_digest",
    ]  # fmt: skip
    rows = [each.receipt.model_dump(mode="json") for each in progress if each.receipt]
    return pd.DataFrame(rows, columns=columns)


def _holds_everywhere(run: Run, manifest: Manifest, targets: list[str]) -> bool:
    """Return whether each node still shows this very model at its final path (names, not bytes)."""
    with run.fleet() as fleet:
        answers = fleet.map_nodes(
            shows_version, targets, run.state_dir, manifest.model_id, manifest.version,
            manifest.digest, timeout_s=60.0,
        )  # fmt: skip
    return all(answers.get(node) is True for node in targets)


def _last_event(run: Run) -> int:
    return run.coordinator.events(2**62, 0).last


def _read_events(run: Run, deployment_id: str, seen: int) -> int:
    news = run.coordinator.events(seen, 0)
    for event in news.events:
        if event.name in NOTEWORTHY and event.deployment_id in (None, deployment_id):
            run.note(_sentence(event))
    return news.last


def _sentence(event: Event) -> str:
    detail = ", ".join(f"{key} {value}" for key, value in event.data.items())
    who = event.worker_id or f"deployment {event.deployment_id}"
    return f"{who} {NOTEWORTHY[event.name]}" + (f" ({detail})" if detail else "")


def _natural(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, 0)
