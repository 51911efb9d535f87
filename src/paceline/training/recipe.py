"""How weights are updated: AdamW, a warm-up and a cosine, and the state that both carry.

Knows no ranks and no files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.errors import CorruptData
from paceline.profile import TrainingSettings

BETAS = (0.9, 0.95)
FINAL_SHARE = 0.1  # of the learning rate, at the last step
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def new_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only: norms have nothing to shrink to."""
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for _, p in named if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=True)


def learning_rate(step: int, steps: int, settings: TrainingSettings) -> float:
    """Return the rate of step ``step`` (from 0): linear warm-up, then a cosine down to a tenth."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    left = max(1, steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / left)
    share = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as flat named tensors; empty before the first step."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Give the optimiser the state that ``optimizer_tensors`` returned.

    Raises CorruptData where it does not fit the model.
    """
    for name, parameter in model.named_parameters():
        try:
            state = {moment: tensors[f"{moment}.{name}"].clone() for moment in _MOMENTS}
        except KeyError as error:
            raise CorruptData("optimiser state is incomplete", got=f"no {error}") from error
        if state["exp_avg"].shape != parameter.shape:
            raise CorruptData("optimiser state does not fit the model", got=name)
        optimizer.state[parameter] = state
