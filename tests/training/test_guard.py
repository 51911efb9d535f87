"""Bad steps: what is a spike, what is done about it, and how often."""

from __future__ import annotations

import json
import math
import pickle
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import GuardSettings, LoraSettings, MeshSettings, TrainingSettings
from paceline.errors import CorruptData, TrainingFailed
from paceline.training import Deadlines
from paceline.training.loop import BadStep, StepDecision, StepGuard

SETTINGS = GuardSettings(on_bad_step="skip", spike_factor=3.0, spike_window=10, max_bad_steps=2)


def warmed(loss: float = 2.0) -> StepGuard:
    guard = StepGuard(SETTINGS)
    for step in range(SETTINGS.spike_window):
        assert judged(guard, loss, step=step) is StepDecision.APPLY
    return guard


def judged(guard: StepGuard, loss: float, norm: float = 1.0, step: int = 0) -> StepDecision:
    return guard.decide(step=step, batch=step + 100, loss=loss, norm=norm)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_finite_number_is_never_taken(number: float) -> None:
    assert judged(StepGuard(SETTINGS), number) is StepDecision.SKIP
    assert judged(StepGuard(SETTINGS), 2.0, norm=number) is StepDecision.SKIP


def test_a_loss_of_three_times_the_usual_is_a_spike_outside_the_window() -> None:
    guard = warmed()
    assert judged(guard, 5.9) is StepDecision.APPLY
    before = guard.state["recent"]
    assert judged(guard, 6.1) is StepDecision.SKIP
    assert guard.state["recent"] == before


def test_the_first_steps_of_a_run_are_no_spikes() -> None:
    guard = StepGuard(SETTINGS)
    for loss in (0.1, 5.0, 0.1, 5.0):
        assert judged(guard, loss) is StepDecision.APPLY


def test_a_noisy_loss_near_zero_is_no_spike() -> None:
    draw = random.Random(0)
    losses = [abs(draw.gauss(0, 1e-4)) for _ in range(300)]
    assert max(losses) > 4 * statistics.median(losses), "the factor alone would trip"
    guard = StepGuard(SETTINGS.model_copy(update={"spike_window": 50}))
    assert all(judged(guard, each) is StepDecision.APPLY for each in losses)


def test_more_bad_steps_than_allowed_stop_the_job() -> None:
    guard = warmed()
    assert [judged(guard, math.nan), judged(guard, 100.0)] == [StepDecision.SKIP] * 2
    with pytest.raises(TrainingFailed, match=r"diverged.*at most 2 bad steps") as caught:
        judged(guard, math.nan)
    assert not isinstance(caught.value, BadStep)


def test_roll_back_names_the_step_and_the_batch_and_counts_those_before() -> None:
    rolling = SETTINGS.model_copy(update={"on_bad_step": "roll-back"})
    with pytest.raises(BadStep) as caught:
        StepGuard(rolling, bad=1).decide(step=7, batch=107, loss=math.nan, norm=1.0)
    found = pickle.loads(pickle.dumps(caught.value))
    assert (found.step, found.batch, found.reason) == (7, 107, "nan")
    with pytest.raises(TrainingFailed) as caught_last:
        StepGuard(rolling, bad=2).decide(step=7, batch=107, loss=math.nan, norm=1.0)
    assert not isinstance(caught_last.value, BadStep)


def test_stop_stops_at_once() -> None:
    guard = StepGuard(SETTINGS.model_copy(update={"on_bad_step": "stop"}))
    with pytest.raises(TrainingFailed, match="without spikes"):
        judged(guard, math.nan)


def test_a_resumed_guard_decides_as_the_one_that_never_stopped() -> None:
    guard = warmed()
    judged(guard, math.nan)
    other = StepGuard(SETTINGS)
    other.restore(json.loads(json.dumps(guard.state)))
    assert other.state == guard.state
    assert judged(other, 6.1) is StepDecision.SKIP
    with pytest.raises(CorruptData):
        other.restore({"recent": ["much"]})


def test_an_unsound_last_state_is_refused_even_where_steps_are_skipped() -> None:
    guard = StepGuard(SETTINGS)
    guard.require_finite_state(True, step=3, batch=3)
    with pytest.raises(BadStep):
        guard.require_finite_state(False, step=3, batch=3)


def test_a_slow_model_has_longer_steps_and_a_large_one_a_longer_start() -> None:
    deadlines = Deadlines(step_s=None)
    found = [deadlines.of("step", slowest_s) for slowest_s in (0, 0.5, 10, 200)]
    assert found == [1800, 60, 200, 1800], "without a step before it, the longest"
    for given in (8, 600):
        assert Deadlines(step_s=given).of("step", 1.0) == given, "rare long steps are allowed"
    adapted = TrainingSettings(lora=LoraSettings())
    large: Any = SimpleNamespace(settings=adapted, base_bytes=140_000_000_000)
    its = Deadlines.of_job(large)
    assert (its.of("loading"), its.of("first step"), its.of("saving")) == (2000, 2000, 2000)
    older = {"compile": True, "guard": {"start_deadline_s": 120}}
    large.settings, large.base_bytes = TrainingSettings.model_validate(older), 0
    large.base_parameters = 0
    assert Deadlines.of_job(large).of("first step") == 600, "it compiles"


@pytest.mark.parametrize(
    ("changes", "gigabytes"),
    [
        ({"ranks": 8, "ranks_per_node": 8}, 84),
        ({"ranks": 8, "ranks_per_node": 8, "optimizer": "muon", "ema": {}}, 84),
        ({"ranks": 8, "ranks_per_node": 8, "optimizer_ref": "m:f"}, 84),
        ({"ranks": 32, "ranks_per_node": 8}, 21),  # each node writes its share
        ({"ranks": 32, "ranks_per_node": 8, "lora": {}}, 14),  # merged and exported by one
    ],
)
def test_a_save_has_time_for_the_state_and_not_the_files(
    changes: dict[str, Any], gigabytes: int
) -> None:
    settings = TrainingSettings.model_validate(changes)
    bf16: Any = SimpleNamespace(
        settings=settings, base_bytes=14_000_000_000, base_parameters=7_000_000_000
    )
    assert Deadlines.of_job(bf16).of("saving") == 600 + gigabytes * 10
    bf16.base_parameters = 0  # of an older version
    assert Deadlines.of_job(bf16).of("saving") == 600 + gigabytes * 10


def test_a_start_has_time_for_a_checkpoint_that_each_node_reads() -> None:
    job: Any = SimpleNamespace(base_bytes=14_000_000_000, base_parameters=7_000_000_000)
    job.settings = TrainingSettings(ranks=32, ranks_per_node=8)
    assert Deadlines.of_job(job).of("resuming") == 600 + 140 + 840
    job.settings = job.settings.model_copy(update={"mesh": MeshSettings(shard=32)})
    assert Deadlines.of_job(job).of("resuming") == 600 + 140 + 210
    assert Deadlines.of_job(job).of("exporting") == 600 + 210
    early = {"evaluate_every_steps": 5, "early_stopping": {"patience": 2}}
    job.settings = TrainingSettings(ranks=32, ranks_per_node=8, **early)
    assert Deadlines.of_job(job).of("exporting") == 600 + 210 + 840, "it reads the best one"
