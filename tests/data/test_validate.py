"""Validation: a good snapshot passes; each planted fault fails its own check."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import numpy as np
import pytest

from paceline.config import DataSettings
from paceline.data import (
    ShardCache,
    Snapshot,
    build_snapshot,
    drift_of,
    read_table,
    require_valid,
    validate_snapshot,
    validation,
    validation_page,
)
from paceline.data.expectations import own_expectations
from paceline.errors import DataRejected, InvalidInput
from paceline.storage import DiskStore, ObjectStore
from tests.data.planting import Rows, as_tokens, replant
from tests.journeys.guide import commands

pytestmark = pytest.mark.xdist_group("great-expectations")  # one worker imports it


def test_a_good_snapshot_passes(snapshot: Snapshot, store: ObjectStore, tmp_path: Path) -> None:
    report = validate_snapshot(snapshot, store, tmp_path)
    assert report.passed, report.failures
    assert not report.needs_review
    assert report.documents == 40
    assert len(report.checks) >= 12
    assert require_valid(report) is report
    assert all(each["passed"] for each in report.checks)
    json.dumps(report.to_dict())
    figures = report.columns[0]
    assert figures["samples"] == 40
    assert 0 < figures["shortest"] < figures["longest"]
    assert figures["greatest"] < 128, "the texts are ASCII"


def test_the_page_shows_what_was_found_and_runs_nothing(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    report = validate_snapshot(snapshot, store, tmp_path)
    assert ">valid<" in validation_page(snapshot, report, {})
    hostile = "</title><script src=//evil></script><img src=x onerror=alert(1)>"
    report.checks.append({"name": hostile, "passed": False, "got": hostile, "examples": [hostile]})
    report.quarantined.append(
        {"shard": "f" * 64, "split": "train", "bytes": 9, "documents": 3, "reason": hostile}
    )
    made = validation_page(snapshot, report, {"tokens": 0.25, hostile: 1.0}, refused=hostile)
    for each in ("key is unique", "25.0%", "f" * 64, snapshot.url, "is gone", ">refused<"):
        assert each in made, each
    assert made.count(escape(hostile)) == 6
    assert re.findall(r"<(script|img|a|iframe|link|object|base|form)\b", made) == []
    assert "default-src 'none'" in made


def duplicate_key(rows: Rows) -> None:
    rows["train"][1]["key"] = rows["train"][0]["key"]


def no_key(rows: Rows) -> None:
    rows["train"][1]["key"] = ""


def same_text_in_both_splits(rows: Rows) -> None:
    rows["held-out"][0]["tokens"] = rows["train"][0]["tokens"]


def wrong_split(rows: Rows) -> None:
    rows["held-out"].append(rows["train"].pop())


def empty_sample(rows: Rows) -> None:
    rows["train"][1]["tokens"] = as_tokens(b"")


def binary_text(rows: Rows) -> None:
    rows["train"][2]["tokens"] = as_tokens(b"\0" * 10)


def not_utf8(rows: Rows) -> None:
    rows["train"][2]["tokens"] = as_tokens(b"caf\xe9")


def wrong_lengths(rows: Rows) -> None:
    row = rows["train"][0]
    lengths = [len(each["tokens"]) for each in rows["train"]]
    row["lengths_file"] = np.array([lengths[0] + 1, *lengths[1:]], dtype="<i4").tobytes()


@pytest.mark.parametrize(
    "faults",
    [
        {
            duplicate_key: {"key is unique"},
            binary_text: {"text is UTF-8"},
            wrong_lengths: {"lengths are those of the index"},
        },
        {
            same_text_in_both_splits: {"no sample is in both splits or twice in one"},
            not_utf8: {"text is UTF-8"},
            empty_sample: {"sample size is in range", "no sample is empty"},
        },
        {wrong_split: {"split is the one its key draws"}, no_key: {"key is present"}},
    ],
    ids=["names", "contents", "splits"],
)
def test_each_fault_fails_its_checks_and_no_others(
    snapshot: Snapshot, url: str, store: ObjectStore, tmp_path: Path, faults
) -> None:
    def plant(rows: Rows) -> None:
        for each in faults:
            each(rows)

    planted = replant(snapshot, url, store, tmp_path, plant)
    report = validate_snapshot(planted, store, tmp_path / "cache")
    assert not report.passed
    failed = {each["name"] for each in report.checks if not each["passed"]}
    assert failed - {"split is the one its key draws"} == set().union(*faults.values()) - {
        "split is the one its key draws"
    }
    assert wrong_split not in faults or "split is the one its key draws" in failed
    with pytest.raises(DataRejected, match="failed its validation"):
        require_valid(report)


def test_frames_are_judged_like_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rows = [{"key": f"k{n}", "frames": [[n, -n], [0.5, n]], "label": n % 3} for n in range(40)]
    lines = [json.dumps(each) for each in rows]
    lines[7] = lines[7].replace("0.5", "NaN")  # as some writers spell it
    (source / "all.jsonl").write_text("\n".join(lines))
    settings = DataSettings(format="jsonl", purpose="tests", held_out_share=0.3, shard_bytes=1024)
    store = DiskStore()
    snapshot = build_snapshot(str(source), DiskStore.url_of(tmp_path / "store"), settings, store)
    report = validate_snapshot(snapshot, store, tmp_path / "cache")
    assert [line.split(":")[0] for line in report.failures] == ["every number is finite"]
    figures = {each["column"]: each for each in report.columns}
    assert figures["frames"]["not_finite"] == 1
    assert (figures["frames"]["least"], figures["frames"]["greatest"]) == (-39, 39)
    assert (figures["label"]["least"], figures["label"]["greatest"]) == (0, 2)
    assert figures["frames"]["kind"] == "float32[any][2]"
    json.dumps(report.to_dict(), allow_nan=False)


def test_of_too_many_samples_whole_shards_are_looked_at_and_it_is_said(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    with ShardCache(snapshot, store, tmp_path) as cache:
        table = read_table(snapshot, cache, max_rows=20)
        everything = read_table(snapshot, cache)
    assert 0 < len(table) < 40 == len(everything)
    assert len(table) + table.samples_left_out == 40
    assert set(table.columns["split"]) == {"train", "held-out"}


def test_a_corrupt_shard_is_quarantined_and_the_rest_validated(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    victim = snapshot.of_split("train")[0]
    store.put_bytes(snapshot.shard_url(victim), b"x" * victim.bytes)
    report = validate_snapshot(snapshot, store, tmp_path)
    assert report.passed, report.failures
    assert report.needs_review
    assert [each["shard"] for each in report.quarantined] == [victim.sha256]
    assert report.documents == 40 - victim.documents


def test_too_much_in_quarantine_is_a_refusal(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    for shard in snapshot.of_split("train"):
        store.delete(snapshot.shard_url(shard))
    report = validate_snapshot(snapshot, store, tmp_path)
    assert not report.passed
    assert "quarantine" in report.failures[0]


OWN = """
all:
  - expect_column_values_to_not_be_null: {column: key}
