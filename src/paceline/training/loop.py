"""The training loop, top to bottom: batch, forward, backward, clip, step, tell, save.

It knows one model and one group and nothing of how gradients travel, where batches come from or
where checkpoints go. Randomness is a pure function of (seed, step, row): there is no generator
whose state would have to be saved, and the same holds for any number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from paceline.data import Batch, Stream
from paceline.errors import TrainingFailed
from paceline.profile import TrainingSettings
from paceline.training.group import Group
from paceline.training.recipe import learning_rate, set_learning_rate


class Saver(Protocol):
    """What the loop needs of a checkpointer (rank 0 has one)."""

    stall_s: float

    def due(self, step: int, steps: int) -> bool: ...
    def save(self, step: int, position: dict[str, Any], metrics: dict[str, float]) -> bool: ...


@dataclass
class Progress:
    """Where training stands, and what it took so far in this process."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    stopped: bool = False  # somebody asked us to stop (SIGTERM on any rank)
    seconds: float = 0.0
    tokens: int = 0
    data_wait_s: float = 0.0
    stall_s: float = 0.0
    skipped: set[str] = field(default_factory=set)

    def metrics(self) -> dict[str, float]:
        """Return what a checkpoint keeps beside the state."""
        found = {"first_loss": self.first_loss, "loss": self.loss}
        return {name: value for name, value in found.items() if value is not None}

    def share(self, seconds: float) -> float:
        """Return ``seconds`` as a share of the time spent."""
        return seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepReport:
    """One step's figures; ``loss`` is the mean over all ranks, in nats per byte."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    data_wait_s: float


def train(
    model: nn.Module,
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
    """Train from ``progress.step`` to ``settings.steps`` and return ``progress``.

    Stops early, state saved, once ``should_stop()`` is true on any rank. Raises TrainingFailed when
    the loss or its gradient is no finite number: the weights in memory are not to be used then.
    """
    if progress.step >= settings.steps:
        return progress
    parallel = group.parallelise(model)
    parameters = [each for each in model.parameters() if each.requires_grad]
    _warm_up(parallel, optimizer, stream, group)
    started = time.perf_counter()
    while progress.step < settings.steps:
        step_started = time.perf_counter()
        waited = stream.data_wait_s
        torch.manual_seed((settings.seed * 1_000_003 + progress.step) * 4096 + group.rank)
        batch = stream.next()
        global_tokens = batch.global_tokens
        inputs_BT, targets_BT, weights_BT = _tensors(
            batch, stream.global_batch, labels, settings.seed
        )

        logits_BTV = parallel(inputs_BT)
        loss_sum = weighted_loss(logits_BTV, targets_BT, weights_BT)
        # DDP averages over ranks, whose parts may differ in size: scale to get the global mean.
        torch.autograd.backward(loss_sum * (group.world_size / global_tokens))
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, settings.clip_norm))

        counted = float(weights_BT.sum())
        loss_total, counted, stops = group.sums(
            [float(loss_sum.detach()), counted, 1.0 if should_stop() else 0.0]
        )
        loss = loss_total / counted if counted else 0.0
        _require_finite(loss, grad_norm, progress.step)
        rate = learning_rate(progress.step, settings.steps, settings)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=group.world_size == 1)

        progress.step += 1
        progress.loss = loss
        if progress.first_loss is None:
            progress.first_loss = loss
        progress.skipped |= set(batch.skipped)
        progress.tokens += int(global_tokens)
        progress.stopped = stops > 0
        if saver is not None and (progress.stopped or saver.due(progress.step, settings.steps)):
            saver.save(progress.step, stream.position, progress.metrics())
            progress.stall_s = saver.stall_s
        now = time.perf_counter()
        progress.seconds = now - started
        progress.data_wait_s = stream.data_wait_s
        if on_step is not None:
            on_step(
                StepReport(
                    step=progress.step,
                    loss=loss,
                    grad_norm=grad_norm,
                    learning_rate=rate,
                    seconds=now - step_started,
                    tokens_per_second=global_tokens / (now - step_started),
                    data_wait_s=stream.data_wait_s - waited,
                )
            )
        if progress.stopped:
            break
    return progress


def weighted_loss(logits_BTV: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Return the sum over tokens of the cross-entropy in nats, each times its weight."""
    loss_BT = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none"
    ).view_as(targets_BT)
    return (loss_BT * weights_BT).sum(dim=1).sum()


def shuffled(
    batch: Batch, global_batch: int, seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """Return the batch's targets, each row in a random order of its own: the control."""
    first = batch.step * global_batch
    rows = [
        np.random.Generator(np.random.Philox([seed, first + row])).permutation(targets_T)
        for row, targets_T in zip(batch.rows, batch.targets_BT, strict=True)
    ]
    return np.stack(rows)


def _tensors(
    batch: Batch, global_batch: int, labels: str, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    targets_BT = batch.targets_BT
    if labels == "shuffled":
        targets_BT = shuffled(batch, global_batch, abs(seed))
    return (
        torch.from_numpy(batch.inputs_BT.astype(np.int64)),
        torch.from_numpy(targets_BT.astype(np.int64)),
        torch.from_numpy(batch.weights_BT),
    )


def _warm_up(
    parallel: nn.Module, optimizer: torch.optim.Optimizer, stream: Stream, group: Group
) -> None:
    """Run one backward pass that changes nothing, where there are several ranks.

    DDP lays out its buckets anew after the first backward pass. Doing that before the first step
    makes a resumed run add gradients in the same order as one that never stopped: bit-identical.
    """
    if group.world_size == 1:
        return
    logits_BTV = parallel(torch.zeros(1, min(2, stream.context), dtype=torch.int64))
    torch.autograd.backward(logits_BTV.sum() * 0.0)
    optimizer.zero_grad(set_to_none=False)


def _require_finite(loss: float, grad_norm: float, step: int) -> None:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise TrainingFailed(
        "training diverged",
        got=f"loss {loss}, gradient norm {grad_norm}",
        wanted="finite numbers",
        where=f"step {step + 1}",
        do="Lower training.learning_rate or training.clip_norm; the last checkpoint is intact.",
    )
