"""Figures of many documents are the same, to the bit, whether one node scores them or several."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EvaluationSettings
from paceline.data import open_tokenizer
from paceline.errors import WorkerLost
from paceline.evaluation import HeldOutDocument, score_share, score_transformer, share_of
from paceline.models import config_for, local_model_digest, new_model, save_model
from paceline.schemas import EvaluationSpec, RecordedScore
from paceline.tasks._support import scores, sealed_records
from tests.security.test_a_forged_report_is_refused import Bucket, run_of

RANDOM = np.random.default_rng(3)
DOCUMENTS = [
    HeldOutDocument(f"{number}", RANDOM.bytes(int(size)), int(size))
    for number, size in enumerate(RANDOM.integers(1, 40, size=700))  # groups of 256, 256 and 188
]
SPEC = EvaluationSpec(
    run_id="run-1",
    snapshot_url="s3://paceline/data/snapshots/5",
    snapshot_digest="5" * 64,
    models={"candidate": "a", "base": "b", "pickled": "c"},
    settings=EvaluationSettings(),
    scorer="paceline 1",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    config = config_for(20_000, 32)
    for name, seed in (("candidate", 1), ("base", 2)):
        found[name] = tmp_path_factory.mktemp(name)
        save_model(new_model(config, seed), config, found[name])
    found["pickled"] = tmp_path_factory.mktemp("pickled")
    (found["pickled"] / "pytorch_model.bin").write_bytes(b"x")
    return found


@pytest.fixture(scope="module")
def whole(models: dict[str, Path]) -> dict[str, Any]:
    return {
        name: score_transformer(models[name], DOCUMENTS, lambda _: None)
        for name in ("candidate", "base")
    }


@pytest.mark.parametrize(
    "nodes", [pytest.param(2, marks=pytest.mark.nightly), 5]
)  # of five, two have nothing to do
def test_parts_of_several_nodes_are_the_whole_to_the_bit(
    nodes: int, models: dict[str, Path], whole: dict[str, Any]
) -> None:
    run = run_of(bucket := Bucket())
    asked: Counter[str] = Counter()

    def process(node: str, spec: EvaluationSpec, on_event: Any) -> None:
        assert spec.share is not None
        documents = share_of(DOCUMENTS, *spec.share)
        asked[node] += len(documents)

        def on_scored(subject: str, bits_D: Any, facts: Any) -> None:
            score = RecordedScore(
                subject=subject,
                snapshot_digest=spec.snapshot_digest,
                held_out_bytes=spec.settings.held_out_bytes,
                scorer=spec.scorer,
                bits=tuple(bits_D.tolist()),
                facts=facts,
                run_id=spec.run_id,
            )
            on_event({"event": "score", "data": score.model_dump(mode="json")})

        ways = on_scored, lambda *_: None, SPEC.settings
        score_share(models, documents, open_tokenizer("bytes"), *ways)

    names = [f"node-{number}" for number in range(nodes)]
    found = scores.scored_in_parts(run, SPEC, names, process)
    assert asked.total() == len(DOCUMENTS)
    assert max(asked.values()) <= 512, "none scores all"
    assert [each.subject for each in found] == [
        local_model_digest(models[name]) for name in whole
    ], "and what cannot be scored is left to the evaluation"
    assert len(bucket.objects) == 2
    for score, its in zip(found, whole.values(), strict=True):
        assert np.array(score.bits).tobytes() == its.bits.tobytes()
        assert score.facts["judged_context"] == its.judged_context > 0
        assert score.facts["tokens"] == its.tokens == sum(len(each.text) for each in DOCUMENTS)
        assert sealed_records.load_score(run, score.key) == score


def test_a_node_that_is_lost_ends_the_evaluation(models: dict[str, Path]) -> None:
    run = run_of(bucket := Bucket())

    def process(node: str, spec: EvaluationSpec, on_event: Any) -> None:
        if node == "node-1":
            raise WorkerLost("the process was lost with its node", where=node)

    with pytest.raises(WorkerLost, match="node-1"):
        scores.scored_in_parts(run, SPEC, ["node-0", "node-1"], process)
    assert not bucket.objects
