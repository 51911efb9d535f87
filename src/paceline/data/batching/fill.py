"""Copying tokens and features into a plan's rows: from pieces to one rank's arrays.

What can be said of all pieces at once is (``layout``); one at a time costs one copy of its tokens
out of the mapped shard. Shape letters: B rows, T tokens a row, P pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batching.beside import Gathered, Place
from paceline.data.batching.layout import Layout, Taken, lay_out
from paceline.data.batching.opened import OpenShard
from paceline.data.batching.rows import Ints
from paceline.data.snapshot import Column, Vocabulary
from paceline.errors import InvalidInput

Array = npt.NDArray[Any]
Get = Callable[[int], OpenShard | None]  # index of a shard → it, or None: in quarantine


@dataclass
class Filled:
    """One share's arrays; ``skipped`` names the shards and samples whose pieces have weight 0."""

    inputs_BT: Array  # noqa: N815
    targets_BT: Array  # noqa: N815
    weights_BT: npt.NDArray[np.float32]  # noqa: N815
    documents_BT: npt.NDArray[np.int32] | None  # noqa: N815
    positions_BT: npt.NDArray[np.int32] | None  # noqa: N815
    carries_B: npt.NDArray[np.bool_] | None  # noqa: N815
    features: dict[str, Array]
    skipped: set[str] = field(default_factory=set)


def token_dtype(vocab_size: int) -> npt.DTypeLike:
    """Return the smallest integer type that batches of such a vocabulary have."""
    if vocab_size <= 2**8:
        return np.uint8
    return np.uint16 if vocab_size <= 2**16 else np.int32


