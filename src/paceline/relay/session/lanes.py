"""The lanes of one plan as works: disjoint runs that tile the model, each with its candidates.

Plain state and look-ups; who is asked when is decided in ``pulling``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.feeds import Work
from paceline.relay.session.limits import PieceMap
from paceline.wire.plan import Source, WorkerLanes


class Works:
    """Every work of a session, in the order of their pieces; empty where no lane names a source."""

    def __init__(self, works: list[Work]) -> None:
        self._all = sorted(works, key=lambda work: work.extent.first)
        self._starts = [work.extent.first for work in self._all]

    @classmethod
    def of(cls, lanes: WorkerLanes, pieces: PieceMap) -> Works:
        """Return the works of ``lanes``. What no lane names may come from any of their sources:
        marks may be fewer than the plan knew, and a held piece may rot.
        """
        works: list[Work] = []
        covered = Extents()
        sources: dict[str, Source] = {}
        for lane in lanes.lanes:
            candidates = _others((lane.source, *lane.spares), lanes.worker_id)
            sources |= {each.key: each for each in candidates}
            extent = pieces.chunk_range(lane.first_chunk, lane.last_chunk)
            if candidates and extent.size:
                for run in list(covered.gaps(extent)):
                    works.append(Work(run, candidates, lane.expected_bytes_s))
                    covered.add(run)
        if sources:
            last_origin = tuple(sorted(sources.values(), key=lambda each: each.kind == "origin"))
            rest = covered.gaps(Extent(0, pieces.count))
            works += [Work(run, last_origin) for run in rest]
        return cls(works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def parts(self, extent: Extent) -> Iterator[tuple[Work, Extent]]:
        """Yield the works that ``extent`` touches, each with its part of it."""
        first, stop = extent
        for at in range(max(0, bisect_right(self._starts, first) - 1), len(self._all)):
            work = self._all[at]
            begin, end = work.extent
            if begin >= stop:
                return
            if first >= begin and stop <= end:
                yield work, extent
                return
            if first < end:
                yield work, Extent(max(first, begin), min(stop, end))

    def sharing(self, work: Work) -> int:
        """Return how many works want pieces from this work's source, itself included."""
        others = (each for each in self._all if each is not work and each.active == work.active)
        return 1 + sum(each.wanting > 0 for each in others)


def _others(candidates: tuple[Source, ...], worker_id: str) -> tuple[Source, ...]:
    """Return the candidates without duplicates and without the worker itself; origins come last
    among the spares.
    """
    unique = {each.key: each for each in reversed(candidates) if each.worker_id != worker_id}
    ordered = list(reversed(unique.values()))
    return (*ordered[:1], *sorted(ordered[1:], key=lambda each: each.kind == "origin"))
