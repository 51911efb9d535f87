"""Conversations: rendered by the model's template, masked, and refused in one line."""

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
    ChatTemplate,
    ShardCache,
    Snapshot,
    build_snapshot,
    open_stream,
    open_tokenizer,
    read_table,
    require_readable,
)
from paceline.errors import InvalidInput, SourceMissing
from paceline.storage import DiskStore
from tests.support.hugging_face import CHATML, MARKED, write_tokenizer

STRICT = (
    "{% if messages[0].role not in ('user', 'system') %}"
    "{{ raise_exception('no ' ~ messages[0].role) }}{% endif %}"
)


def conversation(number: int, turns: int = 1) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"what is {number} + {turn}?"})
        messages.append({"role": "assistant", "content": f"it is {number + turn}"})
    return {"key": f"row-{number}", "messages": messages}


ROWS = [conversation(number, 1 + number % 3) for number in range(30)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [turn["content"] for each in ROWS for turn in each["messages"]]
    directory = tmp_path_factory.mktemp("words")
    return write_tokenizer(directory, texts, 290, template=None, end="<|im_end|>")


@pytest.fixture
def model(words: Path, tmp_path: Path) -> Path:
    """Return the directory of a tokenizer with a chat template."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((words / name).read_bytes())
    (directory / "chat_template.jinja").write_text(MARKED)
    return directory


def built(rows: list[dict[str, Any]], model: Path, tmp_path: Path, **changes: Any) -> Snapshot:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    values = {"format": "jsonl", "tokenizer": str(model / "tokenizer.json"), **changes}
    settings = DataSettings(held_out_share=0.2, seed=3, **values)
    return build_snapshot(str(source), DiskStore.url_of(tmp_path / "store"), settings, DiskStore())


def said_by_assistants(template: ChatTemplate, messages: list[dict[str, str]]) -> str:
    _, tokens, mask = template.tokens(messages)
    return str(template._tokenizer.decode(tokens[mask]))


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_the_mask_is_of_what_assistants_say(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    found = ChatTemplate(str(model / "tokenizer.json"))
    messages = conversation(4, 2)["messages"]
    text, tokens, mask = found.tokens(messages)
    end = "" if template == MARKED else "\n"  # without marks a message is all that it adds
    assert said_by_assistants(found, messages) == f"it is 4<|im_end|>{end}it is 5<|im_end|>{end}"
    assert not mask[0]
    assert found._tokenizer.decode(tokens) == text
    prompt, stop = found.prompt("what?")
    assert found._tokenizer.decode(prompt).endswith("what?<|im_end|>\n<|im_start|>assistant\n")
    assert found._tokenizer.decode([stop]) == "<|im_end|>"


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["marked", "by difference"])
def test_a_message_of_weight_0_does_not_count(model: Path, template: str) -> None:
    """OpenAI's format: what is counted is what the other answers add."""
    (model / "chat_template.jinja").write_text(template)
    found = ChatTemplate(str(model / "tokenizer.json"))
    messages = conversation(4, 3)["messages"]
    text, tokens, mask = found.tokens(messages)
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    again, same, weighted = found.tokens(messages)
    assert (again, same.tolist()) == (text, tokens.tolist())
    assert "it is 4" in found._tokenizer.decode(tokens[mask & ~weighted])
    assert said_by_assistants(found, messages).replace("\n", "") == (
        "it is 5<|im_end|>it is 6<|im_end|>"
    )


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["marked", "by difference"])
def test_an_answer_that_begins_a_conversation_counts(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    found = ChatTemplate(str(model / "tokenizer.json"))
    messages = conversation(4, 2)["messages"][1:]
    said = said_by_assistants(found, messages).replace("\n", "")
    assert said == "it is 4<|im_end|>it is 5<|im_end|>"


def test_an_opening_that_a_template_writes_otherwise_is_explained(model: Path) -> None:
    """One that introduces no answer leaves no way to tell where the first one begins."""
    (model / "chat_template.jinja").write_text(
        "{% for each in messages %}[{{ each.role }}] {{ each.content }}<|im_end|>{% endfor %}"
    )
    found = ChatTemplate(str(model / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"message 1 differently.*mark what assistants say"):
        found.tokens(conversation(4, 2)["messages"][1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"role": "assistant", "weight": 0.5}, "message 2 has weight 0.5, not 0 or 1"),
        ({"role": "assistant", "weight": True}, "has weight True, not 0 or 1"),
        ({"role": "user", "weight": 2}, "has weight 2, not 0 or 1"),
        ({"role": "assistant", "weight": 0}, "every message of an assistant has weight 0"),
    ],
)
def test_other_weights_are_left_out_with_the_reason(
    model: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    odd = conversation(99)
    odd["messages"][1] |= change
    record = built([*ROWS, odd], model, tmp_path).record
    assert record.skipped == 1
    assert reason in record.skipped_examples[0]


def test_rows_with_messages_and_a_pair_name_the_fields_to_keep(model: Path, tmp_path: Path) -> None:
    both = conversation(98) | {"prompt": "what?", "chosen": "this", "rejected": "that"}
    other = {"prompt": "what?", "completion": "this", "rejected": "that", "chosen": "it"}
    label = conversation(97) | {"chosen": "model-a", "rejected": ""}  # of no pair
    record = built([*ROWS, both, other, label], model, tmp_path).record
    assert record.skipped == 2
    first, second = record.skipped_examples[:2]
    assert "has messages and chosen: keep messages; or prompt, chosen, rejected, for" in first
    assert "has prompt, completion and chosen: keep prompt, completion; or" in second


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["marked", "by difference"])
def test_a_template_that_has_the_bos_gets_no_second_one(tmp_path: Path, template: str) -> None:
    """The tokenizer's post-processor adds it to a text, and not to a rendered conversation."""
    messages = conversation(3, turns=2)["messages"]
    made = write_tokenizer(
        tmp_path, [str(ROWS)], template="{{ bos_token }}" + template, end="<|im_end|>", begin="<s>"
    )
    chat = ChatTemplate(str(made / "tokenizer.json"))
    for tokens in (chat.tokens(messages)[1].tolist(), chat.prompt("what is 3?")[0]):
        assert tokens[0] == 0
        assert tokens.count(0) == 1