class Filler:
    """Fills rows with the tokens of one snapshot: its separator, its columns."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        columns: Sequence[Column],
        name: Callable[[int], str],
        token_features: Collection[str] = (),
    ) -> None:
        known = {each.name for each in columns}
        if not known.issuperset(token_features):
            raise InvalidInput(
                "token_features that the snapshot does not have",
                got=sorted(token_features),
                wanted=f"some of {sorted(known)}",
                do="Correct data.token_features.",
            )
        self._token_features = frozenset(token_features)
        self._separator = vocabulary.separator
        self._dtype = token_dtype(vocabulary.vocab_size)
        self._columns = columns
        self._name = name  # index of a shard → what it is listed as

    def fill(self, taken: Taken, count: int, width: int, get: Get) -> Filled:
        """Return the arrays of the ``count`` rows ``taken``; ``width`` is T."""
        layout = lay_out(taken, count, width)
        kept = layout.kept()
        masked = any(rows.masked for rows, _, _ in taken)
        skipped: set[str] = set()
        weights_BT = kept.astype(np.float32)
        if layout.document_P is None:
            inputs_BT, targets_BT = self._windows(layout, get, weights_BT, skipped)
        else:
            inputs_BT, targets_BT = self._documents(layout, get, weights_BT, skipped)
        filled = Filled(
            inputs_BT=inputs_BT,
            targets_BT=targets_BT,
            weights_BT=weights_BT,
            documents_BT=layout.slots() if masked else None,
            positions_BT=None if layout.position_P is None else layout.positions(kept),
            carries_B=_carries(taken, count),
            features={},
            skipped=skipped,
        )
        if layout.document_P is not None and self._columns:
            filled.features = self._beside(layout, get, weights_BT)
        for index in np.unique(layout.shard_P).tolist():
            if (shard := get(index)) is not None:
                skipped.update(f"{self._name(index)}#{document}" for document in shard.bad)
        return filled

    def _documents(
        self, layout: Layout, get: Get, weights_BT: Array, skipped: set[str]
    ) -> tuple[Array, Array]:
        """Return inputs and targets where pieces are documents, or parts of them.

        Targets are a piece's tokens, and the separator where its document ends. Inputs are the
        targets one place later, but for a piece's first: the separator before its document, or
        the token before the piece.
        """
        assert layout.document_P is not None
        assert layout.position_P is not None
        targets = np.full(layout.rows * layout.width, self._separator, dtype=self._dtype)
        at_P = layout.row_P * layout.width + layout.column_P
        before: list[tuple[Ints, Array]] = []  # places of inputs, and what stands there
        for index, these in _by_shard(layout.shard_P):
            shard = get(index)
            at, length = at_P[these], layout.length_P[these]
            if shard is None:
                skipped.add(self._name(index))
                _spoil(weights_BT, at, at + length)
                continue
            document, position = layout.document_P[these], layout.position_P[these]
            if shard.flat is None:
                before += _one_by_one(shard, targets, weights_BT, at, document, position, length)
                continue
            first, count = shard.first_D[document], shard.count_D[document]
            stop = at + np.clip(count - position, 0, length)
            _copy(targets, shard.flat, at, stop, first + position)
            going_on = np.flatnonzero((position > 0) & (count > 0))
            if len(going_on):
                source = (first + position)[going_on] - 1
                before.append((at[going_on], shard.flat[source]))
        targets_BT = targets.reshape(layout.rows, layout.width)
        inputs = np.empty_like(targets)
        inputs[1:] = targets[:-1]
        inputs[:: layout.width] = self._separator
        inputs[at_P] = self._separator
        for places, tokens in before:
            inputs[places] = tokens
        return inputs.reshape(targets_BT.shape), targets_BT

    def _windows(
        self, layout: Layout, get: Get, weights_BT: Array, skipped: set[str]
    ) -> tuple[Array, Array]:
        """Return inputs and targets where each piece is a row, of whatever documents it meets."""
        wide = layout.width + 1
        tokens = np.full(layout.rows * wide, self._separator, dtype=self._dtype)
        for index, these in _by_shard(layout.shard_P):
            shard = get(index)
            row, start = layout.row_P[these], layout.start_P[these]
            if shard is None:
                skipped.add(self._name(index))
                weights_BT[row] = 0.0
                continue
            low = np.searchsorted(shard.offsets_D1, start, side="right") - 1
            high = np.searchsorted(shard.offsets_D1[:-1], start + wide, side="left")
            count = high - low
            within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            document = np.repeat(low, count) + within
            row, start = np.repeat(row, count), np.repeat(start, count)
            offset = shard.offsets_D1[document]
            first = np.maximum(offset + 1, start)  # in the framed stream
            stop = np.minimum(shard.offsets_D1[document + 1], start + wide)
            at = row * wide - start
            if shard.flat is None:
                some = stop > first
                for number in np.flatnonzero(some).tolist():
                    got = shard.tokens(int(document[number]))
                    low_at, high_at = int(first[number]), int(stop[number])
                    if got is None:
                        edge = max(int(offset[number]), int(start[number])) - int(start[number])
                        weights_BT[row[number], edge : high_at - int(start[number])] = 0.0
                    elif len(got):
                        begin = low_at - int(offset[number]) - 1
                        to = int(at[number])
                        tokens[to + low_at : to + high_at] = got[begin : begin + high_at - low_at]
                continue
            source = shard.first_D[document] + first - offset - 1
            _copy(tokens, shard.flat, at + first, at + np.maximum(first, stop), source)
        tokens_BW = tokens.reshape(layout.rows, wide)
        return tokens_BW[:, :-1].copy(), tokens_BW[:, 1:].copy()

    def _beside(self, layout: Layout, get: Get, weights_BT: Array) -> dict[str, Array]:
        """Return the features of the pieces; one whose sample is bad gets weight 0."""
        assert layout.document_P is not None
        assert layout.position_P is not None
        gathered = Gathered(self._columns, self._token_features)
        fields = (layout.row_P, layout.slot_P, layout.column_P, layout.position_P, layout.length_P)
        places = [Place(*each) for each in zip(*(each.tolist() for each in fields), strict=True)]
        of = zip(layout.shard_P.tolist(), layout.document_P.tolist(), places, strict=True)
        for index, document, at in of:
            shard = get(index)
            if shard is not None and not gathered.take(shard, document, at):
                weights_BT[at.row, at.column : at.column + at.length] = 0.0
        return gathered.arrays(layout.rows, layout.width, layout.most_slots)


def _one_by_one(
    shard: OpenShard,
    targets: Array,
    weights_BT: Array,
    at: Ints,
    document: Ints,
    position: Ints,
    length: Ints,
) -> Iterator[tuple[Ints, Array]]:
    """Put each piece's tokens where samples are made one by one (a transform); yield the inputs
    before pieces that go on. A bad sample's places stay separators, of weight 0."""
    fields = (at.tolist(), document.tolist(), position.tolist(), length.tolist())
    for place, number, first, size in zip(*fields, strict=True):
        tokens = shard.tokens(number)
        if tokens is None:
            weights_BT.reshape(-1)[place : place + size] = 0.0
            continue
        part = tokens[first : first + size]
        targets[place : place + len(part)] = part
        if first and len(tokens):
            yield np.array([place]), tokens[first - 1 : first]


def _by_shard(shard_P: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each shard's index and which pieces are of it, in order."""
    order = np.argsort(shard_P, kind="stable")
    edges = np.flatnonzero(np.diff(shard_P[order])) + 1
    for these in np.split(order, edges):
        if len(these):
            yield int(shard_P[these[0]]), these


def _copy(out: Array, flat: Array, at: Ints, stop: Ints, source: Ints) -> None:
    """Copy ``flat`` from ``source`` on to ``out[at:stop]``, piece by piece."""
    ends = source + stop - at
    pieces = zip(at.tolist(), stop.tolist(), source.tolist(), ends.tolist(), strict=True)
    for low, high, first, last in pieces:
        out[low:high] = flat[first:last]


def _spoil(weights_BT: Array, at: Ints, stop: Ints) -> None:
    flat = weights_BT.reshape(-1)
    for low, high in zip(at.tolist(), stop.tolist(), strict=True):
        flat[low:high] = 0.0


def _carries(taken: Taken, count: int) -> npt.NDArray[np.bool_] | None:
    if all(rows.carries_R is None for rows, _, _ in taken):
        return None
    carries_B = np.zeros(count, dtype=np.bool_)
    for rows, ids, places in taken:
        if rows.carries_R is not None:
            carries_B[places] = rows.carries_R[ids]
    return carries_B
