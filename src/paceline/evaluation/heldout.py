"""Which bytes every model is judged on: prefixes of many held-out documents, the same for all.

Many short prefixes rather than a few whole documents, because intervals come from resampling
documents. Deterministic in the documents and the budget alone; knows no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import InvalidSnapshot

SHORTEST_PREFIX_BYTES = 1024  # below this, fewer documents are taken instead of shorter prefixes


@dataclass(frozen=True)
class HeldOutDocument:
    """The prefix of one document that is scored, and the size of the whole of it."""

    path: str
    text: bytes
    size: int


def choose(documents: Iterable[tuple[str, bytes]], budget_bytes: int) -> list[HeldOutDocument]:
    """Return about ``budget_bytes`` (never more) as prefixes of as many documents as sensible.

    Raises InvalidSnapshot where no document has any bytes.
    """
    whole = sorted((path, text) for path, text in documents if text)
    if not whole:
        raise InvalidSnapshot("nothing is held out", got="no bytes", wanted="a held-out split")
    most = max(1, budget_bytes // SHORTEST_PREFIX_BYTES)
    if len(whole) > most:
        whole = sorted(sorted(whole, key=_draw)[:most])
    cap = _water_level([len(text) for _, text in whole], budget_bytes)
    return [HeldOutDocument(path, text[:cap], len(text)) for path, text in whole]


def _draw(document: tuple[str, bytes]) -> bytes:
    return hashlib.sha256(document[0].encode()).digest()  # a fair draw that needs no seed


def _water_level(sizes: Sequence[int], budget: int) -> int:
    """Return the cap at which documents cut to it add up to at most ``budget``."""
    remaining = budget
    for taken, size in enumerate(ordered := sorted(sizes)):
        share = remaining // (len(ordered) - taken)
        if size > share:
            return max(1, share)
        remaining -= size
    return max(ordered)
