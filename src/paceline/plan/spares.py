"""Who steps in when a source is lost: the spares of every lane, in the order to try.

First whom the next plan would name if that source alone were gone (``closing.match``), so that
orphans spread over links that have just become free. Then sources further up, complete workers,
and neighbours; never somebody who only has what this worker gave him.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from paceline.plan.closing import match, nearest_below
from paceline.plan.flows import Flow, nearness
from paceline.plan.line import Line
from paceline.plan.trees import ORIGIN, Trees
from paceline.plan.worker import Standing

MOST_SPARES = 8  # workers; plans of 10,000 workers stay small and a retry loop stays short
MOST_ANCESTORS = 4
_LAST_RESORT = 2
_FARTHEST = 2 * MOST_SPARES  # places along the line that are looked at


class Spares:
    """Answers for one plan, stripe by stripe."""

    def __init__(self, line: Line, trees: Trees, *, returned: bool = True) -> None:
        """``returned``: some may have come back with what they held, also those further down."""
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
        self._heirs = [self._heirs_of(trees, stripe) for stripe in range(len(trees.up))]

    def of(self, flow: Flow) -> list[int]:
        """Return the places that step in for ``flow``'s source, best first; the origin not."""
        reader, stripe = flow.reader, flow.stripe
        chosen: list[int] = []
        taken = {reader, flow.source}

        def add(candidates: Iterable[int], most: int = MOST_SPARES) -> None:
            for place in candidates:
                if len(chosen) >= most:
                    return
                if place >= 0 and place not in taken and self._line.feeds(place):
                    chosen.append(place)
                    taken.add(place)

        own = self._up[stripe][reader]
        add(flow.others)
        if flow.source != ORIGIN:
            if flow.source != own and own >= 0:  # from a holder: the tree's own source steps in
                add([own])
            add([self._heirs[stripe].get(reader, ORIGIN)])
            add(self._free_of(reader, stripe, self._sources_of(flow.source, stripe)))
            ancestors = islice(self._ancestors(flow.source, stripe), _FARTHEST)
            add(self._free_of(reader, stripe, ancestors), MOST_ANCESTORS)
        add(self.holders_for(reader))
        around = self._around(reader)
        if flow.source != ORIGIN:
            add(self._free_of(reader, stripe, around))
        else:
            add(self._roots, MOST_SPARES - len(self._last_resort))
            chosen += [place for place in self._last_resort if place not in taken]
        if self._returned:  # those below got what they have from here, but for what they came with
            add(place for place in around if self._line.workers[place].held_pieces)
        return chosen

    def _heirs_of(self, trees: Trees, stripe: int) -> dict[int, int]:
        """Return who adopts whom, would the one source of each be gone."""
        heirs: dict[int, int] = {}
        up, spans, children = self._up[stripe], self._spans[stripe], trees.children(stripe)
        for place, orphans in enumerate(children):
            if not orphans:
                continue
            others = [
                other
                for other in self._sources_of(place, stripe)
                if self._line.feeds(other) and other != up[place]
            ]

            def above(other: int, orphans: Sequence[int] = orphans) -> int | None:
                return next((each for each in orphans if _below(spans, each, other)), None)

            adopted = match(orphans, up[place], others, above)
            first = next(iter(adopted))
            for orphan, adopter in adopted.items():
                heirs[orphan] = (
                    self._with_room(children, place, up[place], first)
                    if adopter is None
                    else adopter
                )
        return heirs

    def _with_room(
        self, children: Sequence[Sequence[int]], gone: int, source: int, first: int
    ) -> int:
        """Return who has room near ``source`` (or below ``first``, where that is the origin)."""
        start = first if source < 0 else source
        for place in nearest_below(children, start):
            if place != gone and self._line.feeds(place) and self._free[place] > 0:
                return place
        return start

    def _sources_of(self, place: int, stripe: int) -> list[int]:
        """Return whom ``place`` takes from in the other stripes: they pass on this one to few."""
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
        """Yield those of ``places`` that are not fed, in this stripe, by ``reader``."""
        spans = self._spans[stripe]
        return (place for place in places if not _below(spans, reader, place))

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
        if len(turned) > 16 * MOST_SPARES:
            turned = turned[: 16 * MOST_SPARES]
        worker = self._line.workers[reader]
        return sorted(turned, key=lambda place: -nearness(self._line.workers[place], worker))


def _last_resort(line: Line) -> list[int]:
    """Return who is asked for what only the origin has, should it be out of reach (its fuse spent):
    the slow that hold most; the quarantined where nobody else has the whole.
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
    """Return, by place, when a walk through the tree comes to it, and when it leaves it."""
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


def _below(spans: Spans, top: int, place: int) -> bool:
    """Return whether ``place`` is ``top`` or fed by it."""
    begin, end = spans
    return begin[top] >= 0 and begin[top] <= begin[place] <= end[top]
