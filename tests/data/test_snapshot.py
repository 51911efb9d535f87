"""Snapshots: named by content, split by file, labelled, refused when they are not what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import DataSettings
from paceline.data import Snapshot, build_snapshot, documents, load_snapshot
from paceline.errors import CorruptData, InvalidInput, InvalidSnapshot, SourceMissing
from paceline.storage import ObjectStore


def test_the_same_content_is_the_same_snapshot_and_uploads_nothing(
    snapshot: Snapshot, texts: Path, url: str, settings: DataSettings, store: ObjectStore
) -> None:
    before = {info.url: info.etag for info in store.list(url)}
    again = build_snapshot(str(texts), url, settings, store)
    assert again == snapshot
    assert {info.url: info.etag for info in store.list(url)} == before
    (texts / "file-00.txt").write_text("other text\n")
    other = build_snapshot(str(texts), url, settings, store)
    assert other.digest != snapshot.digest
    shared = {each.sha256 for each in other.shards} & {each.sha256 for each in snapshot.shards}
    assert shared, "shards that did not change are shared"


def test_every_file_is_in_exactly_one_split(
    snapshot: Snapshot, texts: Path, store: ObjectStore, tmp_path: Path
) -> None:
    found = {
        split: {each.path: each.text for each in documents(snapshot, split, store, tmp_path / "c")}
        for split in ("train", "held-out")
    }
    assert not set(found["train"]) & set(found["held-out"])
    assert len(found["train"]) > len(found["held-out"]) > 0
    both = found["train"] | found["held-out"]
    assert both == {path.name: path.read_bytes() for path in texts.iterdir()}


def test_two_files_are_enough_for_two_splits(
    tmp_path: Path, url: str, settings: DataSettings, store: ObjectStore
) -> None:
    for seed in range(4):
        few = tmp_path / f"few{seed}"
        few.mkdir()
        (few / "a.txt").write_text("a" * 50)
        (few / "b.txt").write_text("b" * 50)
        built = build_snapshot(str(few), url, settings.model_copy(update={"seed": seed}), store)
        assert [each.documents for each in built.shards] == [1, 1]


def test_what_is_no_text_is_skipped_and_listed(
    texts: Path, url: str, settings: DataSettings, store: ObjectStore
) -> None:
    (texts / "image.bin").write_bytes(b"\x00\x01\x02")
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "copy.txt").write_bytes((texts / "file-01.txt").read_bytes())
    (texts / "link.txt").symlink_to(texts / "file-01.txt")
    record = build_snapshot(str(texts), url, settings, store).record
    assert record.skipped == 4
    assert record.skipped_examples == (
        "empty.txt: empty",
        "image.bin: binary",
        "latin.txt: not UTF-8",
        "link.txt: not a regular file",
    )
    assert record.duplicates == 1
    assert record.documents == 40


def test_a_source_without_text_says_so(
    tmp_path: Path, url: str, settings: DataSettings, store: ObjectStore
) -> None:
    with pytest.raises(SourceMissing, match="nothing"):
        build_snapshot(str(tmp_path / "none"), url, settings, store)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="too little text"):
        build_snapshot(str(tmp_path / "empty"), url, settings, store)
    (tmp_path / "empty" / "a.bin").write_bytes(b"\0")
    with pytest.raises(InvalidInput, match=r"a\.bin: binary"):
        build_snapshot(str(tmp_path / "empty"), url, settings, store)


def test_without_a_budget_all_of_ones_own_text_is_taken(
    url: str, store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(18):
        text = "\n".join(f"line {line} of text {number}" for line in range(45_000))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    built = build_snapshot(str(tmp_path / "texts"), url, DataSettings(purpose="tests"), store)
    size = sum(each.stat().st_size for each in (tmp_path / "texts").iterdir())
    assert built.record.total_bytes == size > 16 * 1024 * 1024
    assert (built.record.documents, built.record.cut_at_bytes) == (18, None)


def test_the_standard_library_fills_the_byte_budget(
    url: str, settings: DataSettings, store: ObjectStore, tmp_path: Path
) -> None:
    built = build_snapshot("stdlib", url, settings, store, work_dir=tmp_path / "work")
    assert 0.9 * settings.max_bytes < built.record.total_bytes <= settings.max_bytes
    assert built.record.cut_at_bytes == settings.max_bytes, "that something was left out is said"
    assert all(each.bytes < 40 * settings.shard_bytes for each in built.shards)
    names = [each.path for each in documents(built, "train", store, tmp_path / "c")]
    assert all(name.endswith(".py") for name in names)
    assert len({name[0] for name in names}) > 3, "a sample of the whole, not its first letters"


def test_a_build_says_how_far_it_is(
    tmp_path: Path, url: str, settings: DataSettings, store: ObjectStore
) -> None:
    source = tmp_path / "many"
    source.mkdir()
    for number in range(600):  # three batches
        (source / f"{number}.txt").write_text(f"text {number}\n" * 20)
    told: list[tuple[float, int, int]] = []
    built = build_snapshot(
        str(source), url, settings, store, on_progress=lambda *each: told.append(each)
    )
    assert len(told) == 3 and told == sorted(told)
    assert told[-1] == (0.99, built.record.documents, built.record.total_bytes)
    assert 0 < told[0][0] < 0.6


def test_a_byte_limit_cuts_between_documents(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    some = list(documents(snapshot, "train", store, tmp_path, max_bytes=3000))
    everything = list(documents(snapshot, "train", store, tmp_path))
    assert some == everything[: len(some)]
    assert 0 < sum(len(each.text) for each in some) <= 3000
    assert len(list(documents(snapshot, "train", store, tmp_path, max_bytes=1))) == 1


def test_a_changed_record_is_refused(snapshot: Snapshot, store: ObjectStore) -> None:
    where = f"{snapshot.url}/snapshot.json"
    raw = store.get_bytes(where)
    store.put_bytes(where, raw.replace(b'"purpose":"tests"', b'"purpose":"other"'))
    with pytest.raises(CorruptData, match="does not match its name"):
        load_snapshot(snapshot.url, store)
    store.put_bytes(where, json.dumps(json.loads(raw) | {"surprise": 1}).encode())
    with pytest.raises(InvalidSnapshot, match="surprise"):
        load_snapshot(snapshot.url, store)
    store.put_bytes(where, raw[:-5])
    with pytest.raises(InvalidSnapshot):
        load_snapshot(snapshot.url, store)
    store.delete(where)
    with pytest.raises(SourceMissing, match="no snapshot here"):
        load_snapshot(snapshot.url, store)


def test_a_bad_shard_stops_a_reader(snapshot: Snapshot, store: ObjectStore, tmp_path: Path) -> None:
    victim = snapshot.of_split("train")[1]
    good = bytearray(store.get_bytes(snapshot.shard_url(victim)))
    good[100] ^= 1
    store.put_bytes(snapshot.shard_url(victim), bytes(good))
    with pytest.raises(CorruptData, match="do not match its digest"):
        list(documents(snapshot, "train", store, tmp_path / "a"))
