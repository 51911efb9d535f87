"""From a deployment's facts to a plan: who takes part now, and what each brings.

The plan itself and the estimate are made by ``paceline.plan``; here is only what is handed to it.
"""

from __future__ import annotations

from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.membership import Membership
from paceline.coordinator.messages import Create
from paceline.coordinator.settings import Patience
from paceline.plan import PlanWorker, Prediction, make_plan, predict
from paceline.wire.plan import Plan


def estimate(event: Create, fleet: Membership, patience: Patience) -> Prediction:
    """Return how long it should take once every target is here."""
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
