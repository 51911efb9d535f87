"""Baselines of evaluation: a byte n-gram model, gzip and xz.

The n-gram model has interpolated Witten–Bell smoothing (Witten and Bell 1991): with c(h, x) the
count of x after h and T(h) the number of different bytes seen after h,

    p(x | h) = (c(h, x) + T(h) · p(x | h without its oldest byte)) / (c(h) + T(h)),

down to the uniform 1/256. numpy only: a gram of up to 8 bytes is one uint64 with its newest byte
lowest, so that a shorter gram is a mask and a context is a shift.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint64]
Reals = NDArray[np.float64]

MAX_ORDER = 8
_BYTE = np.uint64(8)


@dataclass(frozen=True)
class _Level:
    """Counts of all grams of one length, sorted; equal contexts are adjacent."""

    grams: Codes
    counts: Reals
    contexts: Codes
    totals: Reals
    kinds: Reals  # T(h)


class NgramModel:
    """Counts of byte n-grams up to ``order``, read-only once fitted."""

    def __init__(self, levels: Sequence[_Level]) -> None:
        self._levels = levels

    @property
    def order(self) -> int:
        """Return the length of the longest gram: one more than the longest context."""
        return len(self._levels)

    def bits(self, text: bytes) -> Reals:
        """Return −log2 p of each byte of one document, read from its start."""
        codes = _codes([text], self.order)
        return -np.log2(self._probabilities(codes))

    def _probabilities(self, codes: Codes) -> Reals:
        p = np.full(codes.shape, 1 / 256)
        for length, level in enumerate(self._levels, start=1):
            cut = codes & _mask(length)
            count = _look_up(level.grams, level.counts, cut)
            context = cut >> _BYTE
            total = _look_up(level.contexts, level.totals, context)
            kinds = _look_up(level.contexts, level.kinds, context)
            seen = total > 0
            p[seen] = (count[seen] + kinds[seen] * p[seen]) / (total[seen] + kinds[seen])
        return p


def fit(documents: Sequence[bytes], order: int) -> NgramModel:
    """Return the n-gram model of ``documents``; contexts never cross a document's start."""
    assert 1 <= order <= MAX_ORDER, "settings allow orders 1 to 8"
    grams, counts = np.unique(_codes(documents, order), return_counts=True)
    levels = [_level(grams, counts.astype(np.float64))]
    for length in range(order - 1, 0, -1):
        longer = levels[0]
        shorter = longer.grams & _mask(length)
        sequence = np.argsort(shorter, kind="stable")
        starts, grams = _runs(shorter[sequence])
        levels.insert(0, _level(grams, _sum_runs(longer.counts[sequence], starts)))
    return NgramModel(levels)


def _level(grams: Codes, counts: Reals) -> _Level:
    starts, contexts = _runs(grams >> _BYTE)
    kinds = np.diff(starts, append=len(grams)).astype(np.float64)
    return _Level(grams, counts, contexts, _sum_runs(counts, starts), kinds)


def _codes(documents: Sequence[bytes], order: int) -> Codes:
    """Return the gram that ends at each byte of each document, padded with zeros at its start."""
    parts = [np.frombuffer(text, dtype=np.uint8).astype(np.uint64) for text in documents if text]
    if not parts:
        return np.zeros(0, dtype=np.uint64)
    return np.concatenate([_slide(part, order) for part in parts])


def _slide(symbols: Codes, order: int) -> Codes:
    codes = symbols.copy()
    for back in range(1, min(order, len(symbols))):
        codes[back:] |= symbols[:-back] << np.uint64(8 * back)
    return codes


def _runs(ordered: Codes) -> tuple[NDArray[np.intp], Codes]:
    if not len(ordered):
        return np.zeros(0, dtype=np.intp), ordered
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return starts, ordered[starts]


def _sum_runs(values: Reals, starts: NDArray[np.intp]) -> Reals:
    return np.add.reduceat(values, starts) if len(starts) else values


def _look_up(keys: Codes, values: Reals, wanted: Codes) -> Reals:
    if not len(keys):
        return np.zeros(wanted.shape)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Reals = np.where(keys[places] == wanted, values[places], 0.0)
    return found


def _mask(length: int) -> np.uint64:
    return np.uint64((1 << 8 * length) - 1)


# gzip and xz at their highest level, each document on its own: baselines without training.
#
# Their headers and start-up cost are part of the figure, as in a file of that size. On 180 prefixes
# of library files xz gave the sizes of ``xz -9``, and gzip those of GNU ``gzip -9`` within 0.4 %
# (169 of them exactly): zlib and GNU gzip break ties differently.

_SMALLEST_DICTIONARY = 4096


def _gzip(text: bytes) -> bytes:
    return gzip.compress(text, compresslevel=9, mtime=0)


def _xz(text: bytes) -> bytes:
    # Preset 9 clears a 64 MiB dictionary each time, 100 ms a document here; one just large enough
    # for the text gives the same size in 4 ms.
    dictionary = max(_SMALLEST_DICTIONARY, 1 << max(0, len(text) - 1).bit_length())
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(dictionary, 1 << 26)}
    return lzma.compress(text, filters=[lzma2])


COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": _gzip, "xz": _xz}


def compressed_bits(name: str, text: bytes) -> float:
    """Return the size in bits of ``text`` compressed with ``name``."""
    return 8.0 * len(COMPRESSORS[name](text))
