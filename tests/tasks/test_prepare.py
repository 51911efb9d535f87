"""What a snapshot is read with: settings that are refused by name, and a cheap sign of change."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import DataSettings, Profile
from paceline.data import ValidationReport, expectations_text
from paceline.errors import DataRejected, InvalidInput
from paceline.schemas import StageRecord, digest_of
from paceline.storage import DiskStore
from paceline.tasks import prepare
from paceline.tasks.prepare import data_settings, fingerprint
from tests.security.test_a_forged_report_is_refused import Bucket, run_of


class Ledger:
    """A coordinator's ledger in memory; a newer record replaces the older."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], StageRecord] = {}

    def ledger_get(self, stage: str, key: str) -> StageRecord | None:
        return self.records.get((stage, key))

    def ledger_put(self, record: StageRecord) -> None:
        self.records[record.stage, record.input_digest] = record


def test_a_reading_changes_the_profiles_settings_and_bad_ones_are_named() -> None:
    profile = DataSettings(purpose="tests")
    changed = data_settings(profile, {"format": "jsonl", "features": ["a.parquet"]})
    assert (changed.format, changed.features) == ("jsonl", ("a.parquet",))
    assert changed.purpose == "tests"
    assert data_settings(profile, None) == profile
    for bad in ({"formt": "jsonl"}, {"format": "csv"}, {"shard_bytes": 3}):
        with pytest.raises(InvalidInput, match=f"not acceptable.*{next(iter(bad))}"):
            data_settings(profile, bad)


def test_the_sign_of_change_covers_features_and_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = [source / "a.txt", tmp_path / "features.parquet", tmp_path / "tokenizer.json"]
    for each in files:
        each.write_text("one")
    settings = DataSettings(features=(str(files[1]),), tokenizer=str(files[2]))

    def sign() -> str:
        return fingerprint(str(source), settings, DiskStore())

    before = sign()
    assert sign() == before
    for each in files:
        os.utime(each, ns=(1, 1))
        after = sign()
        assert after != before, each.name
        before = after


def test_drift_from_the_last_good_snapshot_is_noted_or_refused() -> None:
    def columns(mean: float) -> list[dict[str, Any]]:
        found = {"kind": "bytes", "mean_length": 10.0, "least": 0.0, "greatest": 100.0}
        return [{"column": "tokens", "mean": mean, **found}]

    def compare(digest: str, mean: float) -> dict[str, float]:
        record = SimpleNamespace(source="s3://b/x", project="p", purpose="t", format="text")
        snapshot: Any = SimpleNamespace(digest=digest * 64, record=record)
        return prepare._compare(run, snapshot, columns(mean))

    run = run_of(Bucket())
    run.__dict__["coordinator"] = Ledger()
    run.retry = lambda call, *_: call()  # type: ignore[method-assign,assignment]
    assert compare("a", 50) == {}, "there is none before"
    assert compare("b", 52) == {"tokens": 0.02}
    assert run.summary.notes == []
    assert compare("c", 82) == {"tokens": 0.3}
    assert compare("c", 82) == {"tokens": 0.3}, "the same again has the same one before it"
    assert run.summary.notes == ["data moved since snapshot bbbbbbbbbbbb: tokens by 30%"] * 2
    profile = Profile.model_validate({"data": {"max_drift": 0.2}})
    run.runtime = run.runtime.model_copy(update={"profile": profile})
    for _ in range(2):
        with pytest.raises(DataRejected, match=r"tokens by 60%.*at most 20%.*after cccc"):
            compare("d", 22)
    assert compare("e", 80) == {"tokens": 0.02}


class Mlflow:
    """Keeps the artifacts of runs."""

    def __init__(self) -> None:
        self.artifacts: dict[str, str] = {}

    def log_artifact_text(self, _mlflow_run: str, text: str, path: str) -> None:
        self.artifacts[path] = text

    def run_url(self, mlflow_run: str, artifact: str = "") -> str:
        return f"http://mlflow/#/runs/{mlflow_run}/artifacts/{artifact}"


@pytest.mark.parametrize("passes", [True, False], ids=["valid", "refused"])
def test_the_page_of_a_validation_is_stored_and_linked_with_run_and_job(
    passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SimpleNamespace(source="s3://b/x", project="p", purpose="t", format="text", skipped=0)
    snapshot = SimpleNamespace(
        url="s3://b/data/snapshots/a", digest="a" * 64, record=record, purpose="t", project="p"
    )
    check = {"name": "no sample is empty", "passed": passes, "got": "3 rows", "examples": []}
    report = ValidationReport("a" * 64, passes, False, 40, 9000, [check])
    validated = []
    monkeypatch.setattr(prepare, "load_snapshot", lambda *_: snapshot)
    monkeypatch.setattr(
        prepare, "validate_snapshot", lambda *_, **__: (validated.append(1), report)[1]
    )
    bucket, ledger = Bucket(), Ledger()
    url = f"s3://paceline/records/validation/{digest_of({'snapshot': 'a' * 64})}"
    # The second run finds the first one's in the ledger; for the third the page has expired.
    for times in (1, 2, 3):
        if times == 3:
            del bucket.objects[f"{url}.html"]
        run, pages = run_of(bucket), dict[str, str]()
        mlflow = Mlflow()
        run.__dict__ |= {
            "coordinator": ledger, "registry": mlflow, "mlflow_run": "7", "work_dir": tmp_path,
        }  # fmt: skip
        run.retry = lambda call, *_: call()  # type: ignore[method-assign,assignment]
        run.job = SimpleNamespace(shown=pages.__setitem__)  # type: ignore[assignment]
        refused = contextlib.nullcontext() if passes else pytest.raises(DataRejected)
        with refused:
            prepare.validate_data.fn(run, {"url": snapshot.url, "digest": snapshot.digest})
        page = bucket.objects[f"{url}.html"].decode()
        assert mlflow.artifacts == {"data-validation.html": page}
        assert ("valid<" if passes else "failed its validation") in page
        assert pages == {"data": "http://mlflow/#/runs/7/artifacts/data-validation.html"}
        assert len(validated) == ((1, 1, 2)[times - 1] if passes else times)
    assert json.loads(bucket.objects[f"{url}.json"])["checks"] == [check]


def test_expectations_are_a_file_or_the_yaml_itself(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("all: []\n")
    for named, text in ((str(file), "all: []\n"), ("all: []", "all: []"), ("", "")):
        assert expectations_text(named, DiskStore()) == text
    with pytest.raises(InvalidInput, match=r"cannot be read.*data\.expectations"):
        expectations_text(str(tmp_path / "gone.yaml"), DiskStore())
