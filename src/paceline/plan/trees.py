"""Builds the trees of a topology over the line of workers: the parent of each place, per stripe.

A chain and a k-ary tree are one stripe. ``tree-of-chains`` and ``mesh`` are several, on trees in
which every link sends as much as it receives (as SplitStream, SOSP 2003). Within a cell of workers
each stripe follows a chain that begins at another worker; cells are joined by trees with disjoint
interiors: in one stripe a cell feeds as many others as there are stripes, in the others none. Cells
are long in a tree-of-chains, short in a mesh, which is shallower.

Within a cell every worker forwards each stripe once, so that when one stripe is late another is
there to send. Trees of single workers, which send four copies of one stripe, took 8 hosts 26 to 33
% longer than the bound on a busy machine, chains of four stripes 8 to 15 %, one chain 5 to 12 %.
Trees depend on racks and places, not on rates or holdings.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from paceline.manifest import version_key
from paceline.plan.inputs import PlanWorker, Standing, rack_of
from paceline.schemas import Plan, Topology

ORIGIN = -1  # parent: the origin
NO_PARENT = -2  # no parent: not in this tree

FANOUT = 2  # children of a worker in a tree
MAX_CELL = 32  # workers of one chain of a tree-of-chains; a rack with more is cut
MIN_MESH_CELL = 4  # workers of a mesh's cell, at least; fewer than twice as many


@dataclass(frozen=True, slots=True)
class Trees:
    """``up[stripe][place]`` is the parent of that place: the place it takes the stripe from.

    ``slots`` is how many children, over all stripes, one worker feeds at the topology's full rate.
    """

    up: list[list[int]]
    slots: int

    def children(self, stripe: int) -> list[list[int]]:
        """Return, for every place, its children in ``stripe``."""
        up = self.up[stripe]
        below: list[list[int]] = [[] for _ in up]
        for place, parent in enumerate(up):
            if parent >= 0:
                below[parent].append(place)
        return below

    def top_down(self, stripe: int) -> list[int]:
        """Return the places of one tree, every parent before its children (in pre-order).

        It may have several roots: workers beside the line that feed a leaf.
        """
        below = self.children(stripe)
        todo = [
            place
            for place, parent in enumerate(self.up[stripe])
            if parent == ORIGIN or (parent == NO_PARENT and below[place])
        ]
        todo.reverse()
        found = []
        while todo:
            place = todo.pop()
            found.append(place)
            todo.extend(reversed(below[place]))
        return found


def build_trees(
    topology: Topology,
    workers: Sequence[PlanWorker],
    core: Sequence[int],
    stripes: int,
) -> Trees:
    """Return the trees of ``topology`` (not direct) over the places ``core`` of ``workers``."""
    if topology is Topology.CHAIN:
        return Trees([_from_parents([None, *range(len(core) - 1)], core, len(workers))], 1)
    if topology is Topology.TREE:
        parents = _tree([workers[place] for place in core])
        return Trees([_from_parents(parents, core, len(workers))], FANOUT)
    assert topology in (Topology.TREE_OF_CHAINS, Topology.MESH), topology
    weaver = _StripeTrees(stripes, len(workers))
    if not core:
        return Trees(weaver.up, stripes)
    zones = _runs(core, lambda place: (workers[place].labels.zone,))
    units = []
    for zone in zones:
        racks = _runs(zone, lambda place: rack_of(workers[place]))
        units.append(weaver.join([weaver.rack(rack, topology) for rack in racks]))
    whole = weaver.join(units)
    for stripe, root in enumerate(whole.entries):
        weaver.up[stripe][root] = ORIGIN
    return Trees(weaver.up, stripes)


def _from_parents(parents: Sequence[int | None], core: Sequence[int], count: int) -> list[int]:
    up = [NO_PARENT] * count
    for place, parent in zip(core, parents, strict=False):
        up[place] = ORIGIN if parent is None else core[parent]
    return up


def _runs(places: Iterable[int], key: Callable[[int], tuple[str, ...]]) -> list[list[int]]:
    """Return ``places`` grouped by ``key``, groups in the order in which they first appear."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for place in places:
        groups.setdefault(key(place), []).append(place)
    return list(groups.values())


# ── one stripe ───────────────────────────────────────────────────────────────────────────────────


