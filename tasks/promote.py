"""From a judged candidate to the champion: package, gate, publish, promote.

The order keeps I10: the digest that the gate saw is bound as evidence, the bytes are published
under exactly that digest, and only then does the registry's alias move: a champion always has its
bytes (docs/decisions/0021-registry-and-gate.md).
"""

from __future__ import annotations

import time
from typing import Any

from prefect.transactions import Transaction, get_transaction

from paceline.data import load_snapshot
from paceline.errors import Conflict, CorruptData, GateRefused, NotFound
from paceline.evaluation import EXAM, EXCEPTED, decide
from paceline.manifest import (
    Manifest,
    build_manifest,
    fetch_manifest,
    publish_model,
)
from paceline.models import CARD_FILE
from paceline.registry import MLMODEL_FILE, gate_metrics, mlmodel, resolve_source
from paceline.schemas import (
    OF_TEAM,
    SUBMITTERS,
    Evaluation,
    Evidence,
    GateDecision,
    Restored,
    TrainResult,
    canonical_json,
    digest_of,
)
from paceline.tasks._support import artifacts, sealed_records
from paceline.tasks._support.cancelling import stop_if_cancelled
from paceline.tasks._support.lineage import code_version
from paceline.tasks._support.run import Run, StageResult
from paceline.tasks._support.stages import stage
from paceline.tasks.package import candidate_dir
from paceline.tasks.prepare import exam_of
from paceline.tasks.publish import publish_progress, published_url


def recorded_evidence(run: Run, report: str) -> tuple[str, Evaluation, TrainResult]:
    """Return the digest of the evaluation that ``report`` names (``sealed_records.resolve``), the
    evaluation and the training that it judged, as they were recorded; raises GateRefused where
    either is missing or was not made by this installation."""
    try:
        digest = sealed_records.resolve(run, report, "evaluation")
        evaluation = sealed_records.load(run, digest, "evaluation", Evaluation)
        training = sealed_records.load(run, evaluation.training_digest, "training", TrainResult)
    except (NotFound, CorruptData) as error:
        raise GateRefused(
            "the candidate was not promoted: its evidence was not recorded here",
            got=error.one_line(),
            wanted="an evaluation of this installation: its run, its job or its report_digest",
            where=f"run {run.run_id}",
            do=error.do,
        ) from error
    return digest, evaluation, training


def require_same(evaluation: Evaluation, **wanted: str | None) -> None:
    """Raise GateRefused where ``evaluation`` is about another thing than ``wanted`` names."""
    for name, value in wanted.items():
        got = getattr(evaluation, name)
        if value is not None and value.rstrip("/") != got:
            raise GateRefused(
                f"the report is about another {name}",
                got=got,
                wanted=value,
                do="Evaluate this candidate, and promote it with that report.",
            )


@stage("gate", retries=2)
def gate(
    run: Run,
    base: Manifest,
    evaluation: Evaluation,
    lineage: dict[str, str | None],
    packaged: dict[str, Any],
) -> GateDecision:
    """Decide from the evidence alone whether the candidate, as ``packaged``, may become champion.

    Where there is a champion, a report without its score is missing evidence; so is one with the
    score of a champion before it.
    """
    began = time.monotonic()
    report = evaluation.report
    candidate = report.score("candidate")
    weights = candidate.weights_digest if candidate else None
    now = champion_reference(run, base, weights).get("champion")
    champion = None if now is None else "champion"
    if now is not None and evaluation.models.get("champion") != now["digest"]:
        champion = f"champion of manifest {now['digest'][:12]}"  # the report has no such score
    is_first = now is None and not has_champion(run, base.model_id)  # else the candidate is it
    policy = run.runtime.profile.gate.policy(base.model_id)
    decision = decide(
        report,
        policy,
        champion=champion,
        lineage=lineage,
        judged_on=evaluation.snapshot_url,
        judges={} if now is None else _judges(run, base.model_id, report.snapshot_digest),
        of_profile=_of_profile(run, evaluation) if is_first else None,
        packaged_bytes=packaged["bytes"],
        packaged_file_bytes=packaged["file_bytes"],
    )
    text = canonical_json(policy).decode()
    run.registry.log_artifact_text(run.mlflow_run, text, f"policy/{decision.policy_digest}.json")
    artifacts.table(
        "gate", [each.model_dump(mode="json") for each in decision.checks], "Why, check by check"
    )
    run.registry.log_metrics(run.mlflow_run, gate_metrics(decision))
    if excepted := policy.except_baselines:
        unbeaten = [each.name for each in decision.checks if each.wanted == EXCEPTED]
        run.warn(
            f"the policy excepts {', '.join(excepted)} (gate.except_baselines); the candidate is "
            + (f"not {', not '.join(unbeaten)}" if unbeaten else "better than each of them")
        )
    own = f"{base.model_id}'s own" if base.model_id in run.runtime.profile.gate.models else "common"
    message = "passed" if decision.passed else "refused: " + "; ".join(decision.reasons)
    run.finish("gate", began, f"{message} ({own} policy {str(decision.policy_digest)[:12]})")
    return decision


