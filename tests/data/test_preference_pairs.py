"""Pairs of answers: rows with a prompt, a chosen and a rejected answer, and why others are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import DataSettings
from paceline.data import (
    ShardCache,
    Snapshot,
    Split,
    build_snapshot,
    documents,
    open_stream,
    open_tokenizer,
    require_readable,
)
from paceline.errors import InvalidInput
from paceline.storage import DiskStore
from tests.support.hugging_face import CHATML, MARKED, write_tokenizer


def pair(number: int) -> dict[str, Any]:
    return {
        "key": f"row-{number}",
        "prompt": f"what is {number} + {number}?",
        "chosen": f"it is {2 * number}",
        "rejected": f"{number} and {number} are {3 * number + 1}, I think",
    }


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """The same pair, after an earlier exchange."""
    before = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello you"}]
    return {
        "key": row["key"],
        "prompt": [*before, {"role": "user", "content": row["prompt"]}],
        **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
    }


ROWS = [pair(number) for number in range(30)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the directory of a tokenizer with a chat template."""
    texts = [each[name] for each in ROWS for name in ("prompt", "chosen", "rejected")]
    (tmp_path / "model").mkdir()
    return write_tokenizer(tmp_path / "model", texts, 290, template=MARKED, end="<|im_end|>")


def settings_of(model: Path, **changes: Any) -> DataSettings:
    values = {"format": "jsonl", "tokenizer": str(model / "tokenizer.json"), **changes}
    return DataSettings(held_out_share=0.2, seed=3, **values)


def built(rows: list[dict[str, Any]], model: Path, tmp_path: Path, **changes: Any) -> Snapshot:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    where = DiskStore.url_of(tmp_path / "store")
    return build_snapshot(str(source), where, settings_of(model, **changes), DiskStore())


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_a_pair_is_two_conversations_of_which_the_answers_count(
    model: Path, tmp_path: Path, template: str
) -> None:
    """Also after earlier answers: what the prompt says does not count."""
    (model / "chat_template.jinja").write_text(template)
    snapshot = built([as_messages(each) for each in ROWS], model, tmp_path)
    assert snapshot.is_paired
    assert snapshot.is_masked
    tokenizer = open_tokenizer(str(model / "tokenizer.json"))
    by_key = {each["key"]: each for each in ROWS}
    end = "<|im_end|>" if template == MARKED else "<|im_end|>\n"
    seen = 0
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        for shard in snapshot.shards:
            with cache.samples(shard) as samples:
                for i in range(len(samples)):
                    row, features = by_key[samples.key(i)], samples.features(i)
                    at, mask = int(features["rejected_at"]), features["loss_mask"]
                    assert not mask[at], "nothing predicts the first token of a conversation"
                    masks = np.split(mask, [at])
                    for tokens, counts, name in zip(
                        samples.sides(i), masks, ("chosen", "rejected"), strict=True
                    ):
                        text = tokenizer.text(tokens).decode().rstrip("\n")
                        assert text.endswith(f"<|im_start|>assistant\n{row[name]}<|im_end|>")
                        assert "assistant\nhello you<|im_end|>" in text
                        assert tokenizer.text(tokens[counts]).decode() == f"{row[name]}{end}"
                    seen += 1
    assert seen == len(ROWS)


def test_a_batch_has_as_many_losses_as_pairs(model: Path, tmp_path: Path) -> None:
    snapshot = built(ROWS, model, tmp_path)
    settings = settings_of(model, batching="bucketed")
    of_split = snapshot.of_split("train")
    total, pairs = sum(each.documents for each in of_split), []
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        for rank in range(2):
            found = 0
            with open_stream(
                snapshot, "train", cache, settings,
                context=256, global_batch=4, seed=1, rank=rank, world_size=2,
            ) as stream:  # fmt: skip
                for _ in range(-(-total // 4)):
                    batch = stream.next()
                    assert batch.global_weight == batch.global_pairs <= 4
                    found += int((batch.weights_BT.sum(axis=1) > 0).sum())
                    if rank == 0:
                        pairs.append(batch.global_pairs)
            pairs.append(-found)
    assert sum(pairs) == 0, "the ranks' rows are the pairs that the plan counts"
    assert sum(each for each in pairs if each > 0) == total


def test_rows_of_parquet_are_the_same_pairs(model: Path, tmp_path: Path) -> None:
    """Texts, and lists of messages, also where a text looks like JSON."""
    odd = {**pair(77), "prompt": '[{"role": "user", "content": "what is JSON?"}]'}
    for rows in ([*ROWS, odd], [as_messages(each) for each in ROWS]):
        wanted = [each.sha256 for each in built(rows, model, tmp_path).shards]
        source = tmp_path / "parquet"
        source.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), source / "rows.parquet")
        found = build_snapshot(
            str(source),
            DiskStore.url_of(tmp_path / "store"),
            settings_of(model, format="parquet"),
            DiskStore(),
        )
        assert found.is_paired
        assert [each.sha256 for each in found.shards] == wanted


