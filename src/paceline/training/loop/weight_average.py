"""Exponential moving average (EMA) of the trained weights, laid out on the ranks as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import EmaSettings
from paceline.training.checkpoint import local_of


class WeightAverage:
    """The average over the steps that an optimiser takes; the first step's weights begin it.

    The values are those of torch's AveragedModel. ``values`` is empty without settings and before
    the first step; checkpoints contain it (``TrainState.averages``).
    """

    def __init__(self, optimizer: Optimizer, settings: EmaSettings | None) -> None:
        self.values: dict[nn.Parameter, Tensor] = {}
        if settings is not None:
            self._weight = 1 - settings.decay
            optimizer.register_step_post_hook(self._stepped)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the ``with`` the model has the average as its weights; then its own again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: FSDP and compiled graphs refer to the memory of the weights.
        for parameter, value in self.values.items():
            mine, average = local_of(parameter.detach()), local_of(value)
            own = mine.clone()
            mine.copy_(average)
            average.copy_(own)

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        if not self.values:
            self.values.update({each: each.detach().clone() for each in trained})
            return
        averages = [local_of(self.values[each]) for each in trained]
        torch._foreach_lerp_(averages, [local_of(each.detach()) for each in trained], self._weight)
