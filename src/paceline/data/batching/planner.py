"""Plan the rows of the next batches of a stream, for one rank, a group ahead, and lay them out.

The current group and the next are planned on a separate thread. A layout is the position of each
piece in a rank's rows, and the weights, masks and positions that follow. Several batches are laid
out in one call on whole arrays, so that small batches do not cost more numpy calls. Token positions
are numbered through all rows of all batches, row after row; the row width may differ between
batches. Reads no tokens and opens no files.

Shape letters: K batches, P pieces, B rows of all batches, N token positions of all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batching.rows import Ints, Pieces, Plan, Rows, rows_of_batch
from paceline.data.loading import PADDING, Position
from paceline.errors import InvalidInput

Ints32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PlannedBatches:
    """One or more batches before they are filled: this rank's rows of them, in order."""

    # (a group's rows, the indexes wanted of them, the row of the batches for each)
    taken: Sequence[tuple[Rows, Ints, Ints]]
    width_K: Sequence[int]  # noqa: N815 - arrays carry shape letters
    tokens_K: Sequence[float]  # noqa: N815 - weight of the whole global batch
    pieces_K: Sequence[int]  # noqa: N815 - of documents, in the whole global batch
    after_K: Sequence[Position]  # noqa: N815


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout(Pieces):
    """The pieces of all batches, row after row; pieces of a row follow each other without a gap."""

    width_B: Ints  # noqa: N815
    row_P: Ints  # noqa: N815
    slot_P: Ints  # noqa: N815 - index among the row's pieces
    column_P: Ints  # noqa: N815 - position in the row

    @cached_property
    def begin_B1(self) -> Ints:  # noqa: N802
        """Return the first position of each row, and the number of positions."""
        return np.concatenate([[0], np.cumsum(self.width_B)])

    @cached_property
    def at_P(self) -> Ints:  # noqa: N802
        return self.begin_B1[self.row_P] + self.column_P

    @cached_property
    def by_shard(self) -> list[tuple[int, Ints]]:
        """Return each shard's index and the indexes of its pieces, in order."""
        order = np.argsort(self.shard_P, kind="stable")
        sorted_P = self.shard_P[order]
        edges = [0, *(np.flatnonzero(sorted_P[1:] != sorted_P[:-1]) + 1).tolist(), len(order)]
        return [(int(sorted_P[a]), order[a:b]) for a, b in pairwise(edges) if b > a]

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
        piece = np.arange(len(self.row_P)) + self.row_P
        rows = np.arange(len(self.width_B))
        left = np.searchsorted(self.row_P, rows, side="right") + rows
        lengths = np.empty(len(piece) + len(rows), dtype=np.int64)
        lengths[piece] = self.length_P
        lengths[left] = self.width_B - self._used_B
        return piece, lengths

    def _spread(self, value_P: Ints, rest: int) -> Ints32:
        """Return each piece's value at all its positions (N), and ``rest`` at padding."""
        piece, lengths = self._stretches
        values = np.full(len(lengths), rest, dtype=np.int32)
        values[piece] = value_P
        return np.repeat(values, lengths)


def lay_out(planned: PlannedBatches, count: int) -> Layout:
    """Return the layout of ``planned``, ``count`` rows a batch, one batch after the other."""
    parts = [_laid(*each) for each in planned.taken]
    found = parts[0]
    if len(parts) > 1:  # one batch with rows of several groups
        joined = {name: [each[name] for each in parts] for name in found}
        order = np.argsort(np.concatenate(joined["row_P"]), kind="stable")
        found = {
            name: None if each[0] is None else np.concatenate(each)[order]
            for name, each in joined.items()
        }
    return Layout(width_B=np.repeat(planned.width_K, count), **found)


def _laid(rows: Rows, ids: Ints, places: Ints) -> dict[str, Any]:
    """Return the fields of a layout but widths: rows ``ids`` of a group, at rows ``places``."""
    first_R = rows.first_R1[ids]
    count_R = rows.first_R1[ids + 1] - first_R
    before_R = np.cumsum(count_R) - count_R
    slot_P = np.arange(int(count_R.sum())) - np.repeat(before_R, count_R)
    pieces = rows.at(np.repeat(first_R, count_R) + slot_P)
    before_P = np.cumsum(pieces["length_P"]) - pieces["length_P"]
    full = count_R > 0
    base_R = np.zeros(len(ids), dtype=np.int64)
    base_R[full] = before_P[before_R[full]]
    column_P = before_P - np.repeat(base_R, count_R)
    return {**pieces, "row_P": np.repeat(places, count_R), "slot_P": slot_P, "column_P": column_P}