def test_the_judge_reads_the_chosen_answers(model: Path, tmp_path: Path) -> None:
    snapshot = built(ROWS, model, tmp_path)
    tokenizer = open_tokenizer(str(model / "tokenizer.json"))
    by_key = {each["key"]: each for each in ROWS}
    found = list(
        documents(snapshot, "held-out", DiskStore(), tmp_path / "cache", text_of=tokenizer.text)
    )
    assert found
    for each in found:
        assert each.text.decode() == f"{by_key[each.path]['chosen']}<|im_end|>"
        assert each.conversation is not None
        assert tokenizer.text(each.conversation.tokens).decode().count("assistant\n") == 1


said = as_messages(pair(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": None}, "a pair of answers without 'prompt'"),
        ({"rejected": None}, "a pair of answers without 'rejected'"),
        ({"chosen": " \n"}, "its 'chosen' is empty"),
        ({"rejected": ""}, "its 'rejected' is empty"),
        ({"rejected": "it is 2"}, "its answers are equal"),
        ({"rejected": " it is 2 "}, "its answers are equal"),  # once rendered
        ({"chosen": 7}, "some of prompt, chosen, rejected are texts, others messages"),
        ({"chosen": said["chosen"]}, "some of prompt, chosen, rejected are texts, others messages"),
        ({**said, "chosen": []}, "its 'chosen' is empty"),
        ({**said, "prompt": []}, "its 'prompt' is empty"),
        ({**said, "chosen": said["prompt"]}, "its 'chosen' begins with a message of 'user'"),
        ({**said, "rejected": said["chosen"]}, "its answers are equal"),
        ({"chosen": "far " * 90}, "tokens in both answers, more than max_tokens 200"),
        (
            {"chosen": None, "rejected": None, "messages": [*said["prompt"], *said["chosen"]]},
            "a conversation, unlike most of the first samples",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named_with_its_reason(
    model: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    (model / "chat_template.jinja").write_text(CHATML.replace("m.content", "m.content | trim"))
    odd = {name: each for name, each in {**pair(1), **change, "key": "odd"}.items() if each}
    odd |= {name: each for name, each in change.items() if each is not None}
    record = built([*ROWS, odd | {"key": "odd"}], model, tmp_path, max_tokens=200).record
    assert record.documents == len(ROWS)
    (found,) = record.skipped_examples
    assert found.startswith("odd: ")
    assert reason in found


def test_pairs_and_dpo_belong_together(model: Path, tmp_path: Path) -> None:
    pairs = built(ROWS, model, tmp_path)
    talks = [{"key": each["key"], "prompt": each["prompt"], "completion": each["chosen"]}
             for each in ROWS]  # fmt: skip
    conversations = built(talks, model, tmp_path)

    def readable(snapshot: Snapshot, batching: str = "bucketed", *, pairs: bool) -> None:
        settings = DataSettings(batching=batching)
        splits: list[Split] = ["train"]
        require_readable(
            snapshot, settings, context=256, global_batch=2, splits=splits, pairs=pairs
        )

    readable(pairs, pairs=True)
    readable(conversations, pairs=False)
    with pytest.raises(InvalidInput, match=r"got pairs without training\.dpo"):
        readable(pairs, pairs=False)
    with pytest.raises(InvalidInput, match=r"got training\.dpo and conversations"):
        readable(conversations, pairs=True)
    with pytest.raises(InvalidInput, match="a pair has a row of its own"):
        readable(pairs, "packed", pairs=True)


def test_pairs_need_a_chat_template(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput, match="has no chat template"):
        built([as_messages(each) for each in ROWS], model, tmp_path)
