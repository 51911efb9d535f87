"""What users do wrong with data: refused before ranks start, with the reason, or it just works."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import DataSettings
from paceline.data import PlannedStream, ShardCache, Snapshot, build_snapshot, open_stream
from paceline.data.loading.process_transform import require_runnable
from paceline.data.snapshot import require_readable
from paceline.errors import InvalidInput, InvalidSnapshot, PacelineError
from paceline.storage import DiskStore
from tests.data.memory import MemoryCache, made, plan_by

KINDS = ["windows", "packed", "bucketed", "carried"]


def built(root: Path, **changes: object) -> Snapshot:
    settings = DataSettings.model_validate(
        {"purpose": "tests", "held_out_share": 0.2, "shard_bytes": 1024, **changes}
    )
    return build_snapshot(
        str(root / "source"), DiskStore.url_of(root / "data"), settings, DiskStore()
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def texts_in(source: Path, count: int = 8) -> None:
    for number in range(count):
        (source / f"{number}.txt").write_text(f"text number {number} " * 20)


def test_texts_that_are_none_are_left_out_and_named(source: Path) -> None:
    texts_in(source)
    (source / "latin.txt").write_bytes("é".encode("latin-1") * 9)
    (source / "long.txt").write_bytes(b"x" * (8 * 1024 * 1024 + 1))
    record = built(source.parent).record
    assert record.documents == 8
    assert record.skipped_examples == (
        "latin.txt: not UTF-8",
        "long.txt: too large: a text has at most 8 MiB, cut it up (JSONL)",
    )


def test_a_corpus_of_one_document_is_refused(source: Path) -> None:
    texts_in(source, 1)
    with pytest.raises(InvalidInput, match=r"too little text.*1 usable sample"):
        built(source.parent)


def jsonl(source: Path, good: int, bad: int) -> None:
    lines = [json.dumps({"text": f"this is sample {n}"}) for n in range(good)]
    (source / "all.jsonl").write_text("\n".join([*lines, *["{bad"] * bad]) + "\n")


def test_a_bad_line_is_left_out_and_named_and_mostly_bad_lines_are_refused(source: Path) -> None:
    jsonl(source, 9, 1)
    assert built(source.parent, format="jsonl").record.skipped_examples == (
        "all.jsonl:10: not JSON",
    )
    jsonl(source, 9, 10)
    with pytest.raises(InvalidInput, match=r"10 of 19: all.jsonl:10: not JSON.*data\.text_field"):
        built(source.parent, format="jsonl")


def test_a_parquet_file_of_another_schema_is_named_or_refused(source: Path) -> None:
    def write(name: str, rows: int, kind: str) -> None:
        table = {"key": [f"{name}{n}" for n in range(rows)], "x": np.arange(rows).astype(kind)}
        pq.write_table(pa.table(table), source / f"{name}.parquet")

    write("a", 9, "f4")
    write("b", 4, "i2")
    record = built(source.parent, format="parquet").record
    assert (record.documents, record.skipped) in {(9, 4), (4, 9)}
    assert "column 'x' is" in record.skipped_examples[0]
    write("c", 9, "f8")
    with pytest.raises(InvalidInput, match="most samples of the source cannot be used"):
        built(source.parent, format="parquet")


def test_a_truncated_tar_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    texts_in(source)
    whole = tmp_path / "whole.tar"
    with tarfile.open(whole, "w") as archive:
        for each in sorted(source.iterdir()):
            archive.add(each, each.name)
    shutil.rmtree(source)
    source.mkdir()
    (source / "cut.tar").write_bytes(whole.read_bytes()[: 3 * 1024 + 700])
    with pytest.raises(InvalidInput, match=r"tar file cannot be read.*cut\.tar"):
        built(tmp_path, format="tar")


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_than_shards_and_documents_read_every_batch_once(kind: str) -> None:
    contents = [[b"a short one", b"another, a little longer"]]
    batch = plan_by(kind, 4, 6)

    def shares(rank: int, world: int) -> list:
        cache = MemoryCache(contents)
        with PlannedStream(batch, cache.shards, cache, rank=rank, world_size=world) as stream:
            return made(stream, 4)

    (whole,) = [shares(0, 1)]
    parts = [shares(rank, 6) for rank in range(6)]
    for number, wanted in enumerate(whole):
        rows = np.concatenate([each[number].inputs_BT for each in parts])
        weights = np.concatenate([each[number].weights_BT for each in parts])
        assert rows.tolist() == wanted.inputs_BT.tolist()
        assert weights.tolist() == wanted.weights_BT.tolist()
        assert {each[number].global_tokens for each in parts} == {wanted.global_tokens}


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
    snapshot = built(source.parent, shard_bytes=2 << 20)
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
    big = built(source.parent, shard_bytes=2 << 20)
    assert "cache is smaller than one shard" in refusal(big, cache_bytes=1 << 20)


def test_a_transform_that_cannot_be_imported_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match=r"no such transform.*nothing_here.*every node"):
        require_runnable("tests.data.nothing_here:clean")


def epoch_of(snapshot: Snapshot, where: Path) -> tuple[list[str], dict[str, str]]:
    """What is skipped in an epoch, and what is in quarantine after it."""
    with (
        ShardCache(snapshot, DiskStore(), where) as cache,
        open_stream(
            snapshot, "train", cache, DataSettings(), context=32, global_batch=2, seed=0
        ) as stream,
    ):
        skipped: list[str] = []
        while stream.position["epoch"] == 0:
            skipped += stream.next().skipped
        return skipped, cache.quarantined


def test_a_shard_that_changes_between_epochs_is_in_quarantine(source: Path, tmp_path: Path) -> None:
    texts_in(source, 24)
    snapshot = built(tmp_path)
    where = tmp_path / "cache"
    assert epoch_of(snapshot, where) == ([], {})
    changed = snapshot.of_split("train")[0]
    DiskStore.path_of(snapshot.shard_url(changed)).write_bytes(b"y" * changed.bytes)
    (where / changed.name).unlink()  # it was not used for longest, and is fetched again
    skipped, quarantined = epoch_of(snapshot, where)
    assert set(skipped) == set(quarantined) == {changed.sha256}
    assert "do not match its digest" in quarantined[changed.sha256]