def test_a_snapshot_has_masks_counts_and_the_templates_digest(model: Path, tmp_path: Path) -> None:
    snapshot = built(ROWS, model, tmp_path)
    record = snapshot.record
    assert snapshot.is_masked
    assert record.template_sha256 == ChatTemplate(str(model / "tokenizer.json")).digest
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        table = read_table(snapshot, cache)
        assert table.figures["tokens"].longest == record.longest_tokens
        for shard in snapshot.shards:
            index = cache.index(shard)
            with cache.samples(shard) as samples:
                masks = [samples.features(i)["loss_mask"] for i in range(len(samples))]
                assert samples.index().tolist() == index.tolist(), "a damaged file is replaced"
            assert index[0].tolist() == [len(each) for each in masks]
            assert index[1].tolist() == [int(each.sum()) for each in masks]
    (model / "chat_template.jinja").write_text(CHATML)
    assert built(ROWS, model, tmp_path).digest != snapshot.digest


def test_a_template_in_a_bucket_renders_tools_as_the_one_on_disk(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ tools[0].function.name }}" + CHATML)

    class Bucket:
        def get_bytes(self, url: str, max_bytes: int) -> bytes:
            path = model / url.removeprefix("s3://bucket/model/")
            if not path.is_file():
                raise SourceMissing("no object here", where=url)
            return path.read_bytes()

    there = ChatTemplate("s3://bucket/model/tokenizer.json", Bucket())  # type: ignore[arg-type]
    here = ChatTemplate(str(model / "tokenizer.json"))
    tools = [{"type": "function", "function": {"name": "adder"}}]
    found, wanted = (each.tokens(conversation(1)["messages"], tools) for each in (there, here))
    assert found[0] == wanted[0]
    assert found[0].startswith("adder<|im_start|>")
    assert found[1].tolist() == wanted[1].tolist()
    assert there.digest == here.digest


