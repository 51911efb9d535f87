"""Precision: in which type products are computed, and loss scaling where that is fp16.

Parameters, gradients and the optimiser stay fp32 masters (fp64 with ``precision = float64``); only
products are cast. fp16 gradients underflow, so the loss is multiplied by a scale that grows while
gradients stay finite and halves when they do not (arXiv 1710.03740). The loop hands the scale to
``Parallel.accumulate`` and its inverse to ``Parallel.clip``, whose norm is the same on every rank:
all ranks change the scale alike, and it works with accumulation and under every layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.errors import CorruptData, TrainingFailed
from paceline.profile import TrainingSettings

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROWTH_STEPS = 2000  # steps in a row without an overflow before the scale doubles

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(settings: TrainingSettings, device_type: str) -> AbstractContextManager[object]:
    """Return the context in which forward passes run: products in ``settings.precision``."""
    half = _HALVES.get(settings.precision)
    if half is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=half)


def master_dtype(settings: TrainingSettings) -> torch.dtype:
    """Return the type that parameters and the optimiser's state are kept in."""
    return torch.float64 if settings.precision == "float64" else torch.float32


@dataclass
class LossScale:
    """The dynamic scale of fp16; its ``state`` travels in each checkpoint."""

    scale: float = INITIAL_SCALE
    good_steps: int = 0
    growth_steps: int = GROWTH_STEPS

    @classmethod
    def of(cls, settings: TrainingSettings) -> LossScale | None:
        """Return the scale that ``settings`` need, None where gradients cannot underflow."""
        return cls() if settings.precision == "float16" else None

    def update(self, finite: bool) -> None:
        """Learn whether the last gradients were finite.

        Raises TrainingFailed where they still are not at the smallest scale.
        """
        if not finite:
            if self.scale <= 1.0:
                raise TrainingFailed(
                    "gradients are not finite at any loss scale",
                    got=f"scale {self.scale:g}",
                    wanted="a finite gradient norm",
                    do="Use training.precision bfloat16, or lower training.learning_rate.",
                )
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            self.scale, self.good_steps = min(LARGEST_SCALE, self.scale * 2), 0

    @property
    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take back what ``state`` gave; raises CorruptData where it is not that."""
        try:
            scale, good_steps = float(state["scale"]), int(state["good_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData("loss scale of a checkpoint is unusable", got=repr(state)) from error
        if not 0 < scale <= LARGEST_SCALE or good_steps < 0:
            raise CorruptData("loss scale of a checkpoint is out of range", got=repr(state))
        self.scale, self.good_steps = scale, good_steps
