"""A virtual clock, and what is to happen when."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Time passes only when somebody says so; what is due at one time happens in its order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` after a virtual while."""
        self.at(self.now_s + delay_s, what)

    @property
    def next_s(self) -> float:
        """Return when something is due next; inf for never."""
        return self._heap[0][0] if self._heap else float("inf")

    def happen(self, until_s: float, then: Callable[[], None]) -> None:
        """Do everything that is due by then, and ``then`` after each."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, what = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, at_s)
            what()
            then()
