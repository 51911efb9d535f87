"""A small recurrent byte model: the example of a custom model.

Each block is a minimal GRU (arXiv 2410.01201): gates depend on the input alone, so a row is one
scan in log space and not T steps. ``paceline.training.recurrent`` makes a ``Workload`` of it.

Shape letters: B rows, T tokens, D width, L blocks, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

BLOCKS = 2


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_(t-1) + z_t g(c_t), with z and c functions of the input at t alone."""

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
