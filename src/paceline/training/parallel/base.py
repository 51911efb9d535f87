"""``Parallel``, the interface that the training loop drives; recompute and compile of blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.models import OtherStage, exclude_from_compilation
from paceline.training.loop import Inputs, LossSums


class Parallel(Protocol):
    """One rank's part of a model and of the work on a batch."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Return this rank's part or parts; parameters have the names of the whole model.

        Sharded parameters are DTensors. A tied embedding is in the first and the last stage.
        """
        ...

    @property
    def data_rank(self) -> int:
        """Return the index of the share of the global batch that this rank reads."""
        ...

    @property
    def data_world(self) -> int:
        """Return the number of shares."""
        ...

    @property
    def bytes_reduced(self) -> int:
        """Return the bytes of gradients that this rank gave to the replicas' all-reduce so far."""
        ...

    def accumulate(self, parts: Sequence[Inputs], scale: float) -> LossSums:
        """Run all ``parts`` forward and backward, and return this rank's sums of the loss.

        Gradients are cleared first. Afterwards they are those of ``scale`` × Σ loss over the parts
        of ALL data ranks, synchronised once. Every rank passes the same number of parts, each of at
        least one row.
        """
        ...

    def clip(self, max_norm: float, unscale: float = 1.0) -> float:
        """Return the norm of ``unscale`` × all gradients of the whole model, each counted once.

        Gradients are multiplied by ``unscale``, and scaled down to ``max_norm`` where the norm is
        larger. The result is the same on every rank; where it is not finite, gradients are left
        unchanged and the step must not be taken.
        """
        ...

    def evaluate(self, inputs: Inputs) -> LossSums:
        """Return the sums of the loss of this rank's share; computes no gradients.

        All ranks call it equally often, also those whose share has weight 0.
        """
        ...


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model``: the members of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += [each for each in child.children() if not isinstance(each, OtherStage)]
        else:
            found += blocks_of(child)
    return found


def recompute_blocks(model: nn.Module) -> None:
    """Recompute each block of ``model`` in the backward pass; store only its input.

    The block's ``forward`` is replaced instead of wrapped, so parameters keep their names.
    """
    for block in blocks_of(model):
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = forward


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of ``model`` (one graph serves all); hooks around blocks stay outside."""
    exclude_from_compilation()
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward)
