"""Runs of pieces: ``Extent`` is one run, ``Extents`` an interval set of piece numbers.

Sessions, stores and transports all use these, so that 119,000 pieces cost a handful of runs instead
of 119,000 entries. Pure arithmetic: no bytes, digests or sources.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Extent(NamedTuple):
    """Pieces ``first`` up to, not including, ``stop``."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


class Extents:
    """A set of piece numbers, stored as sorted runs that neither overlap nor adjoin."""

    __slots__ = ("_firsts", "_stops", "count")

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._firsts: list[int] = []
        self._stops: list[int] = []
        self.count = 0
        for extent in extents:
            self.add(extent)

    @classmethod
    def of(cls, pieces: Iterable[int]) -> Extents:
        """Return the set of the piece numbers ``pieces``."""
        made = cls()
        for piece in pieces:
            made.add(Extent(piece, piece + 1))
        return made

    def copy(self) -> Extents:
        """Return an independent set of the same pieces."""
        made = Extents()
        made._firsts, made._stops, made.count = self._firsts[:], self._stops[:], self.count
        return made

    def add(self, extent: tuple[int, int]) -> int:
        """Add a run (an ``Extent``) and return how many of its pieces are new."""
        first, stop = extent
        if first >= stop:
            return 0
        at = bisect_right(self._firsts, first) - 1  # the run that begins at or before ``first``
        if at >= 0:  # the usual cases: already present, or it extends a run
            end = self._stops[at]
            if stop <= end:
                return 0
            if first == end and (at + 1 == len(self._firsts) or stop < self._firsts[at + 1]):
                self._stops[at] = stop
                self.count += stop - first
                return stop - first
        low = bisect_left(self._stops, first)  # the first run that ends at or after ``first``
        high = bisect_right(self._firsts, stop)  # the first run that begins after ``stop``
        if low == high:
            self._firsts.insert(low, first)
            self._stops.insert(low, stop)
            self.count += stop - first
            return stop - first
        there = sum(self._stops[low:high]) - sum(self._firsts[low:high])
        merged_first = min(first, self._firsts[low])
        merged_stop = max(stop, self._stops[high - 1])
        self._firsts[low:high] = [merged_first]
        self._stops[low:high] = [merged_stop]
        new = merged_stop - merged_first - there
        self.count += new
        return new

    def remove(self, extent: Extent) -> int:
        """Remove a run and return how many of its pieces were in the set."""
        first, stop = extent
        if first >= stop:
            return 0
        low = bisect_right(self._stops, first)
        if low < len(self._firsts) and self._firsts[low] == first and stop < self._stops[low]:
            self._firsts[low] = stop  # the usual case: the start of a run
            self.count -= stop - first
            return stop - first
        high = bisect_left(self._firsts, stop)
        if low >= high:
            return 0
        before, begin, end = self.count, self._firsts[low], self._stops[high - 1]
        if high - low == 1:
            self.count -= min(stop, end) - max(first, begin)
        else:
            there = sum(self._stops[low:high]) - sum(self._firsts[low:high])
            self.count -= there - max(0, first - begin) - max(0, end - stop)
        if begin < first and end > stop:
            self._firsts[low:high] = [begin, stop]
            self._stops[low:high] = [first, end]
        elif begin < first:
            self._firsts[low:high] = [begin]
            self._stops[low:high] = [first]
        elif end > stop:
            self._firsts[low:high] = [stop]
            self._stops[low:high] = [end]
        else:
            del self._firsts[low:high], self._stops[low:high]
        return before - self.count

    def __contains__(self, piece: int) -> bool:
        at = bisect_right(self._firsts, piece) - 1
        return at >= 0 and piece < self._stops[at]

    def __iter__(self) -> Iterator[Extent]:
        return map(Extent, self._firsts, self._stops)

    def __bool__(self) -> bool:
        return self.count > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Extents):
            return NotImplemented
        return self._firsts == other._firsts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Extents({', '.join(f'{a}-{b - 1}' for a, b in self)})"

    @property
    def runs(self) -> int:
        """Return the number of runs that the set is stored as."""
        return len(self._firsts)

    def pieces(self) -> Iterator[int]:
        for first, stop in self:
            yield from range(first, stop)

    def covers(self, extent: Extent) -> bool:
        """Return whether every piece of ``extent`` is in the set."""
        if extent.first >= extent.stop:
            return True
        at = bisect_right(self._firsts, extent.first) - 1
        return at >= 0 and extent.stop <= self._stops[at]

    def gaps(self, within: Extent) -> Iterator[Extent]:
        """Yield the runs of ``within`` that are not in the set, in order."""
        at = within.first
        for index in range(bisect_right(self._stops, within.first), len(self._firsts)):
            first, stop = self._firsts[index], self._stops[index]
            if first >= within.stop:
                break
            if first > at:
                yield Extent(at, first)
            at = stop
        if at < within.stop:
            yield Extent(at, within.stop)

    def common(self, within: Extent) -> Iterator[Extent]:
        """Yield the runs of ``within`` that are in the set, in order."""
        for index in range(bisect_right(self._stops, within.first), len(self._firsts)):
            first, stop = self._firsts[index], self._stops[index]
            if first >= within.stop:
                break
            yield Extent(max(first, within.first), min(stop, within.stop))
