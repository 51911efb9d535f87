"""When to save: every so many steps, every so many seconds, or as failures make it pay.

Pure decisions from measured costs; time is handed in. Rank 0 decides and tells the others. Knows no
store and no tensors.

``auto`` follows Young (1974) and Daly (2006): with a save that blocks training for δ and a mean
time M between failures, an interval of √(2δM) − δ loses least. What a save takes in the background
costs no training and enters as a lower bound only: one save is in flight at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.config import CheckpointSettings

DAY_S = 86_400.0
PRIOR_S = 3_600.0  # for which the profile's rate counts as seen
LOOK_AHEAD = 0.8  # of the time that is left, before the clock is looked at again
MOST_STEPS_AHEAD = 10_000
WRITE_SHARE = 0.8  # of the interval that a save may take in the background
SLOW_FACTOR, SLOW_FLOOR_S = 3.0, 1.0  # times the usual, and at least that long: storage is slow
KEEP_STEPS, KEEP_SAVES = 50, 9  # how many measurements count
TRUSTED_STALLS = 3  # before them one interrupted save could double the interval


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured, in seconds."""

    step_s: float  # median
    stall_s: float  # median time that a save blocks training
    write_s: float  # how long a save takes in the background, by the slower of the last two
    saves: int = TRUSTED_STALLS  # how many of them were measured


@dataclass(frozen=True)
class Failures:
    """What the job has seen so far."""

    count: int = 0
    over_s: float = 0.0


@dataclass(frozen=True)
class Alert:
    """Something about checkpoints that a person should know."""

    kind: str
    step: int
    message: str


def mtbf_s(per_day: float, failures: Failures) -> float:
    """Return the mean time between failures: as the profile expects until some were seen.

    From then on it is what was seen, with that expectation as an hour's worth of it, so that one
    failure in the first minute does not decide alone.
    """
    expected = per_day / DAY_S
    if not failures.count:
        return 1 / expected
    return (PRIOR_S + failures.over_s) / (expected * PRIOR_S + failures.count)


def best_interval_s(stall_s: float, mtbf: float) -> float:
    """Return the interval between saves that loses least; at least ``stall_s``."""
    if stall_s >= mtbf / 2:
        return max(stall_s, mtbf)
    return max(stall_s, math.sqrt(2 * stall_s * mtbf) - stall_s)


def least_interval_s(costs: Costs, max_stall_share: float) -> float:
    """Return the shortest interval that neither stalls too much nor outruns the store."""
    return max(costs.stall_s / max_stall_share, costs.write_s / WRITE_SHARE)


def wanted_interval_s(
    settings: CheckpointSettings, costs: Costs | None, failures: Failures
) -> float:
    """Return the seconds between saves; ``costs`` is None until a save was measured."""
    if costs is None:
        return settings.every_s
    least_s = least_interval_s(costs, settings.max_stall_share)
    if settings.interval == "auto":
        best_s = best_interval_s(costs.stall_s, mtbf_s(settings.failures_per_day, failures))
        return max(least_s, best_s)
    return max(least_s, settings.every_s)


def wanted_steps(settings: CheckpointSettings, costs: Costs | None) -> int:
    """Return the steps between saves: ``every_steps``, or a multiple where saves stall too much.

    A store that is slow needs no rule here: a save that finds another in flight is put off.
    """
    every = settings.every_steps
    if costs is None or costs.saves < TRUSTED_STALLS or costs.step_s <= 0:
        return every
    least_s = costs.stall_s / settings.max_stall_share
    return every * max(1, math.ceil(least_s / (every * costs.step_s) - 1e-9))


