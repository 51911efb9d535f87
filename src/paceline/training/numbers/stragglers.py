"""Which ranks hold the others up: a pure function over seconds of their own work.

In synchronous training every rank's step takes as long as the slowest one's, so step times tell
nothing. What is compared is the time a rank worked before it had to wait for anybody
(``paceline.training.numbers.busy``).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 50  # steps
FEWEST = 10  # steps, before anybody is named
FACTOR = 1.3  # times the others' median
SPREADS = 5.0  # robust standard deviations above the others, too
NORMAL = 1.4826


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    seconds: float  # of its own work a step, median
    others: float  # the same of the other ranks

    @property
    def factor(self) -> float:
        """Return how many times as long as the others it takes."""
        return self.seconds / self.others if self.others else float("inf")


def stragglers(steps: Sequence[Sequence[float]], factor: float = FACTOR) -> list[Straggler]:
    """Return the slow ranks, slowest first; ``steps`` has each step's seconds by rank.

    A rank is judged by its median over the steps, against the median of the OTHER ranks' medians,
    so that one of two can be named; it must be ``factor`` times as slow and stand out of the
    others' spread. Nobody is named in fewer than ``FEWEST`` steps or in a gang of one.
    """
    if len(steps) < FEWEST or len(steps[0]) < 2:
        return []
    typical = [statistics.median(column) for column in zip(*steps, strict=True)]
    ordered = sorted(typical)
    found = []
    for rank, seconds in enumerate(typical):
        if seconds <= ordered[len(ordered) // 2] and len(ordered) > 2:
            continue  # not even above the middle: spares a thousand ranks the work below
        others = typical[:rank] + typical[rank + 1 :]
        middle = statistics.median(others)
        spread = NORMAL * statistics.median(abs(each - middle) for each in others)
        if seconds > factor * middle and seconds > middle + SPREADS * spread:
            found.append(Straggler(rank, seconds, middle))
    return sorted(found, key=lambda each: -each.factor)


@dataclass
class Window:
    """The last steps' seconds by rank."""

    steps: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: Sequence[float]) -> None:
        """Take one step's seconds, one for each rank."""
        self.steps.append(tuple(seconds))

    def stragglers(self) -> list[Straggler]:
        """Return who is slow now."""
        return stragglers(self.steps)