def _judges(run: Run, model_id: str, asked: str) -> dict[str, str]:
    """Return the digests of snapshots that may judge where the policy names none, with URLs where
    they are known: the one that judged the champion, and ``asked`` where this installation built
    both of one source, with the same settings of what is held out."""
    champion = run.registry.champion(model_id)
    assert champion is not None and champion.evidence is not None  # champion() reads it
    before = champion.evidence.snapshot_digest
    exam = sealed_records.find_reference(run, "exam", before)
    same = exam is not None and sealed_records.find_reference(run, "exam", asked) == exam
    evaluated = sealed_records.load_or_none(
        run, champion.evidence.report_digest, "evaluation", Evaluation
    )
    found = {before: evaluated.snapshot_url if evaluated else ""}
    if same:
        found.setdefault(asked, "")
    return found


def _of_profile(run: Run, evaluation: Evaluation) -> bool | None:
    """Return whether this installation built the snapshot that judged of the profile's own source;
    None where a first champion may be judged on any: no token of a team submitted the run."""
    key = digest_of(run.run_id)
    record = run.retry(lambda: run.coordinator.ledger_get(SUBMITTERS, key))
    if record is None or not record.output.get(OF_TEAM):
        return None
    data, judged = run.runtime.profile.data, load_snapshot(evaluation.snapshot_url, run.store)
    return sealed_records.find_reference(run, "exam", judged.digest) == exam_of(
        data.source, data, judged
    )


def bundle(
    run: Run,
    base: Manifest,
    trained: TrainResult,
    evaluation: Evaluation,
    decision: GateDecision,
    lineage: dict[str, str | None],
    approver: str | None,
    *,
    report_digest: str,
) -> Evidence:
    """Return the evidence that is bound to the version, whatever the gate said."""
    return Evidence(
        run_id=run.run_id,
        model_id=base.model_id,
        manifest_digest=str(lineage["manifest_digest"]),
        weights_digest=trained.weights_digest,
        base_version=base.version,
        base_manifest_digest=base.digest,
        snapshot_digest=evaluation.report.snapshot_digest,
        job_id=trained.job_id,
        training_config_digest=trained.config_digest,
        code_version=str(lineage["code_version"]),
        evaluation=evaluation.report,
        gate=decision,
        approver=approver,
        report_digest=report_digest,
        training_digest=evaluation.training_digest,
        training_snapshot_url=trained.snapshot_url,
        training_snapshot_digest=trained.snapshot_digest,
    )


@stage("promote")
def promote(run: Run, evidence: Evidence, source_url: str) -> StageResult:
    """Register the published candidate with its evidence and make it champion."""

    def work() -> dict[str, Any]:
        require_judged(evidence, fetch_manifest(source_url, run.store))
        described = mlmodel(evidence.model_id, source_url, evidence.manifest_digest)
        run.store.put_bytes(f"{source_url}/{MLMODEL_FILE}", described)
        with run.lock(_aliases_of(evidence.model_id)):
            version = run.registry.register_candidate(
                evidence.model_id, source_url, evidence, run.mlflow_run
            )
            promotion = run.registry.promote(
                evidence.model_id, version, evidence, guard=stop_if_cancelled
            )
        return {
            "model_id": evidence.model_id,
            "version": source_url.rpartition("/")[2],
            "registry_version": promotion.version,
            "alias": promotion.alias,
            "previous": promotion.previous_version,
            "evidence_digest": promotion.evidence_digest,
            "url": run.registry.model_url(evidence.model_id, promotion.version),
        }

    result = run.stage(
        "promote",
        {"manifest": evidence.manifest_digest, "report": evidence.weights_digest},
        work,
        still_true=lambda o: _is_champion(run, evidence.model_id, str(o["registry_version"])),
        describe=lambda o: (
            f"{o['model_id']} v{source_url.rpartition('/')[2]} is {o['alias']} "
            f"(version {o['registry_version']} in MLflow)"
        ),
    )
    artifacts.link("registered model", str(result.output["url"]), "The champion in MLflow")
    if not result.reused and (active := get_transaction()) is not None:
        # What is stored is copied, which a run is not.
        named = result.output["model_id"], result.output["registry_version"]
        active.set("promoted", (run.state_dir, run.run_id, *named))
    return result