text:
  - expect_column_values_to_be_between: {column: n_tokens, min_value: 1000, mostly: 0.9}
  - expect_column_mean_to_be_between: {column: n_tokens, max_value: 1}
conversations:
  - expect_column_values_to_be_between: {column: n_tokens, max_value: 1}
"""


def test_expectations_of_ones_own_apply_to_their_kind_of_snapshot(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    report = validate_snapshot(snapshot, store, tmp_path, expectations=OWN)
    own = {each["name"]: each["passed"] for each in report.checks if "expect_" in each["name"]}
    assert own == {
        "all 1: expect_column_values_to_not_be_null key": True,
        "text 1: expect_column_values_to_be_between n_tokens": False,
        "text 2: expect_column_mean_to_be_between n_tokens": False,
    }
    mean = next(each["got"] for each in report.checks if "mean_to_be" in each["name"])
    assert re.fullmatch(r"observed \d+(\.\d+)?", mean)
    assert len(mean) <= len("observed 12.34"), "rounded"
    with pytest.raises(DataRejected, match=r"text 1: expect_.*rows differ"):
        require_valid(report)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("text: [", "not YAML"),
        ("- expect_x", "not a list a kind"),
        ("audio: []", "got audio"),
        ("text: 3", "not a list a kind"),
        ("text: [expect_x]", "one name"),
        ("text: [{expect_nothing: {}}]", "expect_nothing not found"),
        ("pairs: [{expect_nothing: {}}]", "pairs 1"),
        ("text: [{expect_column_values_to_be_unique: {column: body}}]", "no such column"),
        ("text: [{expect_column_values_to_be_unique: {}}]", "field required"),
        ("text: [{expect_column_values_to_be_unique: {column: key, mist: 1}}]", "not permitted"),
        (
            "text: [{expect_column_values_to_be_unique: {column: key, row_condition: '@x()'}}]",
            "no conditions",
        ),
    ],
)
def test_a_bad_expectation_is_one_line_before_a_sample_is_read(
    snapshot: Snapshot, tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        validate_snapshot(snapshot, None, tmp_path, expectations=text)  # type: ignore[arg-type]
    line = refused.value.one_line()
    assert said in line and "data.expectations" in line and "\n" not in line


def test_drift_is_of_means_and_lengths(
    snapshot: Snapshot, texts: Path, url: str, settings: DataSettings, store: ObjectStore,
    tmp_path: Path,
) -> None:  # fmt: skip
    before = validate_snapshot(snapshot, store, tmp_path).columns
    assert drift_of(before, before) == {"tokens": 0.0}
    for each in texts.iterdir():
        each.write_text(each.read_text() * 3)
    longer = build_snapshot(str(texts), url, settings, store)
    (moved,) = drift_of(before, validate_snapshot(longer, store, tmp_path).columns).values()
    assert moved == pytest.approx(2.0, abs=0.01)
    assert drift_of(before, [before[0] | {"column": "other"}]) == {"tokens": 1.0, "other": 1.0}
    assert drift_of(before, [before[0] | {"mean": None}]) == {"tokens": 1.0}


def test_the_expectations_of_the_docs_are_great_expectations_own(snapshot: Snapshot) -> None:
    text = commands("how-to/make-a-data-snapshot.md", "yaml")["expectations"]
    columns = [*validation.COLUMNS, *validation.MADE_COLUMNS, "feature.label"]
    validation._import_great_expectations()
    assert len(own_expectations(text, snapshot, columns)) == 2
