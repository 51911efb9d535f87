"""Best fit decreasing: which pieces share a row, so that as little as possible stays empty.

D. S. Johnson, "Near-optimal bin packing algorithms" (1973): longest first, each into the fullest
row that still has room. Rows with equal room are alike, and pieces of equal length too, so whole
runs of them are placed at once: the work grows with the number of different lengths, not with the
number of pieces (1 M pieces of up to 2,048 tokens: see docs/LOG.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def best_fit(length_P: Ints, capacity: int) -> Ints:
    """Return the row of each piece, rows numbered from 0 in the order they were opened.

    Lengths are 1 to ``capacity``. A row's pieces never add up to more than ``capacity``.
    """
    order = np.argsort(-length_P, kind="stable")
    sizes = length_P[order]
    edges = np.flatnonzero(np.diff(sizes)) + 1
    runs = np.split(order, edges)
    row_P = np.empty(len(length_P), dtype=np.int64)
    # room → stacks of rows that have so much left; ``rooms`` are its keys, sorted
    open_rows: dict[int, list[Ints]] = {}
    rooms: list[int] = []
    opened = 0

    def leave(room: int, rows: Ints) -> None:
        if room == 0 or not len(rows):
            return
        if room not in open_rows:
            open_rows[room] = []
            insort(rooms, room)
        open_rows[room].append(rows)

    for run in runs:
        if not len(run):
            continue
        length = int(length_P[run[0]])
        placed = 0
        while placed < len(run):
            at = bisect_left(rooms, length)
            left = len(run) - placed
            if at < len(rooms):
                room = rooms[at]
                rows = open_rows[room].pop()
                if not open_rows[room]:
                    del open_rows[room], rooms[at]
            else:
                room = capacity
                rows = np.arange(opened, opened - (-left // (capacity // length)))
                opened += len(rows)
            # A row that took one piece has less room than before and is still the fullest that
            # fits, so it takes as many as it can before the next row is looked at.
            each = room // length
            used = min(len(rows), -(-left // each))
            count = min(left, used * each)
            row_P[run[placed : placed + count]] = np.repeat(rows[:used], each)[:count]
            placed += count
            last = count - (used - 1) * each  # pieces in the last row used
            leave(room - each * length, rows[: used - 1])
            leave(room - last * length, rows[used - 1 : used])
            leave(room, rows[used:])
    return row_P
