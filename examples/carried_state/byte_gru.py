r"""A model of your own whose state is carried across batches: a byte-level GRU.

Try it, from the repository's root:

    D=$PWD/examples/carried_state
    PIN=$(python -m paceline.training.code_digest $D)
    paceline train --text docs --output carried --set data.batching=carried \
        --set "security.code_sources=['$D']" \
        --set "training.code_ref=file://$D@$PIN#byte_gru:make"

With ``data.batching = "carried"`` a long document is cut into rows, and each row starts from the
final state of the same row in the previous batch (``Batch.carries_B``).

The workload owns the state: detached (no gradient crosses a cut), stored by row of the global
batch. Checkpoints include it (see ``paceline.training.checkpoint.layout``), so a resumed job
continues with it, even where other ranks read those rows. An evaluation has separate states.

Shapes in names: B rows, T tokens a row, D width, L blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from paceline.data import Batch
from paceline.training.loop import Inputs, as_tensor, weighted_loss
from paceline.training.user_code import Task

BLOCKS = 2


class MinGRU(nn.Module):
    """A minimal GRU (arXiv 2410.01201): a row is one scan in log space and not T steps.

    h_t = (1 - z_t) h_(t-1) + z_t g(c_t), with z and c functions of the input at t alone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.candidate = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, state_BD: Tensor) -> Tensor:
        """Return the state after each token; ``state_BD`` (positive) is the state before the
        row."""
        gate_BTD = self.gate(x_BTD)
        keep_BTD = -F.softplus(gate_BTD)  # log(1 - z)
        value_BTD = -F.softplus(-gate_BTD) + _log_positive(self.candidate(x_BTD))
        kept_BTD = torch.cumsum(keep_BTD, dim=1)
        first_B1D = state_BD.clamp_min(1e-30).log().unsqueeze(1)
        entered_BTD = torch.logcumsumexp(
            torch.cat([first_B1D, value_BTD - kept_BTD], dim=1), dim=1
        )[:, 1:]
        return (kept_BTD + entered_BTD).exp()


