"""Where each piece of a share lies, and what follows from that alone: weights, masks, positions.

Whole arrays at a time: a batch costs tens of calls, not some for each of its documents.

Shape letters: P pieces, B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.batch import PADDING
from paceline.data.batching.rows import Ints, Rows

# rows of a group, which of them, and the row of the share that each of those is
Taken = Sequence[tuple[Rows, Ints, Ints]]
Ints32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Layout:
    """The pieces of a share, row after row; pieces of a row follow each other without a gap."""

    rows: int  # B
    width: int  # T
    shard_P: Ints  # noqa: N815 - arrays carry shape letters
    start_P: Ints  # noqa: N815 - in the shard's framed stream
    length_P: Ints  # noqa: N815
    document_P: Ints | None  # noqa: N815 - None: pieces cross documents
    position_P: Ints | None  # noqa: N815 - in the document
    row_P: Ints  # noqa: N815
    slot_P: Ints  # noqa: N815 - which of its row's pieces
    column_P: Ints  # noqa: N815 - where in its row

    def __len__(self) -> int:
        return len(self.length_P)

    @property
    def most_slots(self) -> int:
        """Return how many pieces the row with most of them has, at least 1."""
        return int(self.slot_P.max()) + 1 if len(self) else 1

    def kept(self) -> npt.NDArray[np.bool_]:
        """Return (B, T): True where a piece is."""
        used_B = np.bincount(self.row_P, weights=self.length_P, minlength=self.rows)
        kept: npt.NDArray[np.bool_] = np.arange(self.width) < used_B[:, None]
        return kept

    def slots(self) -> Ints32:
        """Return (B, T): which piece of the row is there, or PADDING."""
        return self._spread(self.slot_P, PADDING)

    def positions(self, kept: npt.NDArray[np.bool_]) -> Ints32:
        """Return (B, T): the place in its document of what is there, 0 where nothing is."""
        assert self.position_P is not None
        spread = self._spread(self.position_P - self.row_P * self.width - self.column_P, 0)
        spread += np.arange(spread.size, dtype=np.int32).reshape(spread.shape)
        spread *= kept
        return spread

    def _spread(self, value_P: Ints, rest: int) -> Ints32:
        """Return (B, T): each piece's value in all its places, ``rest`` in those of none."""
        ends_B = np.searchsorted(self.row_P, np.arange(self.rows), side="right")
        used_B = np.bincount(self.row_P, weights=self.length_P, minlength=self.rows)
        left_B = self.width - used_B.astype(np.int64)
        values = np.insert(value_P.astype(np.int32), ends_B, np.int32(rest))
        lengths = np.insert(self.length_P, ends_B, left_B)
        return np.repeat(values, lengths).reshape(self.rows, self.width)


def lay_out(taken: Taken, count: int, width: int) -> Layout:
    """Return the layout of a share of ``count`` rows of ``width`` places."""
    parts = [_laid(*each) for each in taken]
    if len(parts) == 1:
        return Layout(count, width, *parts[0])
    whole = [
        None
        if columns[0] is None
        else np.concatenate([each for each in columns if each is not None])
        for columns in zip(*parts, strict=True)
    ]
    row_P = whole[5]
    assert row_P is not None
    order = np.argsort(row_P, kind="stable")
    fields = [None if each is None else each[order] for each in whole]
    return Layout(count, width, *fields)  # type: ignore[arg-type] # as in _laid, one by one


_Fields = tuple[Ints, Ints, Ints, Ints | None, Ints | None, Ints, Ints, Ints]


def _laid(rows: Rows, ids: Ints, places: Ints) -> _Fields:
    """Return a layout's fields for rows ``ids`` of a group, at ``places`` of the share."""
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
