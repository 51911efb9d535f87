"""Builders: whatever the format, every sample once, the same digest again, faults named."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings as hypothesis, strategies as st
from pydantic import ValidationError

from paceline.config import DataSettings
from paceline.data import (
    ShardCache,
    Snapshot,
    assign_splits,
    build_snapshot,
    documents,
    load_snapshot,
    require_readable,
)
from paceline.data.formats import ColumnWriter, ShardSamples, read_columns
from paceline.errors import InvalidInput, InvalidSnapshot, PacelineError, SourceMissing
from paceline.schemas import canonical_json, digest_of
from paceline.storage import DiskStore
from tests.support.rclone import RcloneS3

SETTINGS = DataSettings(shard_bytes=2048, held_out_share=0.3, purpose="tests", seed=5)


def built(source: Path, root: Path, **changes: Any) -> Snapshot:
    settings = DataSettings.model_validate(SETTINGS.model_dump() | changes)
    return build_snapshot(str(source), DiskStore.url_of(root), settings, DiskStore())


def read(snapshot: Snapshot, cache_dir: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every sample of both splits by key; a key that comes twice fails."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    with ShardCache(snapshot, DiskStore(), cache_dir) as cache:
        for shard in snapshot.shards:
            with cache.samples(shard) as samples:
                assert len(samples) == shard.samples
                lengths = cache.lengths(shard)
                total = 0
                for i in range(len(samples)):
                    assert samples.key(i) not in found
                    found[samples.key(i)] = (samples.tokens(i), samples.features(i))
                    total += len(samples.tokens(i))
                    if len(samples.tokens(i)):
                        assert lengths[i] == len(samples.tokens(i))
                assert total == shard.tokens
                flat, ends = samples.flat()
                assert len(flat) == shard.tokens
                assert ends[-1] == shard.tokens
    return found


def as_text(found: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, str]:
    return {key: tokens.tobytes().decode() for key, (tokens, _) in found.items()}


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda text: bool(text.strip())
)


@given(
    texts=st.dictionaries(
        st.from_regex(r"[a-z]{1,6}", fullmatch=True),
        TEXTS | st.sampled_from(["one and the same", "another"]),
        min_size=2,
        max_size=12,
    ),
    share=st.sampled_from([0.1, 0.5, 0.95]),
    seed=st.integers(-(2**40), 2**40),
    shard_bytes=st.integers(1024, 4096),
)
@hypothesis(max_examples=6, deadline=None)
def test_any_documents_are_each_there_once_under_one_digest(
    tmp_path_factory: pytest.TempPathFactory,
    texts: dict[str, str],
    share: float,
    seed: int,
    shard_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("any")
    distinct: dict[str, str] = {}
    for key, text in texts.items():
        distinct.setdefault(text, key)
    if len(distinct) < 2:
        return
    snapshots = []
    for turn, names in enumerate((sorted(texts), sorted(texts, reverse=True))):
        source = root / f"source-{turn}"
        source.mkdir()
        for name in names:  # a directory lists its files in another order
            (source / f"{name}.txt").write_text(texts[name], newline="")
        where = root / f"store-{turn}"
        changes = {"seed": seed, "shard_bytes": shard_bytes, "held_out_share": share}
        snapshots.append(built(source, where, **changes))
    one, other = snapshots
    assert one.record == other.record
    assert one.digest == other.digest
    found = as_text(read(one, root / "cache"))
    assert sorted(found.values()) == sorted(distinct)
    assert all(texts[key.removesuffix(".txt")] == text for key, text in found.items())
    assert one.record.duplicates == len(texts) - len(distinct)
    held_out = {each.path for each in documents(one, "held-out", DiskStore(), root / "cache")}
    assert held_out == assign_splits(sorted(found), share, seed), "by key and seed alone"
    assert 0 < len(held_out) < len(found), "none of the splits is empty"


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "key": f"row-{n:03d}",
            "text": f"this is row {n}: {'ab' * n}",
            "frames": np.arange(3 * (n % 4 + 1), dtype=np.float32).reshape(-1, 3) / 8,
            "events": np.arange(n % 5 + 1, dtype=np.int64),
            "label": n % 3,
        }
        for n in range(count)
    ]


def write_jsonl(rows: list[dict[str, Any]], directory: Path) -> None:
    lines = [
        json.dumps({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()})
        for row in rows
    ]
    half = len(lines) // 2
    (directory / "a.jsonl").write_text("\n".join(lines[:half]) + "\n")
    (directory / "b.jsonl").write_text("\n".join(lines[half:]))


def write_parquet(rows: list[dict[str, Any]], directory: Path) -> None:
    schema = pa.schema(
        {
            "key": pa.string(),
            "text": pa.string(),
            "frames": pa.list_(pa.list_(pa.float32())),
            "events": pa.list_(pa.int64()),
            "label": pa.int16(),
        }
    )
    plain = [
        {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(plain, schema), directory / "all.parquet")


def write_tar(rows: list[dict[str, Any]], directory: Path) -> None:
    with tarfile.open(directory / "all.tar", "w") as archive:
        for row in rows:
            members = {
                "txt": row["text"].encode(),
                "json": json.dumps({"label": row["label"], "note": "a word"}).encode(),
            }
            for name in ("frames", "events"):
                body = io.BytesIO()
                np.save(body, row[name])
                members[f"{name}.npy"] = body.getvalue()
            for extension, body_bytes in members.items():
                info = tarfile.TarInfo(f"{row['key']}.{extension}")
                info.size = len(body_bytes)
                archive.addfile(info, io.BytesIO(body_bytes))


@pytest.mark.parametrize(
    ("format_", "write", "kinds"),
    [
        ("jsonl", write_jsonl, ("float32", "float32", "float32")),
        ("parquet", write_parquet, ("float32", "int64", "int16")),
        ("tar", write_tar, ("float32", "int64", "float32")),
    ],
)
def test_each_format_gives_text_frames_events_and_labels(
    source: Path, tmp_path: Path, format_: str, write: Any, kinds: tuple[str, ...]
) -> None:
    rows = rows_of(40)
    write(rows, source)
    (source / "README.md").write_text("not data")
    snapshot = built(source, tmp_path / "store", format=format_)
    assert snapshot.record.format == format_
    assert snapshot.record.skipped == 1, "the README"
    assert [each.name for each in snapshot.columns] == ["events", "frames", "label"]
    assert [each.shape for each in snapshot.columns] == [(None,), (None, 3), ()]
    by_name = {each.name: each.dtype for each in snapshot.columns}
    assert (by_name["frames"], by_name["events"], by_name["label"]) == kinds
    found = read(snapshot, tmp_path / "cache")
    assert len(found) == 40
    assert len(snapshot.shards) >= 4
    for row in rows:
        tokens, features = found[row["key"]]
        assert tokens.tobytes().decode() == row["text"]
        for name in ("frames", "events", "label"):
            assert np.array_equal(features[name], row[name]), name
    assert built(source, tmp_path / "store", format=format_).digest == snapshot.digest


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    (tmp_path / "source").mkdir()
    write_jsonl(rows_of(20), tmp_path / "source")
    snapshot = built(tmp_path / "source", tmp_path / "store", format="jsonl")
    shard = snapshot.of_split("train")[0]
    arrays = load_file(tmp_path / "store" / "shards" / shard.name)
    assert len(arrays["tokens"]) == shard.tokens
    assert arrays["tokens.ends"][-1] == shard.tokens
    assert arrays["feature.frames"].shape[1] == 3


def test_bad_rows_are_left_out_and_named(source: Path, tmp_path: Path) -> None:
    good = [json.dumps({"key": f"k{n}", "text": f"text {n}"}) for n in range(4)]
    bad = [
        "{",
        "[1, 2]",
        json.dumps({"key": "empty", "text": " "}),
        json.dumps({"key": "nul", "text": "\0"}),
        json.dumps({"key": "number", "text": 7}),
        json.dumps({"key": "none", "name": "no text here"}),
        json.dumps({"key": "ragged", "text": "x", "m": [[1, 2], [3]]}),
        json.dumps({"key": "more", "text": "x", "m": [1, 2]}),
        '{"key": "half", "text": "\\ud800"}',
        json.dumps({"key": [1], "text": "x"}),
    ]
    (source / "all.jsonl").write_text("\n".join(good + bad))
    record = built(source, tmp_path / "store", format="jsonl", max_bad_share=0.8).record
    assert record.documents == 4
    assert record.skipped == len(bad)
    reasons = {each.split(": ", 1)[0]: each.split(": ", 1)[1] for each in record.skipped_examples}
    assert reasons["all.jsonl:5"] == "not JSON"
    assert reasons["all.jsonl:6"] == "not an object"
    assert reasons["empty"] == "empty"
    assert reasons["nul"] == "binary"
    assert reasons["number"] == "its 'text' is no text"
    assert reasons["none"] == "neither text nor numbers"
    assert reasons["ragged"].startswith("'m'")
    assert reasons["more"].startswith("a column 'm'")
    assert reasons["half"] == "not UTF-8"
    assert reasons["all.jsonl:14"] == "its 'key' is no name"


def test_gzipped_jsonl_is_read_and_a_cut_file_is_named(source: Path, tmp_path: Path) -> None:
    write_jsonl(rows_of(20), source)
    plain = built(source, tmp_path / "plain", format="jsonl")
    for path, packed in (("a.jsonl", "a.jsonl.gz"), ("b.jsonl", "b.json.gz")):
        (source / packed).write_bytes(gzip.compress((source / path).read_bytes()))
        (source / path).unlink()
    found = built(source, tmp_path / "packed", format="jsonl")
    assert (found.record.documents, found.record.skipped) == (20, 0)
    assert read(found, tmp_path / "a").keys() == read(plain, tmp_path / "b").keys()
    whole = (source / "a.jsonl.gz").read_bytes()
    (source / "a.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(InvalidInput, match=r"JSONL file cannot be read.*a\.jsonl\.gz"):
        built(source, tmp_path / "cut", format="jsonl")


def test_two_samples_of_one_key_are_refused(source: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"key": key, "text": f"text {n}"}) for n, key in enumerate("abca")]
    (source / "all.jsonl").write_text("\n".join(lines))
    with pytest.raises(InvalidInput, match=r"two samples have the same key.*'a'"):
        built(source, tmp_path / "store", format="jsonl")
    assert not list((tmp_path / "store").rglob("snapshot.json"))


def test_files_that_are_no_parquet_or_tar_are_named(source: Path, tmp_path: Path) -> None:
    (source / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(InvalidInput, match=r"Parquet file cannot be read.*bad\.parquet"):
        built(source, tmp_path / "store", format="parquet")
    (source / "bad.tar").write_bytes(b"x" * 2000)
    with pytest.raises(InvalidInput, match=r"tar file cannot be read.*bad\.tar"):
        built(source, tmp_path / "store", format="tar")
    with pytest.raises(InvalidInput, match="too few samples"):
        built(source, tmp_path / "store", format="jsonl")
    with pytest.raises(SourceMissing, match="no directory of jsonl files"):
        built(tmp_path / "none", tmp_path / "store", format="jsonl")


def test_a_tar_may_not_hide_objects_or_endless_members(source: Path, tmp_path: Path) -> None:
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    members = {
        "a.txt": b"one",
        "b.txt": b"two",
        "c.npy": pickled.getvalue(),
        "d": b"no extension",
        "e.txt": b"three",
        "e.n.npy": b"not an array",
        "f.cls": b"x",
        "../../g.txt": b"a name is a name, nothing is written there",
    }
    with tarfile.open(source / "all.tar", "w") as archive:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
        link = tarfile.TarInfo("h.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    snapshot = built(source, tmp_path / "store", format="tar", max_bad_share=0.8)
    assert set(read(snapshot, tmp_path / "cache")) == {"a", "b", "../../g"}
    assert [each.split(":")[0] for each in snapshot.record.skipped_examples] == [
        *("c", "d", "e", "f")
    ]


def feature_file(path: Path, keys: list[str], **columns: Any) -> str:
    pq.write_table(pa.table({"key": keys, **columns}), path)
    return str(path)


def test_features_are_joined_by_key_from_several_files(source: Path, tmp_path: Path) -> None:
    keys = [f"f{n}.txt" for n in range(6)]
    for n, key in enumerate(keys):
        (source / key).write_text(f"document {n}")
    vectors = [[n + 0.5, n + 1.5] for n in range(7)]
    one = feature_file(
        tmp_path / "one.parquet",
        [*reversed(keys), "nobody's"],
        vector=pa.array([*reversed(vectors[:6]), vectors[6]], pa.list_(pa.float32(), 2)),
    )
    two = feature_file(tmp_path / "two.parquet", keys, weight=pa.array(range(6), pa.int8()))
    snapshot = built(source, tmp_path / "store", features=(one, two))
    found = read(snapshot, tmp_path / "cache")
    assert len(found) == 6
    for n, key in enumerate(keys):
        assert found[key][1]["vector"].tolist() == vectors[n]
        assert found[key][1]["weight"] == n

    with pytest.raises(InvalidInput, match=r"given twice.*'weight' of 'f1\.txt'"):
        twice = feature_file(tmp_path / "twice.parquet", ["f1.txt"], weight=[1])
        built(source, tmp_path / "store", features=(one, two, twice))
    less = feature_file(tmp_path / "less.parquet", keys[:4], weight=[1, 2, 3, 4])
    with pytest.raises(InvalidInput, match=r"a sample has no features.*f[45]\.txt"):
        built(source, tmp_path / "store", features=(less,))
    partial = built(source, tmp_path / "store", features=(less,), missing_features="skip")
    assert partial.record.documents == 4
    assert partial.record.skipped_examples == ("f4.txt: no features", "f5.txt: no features")
    with pytest.raises(InvalidInput, match="no key in column 'id'"):
        built(source, tmp_path / "store", features=(less,), key_field="id")
    with pytest.raises(SourceMissing, match="no feature file"):
        built(source, tmp_path / "store", features=(str(tmp_path / "none.parquet"),))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="an optional extra")
    vocabulary = {"<unk>": 0, "<|endoftext|>": 1, "alpha": 2, "beta": 3, "gamma": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.enable_truncation(2)  # a file may ask for it; documents are whole all the same
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_tokenizer_runs_once_and_its_digest_is_kept(
    source: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    from paceline.data import open_tokenizer

    words = ["alpha", "beta", "gamma"]
    for n in range(30):
        (source / f"{n}.txt").write_text(" ".join(words[(n + i) % 3] for i in range(n + 1)))
    snapshot = built(source, tmp_path / "store", tokenizer=str(tokenizer_file))
    vocabulary = snapshot.vocabulary
    assert (vocabulary.kind, vocabulary.vocab_size, vocabulary.separator) == ("tokenizers", 5, 1)
    assert snapshot.tokens == sum(n + 1 for n in range(30))
    found = read(snapshot, tmp_path / "cache")
    assert found["4.txt"][0].tolist() == [3, 4, 2, 3, 4]
    assert snapshot.tokenizer_url is not None
    kept = open_tokenizer("kept", DiskStore().get_bytes(snapshot.tokenizer_url))
    assert kept.vocabulary == vocabulary
    assert kept.decode(found["4.txt"][0]) == "beta gamma alpha beta gamma"
    assert kept.encode([b"alpha <|endoftext|>"])[0].tolist().count(1) == 0, "text is text"
    held_out = documents(snapshot, "held-out", DiskStore(), tmp_path / "cache")
    assert all(each.text == (source / each.path).read_bytes() for each in held_out)
    with pytest.raises(InvalidInput, match="keep no text"):
        list(documents(snapshot, "train", DiskStore(), tmp_path / "cache"))
    assert vocabulary.sha256 != built(source, tmp_path / "store").vocabulary.sha256
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"not a tokenizer\.json"):
        built(source, tmp_path / "store", tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(SourceMissing, match="no tokenizer"):
        built(source, tmp_path / "store", tokenizer="unheard-of")


def test_tokens_made_before_must_be_the_tokenizers(source: Path, tmp_path: Path) -> None:
    table = pa.table({"key": ["a", "b"], "ids": [[1, 2, 3], [4, 255]]})
    pq.write_table(table, source / "all.parquet")
    settings = {"format": "parquet", "text_field": "ids"}
    found = read(built(source, tmp_path / "store", **settings), tmp_path / "cache")
    assert found["b"][0].tolist() == [4, 255]
    pq.write_table(
        pa.table({"key": ["a", "b"], "ids": [[1, 2, 3], [4, 256]]}), source / "all.parquet"
    )
    with pytest.raises(InvalidInput, match="tokens of another tokenizer"):
        built(source, tmp_path / "store", **settings)


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_a_columns_values_are_slices(source: Path, tmp_path: Path, format_: str) -> None:
    langs = ["en", "en/US", None, "", 7]
    rows = [{"key": str(n), "text": f"text {n}", "lang": each} for n, each in enumerate(langs)]
    if format_ == "jsonl":
        (source / "all.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    else:
        texts = [{**each, "lang": each["lang"] and str(each["lang"])} for each in rows]
        pq.write_table(pa.Table.from_pylist(texts), source / "all.parquet")
    made = built(source, tmp_path / "store", format=format_, slice_field="lang")
    empty = "(empty)" if format_ == "jsonl" else "(none)"
    names = ["en/0", "en_US/1", "(none)/2", f"{empty}/3", "7/4"]
    found = read(made, tmp_path / "cache")
    assert sorted(found) == sorted(names)
    assert not any(features for _, features in found.values()), "a number is a slice, too"
    with pytest.raises(ValidationError, match="a column of JSONL or Parquet"):
        built(source, tmp_path / "store", slice_field="lang")


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_values_of_several_columns_are_slices(source: Path, tmp_path: Path, format_: str) -> None:
    rows = [
        {"key": str(n), "text": f"text {n}", "lang": lang, "topic": topic}
        for n, (lang, topic) in enumerate([("en", "law"), ("de/AT", None), (None, "x=y")])
    ]
    if format_ == "jsonl":
        (source / "all.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source / "all.parquet")
    made = built(source, tmp_path / "store", format=format_, slice_fields=("lang", "topic"))
    assert sorted(read(made, tmp_path / "cache")) == [
        "lang=(none)/topic=x=y/2", "lang=de_AT/topic=(none)/1", "lang=en/topic=law/0",
    ]  # fmt: skip
    for wrong, words in (
        ({"slice_fields": ("lang",)}, "slice_fields: a column of JSONL or Parquet"),
        ({"slice_field": "a", "slice_fields": ("b",), "format": "jsonl"}, "set one of them"),
        ({"slice_fields": ("size",), "format": "jsonl"}, "size names other slices"),
        ({"slice_fields": ("a/b",), "format": "jsonl"}, "pattern"),
    ):
        with pytest.raises(ValidationError, match=words):
            built(source, tmp_path / "store", **wrong)


def test_samples_may_be_frames_alone(source: Path, tmp_path: Path) -> None:
    rows = [{"key": f"k{n}", "frames": [[n, n + 1]] * (n + 1)} for n in range(12)]
    (source / "all.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    snapshot = built(source, tmp_path / "store", format="jsonl")
    assert snapshot.tokens == 0
    found = read(snapshot, tmp_path / "cache")
    assert found["k3"][1]["frames"].shape == (4, 2)
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        lengths = [n for shard in snapshot.shards for n in cache.lengths(shard).tolist()]
    assert sorted(lengths) == list(range(1, 13)), "a sample is as long as it has frames"


def test_a_bucket_is_a_source_like_a_directory(tmp_path: Path, texts: Path, s3: RcloneS3) -> None:
    store, prefix, url = s3.store(), "s3://data/raw", "s3://data/made"
    store.ensure_bucket("data")
    for path in sorted(texts.iterdir())[:12]:
        store.put_bytes(f"{prefix}/{path.name}", path.read_bytes())
        here = tmp_path / "some" / path.name
        here.parent.mkdir(exist_ok=True)
        here.write_bytes(path.read_bytes())
    from_bucket = build_snapshot(prefix, url, SETTINGS, store)
    from_disk = build_snapshot(str(tmp_path / "some"), url, SETTINGS, store)
    assert from_bucket.shards == from_disk.shards
    with pytest.raises(SourceMissing, match="no objects here"):
        build_snapshot(f"{prefix}/none", url, SETTINGS, store)


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    peaks = []
    for number, rows in enumerate((500, 2_000)):
        source = tmp_path / f"source-{number}"
        source.mkdir()
        with (source / "all.jsonl").open("w") as file:
            for n in range(rows):
                file.write(json.dumps({"text": f"{n} {'words ' * 100}"}) + "\n")
        tracemalloc.start()
        snapshot = built(
            source, tmp_path / "store", format="jsonl", shard_bytes=32768, max_bytes=10**9
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert snapshot.record.documents == rows
    assert peaks[1] < 1.3 * peaks[0] + 500_000, peaks


def test_a_snapshot_of_version_1_is_to_be_built_again(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for n in range(5):
        (tmp_path / "source" / f"{n}.txt").write_text(f"text of {n}")
    url = built(tmp_path / "source", tmp_path / "store").url
    record = Path(url.removeprefix("file://")) / "snapshot.json"
    fields = json.loads(record.read_bytes())
    for name in ("format", "vocabulary", "columns", "token_count"):
        del fields[name]
    for each in fields["shards"]:
        del each["token_count"], each["lengths_sha256"]
    fields["schema_version"] = 1
    older = record.parent.with_name(digest_of(fields))
    older.mkdir()
    (older / "snapshot.json").write_bytes(canonical_json(fields))
    with pytest.raises(InvalidSnapshot, match=r"schema_version: Input should be 2.*Build the") as e:
        load_snapshot(DiskStore.url_of(older), DiskStore())
    assert "\n" not in e.value.one_line()


@given(data=st.data())
@hypothesis(max_examples=30, deadline=None)
def test_a_damaged_shard_is_an_error_with_a_reason_and_never_a_wrong_view(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    writer = ColumnWriter((), "uint8")
    for n in range(5):
        text = bytes([65 + n]) * (n + 1)
        writer.add(f"k{n}", np.frombuffer(text, np.uint8), {}, None, text_bytes=n + 1)
    path = tmp_path_factory.mktemp("shard") / "x"
    writer.write(path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        samples = ShardSamples(read_columns(bytes(raw)), 5)
    except ValueError as error:
        assert str(error)
        return
    for i in range(5):
        samples.key(i), samples.tokens(i)


def test_mostly_bad_input_is_refused(source: Path) -> None:
    lines = [json.dumps({"text": f"this is sample {n}"}) for n in range(9)]
    (source / "all.jsonl").write_text("\n".join([*lines, *["{bad"] * 10]) + "\n")
    with pytest.raises(InvalidInput, match=r"10 of 19: all.jsonl:10: not JSON.*data\.text_field"):
        built(source, source.parent / "store", format="jsonl")


def test_a_parquet_file_of_another_schema_is_named_or_refused(source: Path) -> None:
    def write(name: str, rows: int, kind: str) -> None:
        table = {"key": [f"{name}{n}" for n in range(rows)], "x": np.arange(rows).astype(kind)}
        pq.write_table(pa.table(table), source / f"{name}.parquet")

    write("a", 9, "f4")
    write("b", 4, "i2")
    record = built(source, source.parent / "store", format="parquet").record
    assert (record.documents, record.skipped) in {(9, 4), (4, 9)}
    assert "column 'x' is" in record.skipped_examples[0]
    write("c", 9, "f8")
    with pytest.raises(InvalidInput, match="most samples of the source cannot be used"):
        built(source, source.parent / "store", format="parquet")


def texts_in(source: Path, count: int = 8) -> None:
    for number in range(count):
        (source / f"{number}.txt").write_text(f"text number {number} " * 20)


def refusal(snapshot: Snapshot, context: int = 32, **changes: object) -> str:
    settings = DataSettings.model_validate(changes)
    with pytest.raises(PacelineError) as caught:
        require_readable(
            snapshot,
            settings,
            context=context,
            global_batch=6,
            splits=["train", "held-out"],
        )
    assert isinstance(caught.value, InvalidInput | InvalidSnapshot)
    return caught.value.one_line()


def test_what_ranks_could_not_read_is_known_before_they_start(source: Path) -> None:
    texts_in(source)
    snapshot = built(source, source.parent / "store", shard_bytes=2 << 20)
    for split in ("train", "held-out"):
        assert len(snapshot.of_split(split)) == 1
    longest = {each.split: each.stream_bytes for each in snapshot.shards}
    between = min(longest.values())
    assert "too small for one sample" in refusal(snapshot, between), "the held-out split is"
    assert "data.columns" in refusal(snapshot, columns=4)
    assert "token_features" in refusal(snapshot, token_features=["pitch"])
    require_readable(snapshot, DataSettings(), context=between, global_batch=6, splits=["train"])
    texts_in(source, 8)
    (source / "big.txt").write_text("the longest of all texts " * 80_000)
    big = built(source, source.parent / "store", shard_bytes=2 << 20)
    assert "cache is smaller than one shard" in refusal(big, cache_bytes=1 << 20)
