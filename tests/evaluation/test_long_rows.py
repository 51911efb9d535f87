"""Models are judged on rows as long as the profile says, in pieces, and the gate knows how long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from paceline.config import EvaluationSettings, Policy
from paceline.evaluation import (
    TextModel,
    choose_prefixes,
    decide,
    score_models,
    score_transformer,
    serving,
    text_model,
)
from paceline.models import config_for, new_model, save_model
from paceline.tasks._support.scores import scorer_version
from tests.evaluation.reports import LINEAGE, passing
from tests.evaluation.test_own_tokens import TEXTS, documents_of, plain_bits, silent, words
from tests.evaluation.test_policy import LOOSE
from tests.support.hugging_face import write_model

__all__ = ["words"]  # a fixture
PIECE = 24  # tokens; rows have 64


def llama(family: str, directory: Path, words: Path, **changes: Any) -> Path:
    made = write_model(family, directory, vocab_size=310, **changes)
    (made / "tokenizer.json").write_bytes(words.read_bytes())
    return made


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "gemma2", *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("qwen2", "qwen3", "gemma", "gemma3_text", "gpt_neox")
    )],
)  # fmt: skip
def test_a_row_in_pieces_has_the_bits_of_the_whole_row(
    family: str, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_model, "PIECE", PIECE)
    made = llama(family, tmp_path / "model", words)
    model, lengths = TextModel.open(made), set()
    forward = type(model.network).forward
    monkeypatch.setattr(
        type(model.network),
        "forward",
        lambda self, tokens, **more: lengths.add(tokens.shape[1]) or forward(self, tokens, **more),
    )
    found = score_transformer(made, documents_of(TEXTS), silent)
    assert max(lengths) == PIECE, "no logits of more tokens at once"
    wanted = plain_bits(made, words, TEXTS)
    assert found.bits == pytest.approx(wanted, rel=1e-5)
    assert (found.judged_context, found.serving.context) == (64, 64)


def test_a_slow_model_is_measured_by_few_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(60_000, 64)
    save_model(new_model(config, 3), config, tmp_path)
    monkeypatch.setattr(serving, "MEASURED_S", 0.0)
    model, shapes = TextModel.open(tmp_path), []
    forward = model.network.forward
    monkeypatch.setattr(
        model.network,
        "forward",
        lambda tokens, **more: shapes.append(tuple(tokens.shape)) or forward(tokens, **more),
    )
    _, cost = serving.measure_serving(lambda: model)
    rows = cost.throughput_rows
    assert shapes == [(1, 48), (1, 1), (1, 64), (rows, 64)]
    assert min(cost.prefill_ms, cost.decode_ms_per_token, cost.throughput_ms or 0) > 0


def test_short_rows_share_a_batch_where_the_vocabulary_is_large() -> None:
    model: Any = SimpleNamespace(
        vocabulary=151_936, piece=1024, context=1024, device=torch.device("cpu"), network=None
    )
    wide = SimpleNamespace(**(vars(model) | {"context": 32768}))
    for its in (model, wide):  # logits of a piece stay within the limit
        assert max(map(len, serving.in_batches(its, [60] * 40, int))) == 17
    batches = serving.in_batches(model, [60] * 40 + [1024, 3, 500], int)
    assert batches == [[3, *[60] * 16], [60] * 17, [60] * 7, [500], [1024]]
    assert serving.threads_for(model, 64) == 1, "so each operation gets all cores"


def test_a_row_of_ours_in_pieces_has_the_bits_of_the_whole_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(60_000, 64)
    save_model(new_model(config, 3), config, tmp_path)
    whole = score_transformer(tmp_path, documents_of(TEXTS), silent)
    monkeypatch.setattr(text_model, "PIECE", PIECE)
    assert score_transformer(tmp_path, documents_of(TEXTS), silent).bits == pytest.approx(
        whole.bits
    )


@pytest.mark.xdist_group("harness")  # one worker imports lm_eval
def test_answers_to_tasks_are_those_of_whole_rows(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from paceline.evaluation.harness import HarnessModel

    made = llama("llama", tmp_path / "model", words)
    pairs = [(TEXTS[1][:60].decode(), "line 7 is 49 "), ("", "line 1"), (TEXTS[2].decode(), " 4")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    whole = HarnessModel(TextModel.open(made)).loglikelihood(asked)
    monkeypatch.setattr(text_model, "PIECE", 5)
    for one, other in zip(
        HarnessModel(TextModel.open(made)).loglikelihood(asked), whole, strict=True
    ):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_model_that_is_broken_beyond_what_it_was_judged_on_is_found(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no positions from token 32 on: rows of 32 show nothing of it, rows of 64 do."""
    made = llama("llama", tmp_path / "model", words)
    kind = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    forward = kind.forward

    def broken(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, position_ids * (position_ids < 32))

    documents = documents_of([each.decode()[:130].encode() for each in TEXTS])

    def scored(context: int) -> Any:
        settings = EvaluationSettings(context=context)
        return score_transformer(made, documents, silent, settings=settings)

    well = {context: scored(context) for context in (32, 64)}
    monkeypatch.setattr(kind, "forward", broken)
    short, long = scored(32), scored(64)
    assert (short.judged_context, short.serving.context) == (32, 32)
    assert 32 < long.judged_context <= 64
    assert short.bits == pytest.approx(well[32].bits, rel=1e-6)
    assert (abs(long.bits / well[64].bits - 1) > 1e-4).all()


def test_min_context_refuses_a_model_that_was_judged_on_less() -> None:
    policy = Policy(min_context=8192, **LOOSE)
    for facts, passes in (
        ({"context": 8192, "judged_context": 8192}, True),
        ({"context": 8192, "judged_context": 1024}, False),
        ({"context": 8192}, False),
        ({"context": 4096, "judged_context": 4096}, False),
    ):
        decision = decide(passing(**facts), policy, champion="champion", lineage=LINEAGE)
        assert decision.passed == passes
    (check,) = [each for each in decision.checks if each.name == "longest row scored"]
    assert "evaluation.context = 8192" in check.wanted
    assert decide(passing(), Policy(**LOOSE), champion="champion", lineage=LINEAGE).passed


def test_the_report_says_how_long_rows_were(words: Path, tmp_path: Path) -> None:
    made = llama("llama", tmp_path / "model", words)
    settings = EvaluationSettings(context=16, serving_batch=3, bootstrap_samples=100)
    report = score_models(
        {"candidate": made},
        documents_of(TEXTS),
        lambda: TEXTS,
        settings,
        snapshot_digest="0" * 64,
        on_progress=lambda *_: None,
    )
    score = report.score("candidate")
    assert score is not None
    assert score.serving is not None
    assert (score.context, score.judged_context, score.serving.context) == (64, 16, 16)
    assert (score.serving.batch, score.serving.throughput_rows) == (1, 3)


def test_scores_of_other_rows_are_not_taken() -> None:
    versions = [
        scorer_version(EvaluationSettings(**each))
        for each in ({}, {"context": 2048}, {"context": 0}, {"serving_batch": 4})
    ]
    assert len(set(versions)) == 4
    assert scorer_version(EvaluationSettings(context=1024, confidence=0.9)) == versions[0]


def test_longer_rows_have_longer_documents() -> None:
    """1,000 documents of 100 kB: some of what is scored fills a row of 8,192 tokens."""
    whole = [(str(number), b"x" * 100_000) for number in range(1000)]
    assert {len(each.text) for each in choose_prefixes(whole, 2**20, 1024)} == {1048}
    assert min(len(each.text) for each in choose_prefixes(whole, 2**20, 8192)) > 6 * 8192
