"""Alerts on metrics that stay bad for too long, and straggler detection. Pure: the caller has the
clock.

An alert is raised once when its metric has been bad without a break for ``for_s`` seconds, and
cleared once when it has been good for ``clear_s``. A missing metric changes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.config import CheckpointSettings

LEAST_UTILISATION = 0.8  # of the accelerator
MOST_DATA_WAIT = 0.1  # share of the time; above it, ranks starve for data
SLOW_REDUCE = 3.0  # times the best all-reduce bandwidth seen
LONG_S = 300.0
SHORT_S = 60.0

AlertName = Literal["low-utilisation", "data-starvation", "slow-checkpoints", "slow-all-reduce"]


@dataclass(frozen=True)
class AlertChange:
    """An alert that was raised or cleared."""

    name: AlertName
    raised: bool
    value: float
    message: str


@dataclass
class Sustained:
    """A condition that must hold without a break for ``for_s`` seconds."""

    for_s: float
    clear_s: float = 30.0
    raised: bool = False
    _since: float | None = None  # since when the condition differs from ``raised``

    def update(self, bad: bool, now: float) -> bool:
        """Record one observation; return whether ``raised`` changed."""
        if bad == self.raised:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < (self.clear_s if self.raised else self.for_s):
            return False
        self.raised, self._since = bad, None
        return True


@dataclass
class Alerts:
    """The alerts of one rank."""

    max_stall_share: float = CheckpointSettings().max_stall_share
    _states: dict[AlertName, Sustained] = field(
        default_factory=lambda: {
            "low-utilisation": Sustained(LONG_S),
            "data-starvation": Sustained(SHORT_S),
            "slow-checkpoints": Sustained(SHORT_S),
            "slow-all-reduce": Sustained(SHORT_S),
        }
    )
    _best_bandwidth: float = 0.0

    def update(self, figures: Mapping[str, float], now: float) -> list[AlertChange]:
        """Record a step's metrics at ``now`` (seconds of a monotonic clock); return the changes.

        Reads utilisation, data_wait_share and checkpoint_stall_share (of the recent past, 0 to 1)
        and reduce_bytes_per_second.
        """
        self._best_bandwidth = max(
            self._best_bandwidth, figures.get("reduce_bytes_per_second", 0.0)
        )
        best, stall = self._best_bandwidth, self.max_stall_share
        rules: list[tuple[AlertName, str, Callable[[float], bool], str]] = [
            ("low-utilisation", "utilisation", lambda value: value < LEAST_UTILISATION,
             f"accelerator utilisation {{:.0%}}, wanted {LEAST_UTILISATION:.0%}"),
            ("data-starvation", "data_wait_share", lambda value: value > MOST_DATA_WAIT,
             f"{{:.1%}} of the time goes into waiting for data, wanted ≤ {MOST_DATA_WAIT:.0%}"),
            ("slow-checkpoints", "checkpoint_stall_share", lambda value: value > stall,
             f"checkpoints stall training {{:.1%}} of the time, wanted ≤ {stall:.1%}"),
            ("slow-all-reduce", "reduce_bytes_per_second", lambda value: value * SLOW_REDUCE < best,
             f"all-reduce at {{:.3g}} bytes/s, was {best:.3g}"),
        ]  # fmt: skip
        changes = []
        for name, figure, bad, message in rules:
            value = figures.get(figure)
            if value is not None and self._states[name].update(bad(value), now):
                raised = self._states[name].raised
                changes.append(AlertChange(name, raised, value, message.format(value)))
        return changes

    @property
    def raised(self) -> tuple[AlertName, ...]:
        """Return the raised alerts."""
        return tuple(name for name, state in self._states.items() if state.raised)


# Stragglers: the ranks that slow down the others. In synchronous training every rank's step takes
# as long as the slowest one's, so step times show nothing; the detector compares the time that each
# rank worked before it had to wait for another (``metrics.device.Busy``).

WINDOW = 50  # steps
FEWEST = 10  # steps before a straggler is reported
FACTOR = 1.3  # times the median of the others
SPREADS = 5.0  # robust standard deviations above the others; both must hold
NORMAL = 1.4826


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    seconds: float  # median of its own work a step
    others: float  # the same of the other ranks

    @property
    def factor(self) -> float:
        """Return its time as a multiple of the others' time."""
        return self.seconds / self.others if self.others else float("inf")


def stragglers(steps: Sequence[Sequence[float]]) -> list[Straggler]:
    """Return the slow ranks, slowest first; ``steps`` has each step's seconds by rank.

    A rank's median over the steps is compared with the median of the OTHER ranks' medians, so that
    one of two ranks can be reported; it must be ``FACTOR`` times as slow and outside the others'
    spread. Returns [] for fewer than ``FEWEST`` steps or a gang of one.
    """
    if len(steps) < FEWEST or len(steps[0]) < 2:
        return []
    typical = [statistics.median(column) for column in zip(*steps, strict=True)]
    ordered = sorted(typical)
    found = []
    for rank, seconds in enumerate(typical):
        if seconds <= ordered[len(ordered) // 2] and len(ordered) > 2:
            continue  # not above the median: skips the O(n) work below for most ranks
        others = typical[:rank] + typical[rank + 1 :]
        middle = statistics.median(others)
        spread = NORMAL * statistics.median(abs(each - middle) for each in others)
        if seconds > FACTOR * middle and seconds > middle + SPREADS * spread:
            found.append(Straggler(rank, seconds, middle))
    return sorted(found, key=lambda each: -each.factor)
