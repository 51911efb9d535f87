"""The line's order and the topologies on it: who stands behind whom, as indices.

Workers of one rack stand together, racks of one zone too, so that a chain crosses into each rack
once. Whoever holds most stands first, complete workers before all, and its rack with it: what is
held need not come from the origin again, nor cross into that rack.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from itertools import groupby

from paceline.manifest import version_key
from paceline.plan.worker import PlanWorker, rack_of
from paceline.wire.plan import Topology

Parents = list[int | None]


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
    for level in levels:
        held: dict[tuple[str, ...], int] = {}
        for worker in workers:
            pieces = sys.maxsize if worker.complete else worker.held_pieces
            held[level(worker)] = max(held.get(level(worker), 0), pieces)
        most.append(held)

    def key(worker: PlanWorker) -> tuple[object, ...]:
        parts: list[object] = []
        for level, held in zip(levels, most, strict=True):
            group = level(worker)
            parts += [-held[group], name(group[-1])]
        return tuple(parts)

    return sorted(workers, key=key)


def parents_of(topology: Topology, line: Sequence[PlanWorker]) -> Parents:
    """Return, for each place of ``line``, the place it takes from; None is the root.

    Every parent stands before its children.
    """
    if topology is Topology.CHAIN:
        return [None, *range(len(line) - 1)][: len(line)]
    return _binary_tree(line)


def _binary_tree(line: Sequence[PlanWorker]) -> Parents:
    """Return a binary tree in pre-order: first the parent, then its two halves of the rest.

    The rest is cut where a rack begins, if one does within its middle half; so the depth stays
    logarithmic and a rack is mostly fed from within.
    """
    parents: Parents = [None] * len(line)
    edges = {0}
    for _, rack in groupby(range(len(line)), key=lambda place: rack_of(line[place])):
        edges.add(next(iter(rack)))
    todo: list[tuple[int, int, int | None]] = [(0, len(line), None)]
    while todo:
        start, end, parent = todo.pop()
        if start >= end:
            continue
        parents[start] = parent
        rest = end - start - 1
        middle = start + 1 + (rest + 1) // 2
        near = [
            middle + step
            for distance in range(rest // 4 + 1)
            for step in (distance, -distance)
            if middle + step in edges
        ]
        cut = near[0] if near else middle
        todo += [(start + 1, cut, start), (cut, end, start)]
    return parents
