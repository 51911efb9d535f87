"""Attention: causal, with a mask or per-document segments for packed documents.

Documents that share a row are attended to one by one where that is cheaper than a mask over the
whole row: work and memory then grow with the documents' own lengths instead of the row's squared.
Both ways give the same numbers. Shape letters: see ``transformer``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

MOST_SCORES = 2**25  # of a layer, stored for the backward pass: 64 MiB

# Cost of one more attention call, forward and backward, in pairs of tokens (query, key) that a
# masked kernel could process in that time. CPU: measured, one core, 6 heads of 32: 0.15 ms, and
# 27,000 pairs a ms. GPU: an estimate (0.1 ms of launches), not measured.
CALL_PAIRS = {"cpu": 64**2}
CALL_PAIRS_ELSEWHERE = 1024**2


@dataclass(frozen=True, eq=False)
class DocumentSegments:
    """Each row of a batch cut into segments that do not attend to each other.

    ``sizes[b]`` sum to T. A segment is one document, with the mask None, or some short ones with a
    mask between them.
    """

    sizes: list[list[int]]
    masks: list[list[Tensor | None]]


class KeptKeys:
    """A layer's keys and values of the tokens before, for decoding: new tokens attend to them."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._kept: tuple[Tensor, Tensor] | None = None  # (B, K, longest, E)
        self.length = 0  # tokens

    def extended(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return those of all tokens (views)."""
        if self._kept is None:  # allocated once: appending by copies would be O(T²)
            b, heads, _, size = k_BKTE.shape
            shape = (b, heads, self._longest, size)
            self._kept = k_BKTE.new_empty(shape), v_BKTE.new_empty(shape)
        begin, self.length = self.length, self.length + k_BKTE.shape[2]
        for kept, new in zip(self._kept, (k_BKTE, v_BKTE), strict=True):
            kept[:, :, begin : self.length] = new
        k, v = (kept[:, :, : self.length] for kept in self._kept)
        return k, v


# attention in one call, of q_BHTE, k_BKTE, v_BKTE and a mask_B1TT (None: all earlier tokens)
AttendOnce = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
# a mask_B1TT, segments, kept keys and values, or None: all earlier tokens
AttentionScope = Tensor | DocumentSegments | KeptKeys | None


def attention_scope(documents_BT: Tensor | None) -> Tensor | DocumentSegments | None:
    """Return what each token attends to: its own document's earlier tokens, or all of them for
    None.

    Chooses a mask or segments by cost: a pure function of the documents' lengths.
    """
    if documents_BT is None:
        return None
    b, t = documents_BT.shape
    call_pairs = CALL_PAIRS.get(documents_BT.device.type, CALL_PAIRS_ELSEWHERE)
    if documents_BT.is_meta or t * t <= call_pairs:  # a single call is the cheapest
        return document_mask(documents_BT)
    lengths = _lengths(documents_BT)
    if lengths is None:
        return document_mask(documents_BT)
    stretches = [_joined(row, math.isqrt(call_pairs)) for row in lengths]
    if segments_cost(stretches, call_pairs) >= b * t * t + call_pairs:
        return document_mask(documents_BT)
    masks: list[list[Tensor | None]] = []
    for row, sizes in zip(documents_BT, stretches, strict=True):
        parts = row.split([sum(each) for each in sizes])
        alone = [len(each) == 1 for each in sizes]
        masks.append([
            None if one else document_mask(part[None])
            for one, part in zip(alone, parts, strict=True)
        ])  # fmt: skip
    return DocumentSegments([[sum(each) for each in sizes] for sizes in stretches], masks)


def segments_cost(stretches: list[list[list[int]]], call_pairs: int) -> int:
    """Return the cost of attention over segments (per row, of document lengths), in token pairs."""
    cost = 0
    for row in stretches:
        for lengths in row:
            pairs = sum(lengths) ** 2
            cost += call_pairs + (pairs // 2 if len(lengths) == 1 else pairs)  # causal: half
    return cost


def document_mask(documents_BT: Tensor) -> Tensor:
    """Return mask_B1TT: true where a token (row) may attend to another (column) of its own
    document.

    The mask is causal. Padding is a document like any other, so that no row is fully masked.
    """
    t = documents_BT.shape[1]
    causal_TT = torch.ones(t, t, dtype=torch.bool, device=documents_BT.device).tril()
    return ((documents_BT[:, :, None] == documents_BT[:, None, :]) & causal_TT)[:, None]


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, seen: AttentionScope) -> Tensor:
    """Return each token's mix of values: over all earlier tokens, or over those in ``seen``."""
    if isinstance(seen, DocumentSegments):
        return attend_apart(q_BHTE, k_BKTE, v_BKTE, seen, _attend_at_once)
    if isinstance(seen, KeptKeys):
        t, before = q_BHTE.shape[2], seen.length
        k_BKTE, v_BKTE = seen.extended(k_BKTE, v_BKTE)
        if before:  # else as without: causal
            mask_TT = torch.ones(t, before + t, dtype=torch.bool, device=q_BHTE.device)
            gqa = q_BHTE.shape[1] != k_BKTE.shape[1]
            return F.scaled_dot_product_attention(
                q_BHTE, k_BKTE, v_BKTE, attn_mask=mask_TT.tril(before), enable_gqa=gqa
            )
        seen = None
    return _attend_at_once(q_BHTE, k_BKTE, v_BKTE, seen)


def _attend_apart(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    spans: DocumentSegments,
    attend_once: AttendOnce,
) -> Tensor:
    """Return each token's mix of the values in its segment."""
    rows = []
    whole = (each.unbind(0) for each in (q_BHTE, k_BKTE, v_BKTE))
    for q_HTE, k_KTE, v_KTE, sizes, masks in zip(*whole, spans.sizes, spans.masks, strict=True):
        # split, not slices: the gradients of a split are concatenated once, while each slice's
        # gradient fills a whole row.
        parts = (each[None].split(sizes, dim=2) for each in (q_HTE, k_KTE, v_KTE))
        found = [attend_once(q, k, v, mask) for q, k, v, mask in zip(*parts, masks, strict=True)]
        rows.append(torch.cat(found, dim=2))
    return torch.cat(rows)


attend_apart = _attend_apart  # looked up at each call: ``exclude_from_compilation`` replaces it


def exclude_from_compilation() -> None:
    """Exclude per-segment attention from compilation.

    Segments differ in each batch, and each would be compiled. Call it before compiling; it imports
    torch's compiler (2 s).
    """
    global attend_apart  # noqa: PLW0603 - set once per process
    disable: Any = torch.compiler.disable  # untyped in torch
    attend_apart = disable(_attend_apart)


def _attend_at_once(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask_B1TT: Tensor | None
) -> Tensor:
    """Return attention in one call.

    On a CPU in bfloat16 as plain products, while the scores are small enough to be stored: torch's
    own kernel takes 2.3 times as long there (83 ms against 36 ms forward and backward, 8 rows of
    512 tokens, 6 heads of 32, one core).
    """
    b, h, t, e = q_BHTE.shape
    if not _as_products(q_BHTE):
        return F.scaled_dot_product_attention(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            enable_gqa=h != k_BKTE.shape[1],
        )
    kinds = k_BKTE.shape[1]
    bias = torch.full((), float("-inf"), dtype=q_BHTE.dtype)
    if mask_B1TT is None:
        bias_TT = bias.expand(t, t).triu(1)
        bias = bias_TT.expand(h // kinds, t, t).reshape(1, -1, t)
    else:
        bias_B1TT = torch.zeros((), dtype=q_BHTE.dtype).where(mask_B1TT, bias)
        bias = bias_B1TT.expand(b, h, t, t).reshape(b * kinds, -1, t)
    # Query heads that share a key head are rows of one product.
    q, k, v = (each.reshape(b * kinds, -1, e) for each in (q_BHTE, k_BKTE, v_BKTE))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(e))
    return torch.bmm(scores.softmax(dim=-1), v).view(b, h, t, e)


def _as_products(q_BHTE: Tensor) -> bool:
    b, h, t, _ = q_BHTE.shape
    small = q_BHTE.device.type == "cpu" and b * h * t * t <= MOST_SCORES
    return small and q_BHTE.dtype == torch.bfloat16


def _lengths(documents_BT: Tensor) -> list[list[int]] | None:
    """Return the lengths of each row's documents, in order; None if a document occurs in two
    places.

    Synchronises with a GPU once.
    """
    changes = (documents_BT[:, 1:] != documents_BT[:, :-1]).nonzero().tolist()
    b, t = documents_BT.shape
    begins: list[list[int]] = [[0] for _ in range(b)]
    for row, before in changes:
        begins[row].append(before + 1)
    named = [(row, at) for row, each in enumerate(begins) for at in each]
    rows, at = torch.tensor(named, device=documents_BT.device).T
    names = documents_BT[rows, at].tolist()
    if len(set(zip(rows.tolist(), names, strict=True))) != len(names):
        return None
    return [
        [end - begin for begin, end in zip(each, [*each[1:], t], strict=True)] for each in begins
    ]


def _joined(lengths: list[int], most: int) -> list[list[int]]:
    """Group adjacent ``lengths`` so that each group adds up to ``most`` at most; return the
    groups."""
    found: list[list[int]] = []
    total = most + 1
    for each in lengths:
        if total + each > most:
            found.append([])
            total = 0
        found[-1].append(each)
        total += each
    return found
