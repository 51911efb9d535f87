"""Features beside tokens: gathered piece by piece, then laid out as a share's rows are.

Shape letters: B rows, T tokens a row, D documents a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.batching.opened import OpenShard
from paceline.data.snapshot import Column
from paceline.errors import InvalidInput

Array = npt.NDArray[Any]


class Place(NamedTuple):
    """Where a piece is in its share, and in its document."""

    row: int
    slot: int  # which of the row's documents
    column: int
    position: int  # of its first input in its document
    length: int


class Gathered:
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
