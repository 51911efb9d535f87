"""From places in the line to sources: who really feeds whom, and who steps in.

Workers that hold the whole model stand beside the line and feed it: the root from the nearest of
them, and a rack's first worker from one in its own rack where the line would cross.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from paceline.plan.shapes import Parents
from paceline.plan.worker import PlanWorker, rack_of

MOST_SPARES = 8  # workers; plans of 1,000 workers stay small and a retry loop stays short
MOST_ANCESTORS = 4
_FARTHEST = 2 * MOST_SPARES  # places along the line that are looked at


@dataclass(frozen=True, slots=True)
class Feeds:
    """``upstream[i]`` is whom place ``i`` of ``line`` takes from; None is the origin."""

    line: tuple[PlanWorker, ...]
    holders: tuple[PlanWorker, ...]
    upstream: tuple[PlanWorker | None, ...]

    @property
    def depth(self) -> int:
        """Return the longest path in hops; a holder, like the origin, is where paths begin."""
        hops = {holder.worker_id: 0 for holder in self.holders}
        for worker, source in zip(self.line, self.upstream, strict=True):
            hops[worker.worker_id] = 1 + (hops[source.worker_id] if source else 0)
        return max(hops.values(), default=0) or 1

    @property
    def fanout(self) -> int:
        """Return how many workers the busiest worker feeds."""
        return max(Counter(each.worker_id for each in self.upstream if each).values(), default=1)

    def spares(self) -> list[list[PlanWorker]]:
        """Return who steps in for each place's source, in order: its ancestors from near to far,
        then who holds everything, then others; of those that feed on it, only who held something.
        """
        places = {worker.worker_id: at for at, worker in enumerate(self.line)}
        above = [places.get(source.worker_id) if source else None for source in self.upstream]
        return [self._spares_of(at, above) for at in range(len(self.line))]

    def _spares_of(self, at: int, above: list[int | None]) -> list[PlanWorker]:
        worker, source = self.line[at], self.upstream[at]
        chosen: list[PlanWorker] = []
        taken = {worker.worker_id, source.worker_id if source else ""}

        def add(candidates: Iterable[PlanWorker], most: int) -> None:
            for each in candidates:
                if len(chosen) >= most:
                    return
                if each.worker_id not in taken:
                    chosen.append(each)
                    taken.add(each.worker_id)

        path = list(islice(_up(at, above), _FARTHEST))
        add((each for place in path if (each := self.upstream[place])), MOST_ANCESTORS)
        add(by_nearness(worker, self.holders, turn=at), MOST_SPARES)
        # Around this place in the line; only so far that a large fleet stays cheap to plan.
        around = [
            other
            for step in range(1, _FARTHEST)
            for other in (at - step, at + step)
            if 0 <= other < len(self.line)
        ]
        below = {other for other in around if at in islice(_up(other, above), 1, 2 * _FARTHEST)}
        if source is not None:
            add((self.line[other] for other in around if other not in below), MOST_SPARES)
        # Those behind got what they have from here, but one may have come back with its disk.
        add((self.line[other] for other in around if self.line[other].held_pieces), MOST_SPARES)
        return chosen


def _up(place: int, above: list[int | None]) -> Iterator[int]:
    """Yield ``place`` and the places upstream of it, to the root."""
    step: int | None = place
    while step is not None:
        yield step
        step = above[step]


def choose_feeds(
    line: Sequence[PlanWorker], parents: Parents, holders: Sequence[PlanWorker], fanout: int
) -> Feeds:
    """Return the feeds of ``line``: its parents, and ``holders`` where they save a crossing."""
    load: Counter[str] = Counter()
    upstream: list[PlanWorker | None] = []
    for worker, parent in zip(line, parents, strict=True):
        source = line[parent] if parent is not None else None
        if holders and (source is None or rack_of(source) != rack_of(worker)):
            best = min(
                by_nearness(worker, holders),
                key=lambda each: (load[each.worker_id] >= fanout, -_shared(each, worker)),
            )
            idle = load[best.worker_id] < fanout
            if source is None or (idle and rack_of(best) == rack_of(worker)):
                source = best
                load[best.worker_id] += 1
        upstream.append(source)
    return Feeds(tuple(line), tuple(holders), tuple(upstream))


def by_nearness(
    worker: PlanWorker, others: Sequence[PlanWorker], turn: int = 0
) -> list[PlanWorker]:
    """Return ``others`` from near to far; ``turn`` begins elsewhere among equally near ones."""
    if not others:
        return []
    start = turn % len(others)
    turned = [*others[start:], *others[:start]]
    return sorted(turned, key=lambda other: -_shared(other, worker))


def _shared(one: PlanWorker, other: PlanWorker) -> int:
    """Return how close two workers stand: 3 same host, 2 same rack, 1 same zone, 0 neither."""
    if rack_of(one) == rack_of(other):
        return 3 if one.labels.host and one.labels.host == other.labels.host else 2
    return int(one.labels.zone == other.labels.zone)
