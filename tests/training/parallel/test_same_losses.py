"""Every layout computes what one process does; planted mistakes show. One launch of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.layouts.ranks import GROUP_TIMEOUT_S
from tests.support.forked import run_gangs
from tests.training.parallel import launch

pytestmark = [
    pytest.mark.timeout(240),  # seconds alone; a busy machine made it two minutes
    pytest.mark.xdist_group("forked ranks"),
]


def named(form: str, names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for the job of each name; some run nightly."""
    nightly = [form.format(each) in launch.NIGHTLY for each in names]
    marks = [pytest.mark.nightly if each else () for each in nightly]
    cases = [pytest.param(each, marks=mark) for each, mark in zip(names, marks, strict=True)]
    return pytest.mark.parametrize("name", cases)


class Answers(dict[str, Any]):
    """What the jobs answered; a job that runs nightly has a launch with others of its kind."""

    def __missing__(self, job: str) -> Any:
        assert job in launch.NIGHTLY
        self.update(launched("nightly"))
        return self[job]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(launched())


def launched(*words: str) -> dict[str, Any]:
    ((done,),) = run_gangs("tests.training.parallel.launch", [[words]], 220)
    assert done.code == 0, done.err[-4000:]
    return json.loads(done.out)


def furthest(mine: list[float], wanted: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, wanted, strict=True))


def distance(answers: dict[str, Any], job: str, single: str) -> float:
    """How far losses and gradient norms are from those of one process."""
    mine, wanted = answers[job], answers[f"{single} float64"]
    if "local" in job:  # norms are of each rank's own gradients there
        return furthest(mine["losses"], wanted["losses"])
    return max(furthest(mine[each], wanted[each]) for each in ("losses", "norms"))


@named("{} float64", (*launch.RIGHT, launch.STAGES))
def test_a_layout_has_the_losses_and_the_gradient_norms_of_one_process(answers, name) -> None:
    single = launch.BY_NAME[name].single
    assert distance(answers, f"{name} float64", single) < 1e-10


@named("documents apart: {}", launch.APART)
def test_documents_attended_to_one_by_one_are_the_same_to_every_layout(answers, name) -> None:
    assert distance(answers, f"documents apart: {name}", "single") < 1e-12


@pytest.mark.parametrize("job", [each.name for each in launch.PLANTED])
def test_a_planted_mistake_changes_what_is_compared(answers, job) -> None:
    assert distance(answers, job, "single") > 1e-4


def test_gradients_are_long_enough_to_be_shortened(answers) -> None:
    assert min(answers["single float64"]["norms"]) > 0.5  # else clipping would not be compared


@named("evaluated: {}", launch.EVALUATED)
def test_evaluation_gives_the_loss_of_the_next_step_and_changes_nothing(answers, name) -> None:
    mine, single = answers[f"evaluated: {name}"], answers["single float64"]["losses"]
    assert (
        furthest([mine["before"], mine["first"], mine["after"]], [*single[:1] * 2, single[1]])
        < 1e-10
    )
    whole = answers["evaluated: single"]["shapes"]
    assert all(whole[parameter] == shape for parameter, shape in mine["shapes"].items())


@named("hook: {}", ["none", "fp16", "bf16", "powersgd"])
def test_a_hook_sends_fewer_bytes_and_learns_nearly_the_same(answers, name) -> None:
    hook, mine, single = name, answers[f"hook: {name}"], answers["single float32"]["losses"]
    share = mine["bytes"] / mine["gradient_bytes"]
    off = furthest(mine["losses"], single)
    if hook == "none":
        assert share == 1.0
        assert off < 1e-5
    elif hook == "powersgd":
        # One warm-up pass counts; the first ten passes are dense, the last five are thin.
        assert 10 / 14 < share < 1.0
        assert furthest(mine["losses"][:9], single[:9]) < 1e-5
        assert 0 < off < 0.05
    else:
        assert share == pytest.approx(0.5 * 15 / 14)  # the warm-up pass travels too
        assert 1e-9 < off < 0.01


@named(
    "{}",
    [
        "single bfloat16",
        "dp2 bfloat16",
        "shard2 bfloat16",
        "tp2 bfloat16",
        "pp2 bfloat16",
        "single float16",
        "shard2 x pp2 float16",
    ],
)
def test_half_precision_learns_alike_on_whole_masters(answers, name) -> None:
    mine, single = answers[name], answers["single float32"]["losses"][: launch.STEPS]
    assert mine["types"] == ["torch.float32"]
    assert 1e-7 < furthest(mine["losses"], single) < 0.02


def test_both_ends_of_a_pipeline_keep_the_same_embedding_bit_for_bit(answers) -> None:
    mine = answers[f"{launch.STAGES} float64"]
    assert mine["ends_equal"] and mine["shards_differ"]


def test_a_model_without_values_is_laid_out_and_loaded_by_name(answers) -> None:
    mine, single = answers["from meta"], answers["single float64"]
    assert furthest([mine["loss"], mine["norm"]], [single["losses"][0], single["norms"][0]]) < 1e-10


def test_a_sequence_that_tensor_parts_do_not_divide_is_refused(answers) -> None:
    assert "23 tokens, tp 2" in answers["odd sequence"]["refused"]


def test_batches_of_other_lengths_go_through_a_pipeline(answers) -> None:
    mine = answers["shorter batches"]
    assert furthest(mine["staged"], mine["single"]) < 1e-10


def test_shares_of_other_sizes_go_through_sharded_stages_in_step(answers) -> None:
    mine = answers["changing shares"]
    assert furthest(mine["staged"], mine["single"]) < 1e-10


def test_every_group_of_a_mesh_has_the_deadline_of_the_joined_ranks(answers) -> None:
    assert set(answers[f"{launch.STAGES} float64"]["timeouts_s"]) == {GROUP_TIMEOUT_S}
