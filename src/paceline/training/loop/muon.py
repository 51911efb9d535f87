"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimiser.

Muon orthogonalises the momentum of a whole matrix (kellerjordan.github.io/posts/muon) in bfloat16.
On shards torch's Muon sums products of parts there, whose rounding another number of ranks would
change: here each rank gathers a matrix after the other. The scale of its updates is that of AdamW's
(arXiv 2502.16982): one learning rate and one weight decay suit both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from paceline.config import TrainingSettings
from paceline.training.checkpoint import box_of, local_of


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
            its = [
                each for each in self.param_groups if ("ns_steps" in each) == isinstance(rule, Muon)
            ]
            if isinstance(rule, Muon):
                for group in its:
                    for each in group["params"]:
                        if isinstance(each, DTensor) and each.grad is not None:
                            _step_shard(each, self.state[each], group)
                its = [each | {"params": _whole(each["params"])} for each in its]
            rule.param_groups = its
            rule.step()  # type: ignore[no-untyped-call]
        return loss


def _whole(parameters: list[Tensor]) -> list[Tensor]:
    return [each for each in parameters if not isinstance(each, DTensor)]


def _step_shard(parameter: DTensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update this rank's part of a matrix; ``state`` and ``group`` are those of torch's Muon."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    assert isinstance(parameter.grad, DTensor)
    grad, buffer = parameter.grad.to_local(), local_of(state["momentum_buffer"])
    buffer.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
    whole = DTensor.from_local(
        update.bfloat16(),  # as Muon does first
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()
    box = zip(*box_of(parameter), strict=True)
    mine = _direction(whole.to(update.dtype), group)[tuple(slice(at, at + n) for at, n in box)]
    part = parameter.to_local()
    part.mul_(1 - group["lr"] * group["weight_decay"])
    part.add_(mine, alpha=group["lr"])


def _direction(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the step that torch's Muon takes for ``update`` at learning rate 1."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    same = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()  # type: ignore[no-untyped-call]
    return matrix.detach()