def _tree(line: Sequence[PlanWorker]) -> list[int | None]:
    """Return a k-ary tree in pre-order: first the parent, then the rest in ``FANOUT`` parts.

    The rest is cut where a rack begins, if one does near the even cut; so the depth stays
    logarithmic and a rack is mostly fed from within.
    """
    parents: list[int | None] = [None] * len(line)
    edges = {0}
    for _, rack in groupby(range(len(line)), key=lambda place: rack_of(line[place])):
        edges.add(next(iter(rack)))
    todo: list[tuple[int, int, int | None]] = [(0, len(line), None)]
    while todo:
        start, end, parent = todo.pop()
        if start >= end:
            continue
        parents[start] = parent
        first = start + 1
        for parts in range(FANOUT, 0, -1):
            cut = _cut(first, end, parts, edges)
            todo.append((first, cut, start))
            first = cut
    return parents


def _cut(first: int, end: int, parts: int, edges: set[int]) -> int:
    """Return the end of the first of ``parts`` parts of ``[first, end)``, near a rack's edge."""
    if parts == 1:
        return end
    rest = end - first
    even = first + -(-rest // parts)
    for distance in range(rest // (2 * parts) + 1):
        for cut in (even + distance, even - distance):
            if cut in edges:
                return cut
    return even


# ── several stripes ──────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Group:
    """Workers that already forward every stripe among themselves."""

    members: list[int]
    entries: list[int]  # by stripe: the member that takes it from outside
    open: list[int]  # members with free slots

    def slots(self, free: Sequence[int]) -> int:
        return sum(free[place] for place in self.open)


class _StripeTrees:
    """Joins workers to racks, racks to zones, zones to a fleet, each time by interior-disjoint
    trees: k units of m slots each, m (k - 1) edges among them, m slots left for the level above.
    """

    def __init__(self, stripes: int, count: int) -> None:
        self.stripes = stripes
        self.up = [[NO_PARENT] * count for _ in range(stripes)]
        self._depth = [[0] * count for _ in range(stripes)]  # hops below the unit's entry
        self._free = [stripes] * count

    def rack(self, places: Sequence[int], topology: Topology) -> _Group:
        """Return ``places`` as one or more cells, joined."""
        count = len(places)
        cells = count // MIN_MESH_CELL if topology is Topology.MESH else -(-count // MAX_CELL)
        cells = max(1, cells)
        edges = [count * number // cells for number in range(cells + 1)]
        return self.join([self.cell(places[first:stop]) for first, stop in pairwise(edges)])

    def cell(self, places: Sequence[int]) -> _Group:
        """Return ``places`` as chains, one a stripe, each begun at another worker."""
        count = len(places)
        entries = []
        for stripe in range(self.stripes):
            start = stripe * count // self.stripes
            turned = [*places[start:], *places[:start]]
            entries.append(turned[0])
            for step in range(1, count):
                self.up[stripe][turned[step]] = turned[step - 1]
                self._depth[stripe][turned[step]] = step
                self._free[turned[step - 1]] -= 1
        return _Group(list(places), entries, self._open(places))

    def join(self, units: Sequence[_Group]) -> _Group:
        """Return ``units`` as one: in each stripe every unit but the first is entered once."""
        if len(units) == 1:
            return units[0]
        count, stripes = len(units), self.stripes
        slots = [unit.slots(self._free) for unit in units]
        late: list[tuple[int, int]] = []
        placed: list[list[bool]] = []
        for stripe in range(stripes):
            inner = list(range(stripe % count, count, stripes))
            into = set(inner)
            feeders = deque(inner[:1])
            within = [False] * count
            within[inner[0]] = True
            for unit in (*inner[1:], *(other for other in range(count) if other not in into)):
                while feeders and slots[feeders[0]] <= 0:
                    feeders.popleft()
                if not feeders:
                    late.append((stripe, unit))
                    continue
                self._wire(stripe, units[feeders[0]], units[unit])
                slots[feeders[0]] -= 1
                within[unit] = True
                if unit in into:
                    feeders.append(unit)
            placed.append(within)
        for stripe, unit in late:  # where units do not divide by stripes; leaves of this tree
            able = [
                other
                for other in range(count)
                if placed[stripe][other] and other != unit and slots[other] > 0
            ]
            feeder = able[0] if able else stripe % count
            self._wire(stripe, units[feeder], units[unit])
            slots[feeder] -= 1
            placed[stripe][unit] = True
        members = [place for unit in units for place in unit.members]
        entries = [units[stripe % count].entries[stripe] for stripe in range(stripes)]
        return _Group(members, entries, self._open(place for unit in units for place in unit.open))

    def _open(self, places: Iterable[int]) -> list[int]:
        return [place for place in places if self._free[place] > 0]

    def _wire(self, stripe: int, feeder: _Group, unit: _Group) -> None:
        depth = self._depth[stripe]
        able = [place for place in feeder.open if self._free[place] > 0]
        source = min(able or feeder.members, key=lambda place: (depth[place], -self._free[place]))
        entry = unit.entries[stripe]
        self.up[stripe][entry] = source
        self._free[source] -= 1
        deeper = depth[source] + 1
        for place in unit.members:
            depth[place] += deeper


# The line: the order of the workers, the places that the trees are built of, and the leaves.
#
# Workers of one rack are adjacent, racks of one zone too, so that a chain crosses into each rack
# once. The workers that hold most come first, complete workers before all, and their rack with
# them: what is held need not come from the origin again, nor cross into that rack. A plan made with
# the order of the previous one keeps every place, also those of the dead, so that a replan changes
# no more lanes than necessary.

# The standings that form the line where no worker in good standing is left.
_GOOD_ENOUGH = (
    (Standing.LINE, Standing.TAIL),
    (Standing.LINE, Standing.TAIL, Standing.QUARANTINED),
)

SLOW_LINK = 0.5  # of the median: such a link would slow down all places behind it


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """``workers`` by place: those of the line, then complete ones beside it that only feed it."""

    workers: tuple[PlanWorker, ...]
    length: int  # places below it are in the line, the others beside it
    core: tuple[int, ...]  # places that trees are built of, dead ones included
    out: tuple[bool, ...]  # by place: feeds no worker of the line (dead, slow or quarantined)
    link_mbit: float  # the median: the rate of one slot of a tree

    @property
    def beside(self) -> range:
        """Return the places of complete workers beside the line."""
        return range(self.length, len(self.workers))

    @property
    def leaves(self) -> list[int]:
        """Return the places that feed no worker of the line, fastest first, quarantined last."""
        found = [
            place for place in range(self.length) if self.out[place] and not self.is_gone(place)
        ]

        def key(place: int) -> tuple[bool, float, int]:
            worker = self.workers[place]
            return (worker.standing is Standing.QUARANTINED, -worker.link_mbit, place)

        return sorted(found, key=key)

    def is_gone(self, place: int) -> bool:
        """Return whether the worker is dead and only keeps its place."""
        return self.workers[place].standing is Standing.GONE

    def feeds(self, place: int) -> bool:
        """Return whether this worker may be a source of others."""
        return not self.out[place]


def build_line(workers: Sequence[PlanWorker], seed: int, order: Sequence[str] = ()) -> WorkerLine:
    """Return the line: first the places in ``order``, then new workers as ``sort_for_line`` sorts
    them.

    Complete workers that ``order`` does not name are beside the line and only feed it. Where no
    worker in good standing is left, the slow ones form the line, else the quarantined.
    """
    middle = median(worker.link_mbit for worker in workers)
    known = {worker.worker_id: worker for worker in workers}
    line = [known[worker_id] for worker_id in dict.fromkeys(order) if worker_id in known]
    named = {worker.worker_id for worker in line}
    living = [each for each in workers if each.standing is not Standing.GONE]
    rest = sort_for_line([each for each in living if each.worker_id not in named], seed)
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
    return WorkerLine(places, len(line), core, tuple(out), middle)


def next_order(order: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """Return the ``order`` for the plan after ``plan``: no worker ever leaves it, new ones follow.

    Workers without lanes (complete before they had a place) stay beside the line.
    """
    known = set(order)
    new = [each.worker_id for each in plan.workers if each.lanes and each.worker_id not in known]
    return (*order, *new)


def sort_for_line(workers: Sequence[PlanWorker], seed: int) -> list[PlanWorker]:
    """Return ``workers`` in the order of the line; the same set and seed give the same order.

    Seed 0 sorts names in natural order; other seeds shuffle zones, racks, hosts and workers (each
    within its group), so that two models do not load the same head.
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
    most: list[dict[tuple[str, ...], int]] = []  # most pieces held by one worker of each group
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
