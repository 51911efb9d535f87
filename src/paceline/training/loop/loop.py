"""The training loop: batch, split, accumulate, clip, all-reduce, check, save, step, report.

It does not depend on a layout, model or file format: ``Parallel`` distributes the work, a
``Workload`` defines the task, a ``Checkpointer`` stores states. Randomness is a pure function of
(seed, step, data rank), so no generator state is saved.

A due state is saved only after its loss on the next batch is finite and no spike, and before the
optimiser changes it: a corrupted state never becomes a checkpoint. Each held-out evaluation reads
the same sequences under the same layout, so that two results of one job differ only in the weights.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.config import TrainingSettings
from paceline.data import Batch, PlannedStream
from paceline.training.checkpoint import local_of, stateful_of
from paceline.training.loop.group import Group
from paceline.training.loop.optimizer import LossScale, apply_gradients, rate_of
from paceline.training.loop.step_guard import EarlyStopping, StepDecision, StepGuard
from paceline.training.loop.workload import LossSums, Workload, figures_of
from paceline.training.metrics import AlertChange, StepMetrics, Straggler
from paceline.training.parallel import Parallel

if TYPE_CHECKING:
    from paceline.training.checkpoint import Checkpointer


@runtime_checkable
class DivergingReplicas(Protocol):
    """A ``Parallel`` whose ranks may hold different weights."""

    def together(self) -> AbstractContextManager[None]:
        """Use the mean of all ranks' weights inside the ``with``; a collective call."""

    def average(self) -> None:
        """Set weights and optimiser state of all ranks to their mean; a collective call."""


def average_replicas(parallel: Parallel) -> None:
    """Average the ranks' states where they may differ."""
    if isinstance(parallel, DivergingReplicas):
        parallel.average()


def _mean_weights(parallel: Parallel) -> AbstractContextManager[None]:
    return parallel.together() if isinstance(parallel, DivergingReplicas) else nullcontext()


@dataclass(frozen=True)
class Evaluator:
    """Measures a model on ``sequences`` rows of the held-out split, rounded up to whole batches.

    ``open_stream`` returns a new stream of this rank's share from the start of the split;
    ``bytes_per_token`` is 1 for byte-level text, None where targets are not text.
    """

    open_stream: Callable[[], PlannedStream]
    sequences: int
    parts: int = 1  # forward passes per batch, as in training
    bytes_per_token: float | None = 1.0
    during: Callable[[], AbstractContextManager[object]] = nullcontext  # entered per evaluation
    averaged: Callable[[], AbstractContextManager[object]] = nullcontext  # changes the weights

    def evaluate(
        self, parallel: Parallel, workload: Workload, group: Group, device: torch.device
    ) -> dict[str, float]:
        """Return the held-out loss (mean nats a token) and, where the bytes per token are known,
        bits per byte, and the workload's own figures, by the names of checkpoints and MLflow; all
        ranks call it at the same step.
        """
        parts_sums: list[LossSums] = []
        own: Counter[str] = Counter()
        # A task with carried state recognises an evaluation by the disabled gradients.
        with (
            self.during(),
            self.open_stream() as stream,
            self.averaged(),
            _mean_weights(parallel),
            torch.no_grad(),
        ):
            for _ in range(math.ceil(self.sequences / stream.global_batch)):
                for part in stream.next().split(self.parts):
                    inputs = workload.inputs(part, device)
                    parts_sums.append(parallel.evaluate(inputs))
                    own.update(figures_of(workload, [inputs]))
        sums = LossSums.of(parts_sums)
        loss_total, counted, *totals = group.sums([float(sums.loss), sums.weight, *own.values()])
        loss = loss_total / counted if counted else math.nan
        found = {"held_out_loss": loss}
        found |= {f"held_out_{name}": each for name, each in _means(own, totals, counted).items()}
        if self.bytes_per_token:
            found["held_out_bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return found


CPU = torch.device("cpu")


@dataclass
class Progress:
    """Training progress, and the time spent in this process."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    held_out: dict[str, float] = field(default_factory=dict)  # latest evaluation
    extra: dict[str, Any] = field(default_factory=dict)  # JSON stored in each checkpoint
    stopped_early: str = ""  # why training ended before its steps, by early stopping
    stopped: bool = False  # a stop was requested (SIGTERM on any rank)
    seconds: float = 0.0  # excluding evaluations
    evaluate_s: float = 0.0
    tokens: int = 0
    bad_steps: int = 0
    data_wait_s: float = 0.0
    stall_s: float = 0.0
    skipped: set[str] = field(default_factory=set)

    @classmethod
    def at(cls, step: int, metrics: Mapping[str, float]) -> Progress:
        """Return the progress at ``step``, from a checkpoint's ``metrics``."""
        held_out = {name: found for name, found in metrics.items() if name.startswith("held_out")}
        first, last = metrics.get("first_loss"), metrics.get("loss")
        return cls(step=step, first_loss=first, loss=last, held_out=held_out)

    def metrics(self) -> dict[str, float]:
        """Return the metrics stored with a checkpoint."""
        found = {"first_loss": self.first_loss, "loss": self.loss, **self.held_out}
        return {name: value for name, value in found.items() if value is not None}

    def share(self, seconds: float) -> float:
        """Return ``seconds`` as a share of the training time."""
        return seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepReport:
    """One step's figures; ``loss`` is the mean over all ranks' tokens, in nats."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    applied: bool = True  # False: the step was skipped, weights unchanged
    figures: dict[str, float] = field(default_factory=dict)  # of this rank, by name
    held_out: dict[str, float] = field(default_factory=dict)  # where this step evaluated
    slow: tuple[Straggler, ...] = ()
    alerts: tuple[AlertChange, ...] = ()
    stopped_early: str = ""  # why this is the last step, where it is not the planned one

    def data(self) -> dict[str, Any]:
        """Return the data of this step's event, by name."""
        found: dict[str, Any] = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            **self.figures,
            **self.held_out,
        }
        if not self.applied:
            found["step_skipped"] = 1.0
        if self.slow:
            found["stragglers"] = {str(each.rank): round(each.factor, 3) for each in self.slow}
        if self.stopped_early:
            found["stopped_early"] = self.stopped_early
        if self.alerts:
            found["alerts"] = [
                {"name": each.name, "raised": each.raised, "message": each.message}
                for each in self.alerts
            ]
        return found


