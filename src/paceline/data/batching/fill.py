"""Copying tokens and features into a plan's rows: from pieces to one rank's arrays.

Shape letters: B rows, T tokens a row, D documents a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.batch import PADDING
from paceline.data.batching.reading import OpenShard
from paceline.data.batching.rows import Rows
from paceline.data.snapshot import Column, Vocabulary
from paceline.errors import InvalidInput

Array = npt.NDArray[Any]
Taken = Sequence[tuple[Rows, int, int]]  # rows of a group, the first and one past the last
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

    def fill(self, taken: Taken, width: int, get: Get) -> Filled:
        """Return the arrays of the rows ``taken``, stacked; ``width`` is T."""
        count = sum(stop - start for _, start, stop in taken)
        shape = (count, width)
        masked = any(rows.masked for rows, _, _ in taken)
        placed = any(rows.position_P is not None for rows, _, _ in taken)
        carried = any(rows.carries_R is not None for rows, _, _ in taken)
        documents = max((_most_pieces(*each) for each in taken), default=1)
        filled = Filled(
            inputs_BT=np.full(shape, self._separator, dtype=self._dtype),
            targets_BT=np.full(shape, self._separator, dtype=self._dtype),
            weights_BT=np.zeros(shape, dtype=np.float32),
            documents_BT=np.full(shape, PADDING, dtype=np.int32) if masked else None,
            positions_BT=np.zeros(shape, dtype=np.int32) if placed else None,
            carries_B=np.zeros(count, dtype=np.bool_) if carried else None,
            features={},
        )
        found = _Features(self._columns, self._token_features)
        scratch = np.empty(width + 1, dtype=self._dtype)
        row = 0
        for rows, start, stop in taken:
            self._fill(filled, found, row, rows, start, stop, get, scratch)
            if filled.carries_B is not None and rows.carries_R is not None:
                filled.carries_B[row : row + stop - start] = rows.carries_R[start:stop]
            row += stop - start
        filled.features = found.arrays(count, width, documents)
        return filled

    def _fill(
        self,
        filled: Filled,
        found: _Features,
        row: int,
        rows: Rows,
        start: int,
        stop: int,
        get: Get,
        scratch: Array,
    ) -> None:
        first = rows.first_R1[start : stop + 1].tolist()
        pieces = slice(first[0], first[-1])
        shards = rows.shard_P[pieces].tolist()
        starts = rows.start_P[pieces].tolist()
        lengths = rows.length_P[pieces].tolist()
        positions = None if rows.position_P is None else rows.position_P[pieces].tolist()
        numbers = None if rows.document_P is None else rows.document_P[pieces].tolist()
        ramp_T = np.arange(filled.inputs_BT.shape[1], dtype=np.int32)
        piece = 0
        for edge in first[1:]:
            column = slot = 0
            while piece < edge - first[0]:
                length = lengths[piece]
                end = column + length
                position = 0 if positions is None else positions[piece]
                if filled.documents_BT is not None:
                    filled.documents_BT[row, column:end] = slot
                if filled.positions_BT is not None:
                    places_T = filled.positions_BT[row, column:end]
                    np.add(ramp_T[:length], position, out=places_T)
                shard = get(shards[piece])
                if shard is None:
                    filled.skipped.add(self._name(shards[piece]))
                elif numbers is not None:
                    tokens = shard.tokens(numbers[piece])
                    if tokens is not None:
                        _put(filled, row, slice(column, end), tokens, position)
                else:
                    self._put_window(filled, row, shard, starts[piece], scratch[: length + 1])
                if shard is not None:
                    if self._columns and numbers is not None:
                        at = Place(row, slot, column, position, length)
                        if not found.take(shard, numbers[piece], at):
                            filled.weights_BT[row, column:end] = 0.0
                    for document in shard.bad:
                        filled.skipped.add(f"{self._name(shards[piece])}#{document}")
                column, slot, piece = end, slot + 1, piece + 1
            row += 1

    def _put_window(
        self, filled: Filled, row: int, shard: OpenShard, start: int, window: Array
    ) -> None:
        window[:] = self._separator
        spoiled = shard.copy(start, window)
        filled.inputs_BT[row] = window[:-1]
        filled.targets_BT[row] = window[1:]
        filled.weights_BT[row] = 1.0
        for first, stop in spoiled:
            filled.weights_BT[row, first:stop] = 0.0


def _put(filled: Filled, row: int, place: slice, tokens: Array, position: int) -> None:
    """Put a piece of a document, from ``position`` on, in a row full of separators.

    Inputs begin one before targets: with the separator before the document, or the token before
    the piece. A document's last target is the separator after it. Without tokens all stay so.
    """
    targets = tokens[position : position + place.stop - place.start]
    inputs = tokens[max(0, position - 1) : position + place.stop - place.start - 1]
    filled.targets_BT[row, place.start : place.start + len(targets)] = targets
    filled.inputs_BT[row, place.stop - len(inputs) : place.stop] = inputs
    filled.weights_BT[row, place] = 1.0


class Place(NamedTuple):
    """Where a piece is in its share, and in its document."""

    row: int
    slot: int  # which of the row's documents
    column: int
    position: int  # of its first input in its document
    length: int


class _Features:
    """The features of a share's pieces, gathered; those of tokens are cut as the tokens are."""

    def __init__(self, columns: Sequence[Column], along: frozenset[str]) -> None:
        self._columns = columns
        self._along = along
        self._taken: dict[str, list[tuple[Place, Array]]] = {each.name: [] for each in columns}

    def take(self, shard: OpenShard, document: int, at: Place) -> bool:
        """Gather a piece's features; return False where its document is bad."""
        found = shard.features(document)
        if found is None:
            return False
        for name, taken in self._taken.items():
            values = found[name]
            if name in self._along:
                # The first input is the separator before the document: it has no value.
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
        """Return (B, T, …) for features of tokens; else (B, D, …), shorter ones padded with 0."""
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


def _most_pieces(rows: Rows, start: int, stop: int) -> int:
    counts = np.diff(rows.first_R1[start : stop + 1])
    return max(1, int(counts.max())) if len(counts) else 1
