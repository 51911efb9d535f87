"""Held-out loss every n steps, under the same layout and shares as training.

Each evaluation reads the same sequences from the held-out split's beginning, so that two figures of
one job compare the weights and nothing else. Memory holds one batch at a time.
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
class Apart(Protocol):
    """A ``Parallel`` whose ranks may hold different weights."""

    def together(self) -> AbstractContextManager[None]:
        """Hold the mean of them for a while; all ranks enter it at the same step."""


def _together(parallel: Parallel) -> AbstractContextManager[None]:
    return parallel.together() if isinstance(parallel, Apart) else nullcontext()


@dataclass(frozen=True)
class HeldOut:
    """What one evaluation found."""

    loss: float  # mean nats per token
    tokens: float  # that counted
    bits_per_byte: float | None  # None where nobody knows how many bytes a token stands for

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, as checkpoints and MLflow keep them."""
        found = {"held_out_loss": self.loss, "held_out_bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Evaluator:
    """Measures a model on ``sequences`` rows of the held-out split, rounded up to whole batches.

    ``open_stream`` gives this rank's share of that split from its beginning, each time anew;
    ``bytes_per_token`` is 1 for byte-level text, None where targets are not text.
    """

    open_stream: Callable[[], Stream]
    sequences: int
    parts: int = 1  # passes through the model for each batch, as in training
    bytes_per_token: float | None = 1.0
    during: Callable[[], AbstractContextManager[object]] = nullcontext  # around each evaluation

    @classmethod
    def of(
        cls,
        settings: TrainingSettings,
        open_held_out: Callable[[], Stream],
        bytes_per_token: float | None = 1.0,
    ) -> Evaluator | None:
        """Return the evaluator that ``settings`` ask for, None where they ask for none."""
        if not settings.evaluate_every_steps:
            return None
        parts = settings.accumulation
        return cls(open_held_out, settings.evaluate_sequences, parts, bytes_per_token)

    def evaluate(
        self, parallel: Parallel, workload: Workload, group: Group, device: torch.device
    ) -> HeldOut:
        """Return the held-out loss; all ranks call it at the same step."""
        found: list[LossSums] = []
        # Without gradients: so does a task that carries state tell this from training.
        with self.during(), self.open_stream() as stream, _together(parallel), torch.no_grad():
            for _ in range(math.ceil(self.sequences / stream.global_batch)):
                parts = stream.next().split(self.parts)
                found += [parallel.evaluate(workload.inputs(part, device)) for part in parts]
        sums = LossSums.of(found)
        loss_total, counted = group.sums([float(sums.loss), sums.weight])
        loss = loss_total / counted if counted else math.nan
        bits = loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None
        return HeldOut(loss, counted, bits)
