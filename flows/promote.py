"""Gate, promote and publish a judged candidate; or put the previous champion back."""

from __future__ import annotations

from typing import Any

from prefect import flow

from paceline.wire.training import EvaluationReport, TrainResult
from tasks import distribute, promote
from tasks.cancelling import cancellable
from tasks.lineage import recorded
from tasks.prepare import published_url, snapshot_reference
from tasks.run import Run


@flow(name="promote-model")
@cancellable
def promote_model(
    model_id: str,
    base_version: str,
    trained: dict[str, Any],
    report: dict[str, Any],
    snapshot_url: str,
    approver: str | None = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Decide from ``report``; on a pass publish the candidate, register it with its evidence, and
    make it champion. Raises GateRefused, and changes nothing, where the evidence is not enough."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "promote-model"):
        result = TrainResult.model_validate(trained)
        scores = EvaluationReport.model_validate(report)
        base = distribute.fetch_model_manifest(run, published_url(run, model_id, base_version))
        snapshot = snapshot_reference(run, snapshot_url)
        packaged = promote.package_candidate(run, base, result).output
        lineage = promote.lineage_of(run, base, result, snapshot, packaged["manifest_digest"])
        decision = promote.gate(run, base, scores, lineage)
        evidence = promote.bundle(run, base, result, scores, decision, lineage, approver)
        promote.require_passed(run, evidence)
        published = promote.publish_candidate(run, base, result, packaged).output
        promoted = promote.promote(run, evidence, published["url"]).output
        return {
            "gate": decision.model_dump(mode="json"),
            "registry": promoted,
            "published": published,
        }
