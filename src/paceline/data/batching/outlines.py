"""Outlines that readers share, so that not each of them plans from the lengths of all documents.

A reader needs few things of columns that it does not read: how many rows they have, and how many
tokens each batch. Of each group one reader plans everything and leaves the outline where all find
it; the others read their own columns' lengths and that. It is a pure function of the plan: whoever
finds none in time, or another group's, plans everything itself and comes to the same rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from paceline.data.batching.packed import PackedPlan
from paceline.data.batching.rows import Outline, Plan, Rows, identity
from paceline.errors import CorruptData, NotReady, PacelineError

log = logging.getLogger(__name__)

# A first group is wanted at once: a plan of 2 million documents takes 10 s on a busy core. All
# later ones are planned a group ahead.
WAIT_S = 20.0
VERSION = 1  # of how rows are planned: an outline that older code left is not this plan's
LOOK_S = (0.1, 2.0)  # between two looks: the first, and the longest


class Kept(Protocol):
    """Where outlines are kept: few small objects, seen by all readers."""

    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, content: bytes) -> None: ...
    def drop(self, name: str) -> None: ...


class Outlines:
    """What ``reader`` of ``readers`` plans with; ``data`` names what is read, for all the same.

    For one thread; ``stop`` ends its waiting.
    """

    def __init__(
        self,
        kept: Kept,
        data: str,
        reader: int,
        readers: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept, self._data = kept, data
        self._reader, self._readers, self._clock = reader, readers, clock
        self._left = ""  # the one that we left last
        self._stop = threading.Event()

    def stop(self) -> None:
        """Wait for nobody any more, from any thread."""
        self._stop.set()

    def rows(self, plan: Plan, epoch: int, group: int, columns: range) -> Rows:
        """Return the group's rows, those of other columns than ``columns`` without pieces."""
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

    def _wait(self, name: str) -> Outline | None:
        until, pause = self._clock() + WAIT_S, LOOK_S[0]
        while (raw := self._kept.get(name)) is None:
            if self._clock() > until or self._stop.wait(pause):
                return None
            pause = min(LOOK_S[1], pause * 1.5)
        return parsed(raw)

    def _leave(self, name: str, outline: Outline) -> None:
        try:
            self._kept.put(name, written(outline))
            # Everybody is past the one before: as many groups ago as there are readers.
            if self._left and self._left != name:
                self._kept.drop(self._left)
            self._left = name
        except PacelineError as error:  # the others wait, and then plan everything themselves
            log.warning("outline cannot be left name=%s: %s", name, error)

    def _name_of(self, plan: Plan, epoch: int, group: int) -> str:
        said: dict[str, Any] = identity(plan) | {"data": self._data, "version": VERSION}
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        return f"{digest[:16]}-{epoch}-{group}.outline"


def written(outline: Outline) -> bytes:
    """Return the outline as a file: its digest, and JSON."""
    said = {"rows": outline.count_C, "tokens": outline.tokens_S}
    raw = json.dumps(said, separators=(",", ":")).encode()
    return hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw


def parsed(content: bytes) -> Outline:
    """Return the outline in a file; raises CorruptData where it is not what was written."""
    digest, _, raw = content.partition(b"\n")
    if hashlib.sha256(raw).hexdigest().encode() != digest:
        raise CorruptData("outline of a group is damaged", got=repr(content[:80]))
    said = json.loads(raw)
    return Outline(tuple(said["rows"]), tuple(said["tokens"]))
