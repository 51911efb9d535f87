"""Attention of transformers' models: documents of a row one by one, and rows in parts.

Its models look up attention by a name. Those here run transformers' own code for the name's kind
(``sdpa``, ``eager``) on each document, with a mask where one is needed, and exchange parts of rows
before and after it (``RowExchange``). A document that is longer than a sliding window is attended
to in blocks of queries, each with the keys that its window reaches: memory grows with the tokens
times the window. Shape letters: see ``transformer``.
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.models import attention
from paceline.models.attention import (
    CALL_PAIRS,
    CALL_PAIRS_ELSEWHERE,
    AttendOnce,
    DocumentSegments,
    attention_scope,
)

if TYPE_CHECKING:
    from paceline.models.transformer import RowExchange

LONG = 4  # blocks of a row: fewer are not worth calls of their own for each row
Seen = Tensor | DocumentSegments


@dataclass(frozen=True, eq=False)
class Scopes:
    """What tokens attend to in layers with full attention, and in those with a sliding window.

    Masks are added to the scores, made once: of a boolean one torch keeps a copy for each layer. A
    mask with fewer rows than its document has tokens is a band: the rows are a block of queries,
    the columns the keys from the window's begin before the block to the block's end.
    """

    full: Seen
    near: Seen


def whole_rows(kind: str) -> str:
    """Return the name of the attention that runs transformers' ``kind`` on whole rows."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"documents, {kind}"
    AttentionInterface.register(name, partial(_attend, kind))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    return name


def exchange_parts(model: nn.Module) -> None:
    """Let the attention of ``model`` use the ``exchange`` that its modules have, in place."""
    from transformers import AttentionInterface

    whole: Any = model.config
    kind = _kind(whole)
    # Under a name that transformers has no mask for: it builds none of its own, for a part.
    config = copy.deepcopy(whole)  # ``Pretrained`` has the other, to build more models
    config._attn_implementation = f"parts of rows, {kind}"
    AttentionInterface.register(config._attn_implementation, partial(_attend, kind))
    for each in model.modules():
        if getattr(each, "config", None) is whole:
            each.config = config


def scopes_of(config: Any, documents_BT: Tensor) -> Scopes:
    """Return what each token attends to: earlier tokens of its own document."""
    seen, window = attention_scope(documents_BT), getattr(config, "sliding_window", None)
    assert seen is not None
    device, is_eager = documents_BT.device, _kind(config) == "eager"
    full = _added(seen, documents_BT.shape[1], is_eager, device)
    if window is None:
        return Scopes(full, full)
    return Scopes(full, _added(seen, window, is_eager, device))


def needs_scopes(config: Any, tokens: int, device: torch.device, *, is_part: bool) -> bool:
    """Return whether a row of one document needs them, too: a part of a row has no mask without,
    and of a whole one transformers makes one of its ``tokens`` squared."""
    window = getattr(config, "sliding_window", None)
    if is_part:
        return window is not None or _kind(config) == "eager"
    return window is not None and tokens > LONG * _block_of(window, device)


def _block_of(window: int, device: torch.device) -> int:
    """Return how many queries are a block: enough to be worth a call."""
    return max(window, math.isqrt(CALL_PAIRS.get(device.type, CALL_PAIRS_ELSEWHERE)))


def _kind(config: Any) -> str:
    return str(config._attn_implementation).rpartition(", ")[2]


def _added(seen: Seen, window: int, is_eager: bool, device: torch.device) -> Seen:
    """Return ``seen`` within ``window`` tokens, its masks as what is added to the scores."""
    if isinstance(seen, Tensor):
        return _bias_of(seen, window)

    block = _block_of(window, device)
    band: Tensor | None = None

    def mask_of(size: int, mask_11TT: Tensor | None) -> Tensor | None:
        nonlocal band
        if mask_11TT is not None:
            return _bias_of(mask_11TT, window)
        if size <= window and not is_eager:
            return None  # causal, by the kernel itself
        if size <= block:
            return _bias_of(_causal(size, size, device), window)
        if band is None:  # one for all documents
            band = _bias_of(_causal(block, block + window - 1, device), window)
        return band

    masks = [
        [mask_of(size, mask) for size, mask in zip(sizes, row, strict=True)]
        for sizes, row in zip(seen.sizes, seen.masks, strict=True)
    ]
    return replace(seen, masks=masks)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return mask_11QK: the last query sees all keys, each one before it one key less."""
    mask_QK = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    return mask_QK.tril_(keys - queries)


def _bias_of(mask_B1QK: Tensor, window: int) -> Tensor:
    before = mask_B1QK.shape[3] - mask_B1QK.shape[2]  # keys before the first query
    hidden_B1QK = mask_B1QK.triu(before + 1 - window).logical_not_()
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(hidden_B1QK.shape, device=hidden_B1QK.device).masked_fill_(
        hidden_B1QK, lowest
    )


def _in_blocks(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, band_11QK: Tensor, attend_once: AttendOnce
) -> Tensor:
    """Attend block by block of queries; ``band_11QK``: see ``Scopes``."""
    block = band_11QK.shape[2]
    reach = band_11QK.shape[3] - block  # at most a block: the one before has all these keys
    found, before = [], list[Tensor]()
    parts = (torch.split(each, block, dim=2) for each in (q_BHTE, k_BKTE, v_BKTE))
    for q, *own in zip(*parts, strict=True):
        k, v = map(torch.cat, zip(before, own, strict=True), (2, 2)) if before else own
        size = q.shape[2]
        mask = band_11QK[..., :size, reach + size - k.shape[2] : reach + size]
        found.append(attend_once(q, k, v, mask))
        before = [each[:, :, size - reach :] for each in own]
    return torch.cat(found, dim=2)


def _attend(
    kind: str,
    module: Any,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    attention_mask: Tensor | None,
    scopes: Scopes | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``kind`` does: to what is in ``scopes``, where there are any."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if kind == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[kind]
    exchange: RowExchange | None = getattr(module, "exchange", None)
    if exchange is not None:
        q_BHTE, k_BKTE, v_BKTE = map(exchange.to_rows, (q_BHTE, k_BKTE, v_BKTE))

    def attend_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.shape[2] < q.shape[2]:
            return _in_blocks(q, k, v, mask, attend_once)
        if mask is not None and mask.is_floating_point() and kind != "eager":
            mask = mask.to(q.dtype)  # as kernels of a GPU want it
        out_BTHE: Tensor = attend(module, q, k, v, mask, **settings)[0]
        return out_BTHE.transpose(1, 2)

    seen: Seen | None = attention_mask
    if scopes is not None:
        seen = scopes.full if settings.get("sliding_window") is None else scopes.near
    if isinstance(seen, DocumentSegments):
        out_BHTE = attention.attend_apart(q_BHTE, k_BKTE, v_BKTE, seen, attend_once)
    else:
        out_BHTE = attend_once(q_BHTE, k_BKTE, v_BKTE, seen)
    if exchange is not None:
        out_BHTE = exchange.to_parts(out_BHTE)
    return out_BHTE.transpose(1, 2), None
