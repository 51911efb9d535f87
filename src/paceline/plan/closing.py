"""Closing up: when somebody drops out of the trees, who feeds those behind him.

One orphan of X in a stripe goes on with X's own source there; the others go to X's sources in the
other stripes, each of which has just lost a child of the same rate and passes this stripe's bytes
to nobody. Nobody is told to ask those who are fed by him. The same rule makes the first spare of
every lane, so that what a worker does by itself is what the next plan will say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from paceline.plan.trees import NOWHERE, ORIGIN, Trees

_LOOSE = -3  # an orphan that is not yet adopted
_LOOKED_AT = 64  # places whose free slots are looked at where the rule finds nobody


def match(
    orphans: Sequence[int],
    source: int,
    others: Sequence[int],
    above: Callable[[int], int | None],
) -> dict[int, int | None]:
    """Return who adopts each of ``orphans``: one the ``source`` of him who is gone (it may be
    ORIGIN), the others one of ``others`` each; None where no one is left.

    ``above(place)`` is the orphan above a place in this stripe, or None. Following adopters up
    never comes back to the orphan.
    """
    left: dict[int, int | None] = {other: above(other) for other in dict.fromkeys(others)}
    left.pop(source, None)
    owned = list(left.values())
    first = max(orphans, key=lambda orphan: (owned.count(orphan), -orphans.index(orphan)))
    adopted: dict[int, int | None] = {first: source}
    over: dict[int, int | None] = {first: None}  # the orphan above each adopted one

    def leads_to(orphan: int, start: int | None) -> bool:
        step = start
        while step is not None:
            if step == orphan:
                return True
            step = over.get(step)
        return False

    for orphan in orphans:
        if orphan == first:
            continue
        taker = next((each for each, top in left.items() if not leads_to(orphan, top)), None)
        adopted[orphan] = taker
        if taker is not None:
            over[orphan] = left.pop(taker)
    return adopted


def close_up(trees: Trees, out: Sequence[bool]) -> Trees:
    """Return ``trees`` without the places that are ``out``; only their orphans take from others
    than before. Each stripe is still begun at the origin by one.
    """
    if not any(out[place] for up in trees.up for place, above in enumerate(up) if above != NOWHERE):
        return trees
    return _Closing(trees, out).run()


class _Closing:
    def __init__(self, trees: Trees, out: Sequence[bool]) -> None:
        self._base = trees
        self._out = out
        self._up = [list(up) for up in trees.up]
        self._below = [trees.children(stripe) for stripe in range(len(trees.up))]
        self._free = [trees.slots] * len(out)
        for up in trees.up:
            for place, parent in enumerate(up):
                if parent >= 0 and not out[place]:
                    self._free[parent] -= 1

    def run(self) -> Trees:
        for stripe in range(len(self._up)):
            for place in self._base.top_down(stripe):
                if self._out[place]:
                    self._remove(stripe, place)
        return Trees(self._up, self._base.slots)

    def _remove(self, stripe: int, place: int) -> None:
        up, below = self._up[stripe], self._below[stripe]
        source = up[place]
        up[place] = NOWHERE
        if source >= 0:
            below[source].remove(place)
            if self._base.up[stripe][place] != source:
                self._free[source] += 1  # the slot that it took as an orphan
        orphans, below[place] = below[place], []
        if not orphans:
            return
        for orphan in orphans:
            up[orphan] = _LOOSE
        # What has lost a child in place: its sources elsewhere, as long as they have that slot.
        others = [
            other
            for number, elsewhere in enumerate(self._base.up)
            if number != stripe and (other := elsewhere[place]) >= 0 and self._has_slot(other)
        ]
        adopted = match(orphans, source, others, lambda other: self._top(stripe, other))
        # First those with an adopter: whoever is left must not end up below himself.
        for orphan, adopter in sorted(adopted.items(), key=lambda item: item[1] is None):
            self._attach(stripe, orphan, self._settle(stripe, orphan, adopter, adopted))

    def _settle(
        self, stripe: int, orphan: int, adopter: int | None, adopted: Mapping[int, int | None]
    ) -> int:
        if adopter is not None:
            return adopter
        first = next(iter(adopted))
        source = adopted[first]
        start = first if source is None or source == ORIGIN else source
        for place in self._around(stripe, start):
            if self._has_slot(place):
                return place
        free = (place for place in range(len(self._out)) if self._has_slot(place))
        for place in islice(free, _LOOKED_AT):
            if self._top(stripe, place) != orphan and self._base.up[stripe][place] != NOWHERE:
                return place
        return start

    def _around(self, stripe: int, start: int) -> list[int]:
        """Return the nearest places below ``start``; loose orphans are not among them."""
        found = [start]
        for at in range(_LOOKED_AT):
            if at >= len(found):
                break
            found.extend(self._below[stripe][found[at]])
        return found

    def _has_slot(self, place: int) -> bool:
        return not self._out[place] and self._free[place] > 0

    def _top(self, stripe: int, place: int) -> int | None:
        """Return the loose orphan above ``place`` (or itself), or None below the origin."""
        up = self._up[stripe]
        while (parent := up[place]) >= 0:
            place = parent
        return place if parent == _LOOSE else None

    def _attach(self, stripe: int, orphan: int, source: int) -> None:
        self._up[stripe][orphan] = source
        if source >= 0:
            self._below[stripe][source].append(orphan)
            if not self._out[orphan] or self._base.up[stripe][orphan] != source:
                self._free[source] -= 1
