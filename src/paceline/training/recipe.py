"""How weights are updated: AdamW or plain SGD, and the state that they carry.

Knows no ranks, no schedule and no files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.errors import CorruptData
from paceline.profile import TrainingSettings

BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def new_optimizer(
    modules: nn.Module | Sequence[nn.Module], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the optimiser of ``settings`` over one rank's modules (``Parallel.modules``).

    AdamW decays matrices only: norms have nothing to shrink to. SGD is plain: no momentum, no
    decay, so that averaging weights each step is averaging gradients.
    """
    parts = [modules] if isinstance(modules, nn.Module) else modules
    # A rank may hold one parameter in several parts: it is updated once.
    trained = list(dict.fromkeys(p for part in parts for p in part.parameters() if p.requires_grad))
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=settings.learning_rate, foreach=True)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [each for each in groups if each["params"]]
    return torch.optim.AdamW(filled, lr=settings.learning_rate, betas=BETAS, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def take_step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Change the weights by their gradients, at ``rate``."""
    set_learning_rate(optimizer, rate)
    optimizer.step()


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