def test_of_a_prompt_and_completion_in_messages_the_completion_counts(
    model: Path, tmp_path: Path
) -> None:
    """As in TRL's format: what an assistant says in the prompt does not count."""
    whole = [conversation(number, 2)["messages"] for number in range(8)]
    rows = [{"prompt": each[:3], "completion": each[3:]} for each in whole]
    rows += [{"prompt": whole[0], "completion": []}, {"prompt": "a", "completion": whole[1]}]
    found = built(rows, model, tmp_path)
    assert (found.record.documents, found.is_paired) == (8, False)
    assert {each.partition(": ")[2] for each in found.record.skipped_examples} == {
        "its 'prompt' is no list of messages",
        "its 'completion' is empty",
    }
    template = ChatTemplate(f"{model}/tokenizer.json")
    last = sum(int(template.tokens(each, prompt=3)[2].sum()) for each in whole)
    assert found.record.token_count == sum(len(template.tokens(each)[1]) for each in whole)
    counted = 0
    with ShardCache(found, DiskStore(), tmp_path / "cache") as cache:
        for shard in found.shards:
            with cache.samples(shard) as samples:
                masks = [samples.features(i)["loss_mask"] for i in range(len(samples))]
            counted += sum(int(each.sum()) for each in masks)
    assert counted == last


def test_a_template_for_tools_renders_the_rows_with_tools(model: Path, tmp_path: Path) -> None:
    """As transformers does, of a model that has two; the snapshot's own copy has both."""
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    several = {"default": CHATML, "tool_use": "{{ tools[0].function.name }}: " + CHATML}
    named = [{"name": name, "template": each} for name, each in several.items()]
    config["chat_template"] = named
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate(f"{model}/tokenizer.json")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = conversation(1)["messages"]
    (tmp_path / "own.json").write_bytes(found.config)
    kept = ChatTemplate(f"{model}/tokenizer.json", None, [str(tmp_path / "own.json")])
    for each in (found, kept):
        assert each.tokens(messages, tools)[0] == "f: " + each.tokens(messages)[0]
    assert kept.digest == found.digest


def test_a_template_that_writes_the_day_gives_the_same_rows_each_day(
    model: Path, tmp_path: Path
) -> None:
    clock = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %f') }} {% endif %}"
    (model / "chat_template.jinja").write_text(clock + MARKED)
    first, again = (built(ROWS[:6], model, tmp_path).digest for _ in range(2))
    assert first == again
    text = ChatTemplate(f"{model}/tokenizer.json").text_of(ROWS[0]["messages"])
    assert text.startswith("26 Jul 2024, 000000 <|im_start|>user"), "as Llama's without a clock"


def test_rows_of_parquet_and_of_prompts_are_the_same_samples(model: Path, tmp_path: Path) -> None:
    rows = [conversation(number) for number in range(20)]
    wanted = [each.sha256 for each in built(rows, model, tmp_path).shards]
    pairs = [
        {"key": each["key"], "prompt": each["messages"][0]["content"],
         "completion": each["messages"][1]["content"]}
        for each in rows
    ]  # fmt: skip
    assert [each.sha256 for each in built(pairs, model, tmp_path).shards] == wanted
    (tmp_path / "source" / "rows.jsonl").unlink()
    for table in (
        rows,
        pairs,
        [each | {"messages": json.dumps(each["messages"])} for each in rows],
    ):
        pq.write_table(pa.Table.from_pylist(table), tmp_path / "source" / "rows.parquet")
        settings = DataSettings(
            format="parquet", tokenizer=str(model / "tokenizer.json"), held_out_share=0.2, seed=3
        )
        found = build_snapshot(
            str(tmp_path / "source"), DiskStore.url_of(tmp_path / "store"), settings, DiskStore()
        )
        assert [each.sha256 for each in found.shards] == wanted


