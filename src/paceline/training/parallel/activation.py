"""Memory for time: a block keeps only its input, and is run again when its gradient is due.

Parameters keep their names: the block's own ``forward`` is replaced, nothing is wrapped around it.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of ``model``: what stands in its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += child.children()
        else:
            found += blocks_of(child)
    return found


def recompute_blocks(model: nn.Module) -> None:
    """Run each block of ``model`` again in the backward pass; keep only its input."""
    for block in blocks_of(model):
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = forward
