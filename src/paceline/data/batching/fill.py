"""Copy tokens and features into the rows of a plan: one rank's arrays of a batch.

``layout`` computes what follows from positions alone, for all pieces at once; here each piece costs
one copy of its tokens out of the memory-mapped shard.

Shape letters: B rows, T tokens of a row, D documents of a row, P pieces, N token positions of all
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.batching.layout import Layout, RankRows, lay_out
from paceline.data.batching.open_shards import OpenShard
from paceline.data.batching.rows import Ints
from paceline.data.snapshot import Column, Vocabulary, require_token_features
from paceline.errors import InvalidInput

Array = npt.NDArray[Any]


class Place(NamedTuple):
    """The position of a piece in its rank's share of the batch, and in its document."""

    row: int
    slot: int  # index among the row's documents
    column: int
    position: int  # of its first input, in its document
    length: int


class FeatureGatherer:
    """Collects the features of a share's pieces; per-token features are cut as the tokens are."""

    def __init__(self, columns: Sequence[Column], along: frozenset[str]) -> None:
        self._columns = columns
        self._along = along
        self._taken: dict[str, list[tuple[Place, Array]]] = {each.name: [] for each in columns}

    def take(self, shard: OpenShard, document: int, at: Place) -> bool:
        """Add a piece's features; return False if its document cannot be read."""
        found = shard.features(document)
        if found is None:
            return False
        for name, taken in self._taken.items():
            values = found[name]
            if name in self._along:
                # The first input is the separator before the document, which has no feature value.
                first = max(at.position - 1, 0)
                lead = 1 if at.position == 0 else 0
                values = values[first : first + at.length - lead]
                if len(values) != at.length - lead:
                    raise InvalidInput(
                        "a feature is not as long as its sample",
                        got=len(found[name]),
                        wanted=f"at least {first + at.length - lead}",
                        where=f"{shard.shard.sha256}#{document} {name}",
                        do="data.token_features names features with a value for each token.",
                    )
                at_values = at._replace(column=at.column + lead)
            else:
                at_values = at
            taken.append((at_values, values))
        return True

    def arrays(self, count: int, width: int, documents: int) -> dict[str, Array]:
        """Return (B, T, …) for per-token features, else (B, D, …), padded with 0."""
        found: dict[str, Array] = {}
        for column in self._columns:
            taken = self._taken[column.name]
            if column.name in self._along:
                shape: tuple[int, ...] = (count, width, *_sizes(column.shape[1:]))
            else:
                longest = max((len(values) for _, values in taken if values.ndim), default=1)
                first = (longest,) if column.shape else ()
                shape = (count, documents, *first, *_sizes(column.shape[1:]))
            out: Array = np.zeros(shape, dtype=column.dtype)
            for at, values in taken:
                if column.name in self._along:
                    out[at.row, at.column : at.column + len(values)] = values
                elif values.ndim:
                    out[at.row, at.slot, : len(values)] = values
                else:
                    out[at.row, at.slot] = values
            found[column.name] = out
        return found


def _sizes(shape: Sequence[int | None]) -> tuple[int, ...]:
    assert None not in shape, "only a column's first axis may differ"
    return tuple(each for each in shape if each is not None)


Get = Callable[[int], OpenShard | None]  # index of a shard → the shard, None if in quarantine


@dataclass
class RowArrays:
    """One share's arrays; ``skipped`` names unreadable shards and samples (their weight is 0)."""

    inputs_BT: Array  # noqa: N815
    targets_BT: Array  # noqa: N815
    weights_BT: npt.NDArray[np.float32]  # noqa: N815
    documents_BT: npt.NDArray[np.int32] | None  # noqa: N815
    positions_BT: npt.NDArray[np.int32] | None  # noqa: N815
    carries_B: npt.NDArray[np.bool_] | None  # noqa: N815
    features: dict[str, Array]
    skipped: set[str] = field(default_factory=set)


def token_dtype(vocab_size: int) -> npt.DTypeLike:
    """Return the smallest integer type for the tokens of a vocabulary of this size."""
    if vocab_size <= 2**8:
        return np.uint8
    return np.uint16 if vocab_size <= 2**16 else np.int32


