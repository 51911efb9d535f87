"""A task of one's own, as an example: bytes of long documents, with the state carried over cuts.

``training.code_ref = "paceline.training.recurrent:byte_gru"`` trains it. With ``data.batching =
"carried"`` a long document is cut into rows, and each row goes on with the state at which the same
row of the batch before stopped (``Batch.carries_B``).

The state is this workload's own: detached (no gradient crosses a cut), kept by row of the global
batch. Checkpoints have it (``Carried`` is a ``Kept``), so that a job goes on with it, also where
other ranks read those rows. An evaluation carries states of its own.

Shapes in names: B rows, T tokens a row, D width, L blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data import Batch
from paceline.models.recurrent import BLOCKS, RecurrentBytes
from paceline.training.loop.workload import Inputs, as_tensor, weighted_loss
from paceline.training.user_code import Task

INITIAL_STD = 0.02
PREFIX = "carried."
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Carried:
    """The state of each row of the global batch, from one batch to the next; see ``Kept``."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}  # row → LD
        self._settled: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}  # all rows, as they were settled
        self._ours: set[int] = set()  # rows that were computed here, not only restored

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
            self._ours.add(int(row))

    def settle(self) -> None:
        """Keep what rows have now: tensors are replaced, never written over."""
        self._settled = {row: self._rows[row] for row in self._ours}
        self._before = dict(self._rows)

    def let_go(self) -> None:
        """Rows whose state is no number any more go on from the state before the batch."""
        for row, state_LD in list(self._rows.items()):
            if bool(torch.isfinite(state_LD).all()):
                continue
            if row in self._before:
                self._rows[row] = self._before[row]
            else:
                del self._rows[row]
                self._ours.discard(row)

    def tensors(self) -> dict[str, Tensor]:
        """Return runs of neighbouring rows, RLD each, named by their first row."""
        runs: dict[int, list[Tensor]] = {}
        first = last = -2
        for row in sorted(self._settled):
            if row != last + 1:
                first = row
            last = row
            runs.setdefault(first, []).append(self._settled[row])
        return {f"{PREFIX}{first}": torch.stack(states) for first, states in runs.items()}

    def wants(self, name: str) -> bool:
        """Return whether it is a run of rows: which of them are read here is not known yet."""
        return name.startswith(PREFIX)

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Take over the rows of all ranks."""
        for name, state_RLD in found.items():
            first = int(name.removeprefix(PREFIX))
            self._rows |= {first + n: each.clone() for n, each in enumerate(state_RLD)}


class RecurrentWorkload:
    """Predict each next byte with ``RecurrentBytes``, whose state a batch may carry on."""

    def __init__(self, vocabulary: int, width: int, seed: int = 0) -> None:
        self.vocabulary, self.width, self.seed = vocabulary, width, seed
        self._carried = Carried()
        self._judged = Carried()  # of the evaluation under way
        self.keeps = (self._carried,)

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
        carried = self._carried if torch.is_grad_enabled() else self._judged
        state_BLD = carried.before(batch.rows, batch.carries_B, empty_BLD)
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
        """Return Σ weight × cross-entropy; the rows' last states are kept for the next batch."""
        logits_BTV, state_BLD = outputs
        targets_BT, weights_BT, rows_B = targets
        carried = self._carried if torch.is_grad_enabled() else self._judged
        carried.keep(rows_B.tolist(), state_BLD)
        return weighted_loss(logits_BTV, targets_BT, weights_BT)


def byte_gru(task: Task) -> RecurrentWorkload:
    """Return the workload nearest ``task.parameters``: the ``code_ref`` entrypoint."""

    def size(width: int) -> int:
        return task.vocabulary * width + BLOCKS * (3 * width * width + 4 * width) + width

    width = min(WIDTHS, key=lambda each: abs(size(each) - task.parameters))
    return RecurrentWorkload(task.vocabulary, width, task.seed)
