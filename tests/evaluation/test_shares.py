"""Figures of many documents are the same, to the bit, whether one node scores them or several."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.config import EvaluationSettings
from paceline.data import open_tokenizer
from paceline.errors import WorkerLost
from paceline.evaluation import (
    HeldOutDocument,
    score_share,
    score_transformer,
    share_of,
    transformer,
    windows,
)
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


@pytest.fixture
def asked(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The models as a flow names them."""
    digests = {name: local_model_digest(models[name]) for name in ("candidate", "base")}
    digests["pickled"] = "c" * 64
    monkeypatch.setattr(scores, "_model_digest", lambda _run, _name, url, digest: digest)
    return {name: {"url": SPEC.models[name], "digest": each} for name, each in digests.items()}


def recorded(spec: EvaluationSpec, on_event: Any, **more: Any) -> Any:
    """What reports a score as the evaluation process does."""

    def on_scored(subject: str, bits: Any, facts: Any) -> None:
        score = RecordedScore(
            subject=subject,
            snapshot_digest=spec.snapshot_digest,
            held_out_bytes=spec.settings.held_out_bytes,
            scorer=spec.scorer,
            bits=tuple(bits.tolist()),
            facts=facts,
            run_id=spec.run_id,
            **more,
        )
        on_event({"event": "score", "data": score.model_dump(mode="json")})

    return on_scored


@pytest.mark.parametrize(
    "nodes", [pytest.param(2, marks=pytest.mark.nightly), 5]
)  # of five, two have nothing to do
def test_parts_of_several_nodes_are_the_whole_to_the_bit(
    nodes: int,
    models: dict[str, Path],
    whole: dict[str, Any],
    asked: dict[str, dict[str, str]],
) -> None:
    run = run_of(bucket := Bucket())
    given: Counter[str] = Counter()

    def process(node: str, spec: EvaluationSpec, on_event: Any) -> None:
        assert spec.share is not None
        documents = share_of(DOCUMENTS, *spec.share)
        given[node] += len(documents)

        ways = recorded(spec, on_event), lambda *_: None, SPEC.settings
        score_share(models, documents, open_tokenizer("bytes"), *ways)

    names = [f"node-{number}" for number in range(nodes)]
    found = scores.scored_in_parts(run, SPEC, asked, names, process)
    assert given.total() == len(DOCUMENTS)
    assert max(given.values()) <= 512, "none scores all"
    assert [each.subject for each in found] == [
        local_model_digest(models[name]) for name in whole
    ], "and what cannot be scored is left to the evaluation"
    assert len(bucket.objects) == 2 + 2 * nodes, "wholes and parts"
    for score, its in zip(found, whole.values(), strict=True):
        assert np.array(score.bits).tobytes() == its.bits.tobytes()
        assert score.facts["judged_context"] == its.judged_context > 0
        assert score.facts["tokens"] == its.tokens == sum(len(each.text) for each in DOCUMENTS)
        assert sealed_records.load_score(run, score.key) == score


def test_what_a_lost_node_leaves_is_not_scored_again(
    models: dict[str, Path],
    whole: dict[str, Any],
    asked: dict[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the parts of others, nor the rows that were done of its own."""
    monkeypatch.setattr(transformer, "SAVE_EVERY_S", 0.0)
    rows = Counter[str]()
    predicted = transformer._predicted

    def process(node: str, spec: EvaluationSpec, on_event: Any) -> None:
        def counted(model: Any, group: Any, *more: Any) -> Any:
            rows[node] += len(group)
            return predicted(model, group, *more)

        def on_rows(*found: Any) -> None:
            recorded(spec, on_event, unfinished=True)(*found)
            if node == "node-1" and lost:
                raise WorkerLost("the process was lost with its node", where=node)

        assert spec.share is not None
        with monkeypatch.context() as patch:
            patch.setattr(transformer, "_predicted", counted)
            score_share(
                {name: models[name] for name in spec.models},
                share_of(DOCUMENTS, *spec.share),
                open_tokenizer("bytes"),
                recorded(spec, on_event),
                lambda *_: None,
                SPEC.settings,
                known=spec.known,
                on_rows=on_rows,
            )

    run, lost, names = run_of(Bucket()), True, ["node-0", "node-1"]
    two = SPEC.model_copy(update={"models": {name: SPEC.models[name] for name in whole}})
    asked = {name: asked[name] for name in whole}
    one_by_one = lambda _count: nullcontext(SimpleNamespace(map=map))  # noqa: E731
    for module in (scores, transformer):
        monkeypatch.setattr(module, "ThreadPoolExecutor", one_by_one)
    with pytest.raises(WorkerLost, match="node-1"):
        scores.scored_in_parts(run, two, asked, names, process)
    before, lost = Counter(rows), False
    assert before["node-1"] > 0
    found = scores.scored_in_parts(run, two, asked, names, process)
    assert rows["node-0"] == before["node-0"], "its part was recorded"
    each_once = sum(len(windows(len(x.text), 32)) for x in DOCUMENTS)
    assert rows.total() == 2 * each_once
    for score, its in zip(found, whole.values(), strict=True):
        assert np.array(score.bits).tobytes() == its.bits.tobytes()
        assert score.facts["calibration"] == [list(each) for each in its.calibration]
        assert sealed_records.load_score(run, score.key) == score


def test_a_node_that_is_lost_ends_the_evaluation(asked: dict[str, dict[str, str]]) -> None:
    run = run_of(bucket := Bucket())

    def process(node: str, spec: EvaluationSpec, on_event: Any) -> None:
        if node == "node-1":
            raise WorkerLost("the process was lost with its node", where=node)

    with pytest.raises(WorkerLost, match="node-1"):
        scores.scored_in_parts(run, SPEC, asked, ["node-0", "node-1"], process)
    assert not bucket.objects
