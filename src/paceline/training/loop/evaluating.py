"""Held-out loss every n steps, under the same layout and data shares as training.

Each evaluation reads the same sequences from the start of the held-out split, so that two results
of one job differ only in the weights. Memory holds one batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from paceline.config import TrainingSettings
from paceline.data import Stream
from paceline.training.loop.group import Group
from paceline.training.loop.workload import LossSums, Workload
from paceline.training.parallel import Parallel


@runtime_checkable
class DivergingReplicas(Protocol):
    """A ``Parallel`` whose ranks may hold different weights."""

    def together(self) -> AbstractContextManager[None]:
        """Use the mean of all ranks' weights inside the ``with``; a collective call."""


def _together(parallel: Parallel) -> AbstractContextManager[None]:
    return parallel.together() if isinstance(parallel, DivergingReplicas) else nullcontext()


@dataclass(frozen=True)
class HeldOutLoss:
    """The result of one evaluation."""

    loss: float  # mean nats per token
    tokens: float  # sum of the token weights
    bits_per_byte: float | None  # None where the bytes per token are unknown

    def metrics(self) -> dict[str, float]:
        """Return the figures under the names used by checkpoints and MLflow."""
        found = {"held_out_loss": self.loss, "held_out_bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Evaluator:
    """Measures a model on ``sequences`` rows of the held-out split, rounded up to whole batches.

    ``open_stream`` returns a new stream of this rank's share from the start of the split;
    ``bytes_per_token`` is 1 for byte-level text, None where targets are not text.
    """

    open_stream: Callable[[], Stream]
    sequences: int
    parts: int = 1  # forward passes per batch, as in training
    bytes_per_token: float | None = 1.0
    during: Callable[[], AbstractContextManager[object]] = nullcontext  # entered per evaluation

    @classmethod
    def of(
        cls,
        settings: TrainingSettings,
        open_held_out: Callable[[], Stream],
        bytes_per_token: float | None = 1.0,
    ) -> Evaluator | None:
        """Return the evaluator for ``settings``; None where evaluation is off."""
        if not settings.evaluate_every_steps:
            return None
        parts = settings.accumulation
        return cls(open_held_out, settings.evaluate_sequences, parts, bytes_per_token)

    def evaluate(
        self, parallel: Parallel, workload: Workload, group: Group, device: torch.device
    ) -> HeldOutLoss:
        """Return the held-out loss; a collective call of all ranks at the same step."""
        found: list[LossSums] = []
        # A task with carried state recognises an evaluation by the disabled gradients.
        with self.during(), self.open_stream() as stream, _together(parallel), torch.no_grad():
            for _ in range(math.ceil(self.sequences / stream.global_batch)):
                parts = stream.next().split(self.parts)
                found += [parallel.evaluate(workload.inputs(part, device)) for part in parts]
        sums = LossSums.of(found)
        loss_total, counted = group.sums([float(sums.loss), sums.weight])
        loss = loss_total / counted if counted else math.nan
        bits = loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None
        return HeldOutLoss(loss, counted, bits)
