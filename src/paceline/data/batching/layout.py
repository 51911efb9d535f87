"""The position of each piece in a rank's rows, and the weights, masks and positions that follow.

The shares of several batches are laid out in one call on whole arrays, so that small batches do not
cost more numpy calls. Token positions are numbered through all rows of all shares, row after row;
the row width may differ between shares.

Shape letters: P pieces, B rows of all shares, N token positions of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batching.rows import Ints, Rows
from paceline.data.loading.batch import PADDING

Array = npt.NDArray[Any]
Ints32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RankRows:
    """One rank's rows of one batch.

    ``taken`` lists (a group's rows, the indexes wanted of them, the row of the share for each);
    ``width`` is T.
    """

    taken: Sequence[tuple[Rows, Ints, Ints]]
    width: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The pieces of all shares, row after row; pieces of a row follow each other without a gap."""

    width_B: Ints  # noqa: N815 - arrays carry shape letters
    shard_P: Ints  # noqa: N815
    start_P: Ints  # noqa: N815 - in the shard's framed stream
    length_P: Ints  # noqa: N815
    document_P: Ints | None  # noqa: N815 - None: pieces cross documents
    position_P: Ints | None  # noqa: N815 - in the document
    row_P: Ints  # noqa: N815
    slot_P: Ints  # noqa: N815 - index among the row's pieces
    column_P: Ints  # noqa: N815 - position in the row

    def __len__(self) -> int:
        return len(self.length_P)

    @cached_property
    def begin_B1(self) -> Ints:  # noqa: N802
        """Return the first position of each row, and the number of positions."""
        return np.concatenate([[0], np.cumsum(self.width_B)])

    @cached_property
    def at_P(self) -> Ints:  # noqa: N802
        """Return each piece's first position."""
        return self.begin_B1[self.row_P] + self.column_P

    @cached_property
    def by_shard(self) -> list[tuple[int, Ints]]:
        """Return each shard's index and the indexes of its pieces, in order."""
        if not len(self):
            return []
        order = np.argsort(self.shard_P, kind="stable")
        sorted_P = self.shard_P[order]
        edges = [0, *(np.flatnonzero(sorted_P[1:] != sorted_P[:-1]) + 1).tolist(), len(order)]
        return [(int(sorted_P[low]), order[low:high]) for low, high in pairwise(edges)]

    def weights(self) -> npt.NDArray[np.float32]:
        """Return the weights (N): 1 where there is a piece, else 0."""
        used_B = self._used_B
        flags = np.tile(np.array([1, 0], dtype=np.float32), len(used_B))
        return np.repeat(flags, np.stack([used_B, self.width_B - used_B], axis=1).reshape(-1))

    def slots(self) -> Ints32:
        """Return the index of the piece within its row (N), or PADDING."""
        return self._spread(self.slot_P, PADDING)

    def positions(self) -> Ints32:
        """Return each token's position in its document (N), 0 for padding."""
        assert self.position_P is not None
        found = np.arange(int(self.begin_B1[-1]), dtype=np.int32)
        found += self._spread(self.position_P - self.at_P, 0)
        begin, used = self.begin_B1, self._used_B
        for row in np.flatnonzero(used < self.width_B).tolist():
            found[begin[row] + used[row] : begin[row + 1]] = 0
        return found

    @cached_property
    def _used_B(self) -> Ints:  # noqa: N802
        used = np.bincount(self.row_P, weights=self.length_P, minlength=len(self.width_B))
        return used.astype(np.int64)

    @cached_property
    def _stretches(self) -> tuple[Ints, Ints]:
        """Return each piece's index among segments, and the lengths of all segments.

        The segments of a row are its pieces and then its padding.
        """
        piece = np.arange(len(self)) + self.row_P
        rows = np.arange(len(self.width_B))
        left = np.searchsorted(self.row_P, rows, side="right") + rows
        lengths = np.empty(len(self) + len(rows), dtype=np.int64)
        lengths[piece] = self.length_P
        lengths[left] = self.width_B - self._used_B
        return piece, lengths

    def _spread(self, value_P: Ints, rest: int) -> Ints32:
        """Return each piece's value at all its positions (N), and ``rest`` at padding."""
        piece, lengths = self._stretches
        values = np.full(len(lengths), rest, dtype=np.int32)
        values[piece] = value_P
        return np.repeat(values, lengths)


def lay_out(shares: Sequence[RankRows], count: int) -> Layout:
    """Return the layout of ``shares``, of ``count`` rows each, one after the other."""
    groups: dict[int, list[tuple[Rows, Ints, Ints]]] = {}
    for number, share in enumerate(shares):
        for rows, ids, places in share.taken:
            groups.setdefault(id(rows), []).append((rows, ids, places + number * count))
    parts = [_laid(parts[0][0], *_joined(parts)) for parts in groups.values()]
    fields: Any = parts[0]
    if len(parts) > 1:
        columns: Any = zip(*parts, strict=True)
        whole = [None if each[0] is None else np.concatenate(each) for each in columns]
        row_P: Any = whole[_ROW]
        order = np.argsort(row_P, kind="stable")
        fields = [None if each is None else each[order] for each in whole]
    return Layout(np.repeat([each.width for each in shares], count), *fields)


_ROW = 5  # index of the rows among the fields of _laid


def _joined(parts: Sequence[tuple[Rows, Ints, Ints]]) -> tuple[Ints, Ints]:
    if len(parts) == 1:
        return parts[0][1:]
    return np.concatenate([each[1] for each in parts]), np.concatenate([each[2] for each in parts])


def _laid(rows: Rows, ids: Ints, places: Ints) -> tuple[Array | None, ...]:
    """Return the fields of a layout but widths: rows ``ids`` of a group, at rows ``places``."""
    first_R = rows.first_R1[ids]
    count_R = rows.first_R1[ids + 1] - first_R
    before_R = np.cumsum(count_R) - count_R
    slot_P = np.arange(int(count_R.sum())) - np.repeat(before_R, count_R)
    piece_P = np.repeat(first_R, count_R) + slot_P
    length_P = rows.length_P[piece_P]
    before_P = np.cumsum(length_P) - length_P
    full = count_R > 0
    base_R = np.zeros(len(ids), dtype=np.int64)
    base_R[full] = before_P[before_R[full]]
    return (
        rows.shard_P[piece_P],
        rows.start_P[piece_P],
        length_P,
        None if rows.document_P is None else rows.document_P[piece_P],
        None if rows.position_P is None else rows.position_P[piece_P],
        np.repeat(places, count_R),
        slot_P,
        before_P - np.repeat(base_R, count_R),
    )