@promote.on_rollback
def _move_back(active: Transaction) -> None:
    """Undo the promotion of a transaction that failed after it: the champion is the one before."""
    if (done := active.get("promoted", None)) is not None:
        state_dir, run_id, model_id, version = done
        run = Run.open(state_dir, run_id)
        with run.lock(_aliases_of(model_id)):
            run.registry.retract(model_id, version, by_person=False)
        run.warn(f"the promotion of {model_id}, version {version} in MLflow, was undone")


def require_champion(run: Run, evidence: Evidence, promoted: dict[str, Any]) -> None:
    """Raise Conflict unless the registry's champion leads, as a node would resolve it, to the bytes
    that were judged; Cancelled where the run was cancelled meanwhile."""
    stop_if_cancelled()
    address = f"models:/{evidence.model_id}@{promoted['alias']}"
    found = run.retry(lambda: resolve_source(address, run.runtime, run.store)[1])
    if found.digest != evidence.manifest_digest:
        raise Conflict(
            "the champion leads to other bytes than the gate judged",
            got=found.digest,
            wanted=evidence.manifest_digest,
            where=address,
            do="Look at who else moves the aliases, then promote again.",
        )


@stage("publish", retries=2)
def publish_candidate(
    run: Run, base: Manifest, trained: TrainResult, packaged: dict[str, Any]
) -> StageResult:
    """Upload the candidate under its version; the manifest must be the one that was judged."""
    url = published_url(run, base.model_id, packaged["version"])

    def work() -> dict[str, Any]:
        directory = candidate_dir(run, trained)
        (directory / CARD_FILE).write_text(packaged["card"])
        name: dict[str, Any] = {
            "model_id": base.model_id,
            "version": packaged["version"],
            "link_mbit": run.runtime.profile.cluster.link_mbit,
            # as judged: another link since then must not cut the same bytes another way
            "piece_bytes": packaged["piece_bytes"],
            "chunk_bytes": packaged["chunk_bytes"],
            "piece_hash": packaged.get("piece_hash", "sha256"),
        }
        # before the first byte is uploaded: a published version never changes
        if (got := build_manifest(directory, **name).digest) != packaged["manifest_digest"]:
            raise CorruptData(
                "the candidate changed after it was judged",
                got=got,
                wanted=packaged["manifest_digest"],
                where=directory,
                do="Delete that directory and run the same command again.",
            )
        # a candidate that trained for long may be judged after a later one was published
        with publish_progress(run, f"{base.model_id} {packaged['version']}") as progress:
            manifest = publish_model(
                directory, url, store=run.store, allow_older=True, **name, **progress
            )
        return {"url": url, "manifest_digest": manifest.digest, "version": packaged["version"]}

    return run.stage(
        "publish",
        {"manifest": packaged["manifest_digest"], "url": url},
        work,
        still_true=lambda o: (
            run.store.exists(f"{url}/manifest.json")
            and fetch_manifest(url, run.store).digest == o["manifest_digest"]
        ),
        describe=lambda o: f"{o['url']}",
    )


def require_passed(run: Run, evidence: Evidence) -> None:
    """Raise GateRefused, with every reason, unless the gate passed."""
    if not evidence.gate.passed:
        failed = {each.name for each in evidence.gate.checks if not each.passed}
        do = (
            "Judge it on that snapshot (evaluate --snapshot)"
            if failed == {EXAM}
            else "Train longer or on better data"
        )
        raise GateRefused(
            "the candidate was not promoted",
            got="; ".join(evidence.gate.reasons),
            wanted="every check of the gate",
            where=f"{evidence.model_id}, run {run.run_id}",
            do=f"{do}; the champion stays what it was.",
        )


