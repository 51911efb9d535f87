"""Checkpoint interval: every n steps, every n seconds, or computed from cost and failure rate.

Pure decisions from measured costs; the caller passes the time. Rank 0 decides for all ranks. Does
not access a store or tensors. All times in seconds.

``auto`` follows Young (1974) and Daly (2006): with a save that blocks training for δ and a mean
time M between failures, an interval of √(2δM) − δ minimises the lost time. The background part of
a save does not block training and is only a lower bound: at most one save is in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.config import CheckpointSettings

DAY_S = 86_400.0
PRIOR_S = 3_600.0  # weight of the profile's failure rate, as observed time
WRITE_SHARE = 0.8  # largest share of the interval that a background write may take
SLOW_FACTOR, SLOW_FLOOR_S = 3.0, 1.0  # slow storage: over 3 x the median and over 1 s
KEEP_STEPS, KEEP_SAVES = 50, 9  # measurements kept
TRUSTED_STALLS = 3  # with fewer, one interrupted save could double the interval


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """Measured costs in seconds."""

    step_s: float  # median
    stall_s: float  # median time that a save blocks training
    write_s: float  # background time of a save: the slower of the last two
    saves: int = TRUSTED_STALLS  # number of saves measured


@dataclass(frozen=True)
class FailureCount:
    """Failures of the job so far, and the seconds over which they were counted."""

    count: int = 0
    over_s: float = 0.0


@dataclass(frozen=True)
class CheckpointAlert:
    """A checkpoint problem to report to the user."""

    kind: str
    step: int
    message: str


def mtbf_s(per_day: float, failures: FailureCount) -> float:
    """Return the mean time between failures in seconds: the profile's until a failure is counted.

    After that, the observed rate with the profile's rate weighted as one hour of observation, so
    that one failure in the first minute does not dominate.
    """
    expected = per_day / DAY_S
    if not failures.count:
        return 1 / expected
    return (PRIOR_S + failures.over_s) / (expected * PRIOR_S + failures.count)


def best_interval_s(stall_s: float, mtbf: float) -> float:
    """Return the interval between saves with the least lost time; at least ``stall_s``."""
    if stall_s >= mtbf / 2:
        return max(stall_s, mtbf)
    return max(stall_s, math.sqrt(2 * stall_s * mtbf) - stall_s)


def least_interval_s(costs: SaveCosts, max_stall_share: float) -> float:
    """Return the shortest interval that respects the stall share and the store's write time."""
    return max(costs.stall_s / max_stall_share, costs.write_s / WRITE_SHARE)


def wanted_interval_s(
    settings: CheckpointSettings, costs: SaveCosts | None, failures: FailureCount
) -> float:
    """Return the seconds between saves; ``costs`` is None until a save is measured."""
    if costs is None:
        return settings.every_s
    least_s = least_interval_s(costs, settings.max_stall_share)
    if settings.interval == "auto":
        best_s = best_interval_s(costs.stall_s, mtbf_s(settings.failures_per_day, failures))
        return max(least_s, best_s)
    return max(least_s, settings.every_s)


def wanted_steps(settings: CheckpointSettings, costs: SaveCosts | None) -> int:
    """Return the steps between saves: ``every_steps``, or a multiple where saves stall too long.

    A slow store needs no rule here: a save that is due while another is in flight is postponed.
    """
    every = settings.every_steps
    if costs is None or costs.saves < TRUSTED_STALLS or costs.step_s <= 0:
        return every
    least_s = costs.stall_s / settings.max_stall_share
    return every * max(1, math.ceil(least_s / (every * costs.step_s) - 1e-9))


class CheckpointInterval:
    """The measurements of one process and the save decisions derived from them."""

    def __init__(self, settings: CheckpointSettings, failures: FailureCount) -> None:
        self._settings = settings
        self._failures = failures
        self._by_steps = settings.interval == "steps"
        self._steps: deque[float] = deque(maxlen=KEEP_STEPS)
        self._stalls: deque[float] = deque(maxlen=KEEP_SAVES)
        self._writes: deque[float] = deque(maxlen=KEEP_SAVES)
        self._saved_at: float | None = None  # or when training began
        self._stepped_at: float | None = None
        self._slow = False

    @property
    def costs(self) -> SaveCosts | None:
        """Return the measured costs; None before the first save."""
        if not self._stalls or not self._steps:
            return None
        stalls = self._usual(self._stalls)  # the first save allocates buffers and is not typical
        writes = list(self._writes)[-2:]
        return SaveCosts(
            step_s=median(self._steps),
            stall_s=median(stalls),
            write_s=max(writes, default=0.0),
            saves=len(stalls),
        )

    @property
    def expected_s(self) -> float | None:
        """Return the expected seconds between completed saves; None until a step is measured."""
        if not self._steps:
            return None
        costs, settings, step_s = self.costs, self._settings, median(self._steps)
        wanted_s = (
            wanted_steps(settings, costs) * step_s
            if self._by_steps
            else wanted_interval_s(settings, costs, self._failures)
        )
        return max(wanted_s, step_s, costs.write_s if costs else 0.0)

    def stepped(self, now: float) -> None:
        """Record the end of a step."""
        if self._saved_at is None:
            self._saved_at = now
        if self._stepped_at is not None:
            self._steps.append(now - self._stepped_at)
        self._stepped_at = now

    def saved(self, now: float, stall_s: float) -> None:
        """Record a save that started at ``now - stall_s`` and blocked training until ``now``."""
        self._saved_at = now - stall_s
        self._stepped_at = now
        self._stalls.append(stall_s)

    def written(self, step: int, seconds: float) -> CheckpointAlert | None:
        """Record the background time of a save; return an alert when it first becomes slow."""
        usual = median(self._usual(self._writes)) if len(self._writes) >= 2 else None
        # A slow save is recorded too: the median changes slowly, so persistent slowness shows.
        self._writes.append(seconds)
        if usual is None or seconds <= max(SLOW_FLOOR_S, SLOW_FACTOR * usual):
            self._slow = False
            return None
        if self._slow:
            return None
        self._slow = True
        message = f"a save took {seconds:.1f} s in the background, {usual:.1f} s is usual"
        return CheckpointAlert(
            "checkpoint-storage-slow", step, f"{message}; the interval is longer now"
        )

    def postponed(self, step: int) -> CheckpointAlert | None:
        """Record that a due save was postponed; return an alert when storage first becomes slow."""
        if self._slow:
            return None
        self._slow = True
        message = "a save was due while the one before was still being written; it was put off"
        return CheckpointAlert("checkpoint-storage-slow", step, message)

    def due(self, step: int, now: float) -> bool:
        """Return whether to save after ``step``; the next interval begins with a True."""
        if self._by_steps:
            return step % wanted_steps(self._settings, self.costs) == 0
        since = now - (self._saved_at if self._saved_at is not None else now)
        left_s = wanted_interval_s(self._settings, self.costs, self._failures) - since
        if left_s > (median(self._steps) / 2 if self._steps else 0):
            return False
        self._saved_at = now  # the save itself follows within a step
        return True

    @staticmethod
    def _usual(values: Sequence[float]) -> list[float]:
        return list(values)[1:] if len(values) > 1 else list(values)
