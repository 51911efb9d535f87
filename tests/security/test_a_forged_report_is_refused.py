"""A report is what the installation's evaluation recorded, found by digest: no file, no object in
the bucket and no line of the ledger takes its place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.cli import flows
from paceline.config import Endpoints, Profile, Runtime, Secrets
from paceline.errors import (
    AccessDenied,
    CorruptData,
    GateRefused,
    InvalidInput,
    SourceMissing,
)
from paceline.manifest import build_manifest
from paceline.models import weights_digest
from paceline.registry import claim_digest
from paceline.schemas import (
    Evaluation,
    EvaluationReport,
    Evidence,
    GateDecision,
    TrainResult,
    canonical_json,
    digest_of,
)
from paceline.tasks import promote, train
from paceline.tasks._support import sealed_records
from paceline.tasks._support.run import Run
from tests.evaluation.reports import LINEAGE, SIZES, SNAPSHOT, TRAINING_SNAPSHOT, interval, passing
from tests.registry.bundles import make_evidence

BASE = "b" * 64


class Bucket:
    """Objects in memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put_bytes(self, url: str, data: bytes) -> None:
        self.objects[url] = data

    def get_bytes(self, url: str, max_bytes: int) -> bytes:
        if url not in self.objects:
            raise SourceMissing("no such object", where=url)
        assert len(self.objects[url]) <= max_bytes
        return self.objects[url]

    def exists(self, url: str) -> bool:
        return url in self.objects


def run_of(bucket: Bucket, token: str = "the installation's own") -> Run:
    runtime = Runtime(
        profile=Profile(),
        state_dir=Path("/nowhere"),
        endpoints=Endpoints(),
        secrets=Secrets(coordinator_token=token),
    )
    run = Run(runtime, "run-20261120-153600-9f3a1c")
    run.__dict__["store"] = bucket
    return run


def trained() -> TrainResult:
    return TrainResult(
        job_id="job-1",
        steps=2,
        resumed_from_step=0,
        first_loss=5.5,
        final_loss=2.75,
        tokens_per_second=1.0,
        data_wait_share=0.0,
        checkpoint_stall_share=0.0,
        export_url="s3://paceline/checkpoints/job-1/export",
        weights_digest="c" * 64,
        checkpoints=(),
        restarts=(),
        seconds=1.0,
        config_digest="d" * 64,
        snapshot_url="s3://paceline/data/snapshots/7",
        snapshot_digest=TRAINING_SNAPSHOT,
        base_manifest_digest=BASE,
    )


def judged(training_digest: str, report: EvaluationReport | None = None) -> Evaluation:
    return Evaluation(
        model_id="bytelm",
        base_version="1",
        base_manifest_digest=BASE,
        training_digest=training_digest,
        snapshot_url="s3://paceline/data/snapshots/5",
        models={"candidate": "c" * 64, "base": BASE},
        report=report or passing(),
    )


def recorded(bucket: Bucket) -> tuple[Run, str, Evaluation]:
    run = run_of(bucket)
    evaluation = judged(sealed_records.save(run, trained(), "training"))
    return run, sealed_records.save(run, evaluation, "evaluation"), evaluation