def require_not_rolled_back(run: Run, evidence: Evidence) -> None:
    """Raise GateRefused for what an operator rolled back: a schedule must not undo that. An
    approver may."""
    back = run.registry.was_rolled_back(evidence.model_id, evidence.manifest_digest)
    if back and evidence.approver is None:
        raise GateRefused(
            "the candidate was champion before and was rolled back",
            got="nobody approves it again",
            wanted="an approver",
            where=f"{evidence.model_id}, run {run.run_id}",
            do="Run it with --approver NAME to promote it again.",
        )


def require_judged(evidence: Evidence, published: Manifest) -> None:
    """Raise GateRefused unless ``published`` is the manifest of exactly the weights that were
    judged, whatever the ledger says of the stages between (I10)."""
    for what, got, wanted in (
        ("manifest", published.digest, evidence.manifest_digest),
        ("set of weights", sealed_records.weights_of(published), evidence.weights_digest),
    ):
        if got != wanted:
            raise GateRefused(
                f"the gate judged another {what} than what is published",
                got=got,
                wanted=wanted,
                where=f"{published.model_id} {published.version}",
                do="Run the promotion again under a new run; look at who writes the ledger.",
            )


def has_champion(run: Run, model_id: str) -> bool:
    """Return whether a version of ``model_id`` is champion; then nodes run that, not its base."""
    return run.registry.champion(model_id) is not None


def champion_reference(
    run: Run, base: Manifest, candidate_weights: str | None
) -> dict[str, dict[str, str]]:
    """Return the champion's weights as an evaluation input; nothing where there is none yet, or
    where the candidate is the champion (a finished run that is run again)."""
    champion = run.registry.champion(base.model_id)
    if champion is None:
        return {}
    if champion.evidence and champion.evidence.weights_digest == candidate_weights:
        return {}
    return {"champion": {"url": champion.source_url, "digest": champion.manifest_digest}}


def node_copy(manifest: Manifest) -> dict[str, str]:
    """Return the copy that the evaluating node holds on its own disk as an evaluation input."""
    return {"url": f"node:{manifest.model_id}/{manifest.version}", "digest": manifest.digest}


@stage("restore-previous-champion")
def restore_previous(run: Run, model_id: str) -> Restored:
    """Put the champion before this one back; say which published version the nodes should run.

    The first champion has none before it: it steps down, the model has no champion, and the nodes
    go back to the base that it was trained from.
    """
    with run.lock(_aliases_of(model_id)):
        return _restore(run, model_id)


def _restore(run: Run, model_id: str) -> Restored:
    began = time.monotonic()
    champion = run.registry.champion(model_id)
    if champion is None:
        raise NotFound(
            "there is no champion to roll back",
            got=f"no alias champion on {model_id}",
            where=run.runtime.endpoints.mlflow_url,
            do="Promote a version first.",
        )
    if run.registry.has_predecessor(model_id, champion.version):
        run.registry.rollback(model_id, from_version=champion.version)
        restored = run.registry.champion(model_id)
        assert restored is not None  # rollback has read the alias back
        version, url = restored.published_version, restored.source_url
        registry_version: str | None = restored.version
        run.finish("rollback", began, f"{model_id} v{version} is champion again")
    else:
        assert champion.evidence is not None  # champion() reads it
        version = champion.evidence.base_version
        url = published_url(run, model_id, version)
        registry_version = None
        run.registry.retract(model_id, champion.version)
        run.finish(
            "rollback", began, f"{model_id} has no champion; the nodes go back to v{version}"
        )
    return Restored(
        model_id=model_id,
        version=version,
        url=url,
        registry_version=registry_version,
        stepped_down=champion.version,
    )


def lineage_of(
    run: Run, base: Manifest, trained: TrainResult, snapshot: dict[str, Any], manifest_digest: str
) -> dict[str, str | None]:
    """Return everything a promoted version must be traceable to."""
    return {
        "manifest_digest": manifest_digest,
        "base_manifest_digest": base.digest,
        "snapshot_digest": snapshot["digest"],
        "training_snapshot_digest": trained.snapshot_digest,
        "weights_digest": trained.weights_digest,
        "config_digest": trained.config_digest,
        "job_id": trained.job_id,
        "code_version": code_version(),
        "run_id": run.run_id,
        **({} if trained.program is None else {"program_digest": trained.program.sha256}),
    }


def _aliases_of(model_id: str) -> str:
    return f"the aliases of {model_id}"


def _is_champion(run: Run, model_id: str, version: str) -> bool:
    champion = run.registry.champion(model_id)
    return champion is not None and str(champion.version) == version
