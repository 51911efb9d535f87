"""From a call to a deployment's record, and from its facts to a plan: who takes part, with what.

Plans and estimates are made by ``paceline.plan``; here is only what is handed to it.
"""

from __future__ import annotations

from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.membership import Membership
from paceline.coordinator.messages import Create
from paceline.coordinator.settings import Patience
from paceline.errors import InvalidInput
from paceline.plan import PlanWorker, Prediction, make_plan, predict
from paceline.wire.plan import Plan
from paceline.wire.records import Deployment, DeploymentStatus


def new_deployment(event: Create, fleet: Membership, patience: Patience) -> Deployment:
    """Return the record of a deployment that begins; raises InvalidInput where it cannot be."""
    call, manifest = event.call, event.manifest
    if len(set(call.target_workers)) != len(call.target_workers):
        raise InvalidInput("a target worker is named twice", wanted="each target once")
    if (manifest.model_id, manifest.version) != (call.model_id, call.version):
        raise InvalidInput(
            "the source holds another model",
            got=f"{manifest.model_id} {manifest.version}",
            wanted=f"{call.model_id} {call.version}",
            where=call.source_url,
        )
    expected = _estimate(event, fleet, patience)
    return Deployment(
        deployment_id=event.deployment_id,
        model_id=call.model_id,
        version=call.version,
        status=DeploymentStatus.INIT,
        source_url=call.source_url,
        manifest_digest=manifest.digest,
        total_bytes=manifest.total_size,
        total_chunks=len(manifest.chunks),
        total_pieces=manifest.piece_count,
        target_workers=call.target_workers,
        topology=call.topology,
        epoch=0,
        max_failed=call.max_failed,
        started_at=event.at,
        predicted_seconds=expected.seconds,
        bound_seconds=expected.bound_seconds,
        flow_run_id=call.flow_run_id,
        run_id=call.run_id,
    )


def _estimate(event: Create, fleet: Membership, patience: Patience) -> Prediction:
    records = [fleet.find(worker_id) for worker_id in event.call.target_workers]
    links = [record.link_mbit for record in records if record is not None]
    return predict(
        event.call.topology,
        total_bytes=event.manifest.total_size,
        workers=len(records),
        piece_bytes=event.manifest.piece_bytes,
        link_mbit=min(links, default=patience.link_mbit),
    )


def next_plan(run: DeploymentRun, living: list[str], fleet: Membership) -> Plan:
    """Return the plan of the next epoch for ``living`` targets; raises InvalidPlan."""
    workers = []
    for worker_id in living:
        record, part = fleet.find(worker_id), run.parts[worker_id]
        assert record is not None, "a living target is registered"
        workers.append(
            PlanWorker(
                worker_id=worker_id,
                labels=record.labels,
                address=record.address,
                link_mbit=record.link_mbit,
                complete=part.receipt is not None,
                held_pieces=part.pieces_held,
            )
        )
    deployment = run.deployment
    return make_plan(
        deployment.topology,
        deployment_id=deployment.deployment_id,
        epoch=deployment.epoch + 1,
        manifest=run.manifest,
        workers=workers,
        source_url=deployment.source_url,
        seed=run.memo.seed,
        origin_spent_bytes=run.origin_bytes,
    )
