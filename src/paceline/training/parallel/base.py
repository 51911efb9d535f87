"""What the loop drives: ``Parallel``, the same for every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from paceline.training.workload import Inputs, LossSums


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
