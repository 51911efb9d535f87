"""One odd sample is left out, counted and named with the reason; all others are in the snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import DataSettings, Secrets
from paceline.data import ShardCache, Snapshot, build_snapshot, load_snapshot, open_tokenizer
from paceline.data.formats import LAYOUT, ShardSamples, read_columns, tar
from paceline.errors import InvalidInput
from paceline.storage import DiskStore
from paceline.tasks._support.run import StageResult
from paceline.tasks.prepare import build_data_snapshot
from tests.security.archives import ODD_MEMBERS, tar_of

GOOD = 9


def built(source: Path, **changes: Any) -> Snapshot:
    settings = DataSettings.model_validate({"held_out_share": 0.3, "purpose": "tests", **changes})
    store = DiskStore()
    made = build_snapshot(str(source), store.url_of(source.parent / "data"), settings, store)
    return load_snapshot(made.url, store)


def keys_of(snapshot: Snapshot, where: Path) -> set[str]:
    with ShardCache(snapshot, DiskStore(), where / "cache") as cache:
        return {
            samples.key(i)
            for shard in snapshot.shards
            for samples in [cache.samples(shard)]
            for i in range(len(samples))
        }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


GOOD_MEMBERS = [(f"good-{n}.txt", f"text number {n}".encode()) for n in range(GOOD)]
GOOD_KEYS = {f"good-{n}" for n in range(GOOD)}


def test_an_odd_member_of_a_tar_is_counted_and_named(source: Path) -> None:
    odd = [
        (f"{key}.{extension}" if extension else key, body)
        for key, (extension, body) in ODD_MEMBERS.items()
    ]
    (source / "all.tar").write_bytes(tar_of([*GOOD_MEMBERS[:4], *odd, *GOOD_MEMBERS[4:]]))
    snapshot = built(source, format="tar", max_bad_share=0.99)
    assert keys_of(snapshot, source.parent) == GOOD_KEYS
    named = {each.split(":")[0][:500]: each for each in snapshot.record.skipped_examples}
    wanted = {key[:500] for key in ODD_MEMBERS}
    assert set(named) == wanted, set(named) ^ wanted
    assert snapshot.record.skipped == len(ODD_MEMBERS)
    assert "claims 8000000000000 bytes" in named["eight-terabytes"]
    assert "claims 68 bytes of numbers, has 64" in named["more-than-there-is"]


ODD_LINES = {
    "deep": b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "half an escape": rb'{"key": "\ud800", "text": 7}',
    "a terminal's command": rb'{"key": "\u001b[2J\u0000\n", "text": " "}',
    "digits": b'{"text": "x", "n": ' + b"1" * 10_000 + b"}",
    "invalid UTF-8": b'{"text": "\xff\xfe"}',
    "values": b'{"text": "x", "n": [' + b"[]," * 3_000_000 + b"[]]}",
    "a long line": b'{"text": "' + b"x" * (25 << 20) + b'"}',
    "a column without a name": b'{"text": "x", "": 1}',
    "an empty key": b'{"key": "", "text": "x"}',
    "a long key": b'{"key": "' + b"k" * 5000 + b'", "text": "x"}',
}


def test_an_odd_line_of_jsonl_is_counted_and_named(source: Path) -> None:
    good = [json.dumps({"key": f"good-{n}", "text": f"text {n}"}).encode() for n in range(GOOD)]
    (source / "all.jsonl").write_bytes(b"\n".join([*good[:3], *ODD_LINES.values(), *good[3:]]))
    snapshot = built(source, format="jsonl", max_bad_share=0.9)
    assert keys_of(snapshot, source.parent) == GOOD_KEYS
    assert snapshot.record.skipped == len(ODD_LINES) == len(snapshot.record.skipped_examples)
    assert all(each.isprintable() for each in snapshot.record.skipped_examples)


def test_words_of_any_length_in_json_are_not_numbers_and_take_no_memory(source: Path) -> None:
    words = ["short"] * 3000 + ["w" * 1_000_000]  # as an array of strings: 12 GB
    lines = [json.dumps({"key": f"good-{n}", "text": f"text {n}", "tags": words}) for n in range(2)]
    (source / "all.jsonl").write_text("\n".join(lines))
    assert built(source, format="jsonl").record.documents == 2


def odd_parquet(path: Path, odd: pa.Array, kind: pa.DataType) -> None:
    good = pa.array([f"text number {n}" for n in range(GOOD)], pa.string())
    keys = [*(f"good-{n}" for n in range(GOOD)), "odd"]
    text = pa.concat_arrays([good.cast(kind), odd])
    pq.write_table(pa.table({"key": keys, "text": text}), path)


def test_a_string_of_parquet_that_is_not_utf8_is_counted_and_named(source: Path) -> None:
    raw = pa.array([b"\xff\xfe latin"], pa.binary())
    odd = pa.Array.from_buffers(pa.string(), 1, raw.buffers())  # pyarrow does not look
    odd_parquet(source / "all.parquet", odd, pa.string())
    snapshot = built(source, format="parquet")
    assert keys_of(snapshot, source.parent) == GOOD_KEYS
    assert snapshot.record.skipped_examples == ("odd: not UTF-8",)


def test_a_text_of_parquet_that_is_too_large_is_counted_and_named(source: Path) -> None:
    odd_parquet(source / "all.parquet", pa.array(["x" * (9 << 20)]), pa.string())
    snapshot = built(source, format="parquet")
    assert keys_of(snapshot, source.parent) == GOOD_KEYS
    assert snapshot.record.skipped_examples[0].startswith("odd: too large")


def test_lists_of_no_numbers_in_parquet_are_read(source: Path) -> None:
    keys = pa.array([f"good-{n}" for n in range(GOOD)])
    texts = pa.array([f"text {n}" for n in range(GOOD)])
    none = pa.array([[]] * GOOD, pa.list_(pa.list_(pa.float64())))
    words = pa.array([["a", "b"]] * GOOD, pa.list_(pa.string()))
    table = pa.table({"key": keys, "text": texts, "none": none, "words": words})
    pq.write_table(table, source / "all.parquet")
    assert keys_of(built(source, format="parquet"), source.parent) == GOOD_KEYS


def test_an_odd_first_sample_does_not_make_the_others_odd(source: Path) -> None:
    lines = [{"key": "odd", "text": "one", "extra": 1.0}]
    lines += [{"key": f"good-{n}", "text": f"text {n}"} for n in range(GOOD)]
    (source / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    snapshot = built(source, format="jsonl")
    assert keys_of(snapshot, source.parent) == GOOD_KEYS
    assert snapshot.record.skipped_examples[0].startswith("odd: a column 'extra'")


def tokenizer_file(directory: Path, model: dict[str, Any]) -> str:
    tokenizers = pytest.importorskip("tokenizers", reason="an optional extra")
    whole = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(whole | {"model": model}))
    return str(path)


def test_a_text_that_the_tokenizer_cannot_encode_is_counted_and_named(source: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}
    for name, text in (("good-0", "a"), ("good-1", "b"), ("odd", "c")):
        (source / name).write_text(text)
    snapshot = built(source, tokenizer=tokenizer_file(source.parent, model))
    assert keys_of(snapshot, source.parent) == {"good-0", "good-1"}
    assert "odd: its tokenizer fails" in snapshot.record.skipped_examples[0]


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},  # its Rust code panics
        {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"},
        {"type": "WordLevel"},
    ],
)
def test_a_hostile_tokenizer_is_refused_by_name(tmp_path: Path, model: dict[str, Any]) -> None:
    if model["type"] == "BPE":
        model = model | {"continuing_subword_prefix": "##"}
    with pytest.raises(InvalidInput, match=r"not a tokenizer\.json"):
        open_tokenizer(tokenizer_file(tmp_path, model))


def test_a_defect_of_our_own_is_not_taken_for_a_bad_sample(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a defect")

    (source / "all.tar").write_bytes(
        tar_of([("a.txt", b"a"), ("b.x.npy", ODD_MEMBERS["objects"][1])])
    )
    monkeypatch.setattr(tar, "require_numbers", broken)
    with pytest.raises(KeyError, match="a defect"):
        built(source, format="tar")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U8", "shape": [2**70], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [-(2**70)], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0.5, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [2**70, 2**71]},
        {"dtype": [], "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": "four", "data_offsets": [0, 4]},
        [],
    ],
)
def test_a_shard_with_an_odd_header_is_one_to_quarantine(entry: Any) -> None:
    raw = json.dumps({"__metadata__": {"layout": LAYOUT}, "tokens": entry}).encode()
    data = len(raw).to_bytes(8, "little") + raw + b"abcd"
    with pytest.raises(ValueError, match=r"."):  # what the cache takes for a bad shard
        ShardSamples(read_columns(data), 1)


def test_what_is_left_out_is_in_the_summary_of_the_command(source: Path) -> None:
    lines = [json.dumps({"key": f"good-{n}", "text": f"text {n}"}) for n in range(GOOD)]
    again = json.dumps({"key": "again", "text": "text  1"})
    (source / "all.jsonl").write_text("\n".join([*lines, "{odd", again]))
    notes: list[str] = []

    def stage(name: str, _inputs: object, work: Callable[[], Any], **_: object) -> StageResult:
        return StageResult(stage=name, output=work(), seconds=0.0, reused=False)

    settings = DataSettings.model_validate({"held_out_share": 0.3, "format": "jsonl"})
    runtime = SimpleNamespace(
        profile=SimpleNamespace(data=settings), data_url=DiskStore.url_of(source.parent / "data"),
        secrets=Secrets(),
    )  # fmt: skip
    run: Any = SimpleNamespace(
        runtime=runtime, store=DiskStore(), work_dir=source.parent, stage=stage,
        warn=notes.append, report=lambda *_: None,
    )  # fmt: skip
    output = build_data_snapshot.fn(run, str(source)).output
    assert output["skipped"] == 1
    assert output["skipped_examples"] == ["all.jsonl:10: not JSON"]
    assert output["duplicates"] == 1
    assert notes == [
        "1 samples are left out of the snapshot: all.jsonl:10: not JSON",
        "1 samples that say the same as another are left out of the snapshot",
    ]
