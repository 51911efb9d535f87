"""Gradient norm and clipping, whatever mesh each gradient is spread over.

``torch.nn.utils.clip_grad_norm_`` rejects parameters of different meshes and does not support
pipelines. Here each rank sums the squares of what it holds, divided by the number of ranks that
hold the same values; one all-reduce over all ranks gives every rank the same norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.training.checkpoint import local_of
from paceline.training.parallel.mesh import Mesh


def reduce_pending(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute each gradient to its parameter's layout; this completes pending sums."""
    for each in parameters:
        gradient = each.grad
        if (
            isinstance(each, DTensor)
            and isinstance(gradient, DTensor)
            and gradient.placements != each.placements
        ):
            each.grad = gradient.redistribute(placements=each.placements)


def clip(
    parameters: Sequence[nn.Parameter],
    mesh: Mesh,
    max_norm: float,
    unscale: float = 1.0,
    skipped: frozenset[int] = frozenset(),
) -> float:
    """Return the norm of ``unscale`` × all gradients, and scale them down to ``max_norm``.

    ``skipped`` are ids of parameters that another rank counts (the second copy of a tied one). If
    the norm is not finite, gradients are left unchanged.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    square = _square(parameters, mesh, skipped)
    if square is None:  # nothing is sharded: every rank has all of it
        norm = float(_norm([local_of(each) for each in gradients])) * abs(unscale)
    else:
        dist.all_reduce(square)
        norm = float(square.sqrt()) * abs(unscale)
    factor = unscale * min(1.0, max_norm / (norm + 1e-6))
    if gradients and factor != 1.0 and norm < float("inf"):
        torch._foreach_mul_([local_of(each) for each in gradients], factor)
    return norm


def copies(parameter: Tensor, mesh: Mesh) -> int:
    """Return the number of ranks with the same values as this rank's part of ``parameter``."""
    held = mesh.spec.world_size // mesh.spec.pp
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            assert not placement.is_partial(), "reduce_pending() comes first"
            if not placement.is_replicate():  # a shard, plain or strided
                held //= parameter.device_mesh.size(dimension)
    return held


def _square(
    parameters: Sequence[nn.Parameter], mesh: Mesh, skipped: frozenset[int]
) -> Tensor | None:
    """Return this rank's share of the squared norm; None where nothing is sharded."""
    spread = mesh.spec.pp > 1 or any(isinstance(each, DTensor) for each in parameters)
    if not spread or mesh.spec.world_size == 1:
        return None
    by_copies: dict[int, list[Tensor]] = {}
    device = torch.device(mesh.device_type)
    for each in parameters:
        if each.grad is not None and id(each) not in skipped:
            by_copies.setdefault(copies(each, mesh), []).append(local_of(each.grad))
    square = torch.zeros((), dtype=torch.float64, device=device)
    for held, gradients in by_copies.items():
        square += _norm(gradients).double().square() / held
    return square


def _norm(gradients: list[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    return norms.square().sum().sqrt()
