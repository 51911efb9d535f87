"""Gate, promote and publish a judged candidate; or put the previous champion back."""

from __future__ import annotations

from typing import Annotated

from prefect.transactions import transaction

from paceline.schemas import Champion, Promoted, PublishedModel
from paceline.tasks import distribute, promote
from paceline.tasks._support import approval, sealed_records
from paceline.tasks._support.declaring import Approver, ModelId, Reference, Report, about, declared
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.package import package_candidate
from paceline.tasks.prepare import snapshot_reference
from paceline.tasks.publish import published_url

IF_GIVEN = "If given, a report about another one is refused."


@declared("promote-model", "promote a candidate of {model_id}")
def promote_model(
    model_id: ModelId,
    report: Report,
    base_version: Annotated[str | None, about("Base version", IF_GIVEN, "1")] = None,
    trained: Annotated[Reference | None, about("Training", IF_GIVEN, "job-4be1c2a09f3d")] = None,
    snapshot_url: Annotated[
        str | None, about("Data snapshot", IF_GIVEN, "s3://paceline/data/snapshots/5c1f…")
    ] = None,
    approver: Approver = None,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> Promoted:
    """Decide from the recorded evaluation ``report`` (the newest of that run or job, or the one
    with that ``report_digest``); on a pass publish the candidate, register it with its evidence,
    and make it champion. Raises GateRefused, and changes nothing, where the evidence is not enough,
    or the training passed bad data over and no review accepted that; AwaitingApproval where a
    person must approve first.

    ``base_version``, ``trained`` and ``snapshot_url`` may be given; a report about another one is
    refused. What fails after the alias has moved moves it back.
    """
    run = Run.open(state_dir, run_id)
    # An approved promotion goes on by itself, maybe while its submitter runs it again.
    with recorded(run, "promote-model"), run.lock(f"the promotion of run {run.run_id}"):
        report_digest, evaluation, result = promote.recorded_evidence(run, report)
        promote.require_same(
            evaluation,
            model_id=model_id,
            base_version=base_version,
            training_digest=trained and sealed_records.resolve(run, trained, "training"),
            snapshot_url=snapshot_url,
        )
        reviewed = approval.require_reviewed(run, evaluation.training_digest, result)
        approval.require_still_permitted(run, evaluation.training_digest, result)
        base_url = published_url(run, model_id, evaluation.base_version)
        base = distribute.fetch_model_manifest(run, base_url)
        snapshot = snapshot_reference(run, evaluation.snapshot_url)
        packaged = package_candidate(run, base, result, evaluation).output
        lineage = promote.lineage_of(run, base, result, snapshot, packaged["manifest_digest"])
        decision = promote.gate(run, base, evaluation, lineage, packaged)
        evidence = promote.bundle(
            run, base, result, evaluation, decision, lineage, approver, report_digest=report_digest
        )
        promote.require_passed(run, evidence)
        evidence = evidence.model_copy(update={"reviewed": reviewed})
        evidence = approval.require_approved(run, evidence, packaged["version"])
        promote.require_not_rolled_back(run, evidence)
        with transaction():
            published = promote.publish_candidate(run, base, result, packaged).output
            promoted = promote.promote(run, evidence, published["url"]).output
            promote.require_champion(run, evidence, promoted)
        return Promoted(
            model_id=base.model_id,
            version=published["version"],
            gate=decision,
            registry=Champion(**promoted),
            published=PublishedModel(model_id=base.model_id, **published),
        )