class RecurrentBytes(nn.Module):
    """Embedding, residual blocks of a minimal GRU and a projection, then logits."""

    def __init__(self, vocabulary: int, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.width, self.blocks = width, blocks
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(blocks))
        self.cells = nn.ModuleList(MinGRU(width) for _ in range(blocks))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last_norm = nn.RMSNorm(width)

    def forward(self, tokens_BT: Tensor, state_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits_BTV and the state after the row's last token."""
        x_BTD = self.embed(tokens_BT)
        last = []
        for number, (norm, cell, out) in enumerate(
            zip(self.norms, self.cells, self.outs, strict=True)
        ):
            states_BTD = cell(norm(x_BTD), state_BLD[:, number])
            last.append(states_BTD[:, -1])
            x_BTD = x_BTD + out(states_BTD)
        logits_BTV = F.linear(self.last_norm(x_BTD), self.embed.weight)
        return logits_BTV, torch.stack(last, dim=1)

    def initial_state(self, rows: int) -> Tensor:
        """Return the state before a document, BLD."""
        return torch.zeros(rows, self.blocks, self.width, dtype=self.embed.weight.dtype)


def _log_positive(x_BTD: Tensor) -> Tensor:
    """Return log g(x) with g(x) = x + 1/2 above zero and a sigmoid below: always positive."""
    return torch.where(x_BTD >= 0, (F.relu(x_BTD) + 0.5).log(), -F.softplus(-x_BTD))


INITIAL_STD = 0.02
PREFIX = "carried."
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class CarriedState:
    """Stores the state of each row of the global batch from one batch to the next."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}  # row → LD
        self._settled: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}  # all rows at the last snapshot
        self._ours: set[int] = set()  # rows computed by this rank, not only restored

    def before(self, rows: range, carries_B: Any, empty_BLD: Tensor) -> Tensor:
        """Return the initial states of ``rows``: stored ones where ``carries_B``, else empty."""
        if carries_B is None:
            return empty_BLD
        state_BLD = empty_BLD.clone()
        for index, row in enumerate(rows):
            if carries_B[index] and row in self._rows:
                state_BLD[index] = self._rows[row].to(state_BLD)
        return state_BLD

    def keep(self, rows: Iterable[int], state_BLD: Tensor) -> None:
        """Store the final states of ``rows``."""
        for row, state_LD in zip(rows, state_BLD.detach(), strict=True):
            self._rows[row] = state_LD.clone()
            self._ours.add(int(row))

    def snapshot(self) -> None:
        """Snapshot the current rows; tensors are replaced, never overwritten."""
        self._settled = {row: self._rows[row] for row in self._ours}
        self._before = dict(self._rows)

    def roll_back(self) -> None:
        """Reset rows with non-finite state to the state before the batch."""
        for row, state_LD in list(self._rows.items()):
            if bool(torch.isfinite(state_LD).all()):
                continue
            if row in self._before:
                self._rows[row] = self._before[row]
            else:
                del self._rows[row]
                self._ours.discard(row)

    def tensors(self) -> dict[str, Tensor]:
        """Return the snapshot as runs of consecutive rows, RLD each, named by their first row."""
        runs: dict[int, list[Tensor]] = {}
        first = last = -2
        for row in sorted(self._settled):
            if row != last + 1:
                first = row
            last = row
            runs.setdefault(first, []).append(self._settled[row])
        return {f"{PREFIX}{first}": torch.stack(states) for first, states in runs.items()}

    def wants(self, name: str) -> bool:
        """Return whether ``name`` is a run of rows; all are wanted, the split is not known yet."""
        return name.startswith(PREFIX)

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Restore the rows of all ranks."""
        for name, state_RLD in found.items():
            first = int(name.removeprefix(PREFIX))
            self._rows |= {first + n: each.clone() for n, each in enumerate(state_RLD)}


class RecurrentWorkload:
    """Next-byte prediction with ``RecurrentBytes``; its state may carry over between batches."""

    def __init__(self, vocabulary: int, width: int, seed: int = 0) -> None:
        self.vocabulary, self.width, self.seed = vocabulary, width, seed
        self._carried = CarriedState()
        self._evaluation_state = CarriedState()  # states of the current evaluation
        self.keeps = (self._carried,)

    def build(self) -> nn.Module:
        """Return the initialised model; the same seed gives the same bits."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = RecurrentBytes(self.vocabulary, self.width)
            nn.init.normal_(model.embed.weight, std=INITIAL_STD)
        return model

    def initial_state(self, rows: int) -> Tensor:
        """Return the state at the start of a document, BLD."""
        return torch.zeros(rows, BLOCKS, self.width)

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return tokens and initial states; the row numbers are passed as the last target."""
        empty_BLD = self.initial_state(len(batch.rows))
        carried = self._carried if torch.is_grad_enabled() else self._evaluation_state
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

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits_BTV of the model's outputs."""
        logits_BTV: Tensor = outputs[0]
        return logits_BTV

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return Σ weight × cross-entropy; store the rows' final states for the next batch."""
        logits_BTV, state_BLD = outputs
        targets_BT, weights_BT, rows_B = targets
        carried = self._carried if torch.is_grad_enabled() else self._evaluation_state
        carried.keep(rows_B.tolist(), state_BLD)
        return weighted_loss(logits_BTV, targets_BT, weights_BT)


def make(task: Task) -> RecurrentWorkload:
    """Return the workload nearest in size to ``task.parameters``; the ``code_ref`` entrypoint."""

    def size(width: int) -> int:
        return task.vocabulary * width + BLOCKS * (3 * width * width + 4 * width) + width

    width = min(WIDTHS, key=lambda each: abs(size(each) - task.parameters))
    return RecurrentWorkload(task.vocabulary, width, task.seed)
