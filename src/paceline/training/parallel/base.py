"""What the loop drives: ``Parallel``, the same for every layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.models.attention import keep_out_of_graphs
from paceline.training.loop.workload import Inputs, LossSums


class Parallel(Protocol):
    """One rank's part of a model and of the work on a batch."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Return this rank's part or parts; parameters are named as in the whole model.

        Sharded parameters are DTensors. A tied embedding is in the first and the last stage's.
        """
        ...

    @property
    def data_rank(self) -> int:
        """Return which share of the global batch this rank reads."""
        ...

    @property
    def data_world(self) -> int:
        """Return how many shares there are."""
        ...

    @property
    def bytes_reduced(self) -> int:
        """Return how many bytes of gradients this rank gave to the replicas' all-reduce so far."""
        ...

    def accumulate(self, parts: Sequence[Inputs], scale: float) -> LossSums:
        """Run all ``parts`` forward and backward, and return this rank's sums of the loss.

        Gradients are cleared first. Afterwards they are those of ``scale`` × Σ loss over the parts
        of ALL data ranks, synchronised once. Every rank gives equally many parts, of one row or
        more each.
        """
        ...

    def clip(self, max_norm: float, unscale: float = 1.0) -> float:
        """Return the norm of ``unscale`` × all gradients of the whole model, each counted once.

        Gradients become ``unscale`` × themselves, and shorter where that is longer than
        ``max_norm``. The same number on every rank; where it is not finite, gradients are left as
        they are and the step must not be taken.
        """
        ...

    def evaluate(self, inputs: Inputs) -> LossSums:
        """Return the sums of the loss of this rank's share; makes no gradients.

        All ranks call it equally often, also those whose share weighs nothing.
        """
        ...


# Memory for time: a block keeps only its input, and is run again when its gradient is due.
#
# Parameters keep their names: the block's own ``forward`` is replaced, nothing is wrapped around
# it.


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of ``model``: what stands in its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += child.children()
        else:
            found += blocks_of(child)
    return found


def recompute_blocks(model: nn.Module) -> None:
    """Run each block of ``model`` again in the backward pass; keep only its input."""
    for block in blocks_of(model):
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = forward


# ``torch.compile`` a block at a time: one graph serves all, and layouts stay as they are.


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of ``model``; hooks around blocks (sharding) stay outside."""
    keep_out_of_graphs()
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward)
