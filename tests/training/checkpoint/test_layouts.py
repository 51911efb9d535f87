"""Checkpoints of one layout resumed on every other: a gang of two ranks, then one of four."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.models import load_model, weights_digest
from paceline.storage import DiskStore
from paceline.training.checkpoint import Generations, resume_newest_healthy
from paceline.training.loop import Group
from tests.training.checkpoint.ranks import (
    DIGEST,
    LAYOUTS,
    OTHERS,
    SAVE_AT,
    STEPS,
    Run,
    config,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.xdist_group("forked ranks")]


Runs = dict[int, list[dict[str, Any]]]


def saved_of(runs: Runs) -> dict[str, Any]:
    """Return what rank 0 of each launch saved, by layout."""
    return {name: each for gang in runs.values() for name, each in gang[0]["saved"].items()}


def test_every_layout_takes_the_same_steps(runs: Runs) -> None:
    wanted = runs[1][0]["saved"]["single"]["losses"]
    for name, each in saved_of(runs).items():
        assert each["losses"] == pytest.approx(wanted, rel=1e-9), name


def test_every_checkpoint_resumes_on_every_layout(runs: Runs) -> None:
    single = runs[1][0]["saved"]["single"]
    wanted = [*single["losses"][SAVE_AT:], single["averaged"]]
    assert abs(wanted[-1] - wanted[-2]) > 1e-4, "the average is another model"
    resumed = {
        name: [*each["losses"], each["averaged"]]
        for found in runs.values()
        for name, each in found[0]["resumed"].items()
    }
    names = saved_of(runs).keys()
    pairs = {pair for pairs in OTHERS.values() for pair in pairs if names >= set(pair)}
    assert {f"{saved} as {name}" for saved, name in pairs} <= resumed.keys()
    for name, losses in resumed.items():
        assert losses == pytest.approx(wanted, rel=1e-9), name


def test_resume_on_the_same_layout_is_bit_identical(
    runs: Runs,
) -> None:
    for world in LAYOUTS:
        for rank, found in enumerate(runs[world]):
            for name, kept in found["saved"].items():
                again = found["resumed"][f"{name} as {name}"]
                assert again["bits"] == kept["bits"], f"{name}, rank {rank}"
                assert again["losses"] == kept["losses"][SAVE_AT:STEPS]


def test_every_layout_stores_the_same_parameter_groups(runs: Runs, root: Path) -> None:
    found = {}
    for name in saved_of(runs):
        generations = Generations(DiskStore(), DiskStore.url_of(root / "jobs" / name))
        newest = generations.find().committed[0]
        found[name] = generations.index_of(newest, generations.commit_of(newest)).groups
    matrices, vectors, embedding, empty = found["single"]
    assert embedding.parameters == ("model.embed_tokens.weight",)
    assert (matrices.settings["weight_decay"], embedding.settings["weight_decay"]) == (0.1, 0.01)
    assert embedding.settings["learning_rate_factor"] == 0.5
    assert len(matrices.parameters) > len(vectors.parameters) > len(empty.parameters) == 0
    assert all(each == found["single"] for each in found.values()), "a pipeline's stages too"


def test_replicas_write_each_box_once_and_share_the_work(runs: Runs, root: Path) -> None:
    sizes: dict[str, list[int]] = {}
    for name in saved_of(runs):
        generations = Generations(DiskStore(), DiskStore.url_of(root / "jobs" / name))
        commit = generations.commit_of(generations.find().committed[0])
        sizes[name] = [each.bytes for file, each in commit.files.items() if "rank" in file]
        assert commit.world_size == len(sizes[name])
        if name == "shard2cp2":
            assert (commit.layout["shard"], commit.layout["cp"]) == (2, 2)
        if name == "shard2pp2":
            assert commit.layout == {"dp": 1, "shard": 2, "tp": 1, "pp": 2, "cp": 1}
    whole = sum(sizes["single"])
    for name, each in sizes.items():
        assert sum(each) == pytest.approx(whole, rel=0.2), name
    for name in sizes.keys() & {"dp2", "shard2", "dp2shard2"}:
        assert max(sizes[name]) < 1.25 * min(sizes[name]), name


def test_export_is_a_loadable_model_whatever_the_layout(runs: Runs, root: Path) -> None:
    single = load(root, "single")
    for name in saved_of(runs):
        found = load(root, name)
        assert found.keys() == single.keys()
        for tensor, its in found.items():
            assert its.allclose(single[tensor], rtol=1e-4, atol=1e-6), f"{name}: {tensor}"
    assert weights_digest(root / "exports" / "single")


def load(root: Path, name: str) -> dict[str, Any]:
    model, its = load_model(root / "exports" / name)
    assert its == config()
    return model.state_dict()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("broken", ("ServiceUnavailable: checkpoint was not saved", "rank 1")),
        ("nan", ("TrainingFailed", "not finite")),
    ],
)
def test_one_rank_that_cannot_save_its_state_commits_nothing(
    runs: Runs, case: str, words: tuple[str, ...]
) -> None:
    for found in runs[2]:
        assert all(each in found["cases"][case] for each in words)
        assert found["cases"][f"steps after {case}"] == [2, 1]


def test_all_ranks_reject_what_is_damaged_for_any(runs: Runs) -> None:
    assert [found["cases"]["rotten"] for found in runs[2]] == [[1, [2], [1]]] * 2


def test_a_rank_killed_midway_leaves_the_checkpoint_before(
    runs: Runs, root: Path, tmp_path: Path
) -> None:
    """Fault 18, mid-checkpoint."""
    assert runs[2]
    assert json.loads((root / "killed.json").read_text()) == "PeerLost"
    generations = Generations(DiskStore(), DiskStore.url_of(root / "killed"))
    found = generations.find()
    assert [each.step for each in found.committed] == [1]
    assert [each.step for each in found.unfinished] == [2]
    run = Run("single", Group())
    restored = resume_newest_healthy(
        generations, run.state, config_digest=DIGEST, work_dir=tmp_path
    )
    assert restored is not None
    assert restored.step == 1


def test_a_store_slow_for_one_rank_postpones_the_saves_of_all(
    runs: Runs,
) -> None:
    """Fault 21, on real ranks."""
    for found in runs[2]:
        slow = found["cases"]["slow"]
        assert slow["while held"] == [[2], 1, []], "one save in flight, one due and put off"
        assert slow["steps"] == 7
        assert slow["begun"] == [2, 7], "what was put off is due as soon as there is room"
        assert slow["committed"] == [7, 2]
        assert slow["put off"] == 1
        assert slow["alerts"] == ["checkpoint-storage-slow"]
