"""The demo's data: the standard library of whichever Python runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import Policy, Profile, load_profile
from paceline.data import STDLIB, build_snapshot, documents, load_snapshot, source
from paceline.evaluation import choose_prefixes
from paceline.evaluation.overlap import find_overlap
from paceline.models import weights_digest
from paceline.storage import DiskStore

PROFILES = Path(__file__).parents[2] / "profiles"

# What Debian and Ubuntu package apart from python3.
APART = {"test", "tests", "idlelib", "tkinter", "ensurepip", "turtledemo", "lib2to3"}


def demo_model(profile: Profile) -> str:
    """Return the id under which `paceline demo` publishes the profile's base."""
    base = profile.model.base
    return f"{profile.model.model_id}-{weights_digest(Path(base))[:8]}" if base else "any"


@pytest.mark.parametrize("name", sorted(each.stem for each in PROFILES.glob("*.toml")))
def test_no_shipped_profile_loosens_the_gate_of_a_users_model(name: str) -> None:
    gate = load_profile(name).gate
    if name == "ci":  # of tests, whose models no one uses; their ids follow from the data
        assert gate.max_overlap == 0.15
        return
    assert gate.policy("acme/7b") == gate.policy("pylm") == Policy()


def test_the_demos_model_is_the_one_with_a_policy_of_its_own() -> None:
    profile = load_profile("embedded")
    (model_id,) = profile.gate.models
    assert model_id == demo_model(profile)
    assert profile.gate.policy(model_id) == Policy(max_overlap=0.35)


@pytest.mark.nightly
@pytest.mark.parametrize("without", [set(), APART], ids=["whole", "as Debian has it"])
@pytest.mark.parametrize("name", ["embedded", "ci"])
def test_its_held_out_files_may_judge_what_learned_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: set[str], name: str
) -> None:
    skipped = source._SKIPPED_DIRECTORIES | without
    monkeypatch.setattr(source, "_SKIPPED_DIRECTORIES", skipped)
    profile, store = load_profile(name), DiskStore()
    build_snapshot(STDLIB, DiskStore.url_of(tmp_path / "data"), profile.data, store)
    (record,) = (tmp_path / "data/snapshots").iterdir()
    snapshot = load_snapshot(DiskStore.url_of(record), store)
    budget = profile.evaluation.held_out_bytes
    read = [
        (each.path, each.text)
        for each in documents(snapshot, "held-out", store, tmp_path / "cache", 64 * budget)
    ]
    judging = {each.path for each in choose_prefixes(read, budget)}
    texts = [each for each in read if each[0] in judging]
    found = find_overlap(texts, snapshot, store, tmp_path / "training")
    assert found.found == 0
    assert found.overlapping is not None
    policy = profile.gate.policy(demo_model(profile))
    assert found.overlapping / found.held_out_documents < policy.max_overlap - 0.05
