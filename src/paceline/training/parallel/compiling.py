"""``torch.compile`` a block at a time: one graph serves all, and layouts stay as they are."""

from __future__ import annotations

import torch
from torch import nn

from paceline.models.attention import keep_out_of_graphs
from paceline.training.parallel.activation import blocks_of


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of ``model``; hooks around blocks (sharding) stay outside."""
    keep_out_of_graphs()
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward)
