"""What a relay moved, summed up from the receipts of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.schemas import DeploymentView, Plan, WorkerProgress, digest_of


def movement(
    view: DeploymentView, progress: Sequence[WorkerProgress], plan: Plan
) -> dict[str, Any]:
    """Return the fields of a ``Moved`` that a complete deployment has: what the ledger keeps."""
    record, receipts = view.deployment, [each.receipt for each in progress if each.receipt]
    received = sum(each.received_bytes for each in receipts)
    return {
        "deployment_id": view.deployment_id,
        "workers": len(view.workers_complete),
        "workers_failed": list(view.workers_failed),
        "topology": str(record.topology),
        "slow": [each.worker_id for each in progress if each.standing == "tail"],
        "quarantined": [each.worker_id for each in progress if each.standing == "quarantined"],
        "epoch": record.epoch,
        "seconds": float(record.seconds or 0.0),
        "predicted_seconds": record.predicted_seconds,
        "bound_seconds": record.bound_seconds,
        "total_bytes": record.total_bytes,
        "origin_bytes": sum(each.origin_bytes for each in receipts),
        "received_bytes": received,
        "refetched_bytes": sum(each.refetched_bytes for each in receipts),
        "pieces_reused": sum(each.reused_pieces for each in receipts),
        "bytes_reused": sum(each.reused_bytes for each in receipts),
        # an upper bound: reused bytes are not counted by rack
        "cross_rack_bytes": min(plan.cross_rack_bytes, received),
        "plan": {
            "topology": str(plan.topology),
            "line": [each.worker_id for each in plan.workers],
            "predicted_seconds": plan.predicted_seconds,
            "bound_seconds": plan.bound_seconds,
            "cross_rack_bytes": plan.cross_rack_bytes,
            "origin_bytes": plan.origin_bytes,
            "depth": plan.depth,
        },
        "receipts_digest": digest_of([each.model_dump(mode="json") for each in receipts]),
    }