class Interval:
    """What was measured in one process, and the decisions from it."""

    def __init__(self, settings: CheckpointSettings, failures: Failures) -> None:
        self._settings = settings
        self._failures = failures
        self._steps: deque[float] = deque(maxlen=KEEP_STEPS)
        self._stalls: deque[float] = deque(maxlen=KEEP_SAVES)
        self._writes: deque[float] = deque(maxlen=KEEP_SAVES)
        self._saved_at: float | None = None  # or when training began
        self._stepped_at: float | None = None
        self._slow = False

    @property
    def by_steps(self) -> bool:
        """Return whether the decision needs no clock."""
        return self._settings.interval == "steps"

    @property
    def costs(self) -> Costs | None:
        """Return what was measured, or None before a save was."""
        if not self._stalls or not self._steps:
            return None
        stalls = self._usual(self._stalls)  # the first makes buffers and is no measure of the next
        writes = list(self._writes)[-2:]
        return Costs(
            step_s=median(self._steps),
            stall_s=median(stalls),
            write_s=max(writes, default=0.0),
            saves=len(stalls),
        )

    @property
    def expected_s(self) -> float | None:
        """Return the seconds from one save that is kept to the next; None before a step's length is
        known.
        """
        if not self._steps:
            return None
        costs, settings, step_s = self.costs, self._settings, median(self._steps)
        wanted_s = (
            wanted_steps(settings, costs) * step_s
            if self.by_steps
            else wanted_interval_s(settings, costs, self._failures)
        )
        return max(wanted_s, step_s, costs.write_s if costs else 0.0)

    def stepped(self, now: float) -> None:
        """Take note of a step's end."""
        if self._saved_at is None:
            self._saved_at = now
        if self._stepped_at is not None:
            self._steps.append(now - self._stepped_at)
        self._stepped_at = now

    def saved(self, now: float, stall_s: float) -> None:
        """Take note of a save that was started at ``now - stall_s`` and blocked until ``now``."""
        self._saved_at = now - stall_s
        self._stepped_at = now
        self._stalls.append(stall_s)

    def written(self, step: int, seconds: float) -> Alert | None:
        """Take note of how long a save took in the background; return an alert where that is new
        and much longer than usual.
        """
        usual = median(self._usual(self._writes)) if len(self._writes) >= 2 else None
        slow = usual is not None and seconds > max(SLOW_FLOOR_S, SLOW_FACTOR * usual)
        if not slow or usual is None:
            self._writes.append(seconds)
            self._slow = False
            return None
        # What is usual changes slowly, so that a store that stays slow does not go unnoticed.
        self._writes.append(seconds)
        if self._slow:
            return None
        self._slow = True
        message = f"a save took {seconds:.1f} s in the background, {usual:.1f} s is usual"
        return Alert("checkpoint-storage-slow", step, f"{message}; the interval is longer now")

    def put_off(self, step: int) -> Alert | None:
        """Take note of a due save that found one in flight; return an alert where that is new."""
        if self._slow:
            return None
        self._slow = True
        message = "a save was due while the one before was still being written; it was put off"
        return Alert("checkpoint-storage-slow", step, message)

    def next_step(self, step: int) -> int:
        """Return the next step after ``step`` to save at, or at which to ``ask``."""
        if not self.by_steps:
            return step + 1
        every = wanted_steps(self._settings, self.costs)
        return (step // every + 1) * every

    def ask(self, step: int, now: float) -> tuple[bool, int]:
        """Return whether to save after ``step``, and the step at which to ask again."""
        if self.by_steps:
            every = wanted_steps(self._settings, self.costs)
            return step % every == 0, self.next_step(step)
        since = now - (self._saved_at if self._saved_at is not None else now)
        left_s = wanted_interval_s(self._settings, self.costs, self._failures) - since
        if not self._steps:
            return left_s <= 0, step + 1
        step_s = max(median(self._steps), 1e-6)
        if left_s <= step_s / 2:
            return True, step + 1
        ahead = min(MOST_STEPS_AHEAD, max(1, int(LOOK_AHEAD * left_s / step_s)))
        return False, step + ahead

    @staticmethod
    def _usual(values: Sequence[float]) -> list[float]:
        return list(values)[1:] if len(values) > 1 else list(values)