def better(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation that somebody would rather have had."""
    report = passing(bits_per_byte=interval(0.5), difference_to={"base": interval(-3.0)})
    return evaluation.model_copy(update={"report": report})


def test_a_recorded_report_is_found_with_the_training_it_judged() -> None:
    run, digest, evaluation = recorded(Bucket())
    assert promote.recorded_evidence(run, digest) == (digest, evaluation, trained())


def test_a_report_that_nobody_recorded_is_refused() -> None:
    run, _, evaluation = recorded(Bucket())
    with pytest.raises(GateRefused, match=r"no such evaluation was recorded.*paceline evaluate"):
        promote.recorded_evidence(run, digest_of(better(evaluation)))


@pytest.mark.parametrize("seal", ["of another installation", "of the honest report", "none"])
def test_a_report_written_into_the_bucket_is_refused(seal: str) -> None:
    bucket = Bucket()
    run, honest, evaluation = recorded(bucket)
    forged = better(evaluation)
    digest = digest_of(forged)
    url = f"s3://paceline/records/evaluation/{digest}.json"
    content: dict[str, Any] = {"record": forged.model_dump(mode="json"), "seal": ""}
    if seal == "of another installation":
        sealed_records.save(run_of(bucket, "a token of scope deploy"), forged, "evaluation")
        assert url in bucket.objects
    else:
        if seal == "of the honest report":
            of_honest = json.loads(bucket.objects[url.replace(digest, honest)])
            content["seal"] = of_honest["seal"]
        bucket.objects[url] = canonical_json(content)
    with pytest.raises(GateRefused, match="cannot be trusted"):
        promote.recorded_evidence(run, digest)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"record": {}, "seal": 7}', b"[" * 100_000, b"\xff"], ids=len
)
def test_an_object_that_is_no_record_is_refused(raw: bytes) -> None:
    bucket = Bucket()
    run, digest, _ = recorded(bucket)
    bucket.objects[f"s3://paceline/records/evaluation/{digest}.json"] = raw
    with pytest.raises(GateRefused, match="cannot be trusted"):
        promote.recorded_evidence(run, digest)


def test_a_record_edited_in_place_is_refused() -> None:
    bucket = Bucket()
    run, digest, evaluation = recorded(bucket)
    url = f"s3://paceline/records/evaluation/{digest}.json"
    content = json.loads(bucket.objects[url])
    bucket.objects[url] = canonical_json(
        content | {"record": better(evaluation).model_dump(mode="json")}
    )
    with pytest.raises(GateRefused, match="cannot be trusted"):
        promote.recorded_evidence(run, digest)


def test_a_training_that_was_not_recorded_is_missing_evidence() -> None:
    run = run_of(Bucket())
    digest = sealed_records.save(run, judged("e" * 64), "evaluation")
    with pytest.raises(GateRefused, match="no such training was recorded"):
        promote.recorded_evidence(run, digest)


def test_a_training_record_is_no_evaluation() -> None:
    bucket = Bucket()
    run = run_of(bucket)
    digest = sealed_records.save(run, trained(), "training")
    name = f"s3://paceline/records/{{}}/{digest}.json"
    bucket.objects[name.format("evaluation")] = bucket.objects[name.format("training")]
    with pytest.raises(CorruptData):
        sealed_records.load(run, digest, "evaluation", TrainResult)


@pytest.mark.parametrize("digest", ["../../models/x", "", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_what_is_no_digest_becomes_no_path(digest: str) -> None:
    with pytest.raises(InvalidInput, match="not the digest of a recorded evaluation"):
        promote.recorded_evidence(run_of(Bucket()), digest)


def test_a_node_that_joined_neither_records_nor_finds() -> None:
    run, digest, evaluation = recorded(bucket := Bucket())
    joined = run_of(bucket, "")
    with pytest.raises(AccessDenied):
        sealed_records.save(joined, evaluation, "evaluation")
    with pytest.raises(AccessDenied):
        sealed_records.load(joined, digest, "evaluation", Evaluation)
    assert sealed_records.load_or_none(run, "f" * 64, "evaluation", Evaluation) is None


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "another"},
        {"base_version": "2"},
        {"training_digest": "e" * 64},
        {"snapshot_url": "s3://paceline/data/snapshots/6"},
    ],
    ids=str,
)
def test_a_report_about_another_thing_is_refused(other: dict[str, str]) -> None:
    _, _, evaluation = recorded(Bucket())
    promote.require_same(evaluation, model_id="bytelm", base_version=None)
    with pytest.raises(GateRefused, match="the report is about another"):
        promote.require_same(evaluation, **other)


def test_a_training_in_the_ledger_counts_only_as_it_was_recorded() -> None:
    run = run_of(Bucket())
    result = trained()
    digest = sealed_records.save(run, result, "training")
    output = result.model_dump(mode="json") | {"training_digest": digest}
    assert train._is_recorded(run, output, result.config_digest)
    for forged, config in (
        (output | {"snapshot_digest": SNAPSHOT}, result.config_digest),
        (output | {"training_digest": "e" * 64}, result.config_digest),
        (result.model_dump(mode="json"), result.config_digest),
        (output, "e" * 64),
    ):
        assert not train._is_recorded(run, forged, config)


def test_only_a_manifest_of_the_judged_weights_is_promoted(tmp_path: Path) -> None:
    """A line of the ledger may name another published version: its weights were never judged."""
    manifests = []
    for version in ("0", "1"):
        directory = tmp_path / version
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(version.encode() * 99)
        manifests.append(build_manifest(directory, model_id="m", version=version, link_mbit=80))
    evidence = make_evidence("m", "1").model_copy(
        update={
            "manifest_digest": manifests[0].digest,
            "weights_digest": weights_digest(tmp_path / "0"),
        }
    )
    promote.require_judged(evidence, manifests[0])
    with pytest.raises(GateRefused, match="another manifest"):
        promote.require_judged(evidence, manifests[1])
    forged = evidence.model_copy(update={"manifest_digest": manifests[1].digest})
    with pytest.raises(GateRefused, match="another set of weights"):
        promote.require_judged(forged, manifests[1])


def test_a_score_against_a_champion_of_before_is_missing_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promote.artifacts, "table", lambda *_: None)
    evidence = make_evidence("bytelm", "1").model_copy(update={"snapshot_digest": SNAPSHOT})
    url = "s3://paceline/m/3"
    champion = SimpleNamespace(evidence=evidence, source_url=url, manifest_digest=BASE)
    run = run_of(Bucket())
    baselines = ("ngram", "gzip", "xz")
    gate = run.runtime.profile.gate.model_copy(update={"except_baselines": baselines})
    run.runtime = run.runtime.model_copy(
        update={"profile": run.runtime.profile.model_copy(update={"gate": gate})}
    )
    run.__dict__["mlflow_run"] = "1"
    run.__dict__["registry"] = SimpleNamespace(
        champion=lambda _: champion,
        log_metrics=lambda *_: None,
        log_artifact_text=lambda *_: None,
    )
    base = cast(Any, SimpleNamespace(model_id="bytelm"))

    def decided(evaluation: Evaluation) -> GateDecision:
        return promote.gate.fn(run, base, evaluation, dict(LINEAGE), SIZES)

    evaluation = judged("e" * 64)
    now = evaluation.model_copy(update={"models": evaluation.models | {"champion": BASE}})
    assert decided(now).passed
    for models in (evaluation.models, evaluation.models | {"champion": "1" * 64}):
        old = evaluation.model_copy(update={"models": models})
        (reason,) = decided(old).reasons
        assert f"no regression against champion of manifest {BASE[:12]}: got missing" in reason


def test_evidence_of_an_older_version_keeps_its_digest() -> None:
    evidence = make_evidence("bytelm", "1")
    old = evidence.model_dump(mode="json")
    assert {"report_digest", "training_snapshot_digest"}.isdisjoint(old)
    assert "overlaps" not in old["evaluation"]
    read = Evidence.model_validate(old)
    assert digest_of(read) == digest_of(old)
    assert claim_digest(read) == digest_of(old | {"approver": None})


def test_of_a_report_edited_by_hand_the_command_takes_the_digest_alone(tmp_path: Path) -> None:
    run, digest, evaluation = recorded(Bucket())
    printed = better(evaluation).report.model_dump(mode="json")
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(printed | {"report_digest": digest}))
    given = flows._digest_of(str(path), "report_digest", "evaluate")
    assert promote.recorded_evidence(run, given)[1] == evaluation
    path.write_text(json.dumps(printed))  # as an older version printed it
    with pytest.raises(InvalidInput):
        flows._digest_of(str(path), "report_digest", "evaluate")
