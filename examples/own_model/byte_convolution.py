r"""A model of your own: causal convolutions over bytes, in one file that nothing else imports.

Try it, from the repository's root:

    D=$PWD/examples/own_model
    PIN=$(python -m paceline.training.code_digest $D)
    paceline train --ranks 2 --text docs --output own \
        --set "security.code_sources=['$D']" \
        --set "training.code_ref=file://$D@$PIN#byte_convolution:make"

The digest pins what runs: after a change the same lines start another training. Copy the
directory, keep the three methods of the workload, replace what is inside.

Shapes in names: B rows, T tokens a row, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.data import Batch
from paceline.training.loop import Inputs
from paceline.training.user_code import Task

WIDTH_STEP, KERNEL, LAYERS = 16, 8, 2


class ByteConvolution(nn.Module):
    """Each position sees the ones before it: the input is padded on the left alone."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, KERNEL) for _ in range(LAYERS))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV."""
        hidden = self.embed(tokens_BT).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(functional.pad(hidden, (KERNEL - 1, 0))))
        logits_BTV: Tensor = self.head(hidden.transpose(1, 2))
        return logits_BTV


class NextByte:
    """What Paceline asks of a task (`paceline.training.loop.workload.Workload`)."""

    def __init__(self, vocabulary: int, width: int, seed: int) -> None:
        self.vocabulary, self.width, self.seed = vocabulary, width, seed

    def build(self) -> nn.Module:
        """Return the model. Every rank builds it: the same seed must give the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ByteConvolution(self.vocabulary, self.width)

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return a batch as tensors: what the model is called with, what its loss is called with,
        and how many tokens count (``weights_BT`` is 0 for padding)."""

        def to(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, torch.int64)

        return Inputs(
            args=(to(batch.inputs_BT),),
            targets=(to(batch.targets_BT), torch.from_numpy(batch.weights_BT).to(device)),
            weight=float(batch.weights_BT.sum()),
        )

    def loss_sum(self, outputs: Tensor, *targets: Tensor) -> Tensor:
        """Return the SUM of the weighted losses, in nats; Paceline divides by the whole batch's
        weight, so that any number of ranks gives the same step."""
        targets_BT, weights_BT = targets
        loss_N = functional.cross_entropy(
            outputs.flatten(0, 1), targets_BT.flatten(), reduction="none"
        )
        return (loss_N * weights_BT.flatten()).sum()


def make(task: Task) -> NextByte:
    """Return the task whose model has about ``task.parameters`` weights: `model.parameters`."""

    def size(width: int) -> int:
        return LAYERS * (KERNEL * width * width + width) + (2 * width + 1) * task.vocabulary

    widths = range(WIDTH_STEP, 4096, WIDTH_STEP)
    width = min(widths, key=lambda each: abs(size(each) - task.parameters))
    return NextByte(task.vocabulary, width, task.seed)
