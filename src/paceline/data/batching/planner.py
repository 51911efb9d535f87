"""Plan the rows of the next batches of a stream, for one rank, a group ahead.

The current group and the next are planned on a separate thread. Reads no tokens and opens no files.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from paceline.data.batching.layout import PlannedBatches
from paceline.data.batching.rows import Ints, Plan, Rows, rows_of_batch
from paceline.data.loading import Position
from paceline.errors import InvalidInput

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
        """End the planning thread."""
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
            return PlannedBatches(_of_rows(taken, self._ours), [width], [float(tokens)], [after])
        ids = (edges[:fit, None] + self._ours).reshape(-1)
        after_K = [
            replace(position, batch=position.batch + number, item=item)
            for number, item in enumerate(edges[1 : fit + 1].tolist(), start=1)
        ]
        tokens_K = np.diff(rows.tokens_R1[edges[: fit + 1]]).astype(float).tolist()
        taken_once = [(rows, ids, np.arange(len(ids)))]
        return PlannedBatches(taken_once, width_K[:fit].tolist(), tokens_K, after_K)

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