def test_tokens_with_a_mask_of_ones_own_need_no_template(tmp_path: Path) -> None:
    rows = [
        {"key": str(n), "text": list(range(n, n + 9)), "loss_mask": [False] * 5 + [True] * 4}
        for n in range(20)
    ]
    rows[7]["loss_mask"] = [True]
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), source / "rows.parquet")
    settings = DataSettings(format="parquet", held_out_share=0.2)
    url = DiskStore.url_of(tmp_path / "store")
    record = build_snapshot(str(source), url, settings, DiskStore()).record
    assert (record.template_sha256, record.longest_tokens) == (None, 9)
    assert record.skipped_examples == ("7: its 'loss_mask' has 1 values for 9 tokens",)


@pytest.mark.parametrize("batching", ["packed", "bucketed"])
def test_rows_are_whole_conversations_weighted_by_their_masks(
    model: Path, tmp_path: Path, batching: str
) -> None:
    """Together the ranks read each conversation once; weights add up to what was planned."""
    snapshot = built(ROWS, model, tmp_path)
    template = ChatTemplate(str(model / "tokenizer.json"))
    wanted = {}
    for each in ROWS:
        _, tokens, mask = template.tokens(each["messages"])
        wanted[tuple(tokens.tolist())] = mask
    settings = DataSettings(batching=batching)
    seen = []
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        streams = [
            open_stream(
                snapshot, "train", cache, settings, context=128, global_batch=4, seed=1,
                rank=rank, world_size=2,
            )
            for rank in range(2)
        ]  # fmt: skip
        for _ in range(3):
            batches = [each.next() for each in streams]
            counted = sum(float(each.weights_BT.sum()) for each in batches)
            assert counted == batches[0].global_tokens == batches[1].global_tokens
            assert not batches[0].features
            for batch in batches:
                for row, inputs in enumerate(batch.inputs_BT):
                    documents = (
                        np.zeros(len(inputs))
                        if batch.documents_BT is None
                        else batch.documents_BT[row]
                    )
                    for document in sorted(set(documents.tolist()) - {-1}):
                        its = np.flatnonzero(documents == document)
                        ids = inputs[its].tolist()
                        end = max(
                            n for n in range(len(ids) + 1) if tuple(ids[:n]) in wanted or not n
                        )
                        if not end:  # an empty row
                            assert not batch.weights_BT[row].any()
                            continue
                        mask = wanted[tuple(ids[:end])]
                        seen.append(tuple(ids[:end]))
                        assert batch.weights_BT[row][its][: end - 1].tolist() == mask[1:].tolist()
                        assert not batch.weights_BT[row][its][end - 1 :].any()
                        targets = batch.targets_BT[row][its]
                        assert targets[: end - 1].tolist() == ids[1:end]
        for each in streams:
            each.close()
    assert len(seen) > 5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "?"}]}, "no message is an assistant's"),
        ({"messages": "hello"}, "its 'messages' is no list of messages"),
        ({"messages": [{"content": "?"}]}, "message 1 has no role"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "message 1 has no text as content"),
        ({"prompt": "?", "completion": None}, "message 2 has no text as content"),
        ({**conversation(1), "tools": "x"}, "its 'tools' is no list"),
        (
            {"messages": [{"role": "judge", "content": "?"}, *conversation(1)["messages"]]},
            "the chat template raises TemplateError: no judge",
        ),
        ({"text": "no conversation at all"}, "no conversation, unlike most of the first samples"),
        (conversation(1, 9), "tokens, more than max_tokens 90"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_with_its_reason(
    model: Path, tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    (model / "chat_template.jinja").write_text(STRICT + CHATML)
    record = built([*ROWS, {**row, "key": "odd"}], model, tmp_path, max_tokens=90).record
    assert record.documents == len(ROWS)
    (found,) = record.skipped_examples
    assert found.startswith("odd: ")
    assert reason in found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}", "not a chat template"),
        ("{{ raise_exception('never') }}", "the chat template raises TemplateError: never"),
        ("{{ messages[0].absent.deeper }}", "the chat template raises UndefinedError"),
        # drops what was said before the last question, as some do with reasoning
        ("{% for m in messages[-2:] %}<|im_start|>{{ m.content }}{% endfor %}", "{% generation %}"),
        ("a constant", "no token is an assistant's"),
    ],
)
def test_a_template_that_does_not_work_is_refused_in_one_line(
    model: Path, tmp_path: Path, template: str | None, said: str
) -> None:
    (model / "chat_template.jinja").unlink()
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    rows = [conversation(number, 2) for number in range(20)]
    with pytest.raises(InvalidInput) as caught:
        built(rows, model, tmp_path)
    assert said in caught.value.one_line()
    assert "\n" not in caught.value.one_line()


