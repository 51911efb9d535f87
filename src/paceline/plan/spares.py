"""Chooses the spares of every lane: the sources to try, in order, when its source is lost.

First the source that the next plan would name if that source alone were gone
(``tree_repair.match_orphans``), so that orphans spread over links that have just become free. Then
sources further up, complete workers, and neighbours; never a worker that has its pieces only from
this reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from paceline.plan.inputs import Standing
from paceline.plan.transfers import Transfer, nearness
from paceline.plan.tree_repair import match_orphans, nearest_below
from paceline.plan.trees import ORIGIN, Trees, WorkerLine

MAX_SPARES = 8  # workers; plans of 10,000 workers stay small and a retry loop stays short
MAX_ANCESTORS = 4
_LAST_RESORT = 2
_FARTHEST = 2 * MAX_SPARES  # places along the line that are considered


class Spares:
    """Computes the spares of one plan, stripe by stripe."""

    def __init__(self, line: WorkerLine, trees: Trees, *, returned: bool = True) -> None:
        """``returned``: some workers may have come back with pieces, also those further down the
        line.
        """
        self._line = line
        self._returned = returned
        self._up = trees.up
        self._holders = [place for place in line.beside if line.feeds(place)]
        self._roots = [
            place
            for stripe in range(len(trees.up))
            for place, source in enumerate(trees.up[stripe])
            if source == ORIGIN
        ]
        self._last_resort = _last_resort(line)
        self._free = [trees.slots] * len(line.workers)
        for up in trees.up:
            for source in up:
                if source >= 0:
                    self._free[source] -= 1
        self._spans = [_spans(trees, stripe) for stripe in range(len(trees.up))]
        self._below = [trees.children(stripe) for stripe in range(len(trees.up))]
        self._heirs: list[dict[int, int]] = [{} for _ in trees.up]
        for place in range(len(line.workers)):
            self._assign_heirs(place)

    def of(self, transfer: Transfer) -> list[int]:
        """Return the places that replace ``transfer``'s source, best first, without the origin."""
        reader, stripe = transfer.reader, transfer.stripe
        chosen: list[int] = []
        taken = {reader, transfer.source}

        def add(candidates: Iterable[int], most: int = MAX_SPARES) -> None:
            for place in candidates:
                if len(chosen) >= most:
                    return
                if place >= 0 and place not in taken and self._line.feeds(place):
                    chosen.append(place)
                    taken.add(place)

        own = self._up[stripe][reader]
        add(transfer.others)
        if transfer.source != ORIGIN:
            if transfer.source != own and own >= 0:  # from a holder: the own source is a spare
                add([own])
            add([self._heirs[stripe].get(reader, ORIGIN)])
            add(self._free_of(reader, stripe, self._sources_of(transfer.source, stripe)))
            ancestors = islice(self._ancestors(transfer.source, stripe), _FARTHEST)
            add(self._free_of(reader, stripe, ancestors), MAX_ANCESTORS)
        add(self.holders_for(reader))
        around = self._around(reader)
        if transfer.source != ORIGIN:
            add(self._free_of(reader, stripe, around))
        else:
            add(self._roots, MAX_SPARES - len(self._last_resort))
            chosen += [place for place in self._last_resort if place not in taken]
        if self._returned:  # only after a return may workers behind this one hold pieces it lacks
            add(place for place in around if self._line.workers[place].held_pieces)
        return chosen

    def _assign_heirs(self, place: int) -> None:
        """Compute who adopts the orphans of ``place`` alone, by the rule of ``repair_trees``."""
        slots = {
            number: up[place]
            for number, up in enumerate(self._up)
            if up[place] >= 0 and self._line.feeds(up[place]) and not self._below[number][place]
        }
        late: list[tuple[int, int, int]] = []
        for stripe, below in enumerate(self._below):
            if not (orphans := below[place]):
                continue
            source, spans = self._up[stripe][place], self._spans[stripe]

            def above(
                other: int, orphans: Sequence[int] = orphans, spans: Spans = spans
            ) -> int | None:
                return next((each for each in orphans if _is_below(spans, each, other)), None)

            adopted = match_orphans(orphans, source, list(slots.values()), above)
            first = next(iter(adopted))
            for orphan, adopter in adopted.items():
                if adopter is None:
                    late.append((stripe, orphan, first))
                    continue
                self._heirs[stripe][orphan] = adopter
                if orphan != first:
                    del slots[next(number for number, to in slots.items() if to == adopter)]
        left = list(slots.values())
        for stripe, orphan, first in late:
            self._heirs[stripe][orphan] = self._with_room(stripe, orphan, place, first, left)

    def _with_room(self, stripe: int, orphan: int, gone: int, first: int, left: list[int]) -> int:
        """Return a place with a free slot near the source of the lost place ``gone`` that a late
        ``orphan`` does not feed: ``left`` are the slots not taken yet. Without one, return that
        source.
        """
        source = self._up[stripe][gone]
        below = self._below[stripe]
        after = {} if source < 0 else {source: [each for each in below[source] if each != gone]}
        if source >= 0:
            after[source].append(first)
        for place in nearest_below(below, first if source < 0 else source, after):
            if _is_below(self._spans[stripe], orphan, place):
                continue
            if self._line.feeds(place) and self._free[place] + left.count(place) > 0:
                if place in left:
                    left.remove(place)
                return place
        return source

    def _sources_of(self, place: int, stripe: int) -> list[int]:
        """Return the sources of ``place`` in the other stripes, which feed few of this one."""
        if place >= self._line.length:
            return []
        return [
            up[place] for number, up in enumerate(self._up) if number != stripe and up[place] >= 0
        ]

    def _ancestors(self, place: int, stripe: int) -> Iterator[int]:
        up = self._up[stripe]
        while place < self._line.length and (place := up[place]) >= 0:
            yield place

    def _free_of(self, reader: int, stripe: int, places: Iterable[int]) -> Iterator[int]:
        """Yield those of ``places`` that ``reader`` does not feed in this stripe."""
        spans = self._spans[stripe]
        return (place for place in places if not _is_below(spans, reader, place))

    def _around(self, reader: int) -> list[int]:
        return [
            place
            for step in range(1, _FARTHEST)
            for place in (reader - step, reader + step)
            if 0 <= place < self._line.length and not self._line.out[place]
        ]

    def holders_for(self, reader: int) -> list[int]:
        """Return complete workers from near to far; equally near ones in turn."""
        holders = self._holders
        if not holders:
            return []
        start = reader % len(holders)
        turned = [*holders[start:], *holders[:start]]
        if len(turned) > 16 * MAX_SPARES:
            turned = turned[: 16 * MAX_SPARES]
        worker = self._line.workers[reader]
        return sorted(turned, key=lambda place: -nearness(self._line.workers[place], worker))


