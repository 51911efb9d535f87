"""A model of one's own, as an example: a small recurrent byte model and its ``Workload``.

``training.code_ref = "paceline.models.recurrent:byte_gru"`` trains it. Each block is a minimal GRU
(arXiv 2410.01201): gates depend on the input alone, so a row is one scan in log space and not T
steps. With ``data.batching = "carried"`` a long document is cut into rows, and each row goes on
with the state at which the same row of the batch before stopped (``Batch.carries_B``).

The state is this workload's own: detached (no gradient crosses a cut), kept by row, not part of a
checkpoint. After a restart the rows under way begin with an empty state, which changes a few
hundred tokens' losses, so a restarted run with carried state is not bit-identical to a whole one.

Shapes in names: B rows, T tokens a row, D width, L blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

INITIAL_STD = 0.02
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BLOCKS = 2


class TaskLike(Protocol):
    """What an entrypoint is told (``paceline.training.code_ref.Task``)."""

    @property
    def seed(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def parameters(self) -> int: ...


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_(t-1) + z_t g(c_t), with z and c functions of the input at t alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.candidate = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, state_BD: Tensor) -> Tensor:
        """Return the states after each token; ``state_BD`` (positive) is the one before the row."""
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
    """Embedding, blocks of a minimal GRU and a projection, each added back; then logits."""

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

    def keep(self, rows: Iterator[int], state_BLD: Tensor) -> None:
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

    def inputs(self, batch: Any, device: torch.device) -> Any:
        """Return tokens and the states to begin with; rows stand among the targets for later."""
        from paceline.training.workload import Inputs  # the layer above: only where it runs

        empty_BLD = self.initial_state(len(batch.rows))
        state_BLD = self._carried.before(batch.rows, batch.carries_B, empty_BLD)
        return Inputs(
            args=(_integers(batch.inputs_BT, device), state_BLD.to(device)),
            targets=(
                _integers(batch.targets_BT, device),
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
            self._carried.keep(iter(rows_B.tolist()), state_BLD)
        loss_N = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none"
        )
        return torch.dot(loss_N, weights_BT.flatten().to(loss_N.dtype))


def byte_gru(task: TaskLike) -> RecurrentWorkload:
    """Return the workload nearest ``task.parameters``: the ``code_ref`` entrypoint."""

    def size(width: int) -> int:
        return task.vocabulary * width + BLOCKS * (3 * width * width + 4 * width) + width

    width = min(WIDTHS, key=lambda each: abs(size(each) - task.parameters))
    return RecurrentWorkload(task.vocabulary, width, task.seed)


def _log_positive(x_BTD: Tensor) -> Tensor:
    """Return log g(x) with g(x) = x + 1/2 above zero and a sigmoid below: always positive."""
    return torch.where(x_BTD >= 0, (F.relu(x_BTD) + 0.5).log(), -F.softplus(-x_BTD))


def _integers(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, torch.int64)
