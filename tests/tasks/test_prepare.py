"""What a snapshot is read with: settings that are refused by name, and a cheap sign of change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.config import DataSettings
from paceline.errors import InvalidInput
from paceline.storage import DiskStore
from paceline.tasks.prepare import data_settings, fingerprint


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
