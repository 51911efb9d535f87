"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimiser.

Muon orthogonalises the momentum of a whole matrix (kellerjordan.github.io/posts/muon), so it works
on replicas: on shards torch's Muon is off by bfloat16's rounding. The scale of its updates is that
of AdamW's (arXiv 2502.16982): one learning rate and one weight decay suit both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from paceline.config import TrainingSettings


class MuonWithAdamW(Optimizer):
    """One list of parameter groups and one state by parameter, for both update rules."""

    def __init__(
        self,
        hidden: list[dict[str, Any]],
        others: list[dict[str, Any]],
        settings: TrainingSettings,
    ) -> None:
        """``hidden``: parameter groups of matrices; ``others``: those of AdamW."""
        rate = settings.learning_rate
        muon = Muon(hidden, lr=rate, adjust_lr_fn="match_rms_adamw")
        self._rules = (muon, AdamW(others, lr=rate, betas=settings.betas, fused=True))
        super().__init__([group for each in self._rules for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; the state may have been replaced by a restored one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for rule in self._rules:
            rule.state = self.state
            rule.param_groups = [
                each for each in self.param_groups if ("ns_steps" in each) == isinstance(rule, Muon)
            ]
            rule.step()  # type: ignore[no-untyped-call]
        return loss
