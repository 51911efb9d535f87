"""Plan ahead: the rows of the next batches of a stream, for one rank.

The current group and the next are planned on a separate thread. Reads no tokens and opens no files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from paceline.data.batching.layout import RankRows
from paceline.data.batching.plans import PackedPlan
from paceline.data.batching.rows import Ints, Plan, Rows, SharedPlan, identity, rows_of_batch
from paceline.data.loading.batch import Position
from paceline.errors import CorruptData, InvalidInput, NotReady, PacelineError

# Small batches are made several at once, up to this many token positions together.
PLACES_AT_ONCE = 1 << 17


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch before it is filled: this rank's share, the global batch's weight, the position
    after."""

    share: RankRows
    tokens: float
    after: Position


class GroupPlanner:
    """The rows ``ours`` of each batch of a plan, planned ahead; for one thread; close it.

    ``rows_of`` returns a group's rows, those of other ranks only as far as ``tokens_R1`` needs
    them.
    """

    def __init__(self, plan: Plan, ours: range, rows_of: Callable[[int, int], Rows]) -> None:
        self.plan, self.ours = plan, ours
        self._rows_of = rows_of
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
        keys = [here, self.after(*here)] if self._planned else [here]
        if all(key in self._planned for key in keys):
            return []
        self._planned = {key: self._plan(key) for key in keys}
        return keys

    def rows(self, epoch: int, group: int) -> Rows:
        """Return a group's rows."""
        key = (epoch, group)
        self._planned[key] = self._plan(key)
        return self._planned[key].result()

    def after(self, epoch: int, group: int) -> tuple[int, int]:
        """Return the group after this one."""
        return (epoch, group + 1) if group + 1 < self.plan.groups else (epoch + 1, 0)

    def take(self, position: Position) -> tuple[list[tuple[Rows, int, int]], Position]:
        """Return the rows of the whole global batch at ``position``, and the position after it."""
        taken: list[tuple[Rows, int, int]] = []
        missing = self.plan.global_batch
        epoch, group, item = position.epoch, position.group, position.item
        while missing:
            rows = self.rows(epoch, group)
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
                (epoch, group), item = self.after(epoch, group), 0
        after = replace(position, batch=position.batch + 1, epoch=epoch, group=group, item=item)
        return taken, after

    def next(self, position: Position, most: int, skip: Collection[int]) -> list[PlannedBatch]:
        """Return what the next batches consist of: at least one, none of ``skip`` after the first.

        More than one is returned only within a group.
        """
        rows, size = self.rows(position.epoch, position.group), self.plan.global_batch
        most = max(0, min((len(rows) - position.item) // size, most))
        edges = position.item + size * np.arange(most + 1)
        widths = np.full(most, self.plan.context)
        if rows.width_R is not None:
            widths = rows.width_R[edges[:-1]]
        fit = int(np.searchsorted(np.cumsum(widths) * len(self.ours), PLACES_AT_ONCE, side="right"))
        fit = next((n for n in range(1, fit) if position.batch + n in skip), fit)
        if fit <= 1:
            taken, after = self.take(position)
            tokens = sum(int(each.tokens_R1[to] - each.tokens_R1[at]) for each, at, to in taken)
            of, start, _ = taken[0]
            width = self.plan.context if of.width_R is None else int(of.width_R[start])
            return [
                PlannedBatch(RankRows(_of_rows(taken, self._ours), width), float(tokens), after)
            ]
        places_B = np.arange(len(self.ours))
        tokens_K = np.diff(rows.tokens_R1[edges[: fit + 1]]).tolist()
        return [
            PlannedBatch(
                RankRows([(rows, start + self._ours, places_B)], width),
                float(tokens),
                replace(position, batch=position.batch + number, item=start + size),
            )
            for number, (start, width, tokens) in enumerate(
                zip(edges[:fit].tolist(), widths[:fit].tolist(), tokens_K, strict=True), start=1
            )
        ]

    def _plan(self, key: tuple[int, int]) -> Future[Rows]:
        return self._planned.get(key) or self._planner.submit(self._rows_of, *key)


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


# Shared plans, so that not every reader plans from the lengths of all documents.
#
# A reader needs little about the columns that it does not read: their row counts and the tokens of
# each batch. For each group one reader plans everything and publishes this summary, the shared
# plan; the others read their own columns' lengths and the shared plan. It is a pure function of the
# plan: a reader that finds none in time, or one of another group, plans everything itself and gets
# the same rows.

log = logging.getLogger(__name__)

# The first group is needed at once: a plan of 2 million documents takes 10 s on a busy core. All
# later groups are planned one group ahead.
WAIT_S = 20.0
VERSION = 1  # of the planning: a shared plan by older code does not match
LOOK_S = (0.1, 2.0)  # polling interval: first and longest


class SharedPlanStore(Protocol):
    """The store of shared plans: few small objects, visible to all readers."""

    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, content: bytes) -> None: ...
    def drop(self, name: str) -> None: ...


class SharedPlans:
    """Plans groups with shared plans, for reader number ``reader`` of ``readers``.

    ``data`` names the data that is read and is the same for all readers. For one thread; ``stop``
    ends its waiting.
    """

    def __init__(
        self,
        kept: SharedPlanStore,
        data: str,
        reader: int,
        readers: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept, self._data = kept, data
        self._reader, self._readers, self._clock = reader, readers, clock
        self._left = ""  # the name of the one published last
        self._stop = threading.Event()

    def stop(self) -> None:
        """Stop waiting for shared plans; any thread may call this."""
        self._stop.set()

    def rows(self, plan: Plan, epoch: int, group: int, columns: range) -> Rows:
        """Return the group's rows; those of columns other than ``columns`` have no pieces."""
        if not isinstance(plan, PackedPlan) or len(columns) == plan.columns:
            return plan.rows(epoch, group)
        name = self._name_of(plan, epoch, group)
        if (epoch * plan.groups + group) % self._readers == self._reader:
            rows = plan.rows(epoch, group)
            self._leave(name, plan.outline(rows))
            return rows
        try:
            if (outline := self._wait(name)) is not None:
                return plan.rows_of(epoch, group, columns, outline)
            why = f"no outline within {WAIT_S:.0f} s"
        except PacelineError as error:
            why = error.one_line()
        if self._stop.is_set():
            raise NotReady("the stream was closed while it planned")
        log.warning("group is planned from all lengths epoch=%d group=%d: %s", epoch, group, why)
        return plan.rows(epoch, group)

    def _wait(self, name: str) -> SharedPlan | None:
        until, pause = self._clock() + WAIT_S, LOOK_S[0]
        while (raw := self._kept.get(name)) is None:
            if self._clock() > until or self._stop.wait(pause):
                return None
            pause = min(LOOK_S[1], pause * 1.5)
        return parsed(raw)

    def _leave(self, name: str, outline: SharedPlan) -> None:
        try:
            self._kept.put(name, written(outline))
            # All readers have passed the previous one: it is as many groups old as there are
            # readers.
            if self._left and self._left != name:
                self._kept.drop(self._left)
            self._left = name
        except PacelineError as error:  # the others time out and plan everything themselves
            log.warning("outline cannot be left name=%s: %s", name, error)

    def _name_of(self, plan: Plan, epoch: int, group: int) -> str:
        said: dict[str, Any] = identity(plan) | {"data": self._data, "version": VERSION}
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        return f"{digest[:16]}-{epoch}-{group}.outline"


def written(outline: SharedPlan) -> bytes:
    """Return the content of a shared plan's file: its digest and JSON."""
    said = {"rows": outline.count_C, "tokens": outline.tokens_S}
    raw = json.dumps(said, separators=(",", ":")).encode()
    return hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw


def parsed(content: bytes) -> SharedPlan:
    """Return the shared plan in a file; raises CorruptData if the digest does not match."""
    digest, _, raw = content.partition(b"\n")
    if hashlib.sha256(raw).hexdigest().encode() != digest:
        raise CorruptData("outline of a group is damaged", got=repr(content[:80]))
    said = json.loads(raw)
    return SharedPlan(tuple(said["rows"]), tuple(said["tokens"]))
