"""A task of one's own, as an example: bytes of long documents, with the state carried over cuts.

``training.code_ref = "paceline.training.recurrent:byte_gru"`` trains it. With ``data.batching =
"carried"`` a long document is cut into rows, and each row goes on with the state at which the same
row of the batch before stopped (``Batch.carries_B``).

The state is this workload's own: detached (no gradient crosses a cut), kept by row, not part of a
checkpoint. After a restart the rows under way begin with an empty state, which changes a few
hundred tokens' losses, so a restarted run with carried state is not bit-identical to a whole one.

Shapes in names: B rows, T tokens a row, D width, L blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data import Batch
from paceline.models.recurrent import BLOCKS, RecurrentBytes
from paceline.training.code_ref import Task
from paceline.training.workload import Inputs, as_tensor, weighted_loss

INITIAL_STD = 0.02
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Carried:
    """The state of each row of the global batch, from one batch to the next."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}  # row → LD

    def before(self, rows: range, carries_B: Any, empty_BLD: Tensor) -> Tensor:
        """Return the states with which ``rows`` begin: kept where ``carries_B``, else empty."""
        if carries_B is None:
            return empty_BLD
        state_BLD = empty_BLD.clone()
        for index, row in enumerate(rows):
            if carries_B[index] and row in self._rows:
                state_BLD[index] = self._rows[row].to(state_BLD)
        return state_BLD

    def keep(self, rows: Iterable[int], state_BLD: Tensor) -> None:
        """Keep the states with which rows ended."""
        for row, state_LD in zip(rows, state_BLD.detach(), strict=True):
            self._rows[row] = state_LD.clone()


class RecurrentWorkload:
    """Predict each next byte with ``RecurrentBytes``, whose state a batch may carry on."""

    def __init__(self, vocabulary: int, width: int, seed: int = 0) -> None:
        self.vocabulary, self.width, self.seed = vocabulary, width, seed
        self._carried = Carried()

    def build(self) -> nn.Module:
        """Return the model; the same seed gives the same bits."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = RecurrentBytes(self.vocabulary, self.width)
            nn.init.normal_(model.embed.weight, std=INITIAL_STD)
        return model

    def initial_state(self, rows: int) -> Tensor:
        """Return the state before a document, BLD."""
        return torch.zeros(rows, BLOCKS, self.width)

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return tokens and the states to begin with; rows stand among the targets for later."""
        empty_BLD = self.initial_state(len(batch.rows))
        state_BLD = self._carried.before(batch.rows, batch.carries_B, empty_BLD)
        return Inputs(
            args=(as_tensor(batch.inputs_BT, device), state_BLD.to(device)),
            targets=(
                as_tensor(batch.targets_BT, device),
                torch.from_numpy(batch.weights_BT).to(device),
                torch.tensor(batch.rows, dtype=torch.int64),
            ),
            weight=float(batch.weights_BT.sum(dtype=np.float64)),
        )

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return Σ weight × cross-entropy; in training it keeps the rows' last states too."""
        logits_BTV, state_BLD = outputs
        targets_BT, weights_BT, rows_B = targets
        if torch.is_grad_enabled():  # an evaluation must not touch the training rows' states
            self._carried.keep(rows_B.tolist(), state_BLD)
        return weighted_loss(logits_BTV, targets_BT, weights_BT)


def byte_gru(task: Task) -> RecurrentWorkload:
    """Return the workload nearest ``task.parameters``: the ``code_ref`` entrypoint."""

    def size(width: int) -> int:
        return task.vocabulary * width + BLOCKS * (3 * width * width + 4 * width) + width

    width = min(WIDTHS, key=lambda each: abs(size(each) - task.parameters))
    return RecurrentWorkload(task.vocabulary, width, task.seed)