def test_conversations_need_a_tokenizer_whole_rows_and_long_ones(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"--tokenizer MODEL/tokenizer\.json"):
        built(ROWS, model, tmp_path, tokenizer="bytes")
    snapshot = built(ROWS, model, tmp_path)
    longest = snapshot.record.longest_tokens
    assert longest is not None

    def readable(context: int, **changes: Any) -> None:
        settings = DataSettings(**{"batching": "packed", **changes})
        require_readable(snapshot, settings, context=context, global_batch=2, splits=["train"])

    readable(longest + 1)
    with pytest.raises(InvalidInput, match=f"--max-tokens {longest - 1}"):
        readable(longest)
    with pytest.raises(InvalidInput, match=r"data\.batching=packed"):
        readable(longest + 1, batching="windows")
    with pytest.raises(InvalidInput, match="no features a token"):
        readable(longest + 1, token_features=("loss_mask",))


@pytest.mark.parametrize(
    ("changes", "template", "do"),
    [
        ({"max_tokens": 9}, MARKED, "Raise data.max_tokens, or model.context"),
        ({"max_bytes": 1024}, MARKED, "Raise data.max_bytes"),
        ({}, "{{ raise_exception('never') }}", "Mend what was skipped"),
    ],
    ids=["too long", "too many bytes", "refused by the template"],
)
def test_a_source_without_usable_rows_says_what_to_change(
    model: Path, tmp_path: Path, changes: dict[str, Any], template: str, do: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    changes = {"max_bad_share": 0.99, **changes}
    with pytest.raises(InvalidInput, match=f"too few samples.*{do}"):
        built([conversation(number, 60) for number in range(4)], model, tmp_path, **changes)


def test_a_message_without_a_template_is_refused_without_words_on_data(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput, match=r"has no chat template.*generate without --chat"):
        ChatTemplate(f"{model}/tokenizer.json").prompt("hello")


@pytest.mark.parametrize("template", [CHATML, "{{ 'start ' }}" + CHATML])
def test_a_system_message_is_removed_from_a_rendered_conversation(
    model: Path, template: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    found = ChatTemplate(f"{model}/tokenizer.json")
    turns = conversation(1, 2)["messages"]
    system = {"role": "system", "content": "be brief"}
    plain, ruled = (
        found.without_system(found.tokens(each)[0].encode()) for each in (turns, [system, *turns])
    )
    assert plain == ruled
    assert plain.startswith(b"what is 1 + 0?")


@pytest.mark.parametrize("end", ["[EOS]", "<|eos|>", "<EOD>", "<｜end▁of▁sentence｜>"])
def test_a_token_that_ends_documents_may_have_another_name(tmp_path: Path, end: str) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.add_tokens([AddedToken("eos", special=False)])  # a word
    made.add_special_tokens(["[PAD]", end])
    made.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(str(tmp_path / "tokenizer.json")).vocabulary
    assert (found.separator, found.vocab_size) == (made.token_to_id(end), 5)
