"""The loop on one rank: parts, schedules, scaling, bad steps, what is saved, held-out loss."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import ValidationError
from torch import Tensor

from paceline.config import (
    CheckpointSettings,
    EarlyStoppingSettings,
    GuardSettings,
    TrainingSettings,
)
from paceline.data import Batch
from paceline.errors import CorruptData, TrainingFailed
from paceline.models import config_for
from paceline.storage import DiskStore
from paceline.training.checkpoint import Checkpointer, Generations, TrainState
from paceline.training.loop import (
    CPU,
    LARGEST_SCALE,
    BadStep,
    Evaluator,
    Group,
    LossScale,
    Progress,
    StepReport,
    TransformerWorkload,
    learning_rate,
    new_optimizer,
    shuffled,
    train,
)
from paceline.training.parallel import Mesh, MeshSpec, Parallel, parallelise

CONTEXT, ROWS = 16, 7
CONFIG = config_for(20_000, CONTEXT)
SETTINGS = TrainingSettings(
    steps=8,
    batch_sequences=ROWS,
    learning_rate=3e-3,
    warmup_steps=2,
    guard=GuardSettings(on_bad_step="roll-back", max_bad_steps=2),
)


def batch_of(step: int) -> Batch:
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, 256, (ROWS, CONTEXT + 1), dtype=np.uint8)
    weights = np.ones((ROWS, CONTEXT), dtype=np.float32)
    weights[step % ROWS, 5:] = 0  # uneven: one row has padding
    return Batch(
        step=step,
        inputs_BT=tokens[:, :-1],
        targets_BT=tokens[:, 1:],
        weights_BT=weights,
        rows=range(ROWS),
        global_tokens=float(weights.sum()),
    )


@dataclass
class Batches:
    """A stream of random batches, by number."""

    number: int = 0
    context: int = CONTEXT
    global_batch: int = ROWS
    data_wait_s: float = 0.0
    quarantined: dict[str, str] = field(default_factory=dict)

    @property
    def position(self) -> dict[str, Any]:
        return {"batch": self.number}

    def next(self) -> Batch:
        self.number += 1
        return batch_of(self.number - 1)

    def close(self) -> None:
        pass

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Poisoned(TransformerWorkload):
    """Our task, with a loss that is spoilt for the batches in ``bad``."""

    bad: frozenset[int] = frozenset()
    factor: float = math.nan
    seen: list[int] = field(default_factory=list)

    def inputs(self, batch: Batch, device: torch.device) -> Any:
        self.seen.append(batch.step)
        return super().inputs(batch, device)

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        loss = super().loss_sum(outputs, *targets)
        return loss * self.factor if self.seen[-1] in self.bad else loss


@dataclass
class Kept:
    """A saver that keeps copies."""

    parallel: Parallel
    every: int = 2
    stall_s: float = 0.0
    states: dict[int, tuple[dict[str, Any], list[Tensor]]] = field(default_factory=dict)

    def due(self, step: int, steps: int) -> bool:
        return step % self.every == 0

    def save(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> bool:
        assert all(math.isfinite(each) for each in metrics.values())
        self.states[step] = (position, weights_of(self.parallel))
        return True


@dataclass
class Run:
    progress: Progress
    reports: list[StepReport]
    weights: list[Tensor]
    saved: dict[int, tuple[dict[str, Any], list[Tensor]]]
    parallel: Parallel
    optimizer: torch.optim.Optimizer

    @property
    def losses(self) -> list[float]:
        return [each.loss for each in self.reports]


def weights_of(parallel: Parallel) -> list[Tensor]:
    return [each.detach().clone() for each in parallel.modules[0].parameters()]


def run(
    settings: TrainingSettings = SETTINGS,
    workload: TransformerWorkload | None = None,
    before: Run | None = None,
    saved: dict[int, Any] | None = None,
    **changes: Any,
) -> Run:
    """Train from the start, or go on from ``before`` in a process of its own, as it were."""
    workload = workload or TransformerWorkload(CONFIG)
    model = workload.build()
    if settings.precision == "float64":
        model.double()
    parallel = parallelise(model, Mesh(MeshSpec()), settings, workload)
    optimizer = new_optimizer(parallel.modules, settings)
    progress, stream = Progress(), Batches()
    if before is not None:
        model.load_state_dict(before.parallel.modules[0].state_dict())
        optimizer.load_state_dict(before.optimizer.state_dict())
        extra = json.loads(json.dumps(before.progress.extra))
        progress = Progress(step=before.progress.step, extra=extra)
        stream = Batches(before.progress.step)
    saver, reports = Kept(parallel), list[StepReport]()
    saver.states = {} if saved is None else saved
    train(
        parallel,
        workload,
        optimizer,
        stream,
        settings,
        Group(),
        progress=progress,
        saver=saver,
        on_step=reports.append,
        **changes,
    )
    return Run(progress, reports, weights_of(parallel), saver.states, parallel, optimizer)


def change(**changes: Any) -> TrainingSettings:
    settings = SETTINGS.model_dump()
    guard = changes.pop("guard", {})
    return TrainingSettings.model_validate(
        settings | changes | {"guard": settings["guard"] | guard}
    )


def same(left: list[Tensor], right: list[Tensor], tolerance: float = 0.0) -> bool:
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_any_number_of_parts_gives_the_same_step(optimizer: str) -> None:
    runs = [
        run(change(precision="float64", optimizer=optimizer, accumulation=parts))
        for parts in (1, 3, ROWS + 2)
    ]
    for other in runs[1:]:
        assert np.allclose(runs[0].losses, other.losses, rtol=1e-12)
        assert same(runs[0].weights, other.weights, 1e-12)


def test_norms_are_not_decayed_and_sgd_has_no_momentum() -> None:
    model = TransformerWorkload(CONFIG).build()
    matrices, vectors = new_optimizer(model, SETTINGS).param_groups
    assert matrices["weight_decay"] == SETTINGS.weight_decay
    assert vectors["weight_decay"] == 0
    assert all(each.ndim < 2 for each in vectors["params"])
    count = len(matrices["params"]) + len(vectors["params"])
    assert count == len(list(model.parameters()))
    (plain,) = new_optimizer([model, model], change(optimizer="sgd")).param_groups
    assert plain["momentum"] == plain["weight_decay"] == 0
    assert len(plain["params"]) == count


def test_a_resumed_run_is_bit_identical_with_its_guard() -> None:
    whole = run()
    half = run(change(), should_stop=iter([False, False, True]).__next__)
    assert half.progress.step == 3
    assert half.progress.stopped
    rest = run(before=half)
    assert half.losses + rest.losses == whole.losses
    assert same(whole.weights, rest.weights)
    assert rest.progress.extra == whole.progress.extra


def test_a_state_is_saved_once_the_next_batch_has_shown_that_it_is_sane() -> None:
    whole = run()
    assert sorted(whole.saved) == [2, 4, 6], "the last one is the caller's to save"
    assert [position for position, _ in whole.saved.values()] == [
        {"batch": step} for step in (2, 4, 6)
    ]
    stopped = run(should_stop=iter([False, False, False, True]).__next__)
    assert same(whole.saved[4][1], stopped.weights), "weights after 4 steps"


def test_an_interval_in_seconds_has_one_save(tmp_path: Path) -> None:
    settings, workload = change(steps=14), TransformerWorkload(CONFIG)
    parallel = parallelise(workload.build(), Mesh(MeshSpec()), settings, workload)
    optimizer, reports = new_optimizer(parallel.modules, settings), list[StepReport]()
    generations = Generations(DiskStore(), DiskStore.url_of(tmp_path))
    saver = Checkpointer(
        generations,
        TrainState(parallel.modules, optimizer, Group()),
        CheckpointSettings(interval="seconds", every_s=3.0, keep=20),
        job_id="job",
        config_digest="c" * 64,
        code_version="test",
        clock=lambda: float(len(reports)),  # a step is a second
    )

    def on_step(report: StepReport) -> None:
        reports.append(report)
        saver.finish()

    train(
        parallel, workload, optimizer, Batches(), settings, Group(),
        progress=Progress(), saver=saver, on_step=on_step,
    )  # fmt: skip
    assert generations.steps() == [12, 8, 4], "3 s after the last save, and a step to judge it"


def test_a_poisoned_batch_is_never_behind_a_saved_state() -> None:
    settings = change(guard={"on_bad_step": "roll-back"})
    saved: dict[int, Any] = {}
    with pytest.raises(BadStep) as caught:
        run(settings, Poisoned(CONFIG, bad=frozenset({4})), saved=saved)
    assert (caught.value.step, caught.value.batch, caught.value.reason) == (4, 4, "nan")
    assert sorted(saved) == [2], "the state of step 4 has shown no sane loss"


def test_a_skipped_step_leaves_the_weights_and_its_save_to_the_next_one() -> None:
    settings = change(guard={"on_bad_step": "skip"})
    found = run(settings, Poisoned(CONFIG, bad=frozenset({4})))
    clean = run(settings)
    assert [each.applied for each in found.reports] == [True] * 4 + [False] + [True] * 3
    assert found.losses[:4] == clean.losses[:4]
    assert sorted(found.saved) == [2, 5, 6], "what was due at 4 is saved at 5"
    assert found.saved[5][0] == {"batch": 5}
    assert same(found.saved[5][1], clean.saved[4][1]), "the bad batch changed nothing"
    assert found.progress.bad_steps == 1
    assert found.reports[4].data()["step_skipped"] == 1.0


def test_a_spike_is_caught_before_it_is_learned_from() -> None:
    settings = change(guard={"on_bad_step": "skip", "spike_window": 6, "spike_factor": 2.0})
    found = run(settings, Poisoned(CONFIG, bad=frozenset({5}), factor=50.0))
    assert not found.reports[5].applied
    assert found.reports[6].loss < 2 * found.reports[4].loss


def test_weights_that_are_no_numbers_are_not_left_as_the_last_state() -> None:
    wild = {"learning_rate": 1e20, "warmup_steps": 0, "optimizer": "sgd", "clip_norm": 1e38}
    with pytest.raises(BadStep, match="nan"):
        run(change(steps=1, **wild), Poisoned(CONFIG, bad=frozenset({0}), factor=1e25))


def test_a_batch_without_a_single_sound_sample_changes_nothing() -> None:
    class Empty(TransformerWorkload):
        def inputs(self, batch: Batch, device: torch.device) -> Any:
            if batch.step == 1:
                zeros = np.zeros_like(batch.weights_BT)
                batch = dataclasses.replace(batch, weights_BT=zeros)
            return super().inputs(batch, device)

    found = run(change(steps=3), Empty(CONFIG))
    assert [each.applied for each in found.reports] == [True, False, True]


def test_fp16_overflow_halves_the_scale_and_passes_over_the_step() -> None:
    settings = change(precision="float16")
    first = run(change(precision="float16", steps=1))
    assert first.reports[0].applied
    first.progress.extra["loss_scale"] = {"scale": LARGEST_SCALE, "good_steps": 0}
    found = run(settings, before=first)
    taken = [each.applied for each in found.reports]
    assert not taken[0]
    assert taken[-1]
    scale = found.progress.extra["loss_scale"]["scale"]
    assert scale == LARGEST_SCALE / 2 ** taken.count(False)
    assert found.losses[-1] == pytest.approx(run().losses[-1], rel=2e-2), "as fp32 learns"


def test_the_scale_grows_on_finite_gradients_and_fails_at_the_bottom() -> None:
    scale = LossScale(growth_steps=3)
    before = scale.scale
    for _ in range(3):
        scale.update(finite=True)
    assert scale.scale == 2 * before
    other = LossScale()
    other.restore(scale.state)
    assert other.state == scale.state
    with pytest.raises(TrainingFailed, match="any loss scale"):
        for _ in range(40):
            scale.update(finite=False)
    for state in ({"scale": 0, "good_steps": 0}, {"scale": "x"}, {"scale": math.inf}):
        with pytest.raises(CorruptData):
            other.restore(state)


def test_held_out_loss_is_the_mean_over_tokens_and_changes_nothing() -> None:
    workload = TransformerWorkload(CONFIG)
    evaluator = Evaluator(Batches, sequences=2 * ROWS - 1, parts=3)
    plain, found = run(), run(change(evaluate_every_steps=3), evaluator=evaluator)
    assert same(plain.weights, found.weights)
    assert [bool(each.held_out) for each in found.reports] == [False, False, True] * 2 + [
        False,
        True,
    ], "every third step and the last"
    sums = [found.parallel.evaluate(workload.inputs(batch_of(number), CPU)) for number in range(2)]
    wanted = sum(float(each.loss) for each in sums) / sum(each.weight for each in sums)
    held_out = found.reports[-1].held_out
    assert held_out["held_out_loss"] == pytest.approx(wanted, rel=1e-6)
    assert held_out["held_out_bits_per_byte"] == pytest.approx(wanted / math.log(2), rel=1e-6)
    assert found.progress.metrics()["held_out_loss"] == held_out["held_out_loss"]
    assert "held_out_loss" in found.reports[2].data()


@dataclass(frozen=True)
class Losses(Evaluator):
    """Evaluations with given results, by number."""

    given: tuple[float, ...] = ()
    asked: list[float] = field(default_factory=list)

    def evaluate(self, *_: object) -> dict[str, float]:
        self.asked.append(self.given[len(self.asked)])
        return {"held_out_loss": self.asked[-1]}


def test_training_ends_once_the_held_out_loss_no_longer_falls() -> None:
    early = EarlyStoppingSettings(patience=2, min_delta=0.1)
    settings = change(evaluate_every_steps=1, early_stopping=early)
    losses = (3.0, 2.0, 1.95, 1.7, math.nan, 1.65, 1.0)
    found = run(settings, evaluator=Losses(Batches, 1, given=losses))
    assert found.progress.step == 6
    assert "has not fallen in 2 evaluations (best: 1.7000 nats at step 4)" in (
        found.progress.stopped_early
    )
    assert found.reports[-1].data()["stopped_early"] == found.progress.stopped_early
    assert "stopped_early" not in found.reports[-2].data()
    json.dumps(found.progress.extra, allow_nan=False)

    stops = iter([False] * 4 + [True])
    evaluator = Losses(Batches, 1, given=losses[:5])
    first = run(settings, evaluator=evaluator, should_stop=lambda: next(stops))
    assert not first.progress.stopped_early
    went_on = run(settings, before=first, evaluator=Losses(Batches, 1, given=losses[5:]))
    assert went_on.progress.step == 6, "a restart counts on"
    assert same(went_on.weights, found.weights)
    again = run(settings, before=went_on, evaluator=Losses(Batches, 1))
    assert (again.reports, again.progress.step) == ([], 6), "it has ended"
    longer = change(evaluate_every_steps=1, early_stopping=early, steps=9)
    more = run(longer, before=again, evaluator=Losses(Batches, 1, given=(2.0, 1.9, 1.5)))
    assert more.progress.step == 9, "a continuation with more steps counts anew"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "needs evaluate_every_steps"),
        (
            {"evaluate_every_steps": 2, "synchrony": {"kind": "parameter-server"}},
            "has no early_stopping",
        ),
    ],
)
def test_early_stopping_that_cannot_decide_is_refused(changes: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainingSettings.model_validate({"early_stopping": {}, **changes})


def test_shuffled_targets_keep_padding_where_it_is() -> None:
    batch = batch_of(3)
    targets = shuffled(batch, seed=1)
    assert (targets != batch.targets_BT).any()
    assert np.array_equal(targets[3, 5:], batch.targets_BT[3, 5:]), "weight 0: not moved"
    assert np.array_equal(np.sort(targets, axis=1)[:3], np.sort(batch.targets_BT, axis=1)[:3])
    assert np.array_equal(shuffled(batch, 1), targets)
    part = batch.split(3)[1]
    rows = slice(part.rows.start, part.rows.stop)
    assert np.array_equal(shuffled(part, 1), targets[rows]), "whatever the parts"


kinds = st.sampled_from(["cosine", "linear", "wsd"])


@given(
    kinds,
    st.integers(1, 400),
    st.integers(0, 100),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_the_rate_rises_through_the_warm_up_and_never_after_it(
    kind: str, steps: int, warmup: int, final: float, decay: float
) -> None:
    settings = TrainingSettings(
        schedule=kind,  # type: ignore[arg-type]
        warmup_steps=warmup,
        final_share=final,
        decay_share=decay,
        learning_rate=0.5,
    )
    rates = [learning_rate(step, steps, settings) for step in range(steps + 5)]
    rise, fall = rates[:warmup], rates[warmup:]
    assert all(0 <= each <= 0.5 + 1e-12 for each in rates)
    assert rise == sorted(rise)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(fall))
    if warmup < steps:
        assert fall[0] == pytest.approx(0.5)
        assert rates[-1] == pytest.approx(0.5 * final)
    if warmup:
        assert rates[0] == pytest.approx(0.5 / warmup)


def test_wsd_stays_on_its_plateau_until_the_last_share() -> None:
    settings = TrainingSettings(schedule="wsd", warmup_steps=10, decay_share=0.2, final_share=0)
    rates = [learning_rate(step, 100, settings) for step in range(101)]
    assert rates[10:81] == [settings.learning_rate] * 71
    assert rates[90] == pytest.approx(settings.learning_rate / 2)
    assert rates[100] == 0
