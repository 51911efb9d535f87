"""Gate, promote and publish a judged candidate; or put the previous champion back."""

from __future__ import annotations

from typing import Any

from prefect import flow

from paceline.tasks import distribute, promote
from paceline.tasks.cancelling import cancellable
from paceline.tasks.lineage import recorded
from paceline.tasks.prepare import published_url, snapshot_reference
from paceline.tasks.run import Run


@flow(name="promote-model")
@cancellable
def promote_model(
    model_id: str,
    report: str,
    base_version: str | None = None,
    trained: str | None = None,
    snapshot_url: str | None = None,
    approver: str | None = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Decide from the recorded evaluation ``report`` (its ``report_digest``); on a pass publish the
    candidate, register it with its evidence, and make it champion. Raises GateRefused, and changes
    nothing, where the evidence is not enough.

    ``base_version``, ``trained`` (a ``training_digest``) and ``snapshot_url`` may be given; a
    report about another one is refused.
    """
    run = Run.open(state_dir, run_id)
    with recorded(run, "promote-model"):
        evaluation, result = promote.recorded_evidence(run, report)
        promote.require_same(
            evaluation,
            model_id=model_id,
            base_version=base_version,
            training_digest=trained,
            snapshot_url=snapshot_url,
        )
        base_url = published_url(run, model_id, evaluation.base_version)
        base = distribute.fetch_model_manifest(run, base_url)
        snapshot = snapshot_reference(run, evaluation.snapshot_url)
        packaged = promote.package_candidate(run, base, result, evaluation).output
        lineage = promote.lineage_of(run, base, result, snapshot, packaged["manifest_digest"])
        decision = promote.gate(run, base, evaluation, lineage)
        evidence = promote.bundle(
            run, base, result, evaluation, decision, lineage, approver, report_digest=report
        )
        promote.require_passed(run, evidence)
        published = promote.publish_candidate(run, base, result, packaged).output
        promoted = promote.promote(run, evidence, published["url"]).output
        return {
            "gate": decision.model_dump(mode="json"),
            "registry": promoted,
            "published": published,
        }
