"""Copying tokens and features into a plan's rows: from pieces to one rank's arrays.

Shape letters: B rows, T tokens a row, D documents a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        self, vocabulary: Vocabulary, columns: Sequence[Column], name: Callable[[int], str]
    ) -> None:
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
            features={each.name: _empty(each, count, width, documents) for each in self._columns},
        )
        scratch = np.empty(width + 1, dtype=self._dtype)
        row = 0
        for rows, start, stop in taken:
            self._fill(filled, row, rows, start, stop, get, scratch)
            if filled.carries_B is not None and rows.carries_R is not None:
                filled.carries_B[row : row + stop - start] = rows.carries_R[start:stop]
            row += stop - start
        return filled

    def _fill(
        self, filled: Filled, row: int, rows: Rows, start: int, stop: int, get: Get, scratch: Array
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
                else:
                    tokens = scratch[: length + 1]
                    tokens[:] = self._separator
                    spoiled = shard.copy(starts[piece], tokens)
                    filled.inputs_BT[row, column:end] = tokens[:-1]
                    filled.targets_BT[row, column:end] = tokens[1:]
                    filled.weights_BT[row, column:end] = 1.0
                    for bad_from, bad_to in spoiled:
                        filled.weights_BT[row, column + bad_from : min(column + bad_to, end)] = 0.0
                    if self._columns and numbers is not None:
                        at = (row, slot, column, position, length)
                        if not self._features(filled, shard, numbers[piece], at):
                            filled.weights_BT[row, column:end] = 0.0
                    for document in shard.bad:
                        filled.skipped.add(f"{self._name(shards[piece])}#{document}")
                column, slot, piece = end, slot + 1, piece + 1
            row += 1

    def _features(
        self, filled: Filled, shard: OpenShard, document: int, at: tuple[int, int, int, int, int]
    ) -> bool:
        """Copy a piece's features; return False where its document is bad."""
        row, slot, column, position, length = at
        found = shard.features(document)
        if found is None:
            return False
        for each in self._columns:
            values, out = found[each.name], filled.features[each.name]
            if not _along_time(each):
                out[row, slot] = values
                continue
            # The first input is the separator before the document: it has no frame of its own.
            first = max(position - 1, 0)
            lead = 1 if position == 0 else 0
            part = values[first : first + length - lead]
            if len(part) != length - lead:
                raise InvalidInput(
                    "a feature is not as long as its sample",
                    got=len(values),
                    wanted=f"at least {first + length - lead}",
                    where=f"{shard.shard.sha256}#{document} {each.name}",
                    do="A feature whose first axis differs must have one value for each token.",
                )
            out[row, column + lead : column + length] = part
        return True


def _most_pieces(rows: Rows, start: int, stop: int) -> int:
    counts = np.diff(rows.first_R1[start : stop + 1])
    return max(1, int(counts.max())) if len(counts) else 1


def _along_time(column: Column) -> bool:
    """Return whether the column has one value for each token of its sample."""
    return bool(column.shape) and column.shape[0] is None


def _empty(column: Column, count: int, width: int, documents: int) -> Array:
    if _along_time(column):
        return np.zeros((count, width, *column.shape[1:]), dtype=column.dtype)  # type: ignore[arg-type]
    return np.zeros((count, documents, *column.shape), dtype=column.dtype)  # type: ignore[arg-type]