def train(
    parallel: Parallel,
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    stream: PlannedStream,
    settings: TrainingSettings,
    group: Group,
    *,
    progress: Progress,
    device: torch.device = CPU,
    saver: Checkpointer | None = None,
    evaluator: Evaluator | None = None,
    guard: StepGuard | None = None,
    step_metrics: StepMetrics | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train from ``progress.step`` to ``settings.steps``; return ``progress``.

    Stops early once ``should_stop()`` is true on any rank, and ends early as ``early_stopping``
    says. The final state is finite, and the
    caller saves it. Raises BadStep where the job must roll back to its last healthy checkpoint,
    TrainingFailed where it cannot continue; the weights in memory are invalid after either.
    """
    guard, scaler = guard or StepGuard(settings.guard), LossScale.of(settings)
    early_stopping = _restore(progress, settings, guard, scaler)
    if progress.step >= settings.steps or progress.stopped_early:
        return progress
    step_metrics = step_metrics or StepMetrics.of(settings, parallel, group, device)
    stateful, started, save_is_due = stateful_of(parallel, workload), time.perf_counter(), False
    while progress.step < settings.steps:
        for each_state in stateful:
            each_state.snapshot()
        step_metrics.begin(progress.step + 1, stream.data_wait_s, progress.stall_s)
        seed_step(settings.seed, progress.step, parallel.data_rank, device)
        position = stream.position
        batch = stream.next()
        parts = [workload.inputs(part, device) for part in batch.split(settings.accumulation)]

        scale = scaler.scale if scaler else 1.0
        sums = parallel.accumulate(parts, scale / max(batch.global_weight, 1.0))
        norm = parallel.clip(settings.clip_norm, 1.0 / scale)

        flags = (
            should_stop(),
            not math.isfinite(norm),
            saver is not None and saver.due(progress.step + 1, settings.steps),
        )
        own, slots = figures_of(workload, parts), step_metrics.shared(stream.data_wait_s)
        own_sums = [float(sums.loss), sums.weight, *map(float, flags), *slots, *own.values()]
        loss_total, counted, stops, overflows, dues, *rest = group.sums(own_sums)
        loss = loss_total / counted if counted else 0.0
        norm = math.inf if overflows else norm  # of any rank: local SGD has a norm per replica

        decision = _decide_step(
            guard, scaler, progress.step, batch, loss=loss, norm=norm, counted=counted
        )
        rate = rate_of(optimizer, progress.step, settings)
        if decision is StepDecision.APPLY:
            if saver is not None and save_is_due:
                saver.save(progress.step, position, progress.metrics())
                progress.stall_s, save_is_due = saver.stall_s, False
            apply_gradients(optimizer, rate)
        else:
            for each_state in stateful:
                each_state.roll_back()

        _record_step(progress, batch, loss, decision, stopped=stops > 0)
        # In place: the saver holds the same dict.
        progress.extra.update(_resume_extra(guard, scaler))
        if dues:
            save_is_due = True
            average_replicas(parallel)  # all ranks continue from the state that is saved
        progress.data_wait_s = stream.data_wait_s
        figures = step_metrics.end(
            progress.step,
            batch.global_tokens,
            rest[: len(slots)],
            progress.data_wait_s,
            progress.stall_s,
        )
        held_out: dict[str, float] = {}
        if evaluator is not None and is_evaluation_step(progress.step, settings):
            held_out = _evaluate(evaluator, parallel, workload, group, device, progress)
            early_stopping.record_evaluation(progress, settings.steps)
        progress.seconds = time.perf_counter() - started - progress.evaluate_s
        if on_step is not None:
            on_step(
                StepReport(
                    step=progress.step,
                    loss=loss,
                    grad_norm=norm,
                    learning_rate=rate,
                    applied=decision is StepDecision.APPLY,
                    figures=_means(own, rest[len(slots) :], counted) | figures,
                    held_out=held_out,
                    slow=tuple(step_metrics.slow),
                    alerts=tuple(step_metrics.changes(figures)),
                    stopped_early=progress.stopped_early,
                )
            )
        if progress.stopped or progress.stopped_early:
            break
    for each_state in stateful:
        each_state.snapshot()
    step_metrics.close()
    guard.require_finite_state(
        group.all(finite_state(parallel.modules, optimizer)),
        step=progress.step - 1,
        batch=batch.step,
    )
    return progress


def seed_step(seed: int, step: int, data_rank: int, device: torch.device = CPU) -> None:
    """Seed torch for one step, so that dropout is a function of (seed, step, data rank)."""
    number = (seed * 1_000_003 + step) * 4096 + data_rank
    if not -(2**63) <= number < 2**64:  # torch's range of seeds
        number %= 2**64
    torch.default_generator.manual_seed(number)  # torch.manual_seed visits every backend: 0.4 ms
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def finite_state(modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all of this rank's weights and optimiser state are finite."""
    weights = [each.detach() for module in modules for each in module.parameters()]
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return all(bool(torch.isfinite(local_of(each)).all()) for each in weights + moments)


def _means(names: Iterable[str], totals: Sequence[float], counted: float) -> dict[str, float]:
    """Return ``totals`` by name, as means; {} where nothing was counted."""
    return {name: each / counted for name, each in zip(names, totals, strict=True) if counted}


def _decide_step(
    guard: StepGuard,
    scaler: LossScale | None,
    step: int,
    batch: Batch,
    *,
    loss: float,
    norm: float,
    counted: float,
) -> StepDecision:
    if not counted:  # every sample of the batch is in quarantine
        return StepDecision.SKIP
    if scaler and math.isfinite(loss):
        scaler.update(finite=math.isfinite(norm))
        if not math.isfinite(norm):  # fp16 overflow is not a bad batch
            return StepDecision.SKIP
    return guard.decide(step=step, batch=batch.step, loss=loss, norm=norm)


def _record_step(
    progress: Progress, batch: Batch, loss: float, decision: StepDecision, *, stopped: bool
) -> None:
    progress.step += 1
    progress.stopped = stopped
    progress.tokens += int(batch.global_tokens)
    progress.skipped |= set(batch.skipped)
    if decision is not StepDecision.APPLY:
        progress.bad_steps += 1
        return
    progress.loss = loss
    if progress.first_loss is None:
        progress.first_loss = loss


def is_evaluation_step(step: int, settings: TrainingSettings) -> bool:
    """Return whether the model is evaluated after ``step``."""
    every = settings.evaluate_every_steps
    return every > 0 and (step % every == 0 or step == settings.steps)


def _evaluate(
    evaluator: Evaluator,
    parallel: Parallel,
    workload: Workload,
    group: Group,
    device: torch.device,
    progress: Progress,
) -> dict[str, float]:
    began = time.perf_counter()
    progress.held_out = evaluator.evaluate(parallel, workload, group, device)
    progress.evaluate_s += time.perf_counter() - began
    return progress.held_out


def _resume_extra(guard: StepGuard, scaler: LossScale | None) -> dict[str, Any]:
    """Return the guard and loss-scale state that a checkpoint stores."""
    each_state: dict[str, Any] = {"guard": guard.state}
    if scaler:
        each_state["loss_scale"] = scaler.state
    return each_state


def _restore(
    progress: Progress, settings: TrainingSettings, guard: StepGuard, scaler: LossScale | None
) -> EarlyStopping:
    extra = progress.extra
    if "guard" in extra:
        guard.restore(extra["guard"])
    if scaler and "loss_scale" in extra:
        scaler.restore(extra["loss_scale"])
    early_stopping = EarlyStopping(settings, extra)
    progress.stopped_early = early_stopping.reason
    return early_stopping
