"""Supervised fine-tuning: the losses of a plain loop of transformers with labels of -100."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data import ChatTemplate, SnapshotRecord, assign_splits
from paceline.training import single
from tests.support.hugging_face import (
    CHATML,
    MARKED,
    losses_of_plain_steps,
    write_model,
    write_tokenizer,
)
from tests.training.warm import typed

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("warm node")]
STEPS = 3
CONTEXT = 128
TEMPLATES = {"marked": MARKED, "chatml": CHATML}


def rows() -> list[dict[str, Any]]:
    """Conversations of which no two fit in a row, so that a batch of all of them is an epoch."""
    found = []
    for number in range(24):
        turns = []
        for turn in range(3 + number % 2):
            turns.append({"role": "user", "content": f"{number} and {turn}"})
            turns.append({"role": "assistant", "content": f"{number * 7} {turn + number}"})
        found.append({"key": f"row-{number}", "messages": turns})
    return found


def tokens_and_labels(tokenizer: Any, messages: list[dict[str, str]], marked: bool) -> Any:
    """Return what a user of transformers trains on: ids, and labels of -100 where none counts."""
    if marked:
        found = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
    else:
        ids, mask = [], []
        for number, each in enumerate(messages):
            is_counted = each["role"] == "assistant"
            if is_counted:
                head = tokenizer.apply_chat_template(
                    messages[:number], tokenize=False, add_generation_prompt=True
                )
                more = tokenizer(head)["input_ids"][len(ids) :]
                ids, mask = ids + more, mask + [0] * len(more)
            text = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
            more = tokenizer(text)["input_ids"][len(ids) :]
            ids, mask = ids + more, mask + [int(is_counted)] * len(more)
    return ids, [each if counts else -100 for each, counts in zip(ids, mask, strict=True)]


def plain_loop(directory: Path, marked: bool, rates: list[float]) -> list[float]:
    """The loss of each step: of all conversations, each by itself, averaged over labels."""
    from transformers import PreTrainedTokenizerFast

    # not AutoTokenizer: for qwen2 it cuts words as Qwen's own file says, not as this one does
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    data = rows()
    held_out = assign_splits([each["key"] for each in data], 0.1, 0)
    trained_on = [each["messages"] for each in data if each["key"] not in held_out]
    examples = [tokens_and_labels(tokenizer, each, marked) for each in trained_on]
    counted = sum(sum(label != -100 for label in labels[1:]) for _, labels in examples)
    assert 0 < counted < sum(len(ids) for ids, _ in examples) / 1.5
    return losses_of_plain_steps(directory, examples, rates)


# family, template, ranks, batching, settings of the mesh
EVERY_TIME = [("llama", "chatml", 1, "bucketed", "dp=1")]
NIGHTLY = [
    ("llama", "marked", 2, "packed", "dp=2"),
    ("qwen2", "chatml", 2, "packed", "shard=2"),
    ("qwen2", "marked", 1, "packed", "dp=1"),
    ("llama", "chatml", 2, "bucketed", "tp=2"),
]


@pytest.mark.parametrize(
    ("family", "template", "ranks", "batching", "mesh"),
    [*EVERY_TIME, *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY)],
)
def test_losses_are_those_of_a_plain_loop_with_masked_labels(
    tmp_path: Path, family: str, template: str, ranks: int, batching: str, mesh: str
) -> None:
    model = write_model(family, tmp_path / "model", vocab_size=320, max_position_embeddings=CONTEXT)
    texts = [turn["content"] for each in rows() for turn in each["messages"]]
    write_tokenizer(model, texts, 265, template=TEMPLATES[template], end="<|im_end|>")
    source = tmp_path / "chat"
    source.mkdir()
    (source / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows()))
    held_out = assign_splits([each["key"] for each in rows()], 0.1, 0)
    typed(
        *("train", "--model", str(model), "--text", str(source), "--output", str(tmp_path / "out")),
        *("--steps", str(STEPS), "--ranks", str(ranks), "--set", f"model.context={CONTEXT}"),
        *("--set", "data.format=jsonl", "--set", f"data.batching={batching}"),
        *("--set", f"training.batch_sequences={len(rows()) - len(held_out)}"),
        *("--set", "training.accumulation=3", "--set", f"training.mesh.{mesh}"),
    )
    (metrics,) = (tmp_path / "out").glob("checkpoints/*/metrics.jsonl")
    steps = [json.loads(each) for each in metrics.read_text().splitlines()]
    (record,) = (tmp_path / "out").glob("data/snapshots/*/snapshot.json")
    longest = SnapshotRecord.model_validate_json(record.read_bytes()).longest_tokens
    assert longest is not None
    assert CONTEXT / 2 < longest < CONTEXT
    wanted = plain_loop(model, template == "marked", [each["lr"] for each in steps])
    assert wanted[-1] < wanted[0]
    assert [each["loss"] for each in steps] == pytest.approx(wanted, rel=1e-5)


def test_an_export_of_our_own_model_has_the_template_of_its_data(tmp_path: Path) -> None:
    texts = [turn["content"] for each in rows() for turn in each["messages"]]
    tokenizer = write_tokenizer(tmp_path / "words", texts, 265, template=CHATML, end="<|im_end|>")
    source = tmp_path / "chat"
    source.mkdir()
    (source / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows()))
    done = typed(
        *("train", "--text", str(source), "--output", str(tmp_path / "out"), "--steps", "1"),
        *("--ranks", "1", "--set", "model.parameters=30000", "--set", f"model.context={CONTEXT}"),
        *("--set", f"data.tokenizer={tokenizer}/tokenizer.json", "--set", "data.format=jsonl"),
        *("--set", "data.batching=packed", "--set", "training.batch_sequences=4"),
    )
    (export,) = (tmp_path / "out").glob("checkpoints/*/export")
    assert "done: 1 step on 1 rank in " in done.stdout
    assert f"paceline generate {export} PROMPT --chat\n" in done.stdout
    before, after = (ChatTemplate(f"{each}/tokenizer.json") for each in (tokenizer, export))
    assert after.digest == before.digest
    assert after.prompt("3 and 4") == before.prompt("3 and 4"), "tokens, and what ends an answer"


def test_a_copied_base_keeps_its_template(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    copy.mkdir()
    write_tokenizer(source, ["some text"], template=CHATML)
    assert (source / "chat_template.jinja").is_file()
    single._copy_model(source, copy)
    assert (copy / "chat_template.jinja").is_file()
