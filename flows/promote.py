"""Gate, promote and publish a judged candidate; or put the previous champion back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.schemas import is_run_id
from paceline.tasks import approval, distribute, promote, sealed
from paceline.tasks.declaring import Approver, ModelId, declared
from paceline.tasks.lineage import recorded
from paceline.tasks.prepare import snapshot_reference
from paceline.tasks.publish import published_url
from paceline.tasks.run import Run

Expected = Annotated[
    str | None, Field(description="If given, a report about another one is refused.")
]


@declared("promote-model", "promote a candidate of {model_id}")
def promote_model(
    report: Annotated[
        str,
        Field(description="The evaluated run's id, or report_digest as evaluate-model returns it."),
    ],
    model_id: ModelId = "",
    base_version: Expected = None,
    trained: Expected = None,
    snapshot_url: Expected = None,
    approver: Approver = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Decide from the recorded evaluation ``report`` (a run's id, or its ``report_digest``); on a
    pass publish the candidate, register it with its evidence, and make it champion. Raises
    GateRefused, and changes nothing, where the evidence is not enough; AwaitingApproval where a
    person must approve first.

    ``model_id``, ``base_version``, ``trained`` (a ``training_digest``) and ``snapshot_url``
    may be given; a report about another one is refused.
    """
    run = Run.open(state_dir, run_id)
    # An approved promotion goes on by itself, maybe while its submitter runs it again.
    with recorded(run, "promote-model"), run.alone(f"the promotion of run {run.run_id}"):
        if is_run_id(report):
            report = sealed.of_run(run, report, "evaluation").digest
        evaluation, result = promote.recorded_evidence(run, report)
        promote.require_same(
            evaluation,
            model_id=model_id or None,
            base_version=base_version,
            training_digest=trained,
            snapshot_url=snapshot_url,
        )
        base_url = published_url(run, evaluation.model_id, evaluation.base_version)
        base = distribute.fetch_model_manifest(run, base_url)
        snapshot = snapshot_reference(run, evaluation.snapshot_url)
        packaged = promote.package_candidate(run, base, result, evaluation).output
        lineage = promote.lineage_of(run, base, result, snapshot, packaged["manifest_digest"])
        decision = promote.gate(run, base, evaluation, lineage)
        evidence = promote.bundle(
            run, base, result, evaluation, decision, lineage, approver, report_digest=report
        )
        promote.require_passed(run, evidence)
        evidence = approval.require_approved(run, evidence, packaged["version"])
        promote.require_not_rolled_back(run, evidence)
        published = promote.publish_candidate(run, base, result, packaged).output
        promoted = promote.promote(run, evidence, published["url"]).output
        return {
            "gate": decision.model_dump(mode="json"),
            "registry": promoted,
            "published": published,
        }
