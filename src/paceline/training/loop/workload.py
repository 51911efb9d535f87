"""The training task: model, conversion of a batch to inputs, and loss.

The loop and every layout use the task only through ``Workload``; a ``codeRef`` entrypoint returns
one. ``TransformerWorkload`` is the built-in task: next-token prediction. Losses are SUMS over
weighted tokens in nats, never means: only sums add up over parts, ranks and uneven shares.

Shapes in names: B rows, T tokens a row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from paceline.data import Batch
from paceline.models import ModelConfig, Pretrained, new_model


@dataclass(frozen=True)
class Inputs:
    """One part of a batch as tensors: ``model(*args, **kwargs)``, and the targets of the loss.

    Tensors in ``args``, ``kwargs`` and ``targets`` have rows as their first dimension, so that a
    pipeline can split them into microbatches.
    """

    args: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    weight: float  # sum of the tokens' weights; on the host, so that no device sync is needed
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class LossSums(NamedTuple):
    """One rank's loss: nats summed over weighted tokens, and the sum of the weights.

    A rank without a loss (an early pipeline stage) has zeros in both, and ranks that work on the
    same rows have the same sums: Σ loss / Σ weight over all ranks is the mean under every layout.
    ``loss`` is a detached scalar tensor: converting it to a float synchronises with the GPU.
    """

    loss: Tensor
    weight: float

    @classmethod
    def of(cls, parts: Sequence[LossSums]) -> LossSums:
        """Return the sum of ``parts`` (at least one)."""
        loss = parts[0].loss
        for each in parts[1:]:
            loss = loss + each.loss
        return cls(loss, sum(each.weight for each in parts))


@runtime_checkable
class Workload(Protocol):
    """A training task; a ``codeRef`` entrypoint returns one.

    One that carries state between batches starts a row from the previous batch's where
    ``Batch.carries_B`` is set (see ``examples/carried_state``).
    """

    def build(self) -> nn.Module:
        """Return the model, freshly initialised, on the CPU or on the meta device.

        The same workload returns the same bits each time.
        """
        ...

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return ``batch`` as tensors on ``device``."""
        ...

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return the loss as a scalar: the SUM over weighted tokens, in nats."""
        ...


@runtime_checkable
class HasLogits(Protocol):
    """A language model whose module does not return the logits of the next token alone."""

    def logits(self, outputs: Any) -> Tensor:
        """Return logits_BTV of what the module returned; those at t are of the token after t."""
        ...


@runtime_checkable
class HasFigures(Protocol):
    """A training task with figures of its own beside the loss."""

    def figure_sums(self, inputs: Inputs) -> dict[str, float]:
        """Return sums by name after the loss of ``inputs``: they add up as the loss does."""
        ...


def figures_of(workload: Workload, parts: Sequence[Inputs]) -> dict[str, float]:
    """Return the sums of the workload's own figures over ``parts``; {} where it has none."""
    if not isinstance(workload, HasFigures):
        return {}
    found = [workload.figure_sums(each) for each in parts]
    return {name: sum(each[name] for each in found) for name in found[0]}


@dataclass(frozen=True)
class TransformerWorkload:
    """Next-token prediction with the built-in decoder, or a model in transformers' layout."""

    config: ModelConfig | Pretrained
    seed: int = 0

    def build(self) -> nn.Module:
        """Return the model of ``config``: initialised from ``seed``, or without values."""
        if isinstance(self.config, Pretrained):
            return self.config.build()
        return new_model(self.config, self.seed)

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return tokens; for a packed batch also document ids and positions."""
        return Inputs(
            args=(as_tensor(batch.inputs_BT, device),),
            kwargs={
                name: as_tensor(found, device)
                for name in ("positions_BT", "documents_BT")
                if (found := getattr(batch, name)) is not None
            },
            targets=(
                as_tensor(batch.targets_BT, device),
                torch.from_numpy(batch.weights_BT).to(device, non_blocking=True),
            ),
            weight=float(batch.weights_BT.sum(dtype=np.float64)),
        )

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return the weighted sum of the cross-entropy of ``outputs`` (logits_BTV)."""
        targets_BT, weights_BT = targets
        return weighted_loss(outputs, targets_BT, weights_BT)


@dataclass(frozen=True)
class ShuffledLabels:
    """The control run: the same task with the targets of each row in random order.

    Whatever a model learns from it does not come from the order of the text.
    """

    workload: Workload
    seed: int

    def build(self) -> nn.Module:
        """Return the model of the true task."""
        return self.workload.build()

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return ``batch`` with permuted targets as tensors on ``device``."""
        changed = dataclasses.replace(batch, targets_BT=shuffled(batch, self.seed))
        return self.workload.inputs(changed, device)

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return the loss of the true task."""
        return self.workload.loss_sum(outputs, *targets)


def weighted_loss(logits_BTV: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Return Σ over tokens of weight × cross-entropy, in nats; halves are computed in float32."""
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    loss_N = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    return torch.dot(loss_N, weights_BT.flatten().to(loss_N.dtype))


def shuffled(batch: Batch, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """Return the batch's targets, with the weighted ones of each row in random order.

    The order is a pure function of (seed, step, row): the same for any number of ranks.
    """
    targets_BT = np.array(batch.targets_BT)
    for row, targets_T, weights_T in zip(batch.rows, targets_BT, batch.weights_BT, strict=True):
        (counted,) = np.nonzero(weights_T)
        generator = np.random.Generator(np.random.Philox([abs(seed), batch.step, row]))
        targets_T[counted] = generator.permutation(targets_T[counted])
    return targets_BT


def as_tensor(array: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> Tensor:
    """Return an integer array as an int64 tensor on ``device``."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, torch.int64, non_blocking=True)
