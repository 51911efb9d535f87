"""Continued pre-training on text: the losses of a plain loop of transformers on its own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.data import assign_splits
from tests.support.hugging_face import losses_of_plain_steps, write_model, write_tokenizer
from tests.training.warm import typed

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("warm node")]
CONTEXT = 64
END = "<|endoftext|>"
# of which no two fit in a row, so that a batch of all of them is an epoch
TEXTS = {f"row-{n}": " ".join(f"{n * k:x}" for k in range(1, 16)) for n in range(20, 40)}


def plain_loop(directory: Path, trained_on: list[str], rates: list[float]) -> list[float]:
    """The loss of each step: of all texts, each by itself, averaged over the predicted tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    end = tokenizer.convert_tokens_to_ids(END)
    rows = [tokenizer(each)["input_ids"] for each in trained_on]
    rows = [(row if row[0] == tokenizer.bos_token_id else [end, *row]) + [end] for row in rows]
    assert all(CONTEXT / 2 < len(row) - 1 <= CONTEXT for row in rows), [len(row) for row in rows]
    return losses_of_plain_steps(directory, [(row, row) for row in rows], rates)


@pytest.mark.parametrize(
    ("begin", "batching"),
    [
        ("<s>", "packed"),
        pytest.param("<s>", "bucketed", marks=pytest.mark.nightly),
        pytest.param(None, "packed", marks=pytest.mark.nightly),
    ],
)
def test_a_text_begins_as_the_models_own_tokenizer_begins_it(
    tmp_path: Path, begin: str | None, batching: str
) -> None:
    sizes = {"vocab_size": 320, "max_position_embeddings": CONTEXT}
    model = write_model("llama", tmp_path / "model", **sizes)
    write_tokenizer(model, [*TEXTS.values()], 270, begin=begin)
    (tmp_path / "text").mkdir()
    lines = [json.dumps({"key": key, "text": text}) + "\n" for key, text in TEXTS.items()]
    (tmp_path / "text" / "rows.jsonl").write_text("".join(lines))
    held_out = assign_splits([*TEXTS], 0.1, 0)
    mine = [text for key, text in TEXTS.items() if key not in held_out]
    typed(
        *("train", "--model", str(model), "--text", str(tmp_path / "text"), "--steps", "3"),
        *("--output", str(tmp_path / "out"), "--ranks", "1"),
        *("--set", f"model.context={CONTEXT}", "--set", "data.format=jsonl"),
        *("--set", f"data.batching={batching}", "--set", "training.accumulation=3"),
        *("--set", f"training.batch_sequences={len(mine)}"),
    )
    (metrics,) = (tmp_path / "out").glob("checkpoints/*/metrics.jsonl")
    steps = [json.loads(each) for each in metrics.read_text().splitlines()]
    wanted = plain_loop(model, mine, [each["lr"] for each in steps])
    assert wanted[-1] < wanted[0]
    assert [each["loss"] for each in steps] == pytest.approx(wanted, rel=1e-5)
