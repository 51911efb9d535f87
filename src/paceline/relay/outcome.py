"""What one call of ``distribute`` came to: its workers' last beats as one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from paceline.manifest import Manifest
from paceline.relay.fuse import Fuse
from paceline.relay.request import Request
from paceline.wire.calls import DeploymentBeat
from paceline.wire.local import Distribution
from paceline.wire.plan import Plan
from paceline.wire.records import Failure


def outcome(
    request: Request,
    manifest: Manifest,
    url: str,
    plan: Plan,
    beats: Mapping[str, DeploymentBeat],
    *,
    racks: Mapping[str, str],
    failed: Mapping[str, Failure],
    fuse: Fuse,
    seconds: float,
) -> Distribution:
    """Return the record of a deployment whose workers have all ended, after ``plan``, its last."""
    total = manifest.total_size
    receipts = tuple(beat.receipt for beat in beats.values() if beat.receipt)
    crossing = {
        (edge.source, edge.reader): edge.bytes
        for beat in beats.values()
        for edge in beat.edges
        if edge.source in racks
        and edge.reader in racks
        and racks[edge.source] != racks[edge.reader]
        and edge.bytes
    }
    corrupt: Counter[str] = Counter()
    for beat in beats.values():
        for edge in beat.edges:
            corrupt[edge.source] += edge.corrupt
    bound = total / (request.link_mbit * 1e6 / 8) if request.link_mbit else None
    origin = sum(fuse.read().values())  # by those too who failed
    return Distribution(
        deployment_id=fuse.deployment_id,
        model_id=manifest.model_id,
        version=manifest.version,
        manifest_digest=manifest.digest,
        source_url=url,
        topology=plan.topology,
        epochs=plan.epoch,
        workers=len(racks),
        workers_complete=len(receipts),
        workers_failed=dict(failed),
        racks=len(set(racks.values())),
        total_bytes=total,
        seconds=seconds,
        predicted_seconds=plan.predicted_seconds if bound else None,
        bound_seconds=bound,
        ratio=seconds / bound if bound else None,
        origin_bytes=origin,
        origin_before_bytes=fuse.before_bytes,
        origin_ratio=origin / total,
        received_bytes=sum(receipt.received_bytes for receipt in receipts),
        reused_bytes=sum(receipt.reused_bytes for receipt in receipts),
        refetched_bytes=sum(receipt.refetched_bytes for receipt in receipts),
        corrupt_from=dict(+corrupt),
        cross_rack_bytes=sum(crossing.values()),
        activated=request.activate,
        receipts=receipts,
    )
