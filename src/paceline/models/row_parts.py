"""Attention over whole rows where each process has a part of every row: ``attend_over_rows``.

All else in a model treats tokens one by one. Before attention a process gives its tokens' heads
away and gets some heads of all tokens (``RowExchange``); attention runs as ever, with the masks of
whole rows, and its result goes back. Contains no communication. Shape letters: see ``transformer``;
P is the number of parts.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.models.transformer import Attention


class RowExchange(Protocol):
    """What the processes of one row give each other; part p has tokens p·T/P to (p + 1)·T/P."""

    @property
    def parts(self) -> int:
        """Return P."""
        ...

    def to_rows(self, x_BHTE: Tensor) -> Tensor:
        """Return H/P heads of whole rows, (B, H/P, T, E), of all heads of a part (B, H, T/P, E)."""
        ...

    def to_parts(self, x_BHTE: Tensor) -> Tensor:
        """Return all heads of a part, of H/P heads of whole rows."""
        ...


def attend_over_rows(model: nn.Module, exchange: RowExchange) -> None:
    """Let ``model``, ours or of transformers, take parts of rows: tokens_BT and positions_BT are
    the part's (positions must be given), documents_BT the whole row's, and logits_BTV the part's.
    """
    for each in model.modules():
        each.exchange = exchange  # type: ignore[assignment] # torch: modules and tensors
    if any(isinstance(each, Attention) for each in model.modules()):
        return
    from transformers import AttentionInterface

    whole: Any = model.config
    kind = whole._attn_implementation
    # Under a name that transformers has no mask for: it builds none of its own, for a part.
    config = copy.deepcopy(whole)  # ``Pretrained`` has the other, to build more models
    config._attn_implementation = f"parts of rows, {kind}"
    AttentionInterface.register(config._attn_implementation, partial(_attend, kind))
    for each in model.modules():
        if getattr(each, "config", None) is whole:
            each.config = config


def _attend(
    kind: str,
    module: Any,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``kind`` does, in between two exchanges."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    exchange: RowExchange = module.exchange
    q_BHTE, k_BKTE, v_BKTE = map(exchange.to_rows, (q_BHTE, k_BKTE, v_BKTE))
    out_BTHE, _ = attend(module, q_BHTE, k_BKTE, v_BKTE, attention_mask, **settings)
    return exchange.to_parts(out_BTHE.transpose(1, 2)).transpose(1, 2), None