class RowFiller:
    """Fills rows with the tokens and features of one snapshot."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        columns: Sequence[Column],
        name: Callable[[int], str],
        token_features: Collection[str] = (),
    ) -> None:
        require_token_features(token_features, columns)
        self._token_features = frozenset(token_features)
        self._separator = vocabulary.separator
        self._dtype = token_dtype(vocabulary.vocab_size)
        self._columns = columns
        self._name = name  # index of a shard → its name

    def fill(self, shares: Sequence[RankRows], count: int, get: Get) -> list[RowArrays]:
        """Return the arrays of each share of ``count`` rows.

        They are views into larger arrays that do not overlap.
        """
        layout = lay_out(shares, count)
        masked = any(rows.masked for rows, _, _ in shares[0].taken)
        weights_N = layout.weights()
        bad: list[tuple[int, str]] = []  # row, name of an unreadable shard or sample
        _expect(layout, get)
        if layout.document_P is None:
            inputs_N, targets_N = self._windows(layout, get, weights_N, bad)
        else:
            inputs_N, targets_N = self._documents(layout, get, weights_N, bad)
        documents_N = layout.slots() if masked else None
        positions_N = None if layout.position_P is None else layout.positions()
        beside: list[dict[str, Array]] = [{}] * len(shares)
        if layout.document_P is not None and self._columns:
            beside = self._beside(layout, get, weights_N, bad, count)
        skipped: list[set[str]] = [set() for _ in shares]
        for row, name in bad:
            skipped[row // count].add(name)
        found = []
        for number, share in enumerate(shares):
            edges = layout.begin_B1[[number * count, (number + 1) * count]].tolist()
            part, shape = slice(*edges), (count, share.width)
            found.append(
                RowArrays(
                    inputs_BT=inputs_N[part].reshape(shape),
                    targets_BT=targets_N[part].reshape(shape),
                    weights_BT=weights_N[part].reshape(shape),
                    documents_BT=None if documents_N is None else documents_N[part].reshape(shape),
                    positions_BT=None if positions_N is None else positions_N[part].reshape(shape),
                    carries_B=_carries(share, count),
                    features=beside[number],
                    skipped=skipped[number],
                )
            )
        return found

    def _documents(
        self, layout: Layout, get: Get, weights_N: Array, bad: list[tuple[int, str]]
    ) -> tuple[Array, Array]:
        """Return inputs and targets where each piece is a document or a part of one.

        Targets are a piece's tokens, then the separator at the document's end. Inputs are the
        targets shifted by one, except for a piece's first input: the separator before its document,
        or the token before the piece.
        """
        assert layout.document_P is not None
        assert layout.position_P is not None
        targets = np.full(int(layout.begin_B1[-1]), self._separator, dtype=self._dtype)
        before: list[tuple[Ints, Array]] = []  # positions of inputs, and their tokens
        for index, these in layout.by_shard:
            shard = get(index)
            at, length = layout.at_P[these], layout.length_P[these]
            if shard is None:
                self._pass_over(layout, weights_N, bad, these, self._name(index))
                continue
            document, position = layout.document_P[these], layout.position_P[these]
            if shard.flat is not None:
                first, count = shard.first_D[document], shard.count_D[document]
                stop = at + np.clip(
                    count - position, 0, length
                )  # negative: a sample with features only
                _copy(targets, shard.flat, at, stop, first + position)
                going_on = np.flatnonzero((position > 0) & (count > 0))
                if len(going_on):
                    source = (first + position)[going_on] - 1
                    before.append((at[going_on], shard.flat[source]))
                continue
            for piece, number in zip(these.tolist(), document.tolist(), strict=True):
                tokens = shard.tokens(number)
                if tokens is None:
                    name = f"{self._name(index)}#{number}"
                    self._pass_over(layout, weights_N, bad, np.array([piece]), name)
                    continue
                place, skip = int(layout.at_P[piece]), int(layout.position_P[piece])
                part = tokens[skip : skip + int(layout.length_P[piece])]
                targets[place : place + len(part)] = part
                if skip and len(tokens):
                    before.append((np.array([place]), tokens[skip - 1 : skip]))
        inputs = np.empty_like(targets)
        inputs[1:] = targets[:-1]
        inputs[layout.begin_B1[:-1]] = self._separator  # also in empty rows
        inputs[layout.at_P] = self._separator
        for places, found in before:
            inputs[places] = found
        return inputs, targets

    def _windows(
        self, layout: Layout, get: Get, weights_N: Array, bad: list[tuple[int, str]]
    ) -> tuple[Array, Array]:
        """Return inputs and targets where each piece is a row that crosses document boundaries."""
        width, rows = int(layout.width_B[0]), len(layout.width_B)
        wide = width + 1
        tokens = np.full(rows * wide, self._separator, dtype=self._dtype)
        for index, these in layout.by_shard:
            shard = get(index)
            if shard is None:
                self._pass_over(layout, weights_N, bad, these, self._name(index))
                continue
            of, document = shard.met(layout.start_P[these], wide)
            row, start = layout.row_P[these][of], layout.start_P[these][of]
            offset = shard.offsets_D1[document]
            first = np.maximum(offset + 1, start)  # in the framed stream
            stop = np.maximum(np.minimum(shard.offsets_D1[document + 1], start + wide), first)
            at, to = row * wide + first - start, row * wide + stop - start
            if shard.flat is not None:
                _copy(tokens, shard.flat, at, to, shard.first_D[document] + first - offset - 1)
                continue
            for number in np.flatnonzero(stop > first).tolist():
                its = int(document[number])
                got = shard.tokens(its)
                skip, size = int((first - offset)[number]) - 1, int((to - at)[number])
                if got is not None:
                    tokens[int(at[number]) : int(to[number])] = got[skip : skip + size]
                    continue
                bad.append((int(row[number]), f"{self._name(index)}#{its}"))
                edge = max(int((offset - start)[number]), 0)
                begin = int(row[number]) * width
                end = min(int((stop - start)[number]), width)
                weights_N[begin + edge : begin + end] = 0.0
        tokens_BW = tokens.reshape(rows, wide)
        return tokens_BW[:, :-1].reshape(-1), tokens_BW[:, 1:].reshape(-1)

    def _beside(
        self,
        layout: Layout,
        get: Get,
        weights_N: Array,
        bad: list[tuple[int, str]],
        count: int,
    ) -> list[dict[str, Array]]:
        """Return the features of each share's pieces; a piece of an unreadable sample gets weight
        0."""
        assert layout.document_P is not None
        assert layout.position_P is not None
        shares = len(layout.width_B) // count
        gathered = [FeatureGatherer(self._columns, self._token_features) for _ in range(shares)]
        slots = [1] * shares
        fields = (layout.slot_P, layout.column_P, layout.position_P, layout.length_P)
        places = zip(layout.row_P.tolist(), *(each.tolist() for each in fields), strict=True)
        of = zip(layout.shard_P.tolist(), layout.document_P.tolist(), places, strict=True)
        for piece, (index, document, (row, slot, *place)) in enumerate(of):
            share = row // count
            slots[share] = max(slots[share], slot + 1)
            shard = get(index)
            if shard is None:
                continue
            if not gathered[share].take(shard, document, Place(row % count, slot, *place)):
                name = f"{self._name(index)}#{document}"
                self._pass_over(layout, weights_N, bad, np.array([piece]), name)
        return [
            each.arrays(count, int(layout.width_B[number * count]), slots[number])
            for number, each in enumerate(gathered)
        ]

    def _pass_over(
        self,
        layout: Layout,
        weights_N: Array,
        bad: list[tuple[int, str]],
        pieces: Ints,
        name: str,
    ) -> None:
        """Set the weight of unreadable pieces to 0 and record their names."""
        bad += [(row, name) for row in dict.fromkeys(layout.row_P[pieces].tolist())]
        at = layout.at_P[pieces]
        for low, high in zip(at.tolist(), (at + layout.length_P[pieces]).tolist(), strict=True):
            weights_N[low:high] = 0.0


def _expect(layout: Layout, get: Get) -> None:
    """Start computing all wanted transformed samples before the first one is needed."""
    for index, these in layout.by_shard:
        shard = get(index)
        if shard is None or shard.flat is not None:
            continue
        if layout.document_P is not None:
            shard.expect(layout.document_P[these])
        else:
            shard.expect(shard.met(layout.start_P[these], int(layout.width_B[0]) + 1)[1])


def _copy(out: Array, flat: Array, at: Ints, stop: Ints, source: Ints) -> None:
    """For each piece, copy ``flat`` from index ``source`` on into ``out[at:stop]``."""
    ends = source + stop - at
    pieces = zip(at.tolist(), stop.tolist(), source.tolist(), ends.tolist(), strict=True)
    for low, high, first, last in pieces:
        out[low:high] = flat[first:last]


def _carries(share: RankRows, count: int) -> npt.NDArray[np.bool_] | None:
    if all(rows.carries_R is None for rows, _, _ in share.taken):
        return None
    carries_B = np.zeros(count, dtype=np.bool_)
    for rows, ids, places in share.taken:
        if rows.carries_R is not None:
            carries_B[places] = rows.carries_R[ids]
    return carries_B
