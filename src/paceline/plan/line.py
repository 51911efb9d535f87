"""Who stands where: the line's order, whose place in the trees it keeps, and who only follows.

Workers of one rack stand together, racks of one zone too, so that a chain crosses into each rack
once. Whoever holds most stands first, complete workers before all, and its rack with it: what is
held need not come from the origin again, nor cross into that rack. A plan made with the order of
the one before keeps every place, also those of the dead: so a replan changes what it must.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.manifest import version_key
from paceline.plan.worker import PlanWorker, Standing, rack_of
from paceline.wire.plan import Plan

# Who makes the line where nobody of good standing is left.
_GOOD_ENOUGH = (
    (Standing.LINE, Standing.TAIL),
    (Standing.LINE, Standing.TAIL, Standing.QUARANTINED),
)

SLOW_LINK = 0.5  # of the median: such a link would hold up whoever stands behind it


@dataclass(frozen=True, slots=True)
class Line:
    """``workers`` in places: those of the line, then complete ones that feed it from beside."""

    workers: tuple[PlanWorker, ...]
    length: int  # places below it are the line's, the others stand beside it
    core: tuple[int, ...]  # places that trees are built of, the dead among them
    out: tuple[bool, ...]  # by place: feeds nobody of the line (dead, slow or quarantined)
    link_mbit: float  # the median: what one slot of a tree is measured by

    @property
    def beside(self) -> range:
        """Return the places of complete workers that stand beside the line."""
        return range(self.length, len(self.workers))

    @property
    def leaves(self) -> list[int]:
        """Return who is fed and feeds nobody of the line, fastest first, the quarantined last."""
        found = [
            place for place in range(self.length) if self.out[place] and not self.is_gone(place)
        ]

        def key(place: int) -> tuple[bool, float, int]:
            worker = self.workers[place]
            return (worker.standing is Standing.QUARANTINED, -worker.link_mbit, place)

        return sorted(found, key=key)

    def is_gone(self, place: int) -> bool:
        """Return whether nothing is left of the worker but its place."""
        return self.workers[place].standing is Standing.GONE

    def feeds(self, place: int) -> bool:
        """Return whether others may be told to ask this worker."""
        return not self.out[place]


def line_up(workers: Sequence[PlanWorker], seed: int, order: Sequence[str] = ()) -> Line:
    """Return everybody's place: first as in ``order``, then the new ones as ``line_order`` has it.

    Complete workers that ``order`` does not name stand beside the line and only feed it. Where
    nobody in good standing is left, the slow ones make the line, else the quarantined.
    """
    middle = median(worker.link_mbit for worker in workers)
    known = {worker.worker_id: worker for worker in workers}
    line = [known[worker_id] for worker_id in dict.fromkeys(order) if worker_id in known]
    named = {worker.worker_id for worker in line}
    living = [each for each in workers if each.standing is not Standing.GONE]
    rest = line_order([each for each in living if each.worker_id not in named], seed)
    beside = [each for each in rest if each.complete]
    new = [each for each in rest if not each.complete]

    def slow(worker: PlanWorker) -> bool:
        return worker.link_mbit < SLOW_LINK * middle

    line += [each for each in new if not slow(each)]
    line += sorted((each for each in new if slow(each)), key=lambda each: -each.link_mbit)
    places = (*line, *beside)
    core = tuple(place for place, worker in enumerate(line) if not slow(worker))
    out = [each.standing is not Standing.LINE or slow(each) for each in places]
    for good in _GOOD_ENOUGH:
        if not all(out[: len(line)]):
            break
        core = tuple(range(len(line)))
        out = [each.standing not in good for each in places]
    return Line(places, len(line), core, tuple(out), middle)


def next_order(order: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """Return the ``order`` for the plan after ``plan``: nobody ever leaves it, new ones follow.

    Workers without lanes (complete before they had a place) stay beside the line.
    """
    known = set(order)
    new = [each.worker_id for each in plan.workers if each.lanes and each.worker_id not in known]
    return (*order, *new)


def line_order(workers: Sequence[PlanWorker], seed: int) -> list[PlanWorker]:
    """Return ``workers`` in the order of the line; the same set and seed give the same order.

    Seed 0 sorts names as people do; other seeds shuffle zones, racks, hosts and workers (each
    within its group), so that two models do not burden the same head.
    """

    def name(value: str) -> tuple[object, ...]:
        if seed == 0:
            return (version_key(value), value)
        return (hashlib.sha256(f"{seed}:{value}".encode()).digest(), value)

    levels: list[Callable[[PlanWorker], tuple[str, ...]]] = [
        lambda worker: (worker.labels.zone,),
        rack_of,
        lambda worker: (*rack_of(worker), worker.labels.host),
        lambda worker: (worker.worker_id,),
    ]
    most: list[dict[tuple[str, ...], int]] = []  # pieces held by the richest of each group
    names: list[dict[tuple[str, ...], tuple[object, ...]]] = []
    for level in levels:
        held: dict[tuple[str, ...], int] = {}
        for worker in workers:
            pieces = sys.maxsize if worker.complete else worker.held_pieces
            group = level(worker)
            held[group] = max(held.get(group, 0), pieces)
        most.append(held)
        names.append({group: name(group[-1]) for group in held})

    def key(worker: PlanWorker) -> tuple[object, ...]:
        parts: list[object] = []
        for level, held, named in zip(levels, most, names, strict=True):
            group = level(worker)
            parts += [-held[group], named[group]]
        return tuple(parts)

    return sorted(workers, key=key)