def _last_resort(line: WorkerLine) -> list[int]:
    """Return the sources for what only the origin has, should its budget be spent: the slow workers
    that hold most; quarantined ones where no other worker has the whole model.
    """

    def richest(standing: Standing) -> list[int]:
        found = [
            place
            for place, worker in enumerate(line.workers)
            if line.out[place]
            and worker.standing is standing
            and (worker.held_pieces or worker.complete)
        ]
        found.sort(key=lambda at: (not line.workers[at].complete, -line.workers[at].held_pieces))
        return found[:_LAST_RESORT]

    slow = richest(Standing.TAIL)
    others = [place for place in range(len(line.workers)) if line.feeds(place)]
    if any(line.workers[place].complete for place in (*others, *slow)):
        return slow
    bad = [place for place in richest(Standing.QUARANTINED) if line.workers[place].complete]
    return [*slow, *bad]


Spans = tuple[list[int], list[int]]


def _spans(trees: Trees, stripe: int) -> Spans:
    """Return, by place, the first and last pre-order number of its subtree."""
    begin = [-1] * len(trees.up[stripe])
    end = [-1] * len(trees.up[stripe])
    order = trees.top_down(stripe)
    for at, place in enumerate(order):
        begin[place] = end[place] = at
    up = trees.up[stripe]
    for place in reversed(order):
        if (above := up[place]) >= 0:
            end[above] = max(end[above], end[place])
    return begin, end


def _is_below(spans: Spans, top: int, place: int) -> bool:
    """Return whether ``place`` is ``top`` or in its subtree."""
    begin, end = spans
    return begin[top] >= 0 and begin[top] <= begin[place] <= end[top]
