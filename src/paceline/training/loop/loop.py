"""The training loop: batch, split, accumulate, clip, all-reduce, judge, save, step, report.

It does not depend on a layout, model or file format: ``Parallel`` distributes the work, a
``Workload`` defines the task, a ``Saver`` stores states. Randomness is a pure function of
(seed, step, data rank), so no generator state is saved.

A due state is saved only after the next batch has a sane loss under it, and before the optimiser
changes it: a corrupted state never becomes a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.config import TrainingSettings
from paceline.data import Batch, Stream
from paceline.models import Transformer
from paceline.training.checkpoint.stateful import keeps_of, let_go, settle
from paceline.training.loop.evaluating import Evaluator
from paceline.training.loop.group import Group
from paceline.training.loop.optimizer import LossScale, learning_rate, take_step
from paceline.training.loop.step_guard import StepGuard, Verdict
from paceline.training.loop.workload import ShuffledLabels, TransformerWorkload, Workload
from paceline.training.metrics import AlertChange, StepMetrics, Straggler
from paceline.training.parallel import Parallel, parallelise
from paceline.training.parallel.mesh import Mesh, MeshSpec, open_mesh

CPU = torch.device("cpu")


class Saver(Protocol):
    """The checkpointer interface of the loop; every rank calls it at the same steps."""

    stall_s: float  # total time that saves blocked training

    def due(self, step: int, steps: int) -> bool:
        """Return whether to save the state after ``step`` steps; called once per step."""
        ...

    def save(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> bool:
        """Start saving the current state."""
        ...


@dataclass
class Progress:
    """Training progress, and the time spent in this process."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    held_out: dict[str, float] = field(default_factory=dict)  # latest evaluation
    extra: dict[str, Any] = field(default_factory=dict)  # JSON stored in each checkpoint
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
    seconds: float
    tokens_per_second: float
    data_wait_s: float
    taken: bool = True  # False: the step was skipped, weights unchanged
    figures: dict[str, float] = field(default_factory=dict)  # of this rank, by name
    held_out: dict[str, float] = field(default_factory=dict)  # where this step evaluated
    slow: tuple[Straggler, ...] = ()
    alerts: tuple[AlertChange, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return the data of this step's event, by name."""
        found: dict[str, Any] = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            **self.figures,
            **self.held_out,
        }
        if not self.taken:
            found["step_skipped"] = 1.0
        if self.slow:
            found["stragglers"] = {str(each.rank): round(each.factor, 3) for each in self.slow}
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
    stream: Stream,
    settings: TrainingSettings,
    group: Group,
    *,
    progress: Progress,
    device: torch.device = CPU,
    saver: Saver | None = None,
    evaluator: Evaluator | None = None,
    guard: StepGuard | None = None,
    numbers: StepMetrics | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train from ``progress.step`` to ``settings.steps``; return ``progress``.

    Stops early once ``should_stop()`` is true on any rank. The final state is finite, and the
    caller saves it. Raises BadStep where the job must roll back to its last healthy checkpoint,
    TrainingFailed where it cannot continue; the weights in memory are invalid after either.
    """
    if progress.step >= settings.steps:
        return progress
    guard = guard or StepGuard.of(settings.guard)
    scaler = LossScale.of(settings)
    _restore(progress.extra, guard, scaler)
    numbers = numbers or StepMetrics.of(settings, parallel, group, device)
    keeps = keeps_of(parallel, workload)
    started, owed = time.perf_counter(), False
    while progress.step < settings.steps:
        settle(keeps)
        numbers.begin(progress.step + 1, stream.data_wait_s, progress.stall_s)
        seed_step(settings.seed, progress.step, parallel.data_rank, device)
        position = stream.position
        batch = stream.next()
        parts = [workload.inputs(part, device) for part in batch.split(settings.accumulation)]

        scale = scaler.scale if scaler else 1.0
        sums = parallel.accumulate(parts, scale / max(batch.global_tokens, 1.0))
        norm = parallel.clip(settings.clip_norm, 1.0 / scale)

        flags = [float(should_stop()), float(not math.isfinite(norm))]
        mine = [float(sums.loss), sums.weight, *flags, *numbers.shared(stream.data_wait_s)]
        loss_total, counted, stops, overflows, *slots = group.sums(mine)
        loss = loss_total / counted if counted else 0.0
        norm = math.inf if overflows else norm  # of any rank: local SGD has a norm per replica

        verdict = _judge(guard, scaler, progress.step, batch, loss=loss, norm=norm, counted=counted)
        rate = learning_rate(progress.step, settings.steps, settings)
        if verdict is Verdict.TAKE:
            if saver is not None and owed:
                saver.save(progress.step, position, progress.metrics())
                progress.stall_s, owed = saver.stall_s, False
            take_step(optimizer, rate)
        else:
            let_go(keeps)

        _count(progress, batch, loss, verdict)
        progress.extra.update(_kept(guard, scaler))  # in place: the saver holds the same dict
        progress.stopped = stops > 0
        if saver is not None and saver.due(progress.step, settings.steps):
            owed = True
        progress.data_wait_s = stream.data_wait_s
        figures = numbers.end(
            progress.step, batch.global_tokens, slots, progress.data_wait_s, progress.stall_s
        )
        held_out: dict[str, float] = {}
        if evaluator is not None and _evaluates(progress.step, settings):
            held_out = _evaluate(evaluator, parallel, workload, group, device, progress)
        progress.seconds = time.perf_counter() - started - progress.evaluate_s
        if on_step is not None:
            on_step(
                StepReport(
                    step=progress.step,
                    loss=loss,
                    grad_norm=norm,
                    learning_rate=rate,
                    seconds=figures["step_seconds"],
                    tokens_per_second=figures["tokens_per_second"],
                    data_wait_s=figures["data_wait_s"],
                    taken=verdict is Verdict.TAKE,
                    figures=figures,
                    held_out=held_out,
                    slow=tuple(numbers.slow),
                    alerts=tuple(numbers.changes(figures)),
                )
            )
        if progress.stopped:
            break
    settle(keeps)
    numbers.close()
    guard.require_sound(
        group.all(finite_state(parallel.modules, optimizer)),
        step=progress.step - 1,
        batch=batch.step,
    )
    return progress


def train_model(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    stream: Stream,
    settings: TrainingSettings,
    group: Group,
    *,
    progress: Progress,
    labels: str = "true",
    saver: Saver | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train the transformer with data parallelism over ``group``; see ``train``."""
    workload: Workload = TransformerWorkload(model.config)
    if labels == "shuffled":
        workload = ShuffledLabels(workload, settings.seed)
    mesh = Mesh(MeshSpec()) if group.world_size == 1 else open_mesh(MeshSpec(dp=group.world_size))
    return train(
        parallelise(model, mesh, settings, workload),
        workload,
        optimizer,
        stream,
        settings,
        group,
        progress=progress,
        saver=saver,
        on_step=on_step,
        should_stop=should_stop,
    )


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
    return all(bool(torch.isfinite(_local(each)).all()) for each in weights + moments)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _judge(
    guard: StepGuard,
    scaler: LossScale | None,
    step: int,
    batch: Batch,
    *,
    loss: float,
    norm: float,
    counted: float,
) -> Verdict:
    if not counted:  # every sample of the batch is in quarantine
        return Verdict.SKIP
    if scaler and math.isfinite(loss):
        scaler.update(finite=math.isfinite(norm))
        if not math.isfinite(norm):  # fp16 overflow is not a bad batch
            return Verdict.SKIP
    return guard.judge(step=step, batch=batch.step, loss=loss, norm=norm)


def _count(progress: Progress, batch: Batch, loss: float, verdict: Verdict) -> None:
    progress.step += 1
    progress.tokens += int(batch.global_tokens)
    progress.skipped |= set(batch.skipped)
    if verdict is not Verdict.TAKE:
        progress.bad_steps += 1
        return
    progress.loss = loss
    if progress.first_loss is None:
        progress.first_loss = loss


def _evaluates(step: int, settings: TrainingSettings) -> bool:
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
    progress.held_out = evaluator.evaluate(parallel, workload, group, device).metrics()
    progress.evaluate_s += time.perf_counter() - began
    return progress.held_out


def _kept(guard: StepGuard, scaler: LossScale | None) -> dict[str, Any]:
    """Return the guard and loss-scale state that a checkpoint stores."""
    kept: dict[str, Any] = {"guard": guard.state}
    if scaler:
        kept["loss_scale"] = scaler.state
    return kept


def _restore(extra: dict[str, Any], guard: StepGuard, scaler: LossScale | None) -> None:
    if "guard" in extra:
        guard.restore(extra["guard"])
    if scaler and "loss_scale" in extra:
        scaler.restore(extra["loss_scale"])
