"""Context parallelism: each rank of a ``cp`` has a part of every row (Ulysses, arXiv 2309.14509).

Within attention an all-to-all exchanges parts of rows for heads, so that a rank attends over whole
rows with some of the heads; masks, windows and caps are those of one process, and all ranks have
equal work. The context parallelism of torch itself (2.13) has no masks and no kernel of a CPU. The
ranks also share the parameters, as those of ``shard`` do (``MeshSpec.weight_shards``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from paceline.errors import InvalidInput
from paceline.models import attend_over_rows
from paceline.training.loop import Inputs
from paceline.training.parallel.mesh import Mesh


class HeadExchange:
    """The ``RowExchange`` of the ranks of one ``cp``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.parts = group.size()

    def to_rows(self, x_BHTE: Tensor) -> Tensor:
        """Return H/P heads of whole rows."""
        b, h, t, e = x_BHTE.shape
        x_PBHTE = x_BHTE.reshape(b, self.parts, h // self.parts, t, e).movedim(1, 0)
        return self._swap(x_PBHTE).movedim(0, 2).flatten(2, 3)

    def to_parts(self, x_BHTE: Tensor) -> Tensor:
        """Return all heads of this rank's part."""
        b, h, t, e = x_BHTE.shape
        x_PBHTE = x_BHTE.reshape(b, h, self.parts, t // self.parts, e).movedim(2, 0)
        return self._swap(x_PBHTE).movedim(0, 1).flatten(1, 2)

    def _swap(self, x_PBHTE: Tensor) -> Tensor:
        """Return what each rank p of the group has for this one, at p; autograd swaps back."""
        found = collectives.all_to_all_single(x_PBHTE.contiguous(), None, None, self._group)
        waited: Tensor = collectives.wait_tensor(found)  # type: ignore[no-untyped-call]
        return waited


def cut_attention(model: nn.Module, mesh: Mesh) -> None:
    """Let ``model`` run on this rank's part of rows, in place."""
    attend_over_rows(model, HeadExchange(mesh.group("cp")))


def part_of(inputs: Inputs, mesh: Mesh) -> Inputs:
    """Return this rank's part of each row of ``inputs``; raises InvalidInput for uneven ones.

    Documents stay whole, for the masks. What is not of each token (one dimension) stays, too.
    """
    tokens_BT = inputs.args[0]
    b, t = tokens_BT.shape
    size, rest = divmod(t, mesh.spec.cp)
    if rest:
        raise InvalidInput(
            "context parallelism does not divide the row",
            got=f"{t} tokens, cp {mesh.spec.cp}",
            wanted=f"a multiple of {mesh.spec.cp} tokens",
            do="Change training.mesh.cp, or the tokens of a row.",
        )
    begin = mesh.spec.place(mesh.rank)["cp"] * size

    def cut(each: Tensor) -> Tensor:
        return each[:, begin : begin + size] if each.dim() > 1 else each

    positions_BT = inputs.kwargs.get("positions_BT")
    if positions_BT is None:
        positions_BT = torch.arange(t, device=tokens_BT.device).expand(b, t)
    return dataclasses.replace(
        inputs,
        args=tuple(map(cut, inputs.args)),
        targets=tuple(map(cut, inputs.targets)),
        kwargs={**inputs.kwargs, "positions_BT": cut(positions_BT)},
    )


def sum_of_parts(mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """Return the function that gives every rank of one ``cp`` the sum of their values.

    Its gradient is the identity: each rank goes back through its own part, and the reduction of
    gradients adds these up.
    """
    if mesh.spec.cp == 1:
        return lambda values: values
    group = mesh.group("cp")
    return lambda values: _Sum.apply(values, group)  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
