"""Scores of before are used again only as this installation recorded them, each under its own
key; what cannot be trusted is named and scored again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import EvaluationSettings
from paceline.errors import CorruptData
from paceline.manifest import build_manifest
from paceline.models import (
    config_for,
    local_model_digest,
    new_model,
    save_model,
    weights_digest,
)
from paceline.schemas import EvaluationSpec, RecordedScore, canonical_json
from paceline.tasks._support import scores, sealed_records
from tests.security.test_a_forged_report_is_refused import Bucket, run_of

SCORE = RecordedScore(
    subject="gzip",
    snapshot_digest="5" * 64,
    held_out_bytes=4096,
    scorer="paceline 1",
    bits=(0.1 + 0.2, 800.0, 1e-9),
    facts={"latency_ms": 2.5},
    run_id="run-1",
)
LOW = SCORE.model_copy(update={"bits": (0.1, 0.1, 0.1)})
OTHERS = (
    {"subject": "xz"},
    {"snapshot_digest": "6" * 64},
    {"held_out_bytes": 4097},
    {"scorer": "paceline 2"},
)


def place(score: RecordedScore) -> str:
    return f"s3://paceline/records/score/{score.key}.json"


def test_a_recorded_score_is_found_to_the_bit_and_only_under_its_key() -> None:
    run = run_of(Bucket())
    sealed_records.save_score(run, SCORE)
    assert sealed_records.load_score(run, SCORE.key) == SCORE
    for other in OTHERS:
        assert sealed_records.load_score(run, SCORE.model_copy(update=other).key) is None


def written(bucket: Bucket, how: str) -> None:
    """Put a record that is not what the installation made at the place of ``SCORE``."""
    if how == "of another installation":
        sealed_records.save_score(run_of(bucket, "a token of scope deploy"), LOW)
    elif how == "edited":
        content = json.loads(bucket.objects[place(SCORE)])
        content["record"] = LOW.model_dump(mode="json")
        bucket.objects[place(SCORE)] = canonical_json(content)
    elif how == "of another key":
        other = LOW.model_copy(update={"subject": "xz"})
        sealed_records.save_score(run_of(bucket), other)
        bucket.objects[place(SCORE)] = bucket.objects[place(other)]
    elif how == "of another kind":
        run = run_of(bucket)
        digest = sealed_records.save(run, LOW, "evaluation")
        bucket.objects[place(SCORE)] = bucket.objects[
            f"s3://paceline/records/evaluation/{digest}.json"
        ]
    else:
        bucket.objects[place(SCORE)] = bucket.objects[place(SCORE)][:-40]


HOW = ("of another installation", "edited", "of another key", "of another kind", "truncated")


@pytest.mark.parametrize("how", HOW)
def test_a_score_that_was_not_recorded_here_is_named_and_not_used(how: str) -> None:
    run = run_of(bucket := Bucket())
    spec = spec_of({})
    score = SCORE.model_copy(update={"scorer": spec.scorer})
    sealed_records.save_score(run, SCORE)
    written(bucket, how)
    with pytest.raises(CorruptData, match="cannot be trusted"):
        sealed_records.load_score(run, SCORE.key)
    bucket.objects[place(score)] = bucket.objects[place(SCORE)]
    assert scores.recorded_scores(run, spec, {}) == {}
    (note,) = run.summary.notes
    assert note.startswith("gzip is scored again: the record of this score cannot be trusted")
    sealed_records.save_score(run, score)  # as the evaluation does
    assert scores.recorded_scores(run, spec, {}) == {"gzip": score}


def spec_of(models: dict[str, str]) -> EvaluationSpec:
    return EvaluationSpec(
        run_id="run-2",
        snapshot_url="s3://paceline/data/snapshots/5",
        snapshot_digest="5" * 64,
        models=models,
        settings=EvaluationSettings(held_out_bytes=4096),
        scorer="paceline 3",
    )


def test_a_model_is_known_by_all_that_its_predictions_follow_from(tmp_path: Path) -> None:
    """The flow finds, from a manifest or an export, the digest that the node computes."""
    config = config_for(20_000, 32)
    save_model(new_model(config, 1), config, tmp_path)
    chat = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json",
            "generation_config.json")  # fmt: skip
    for name in ("tokenizer.json", *chat):
        (tmp_path / name).write_text("{}")
    bucket, export = Bucket(), "s3://paceline/checkpoints/job-1/export"
    for each in tmp_path.iterdir():
        bucket.objects[f"{export}/{each.name}"] = each.read_bytes()
    run = run_of(bucket)
    named = {"model_id": "m", "version": "1", "link_mbit": 80.0}
    run.manifest = lambda _url: build_manifest(tmp_path, **named)  # type: ignore[method-assign]
    models = {
        "candidate": {"url": export, "digest": weights_digest(tmp_path)},
        "base": {"url": "node:m/1", "digest": "a" * 64},
    }
    spec = spec_of({name: each["url"] for name, each in models.items()})
    subject = local_model_digest(tmp_path)
    sealed_records.save_score(
        run, SCORE.model_copy(update={"subject": subject, "scorer": spec.scorer})
    )
    for one, where in models.items():
        found = scores.recorded_scores(run, spec, {one: where})
        assert {name: each.subject for name, each in found.items()} == {one: subject}
    digests = {subject}
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", *chat):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before + b" ")
        digests.add(local_model_digest(tmp_path))
        (tmp_path / name).write_bytes(before)
    assert len(digests) == 8, "the same weights with another config are another model"
    (tmp_path / "README.md").write_text("a card")
    assert local_model_digest(tmp_path) == subject, "no figure follows from it"
