"""Repairs the trees when workers drop out: chooses new parents for their orphans.

One orphan of a lost worker X in a stripe continues with X's own source there; the others go to X's
sources in the other stripes, each of which has just lost a child of the same rate and forwards this
stripe to no one. No orphan gets a source that it feeds itself. The same rule makes the first spare
of every lane, so that what a worker does by itself is what the next plan contains.

Trees have few free slots, four in a mesh of any size, so all of them may be below the one orphan
that is left. It then takes the place of another orphan, which continues below it: no place ever has
more children than slots, and only places that lost their source move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from paceline.plan.trees import NO_PARENT, ORIGIN, Trees

_UNATTACHED = -3  # an orphan that is not yet adopted
_MOST_STEPS = 200  # limit of the search for adopters; four orphans need a dozen
_LOOKED_AT = 64  # places whose free slots are considered where the rule finds no adopter


def match_orphans(
    orphans: Sequence[int],
    source: int,
    others: Sequence[int],
    above: Callable[[int], int | None],
) -> dict[int, int | None]:
    """Return the adopter of each of ``orphans``: for one the ``source`` of the lost place (it may
    be ORIGIN), for the others one of ``others`` each; None where none is left.

    ``above(place)`` is the orphan above a place in this stripe, or None. Adoption makes no cycle:
    the path from an adopter upwards never returns to its orphan.
    """
    tops = [above(other) for other in others]
    # The orphan that has most of ``others`` below itself can use the fewest: it gets the source.
    first, *rest = sorted(orphans, key=lambda orphan: -tops.count(orphan))
    matching = _Matching(rest, tops)
    spare = max(0, len(rest) - len(others))
    while not matching.assign(0, spare):
        spare += 1
    adopted = matching.adopted
    found: dict[int, int | None] = {first: source}
    for orphan in rest:
        found[orphan] = others[adopted[orphan]] if orphan in adopted else None
    return found


class _Matching:
    """The search for adopters. An object and no closure: a function that calls itself is a
    reference cycle, which kept each plan's trees in memory until garbage was collected.
    """

    def __init__(self, orphans: Sequence[int], tops: Sequence[int | None]) -> None:
        self._orphans = orphans
        self._tops = tops
        self._steps = 0
        self.adopted: dict[int, int] = {}  # orphan → index in the others

    def assign(self, at: int, spare: int) -> bool:
        """Choose adopters for the orphans from number ``at`` on, for all but ``spare`` of them."""
        if at == len(self._orphans):
            return True
        orphan, adopted = self._orphans[at], self.adopted
        for number, top in enumerate(self._tops):
            self._steps += 1
            if (
                number in adopted.values()
                or self._leads_to(orphan, top)
                or self._steps > _MOST_STEPS
            ):
                continue
            adopted[orphan] = number
            if self.assign(at + 1, spare):
                return True
            del adopted[orphan]
        return spare > 0 and self.assign(at + 1, spare - 1)

    def _leads_to(self, orphan: int, start: int | None) -> bool:
        while start is not None:
            if start == orphan:
                return True
            start = self._tops[self.adopted[start]] if start in self.adopted else None
        return False


def nearest_below(
    below: Sequence[Sequence[int]],
    start: int,
    instead: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[int]:
    """Return ``start`` and the nearest places below it, a bounded number of them.

    ``below[place]`` are the children of a place; ``instead`` replaces those of some places.
    """
    found = [start]
    for at in range(_LOOKED_AT):
        if at >= len(found):
            break
        found.extend(instead.get(found[at], below[found[at]]))
    return found


def repair_trees(trees: Trees, out: Sequence[bool]) -> Trees:
    """Return ``trees`` without the places ``out``; only their orphans get another parent."""
    if not any(
        out[place] for up in trees.up for place, above in enumerate(up) if above != NO_PARENT
    ):
        return trees
    return _TreeRepair(trees, out).run()


class _TreeRepair:
    def __init__(self, trees: Trees, out: Sequence[bool]) -> None:
        self._base = trees
        self._out = out
        self._up = [list(up) for up in trees.up]
        self._below = [trees.children(stripe) for stripe in range(len(trees.up))]
        self._fed = [[bool(below) for below in stripe] for stripe in self._below]
        self._left: dict[int, dict[int, int]] = {}
        self._moved: list[list[int]] = [[] for _ in trees.up]  # by stripe: moved places
        self._free = [trees.slots] * len(out)
        for up in trees.up:
            for place, parent in enumerate(up):
                if parent >= 0 and not out[place]:
                    self._free[parent] -= 1

    def run(self) -> Trees:
        late: list[tuple[int, int, int]] = []
        for stripe in range(len(self._up)):
            # Bottom up: where parent and child are both gone, the child's orphan takes its place.
            for place in reversed(self._base.top_down(stripe)):
                if self._out[place]:
                    late += self._remove(stripe, place)
        # Only now the unclaimed slots; first the orphans that feed most places, which can use the
        # fewest.
        for stripe, orphan, start in sorted(late, key=lambda each: -self._weight(*each[:2])):
            self._settle(stripe, orphan, start)
        return Trees(self._up, self._base.slots)

    def _remove(self, stripe: int, place: int) -> list[tuple[int, int, int]]:
        """Take ``place`` out of a tree; return (stripe, orphan, place to search from) of orphans
        left over.
        """
        up, below = self._up[stripe], self._below[stripe]
        source = up[place]
        up[place] = NO_PARENT
        if source >= 0:
            below[source].remove(place)
        orphans, below[place] = below[place], []
        if not orphans:
            return []
        for orphan in orphans:
            up[orphan] = _UNATTACHED
        # The sources of ``place`` in other stripes, where none of its own orphans needs that slot.
        slots = self._slots_left(place)
        others = list(slots.values())
        adopted = match_orphans(orphans, source, others, lambda other: self._top(stripe, other))
        start = source if source >= 0 else next(iter(adopted))
        late = []
        for at, (orphan, adopter) in enumerate(adopted.items()):
            if adopter is None:
                late.append((stripe, orphan, start))
                continue
            self._attach(stripe, orphan, adopter)
            if at:  # not the one that gets the source itself
                del slots[next(number for number, other in slots.items() if other == adopter)]
        return late

    def _slots_left(self, place: int) -> dict[int, int]:
        """Return, by stripe, the source whose slot ``place`` leaves free and none of its own
        orphans needs; the caller deletes a slot that it uses.
        """
        if place not in self._left:
            self._left[place] = {
                number: source
                for number, up in enumerate(self._base.up)
                if (source := up[place]) >= 0
                and not self._out[source]
                and not self._fed[number][place]
            }
        return self._left[place]

    def _weight(self, stripe: int, orphan: int) -> int:
        """Return how many places ``orphan`` feeds, up to the limit of the search."""
        return len(nearest_below(self._below[stripe], orphan))

    def _settle(self, stripe: int, orphan: int, start: int) -> None:
        """Attach a late ``orphan``, near ``start`` where there is a slot."""
        up = self._up[stripe]
        if up[start] == NO_PARENT:  # removed in the meantime
            start = self._root(stripe)
        below_itself: int | None = None
        for place in self._with_slots(stripe, start):
            if self._top(stripe, place) != orphan:
                self._attach(stripe, orphan, place)
                return
            below_itself = place if below_itself is None else below_itself
        if below_itself is None:
            raise RuntimeError(f"no slot is left in stripe {stripe} of {len(self._out)} places")
        self._swap_places(stripe, orphan, self._nearest_slot(stripe, orphan, below_itself))

    def _with_slots(self, stripe: int, start: int) -> Iterator[int]:
        """Yield places with a free slot: the nearest below ``start``, then some others."""
        up = self._up[stripe]
        for place in nearest_below(self._below[stripe], start):
            if self._has_slot(place):
                yield place
        free = (
            place
            for place in range(len(self._out))
            if self._has_slot(place) and up[place] != NO_PARENT
        )
        yield from islice(free, _LOOKED_AT)

    def _nearest_slot(self, stripe: int, orphan: int, known: int) -> int:
        near = nearest_below(self._below[stripe], orphan)
        return next((place for place in near if self._has_slot(place)), known)

    def _swap_places(self, stripe: int, orphan: int, slot: int) -> None:
        """Put ``orphan`` in the place of another moved one of this stripe, the one that feeds
        fewest: that one goes to ``slot``, which is below the orphan.

        There is always one: the first orphan of the lost place nearest to the origin is attached.
        """
        up = self._up[stripe]
        able = (
            other
            for other in self._moved[stripe]
            if up[other] not in (NO_PARENT, _UNATTACHED) and self._top(stripe, other) != orphan
        )
        giving = min(islice(able, _LOOKED_AT), key=lambda other: self._weight(stripe, other))
        source = up[giving]
        if source >= 0:
            self._below[stripe][source].remove(giving)
            self._free[source] += 1
        self._attach(stripe, orphan, source)
        self._attach(stripe, giving, slot)

    def _root(self, stripe: int) -> int:
        return next(place for place, source in enumerate(self._up[stripe]) if source == ORIGIN)

    def _has_slot(self, place: int) -> bool:
        return not self._out[place] and self._free[place] > 0

    def _top(self, stripe: int, place: int) -> int | None:
        """Return the unattached orphan above ``place`` (or itself), or None below the origin."""
        up = self._up[stripe]
        while (parent := up[place]) >= 0:
            place = parent
        return place if parent == _UNATTACHED else None

    def _attach(self, stripe: int, orphan: int, source: int) -> None:
        self._up[stripe][orphan] = source
        self._moved[stripe].append(orphan)
        if source >= 0:
            self._below[stripe][source].append(orphan)
            self._free[source] -= 1
