"""Alerts: figures that stay bad for too long. Pure: time comes with each figure.

An alert is raised once when its figure has been bad without a break for ``for_s`` seconds, and
cleared once when it has been good for as long as ``clear_s``. A figure that is missing says nothing
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.profile import CheckpointSettings

LEAST_UTILISATION = 0.8  # of the accelerator
MOST_DATA_WAIT = 0.1  # share of the time: more, and data starves the ranks
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
    """Whether a condition has held without a break for ``for_s`` seconds."""

    for_s: float
    clear_s: float = 30.0
    raised: bool = False
    _since: float | None = None  # since when the condition is not what ``raised`` says

    def update(self, bad: bool, now: float) -> bool:
        """Take one observation; return whether ``raised`` changed."""
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
        """Take a step's figures at ``now`` (seconds of a clock that never goes back).

        Reads utilisation, data_wait_share and checkpoint_stall_share (of the recent past, 0 to 1)
        and reduce_bytes_per_second.
        """
        self._best_bandwidth = max(
            self._best_bandwidth, figures.get("reduce_bytes_per_second", 0.0)
        )
        rules: list[tuple[AlertName, str, Callable[[float], bool], str]] = [
            (
                "low-utilisation",
                "utilisation",
                lambda value: value < LEAST_UTILISATION,
                f"accelerator utilisation {{:.0%}}, wanted {LEAST_UTILISATION:.0%}",
            ),
            (
                "data-starvation",
                "data_wait_share",
                lambda value: value > MOST_DATA_WAIT,
                f"{{:.1%}} of the time goes into waiting for data, wanted ≤ {MOST_DATA_WAIT:.0%}",
            ),
            (
                "slow-checkpoints",
                "checkpoint_stall_share",
                lambda value: value > self.max_stall_share,
                f"checkpoints stall training {{:.1%}} of the time, wanted ≤ "
                f"{self.max_stall_share:.1%}",
            ),
            (
                "slow-all-reduce",
                "reduce_bytes_per_second",
                lambda value: value * SLOW_REDUCE < self._best_bandwidth,
                f"all-reduce at {{:.3g}} bytes/s, was {self._best_bandwidth:.3g}",
            ),
        ]
        changes = []
        for name, figure, bad, message in rules:
            value = figures.get(figure)
            if value is not None and self._states[name].update(bad(value), now):
                raised = self._states[name].raised
                changes.append(AlertChange(name, raised, value, message.format(value)))
        return changes

    @property
    def raised(self) -> tuple[AlertName, ...]:
        """Return the alerts that stand."""
        return tuple(name for name, state in self._states.items() if state.raised)
