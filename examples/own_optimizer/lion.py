"""An optimiser of one's own: Lion (arXiv 2302.06675), which keeps one moment and steps by signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.config import TrainingSettings


class Lion(torch.optim.Optimizer):
    """Every operation is one of torch on whole parameters, so it works on shards as well."""

    def __init__(self, groups: list[dict[str, Any]], settings: TrainingSettings) -> None:
        super().__init__(groups, {"lr": settings.learning_rate, "betas": settings.betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters; the rate of this step is already in the groups."""
        assert closure is None
        for group in self.param_groups:
            rate, (now, kept) = group["lr"], group["betas"]
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["momentum"] = torch.zeros_like(each)
                each.mul_(1 - rate * group["weight_decay"])
                each.sub_(state["momentum"].lerp(each.grad, 1 - now).sign(), alpha=rate)
                state["momentum"].lerp_(each.grad, 1 - kept)


def make(groups: list[dict[str, Any]], settings: TrainingSettings) -> Lion:
    """Return the optimiser; ``training.optimizer_ref`` names this function."""
    return Lion(groups, settings)
