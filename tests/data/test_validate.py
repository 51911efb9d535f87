"""Validation: a good snapshot passes; each planted fault fails its own check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.data import Shard, Snapshot, load_snapshot, require_valid, validate_snapshot
from paceline.data.snapshot import SnapshotRecord, snapshot_url
from paceline.errors import DataRejected, InvalidSnapshot
from paceline.objects import ObjectStore
from paceline.wire.base import canonical_json, digest_of

Lines = dict[str, list[dict[str, Any]]]  # of the first train and the first held-out shard


def replant(
    snapshot: Snapshot, url: str, store: ObjectStore, change: Callable[[Lines], None]
) -> Snapshot:
    """A consistent snapshot (right digests, right sums) whose documents were changed."""
    chosen = {split: snapshot.of_split(split)[0] for split in ("train", "held-out")}
    lines: Lines = {
        split: [json.loads(raw) for raw in store.get_bytes(snapshot.shard_url(shard)).splitlines()]
        for split, shard in chosen.items()
    }
    change(lines)
    fresh: dict[str, Shard] = {}
    for split, shard in chosen.items():
        data = b"".join(canonical_json(line) + b"\n" for line in lines[split])
        fresh[shard.sha256] = Shard(
            split=shard.split,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            documents=len(lines[split]),
            text_bytes=sum(len(line["text"].encode()) for line in lines[split]),
        )
        store.put_bytes(f"{url}/shards/{fresh[shard.sha256].name}", data)
    shards = tuple(fresh.get(each.sha256, each) for each in snapshot.shards)
    fields = snapshot.record.model_dump() | {
        "shards": [each.model_dump() for each in shards],
        "documents": sum(each.documents for each in shards),
        "total_bytes": sum(each.text_bytes for each in shards),
    }
    record = SnapshotRecord.model_validate(fields)
    where = snapshot_url(url, digest_of(record))
    store.put_bytes(f"{where}/snapshot.json", canonical_json(record))
    return load_snapshot(where, store)


def test_a_good_snapshot_passes(snapshot: Snapshot, store: ObjectStore, tmp_path: Path) -> None:
    report = validate_snapshot(snapshot, store, tmp_path, purpose="tests")
    assert report.passed, report.failures
    assert not report.needs_review
    assert report.documents == 40
    assert len(report.checks) >= 12
    assert require_valid(report) is report
    assert list(report.frame["passed"]) == [True] * len(report.checks)
    json.dumps(report.to_dict())


def duplicate_path(lines: Lines) -> None:
    lines["train"][1]["path"] = lines["train"][0]["path"]


def same_text_in_both_splits(lines: Lines) -> None:
    lines["held-out"][0] |= {key: lines["train"][0][key] for key in ("text", "sha256", "n_bytes")}


def wrong_split(lines: Lines) -> None:
    lines["held-out"].append(lines["train"].pop())


def wrong_digest(lines: Lines) -> None:
    lines["train"][0]["sha256"] = "0" * 64


def not_a_digest(lines: Lines) -> None:
    lines["train"][0]["sha256"] = "MD5"


def wrong_size(lines: Lines) -> None:
    lines["train"][0]["n_bytes"] = 0


def binary_text(lines: Lines) -> None:
    text = "\0" * 10
    lines["train"][0] |= {
        "text": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "n_bytes": 10,
    }


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (duplicate_path, "path is unique"),
        (same_text_in_both_splits, "no document is in both splits or twice in one"),
        (wrong_split, "split is the one its path draws"),
        (wrong_digest, "digest is the text's"),
        (not_a_digest, "digest is SHA-256"),
        (wrong_size, "document size is in range"),
        (binary_text, "text is UTF-8"),
    ],
)
def test_each_fault_fails_its_check(
    snapshot: Snapshot, url: str, store: ObjectStore, tmp_path: Path, plant, check
) -> None:
    planted = replant(snapshot, url, store, plant)
    report = validate_snapshot(planted, store, tmp_path)
    assert not report.passed
    assert any(line.startswith(f"{check}:") for line in report.failures), report.failures
    with pytest.raises(DataRejected, match="failed its validation"):
        require_valid(report)


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


def test_the_wrong_purpose_is_refused_before_anything_is_read(
    snapshot: Snapshot, store: ObjectStore, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        validate_snapshot(snapshot, store, tmp_path / "c", purpose="medical")
    assert not (tmp_path / "c").exists()