# Small batches are made several at once, up to this many token positions together.
PLACES_AT_ONCE = 1 << 17


class GroupPlanner:
    """The rows ``ours`` of each batch of a plan, planned ahead; for one thread; close it."""

    def __init__(self, plan: Plan, ours: range) -> None:
        self.plan = plan
        self._ours = rows_of_batch(ours, plan.global_batch, plan.columns)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="data-plan")
        self._planned: dict[tuple[int, int], Future[Rows]] = {}

    def close(self) -> None:
        self._planner.shutdown(wait=True, cancel_futures=True)

    def look(self, position: Position) -> list[tuple[int, int]]:
        """Plan this group and the next; return both as (epoch, group), or nothing if both are
        planned.

        The first call plans only the current group, so that the first batch is not delayed.
        """
        here = (position.epoch, position.group)
        keys = [here, self._after(*here)] if self._planned else [here]
        if all(key in self._planned for key in keys):
            return []
        self._planned = {key: self._plan(key) for key in keys}
        return keys

    def take(self, position: Position) -> tuple[list[tuple[Rows, int, int]], Position]:
        """Return the rows of the whole global batch at ``position``, and the position after it."""
        taken: list[tuple[Rows, int, int]] = []
        missing = self.plan.global_batch
        epoch, group, item = position.epoch, position.group, position.item
        while missing:
            rows = self._rows(epoch, group)
            if item > len(rows):
                raise InvalidInput(
                    "position is beyond its group", got=item, wanted=f"at most {len(rows)}"
                )
            stop = min(item + missing, len(rows))
            if stop > item:
                taken.append((rows, item, stop))
                missing -= stop - item
                item = stop
            if missing:
                (epoch, group), item = self._after(epoch, group), 0
        after = replace(position, batch=position.batch + 1, epoch=epoch, group=group, item=item)
        return taken, after

    def next(self, position: Position, most: int, skip: Collection[int]) -> PlannedBatches:
        """Return what the next batches consist of: at least one, none of ``skip`` after the first.

        More than one is returned only within a group.
        """
        rows, size = self._rows(position.epoch, position.group), self.plan.global_batch
        most = max(0, min((len(rows) - position.item) // size, most))
        edges = position.item + size * np.arange(most + 1)
        width_K = np.full(most, self.plan.context)
        if rows.width_R is not None:
            width_K = rows.width_R[edges[:-1]]
        fit = int(np.searchsorted(np.cumsum(width_K) * len(self._ours), PLACES_AT_ONCE, "right"))
        fit = next((n for n in range(1, fit) if position.batch + n in skip), fit)
        if fit <= 1:
            taken, after = self.take(position)
            tokens = sum(int(each.tokens_R1[to] - each.tokens_R1[at]) for each, at, to in taken)
            first, start, _ = taken[0]
            width = self.plan.context if first.width_R is None else int(first.width_R[start])
            pieces = sum(int(each.first_R1[to] - each.first_R1[at]) for each, at, to in taken)
            of_ours = _of_rows(taken, self._ours)
            return PlannedBatches(of_ours, [width], [float(tokens)], [pieces], [after])
        ids = (edges[:fit, None] + self._ours).reshape(-1)
        after_K = [
            replace(position, batch=position.batch + number, item=item)
            for number, item in enumerate(edges[1 : fit + 1].tolist(), start=1)
        ]
        tokens_K = np.diff(rows.tokens_R1[edges[: fit + 1]]).astype(float).tolist()
        pieces_K = np.diff(rows.first_R1[edges[: fit + 1]]).tolist()
        taken_once = [(rows, ids, np.arange(len(ids)))]
        return PlannedBatches(taken_once, width_K[:fit].tolist(), tokens_K, pieces_K, after_K)

    def _after(self, epoch: int, group: int) -> tuple[int, int]:
        return (epoch, group + 1) if group + 1 < self.plan.groups else (epoch + 1, 0)

    def _rows(self, epoch: int, group: int) -> Rows:
        key = (epoch, group)
        self._planned[key] = self._plan(key)
        return self._planned[key].result()

    def _plan(self, key: tuple[int, int]) -> Future[Rows]:
        return self._planned.get(key) or self._planner.submit(self.plan.rows, *key)


def _of_rows(taken: list[tuple[Rows, int, int]], wanted: Ints) -> list[tuple[Rows, Ints, Ints]]:
    """Return, of the rows ``taken``, those at ``wanted``: the indexes in each group and their
    places."""
    first = 0
    found = []
    for rows, start, stop in taken:
        here = np.flatnonzero((wanted >= first) & (wanted < first + stop - start))
        if len(here):
            found.append((rows, wanted[here] - first + start, here))
        first += stop - start
    return found
