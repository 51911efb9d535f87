"""Where the time of a job went: each second in exactly one account, so that they sum to the wall.

A pure object: times go in, accounts come out. Work that a failure undid moves from ``productive``
to ``lost_work`` when the job resumes before it. A lost step that ended only after the failure was
found is no work: a frozen rank goes on for a moment, so that it can say where it was, and what then
ends is a step that its peers had waited in. That time is ``detection``, and ``restart`` from the
finding on.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from paceline.wire.training import TimeLedger

STEPS_KEPT = 100_000  # of which a later resume could still say that they were lost
ACCOUNTS = (
    "start",
    "productive",
    "data_wait",
    "checkpoint_stall",
    "lost_work",
    "detection",
    "restart",
    "finish",
)


class _Step(NamedTuple):
    number: int
    began: float
    ended: float
    worked: float
    waited: float
    stalled: float


class Ledger:
    """The accounts of one job, from ``now`` on (seconds of any one clock that goes forward)."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._phase = "start"
        self._spent = dict.fromkeys(ACCOUNTS, 0.0)
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._first_step: float | None = None
        self._last_step: float | None = None
        self._found_at = math.inf  # a failure, until the job resumes after it

    def stepped(
        self, now: float, step: int, *, seconds: float, data_wait_s: float, stall_s: float
    ) -> None:
        """A step ended that took ``seconds``, of which it waited and stalled so long."""
        passed = self._take(now)
        own = min(passed, max(0.0, seconds))
        if self._phase != "productive":  # what came before the first step of an attempt
            self._spent[self._phase] += passed - own
            passed = own
            if self._first_step is None:
                self._first_step = now - own
        waited = min(passed, max(0.0, data_wait_s))
        stalled = min(passed - waited, max(0.0, stall_s))
        worked = passed - waited - stalled
        self._spent["data_wait"] += waited
        self._spent["checkpoint_stall"] += stalled
        self._spent["productive"] += worked
        self._steps.append(_Step(step, now - passed, now, worked, waited, stalled))
        self._phase, self._last_step = "productive", now

    def noticed(self, now: float, found_at: float | None = None) -> None:
        """The gang is gone whose failure was found at ``found_at`` (``now`` where it is not known).

        Since the last word before that it may have been dead.
        """
        found_at = min(now, now if found_at is None else found_at)
        self._found_at = min(self._found_at, found_at)  # the next attempt may not resume either
        account = "detection" if self._phase == "productive" else self._phase
        until_found = max(0.0, found_at - self._last)
        self._spent[account] += until_found
        self._spent["restart"] += self._take(now) - until_found
        self._phase = "restart"

    def stopping(self, now: float) -> None:
        """The gang ended as asked: nothing was to be detected."""
        self._spent["restart"] += self._take(now)
        self._phase = "restart"

    def resumed(self, step: int) -> None:
        """The job goes on after ``step``: what was done beyond it is lost."""
        while self._steps and self._steps[-1].number > step:
            lost = self._steps.pop()
            self._spent["productive"] -= lost.worked
            if lost.ended <= self._found_at:
                self._spent["lost_work"] += lost.worked
                continue
            self._spent["data_wait"] -= lost.waited
            self._spent["checkpoint_stall"] -= lost.stalled
            found_at = max(lost.began, self._found_at)
            self._spent["detection"] += found_at - lost.began
            self._spent["restart"] += lost.ended - found_at
        self._found_at = math.inf

    def finished(self, now: float) -> TimeLedger:
        """Return the accounts, closed at ``now``."""
        self._spent["finish"] += self._take(now)
        wall = now - self._began
        trained = (self._last_step or now) - (self._first_step or self._began)
        productive = max(0.0, self._spent["productive"])
        return TimeLedger(
            **{f"{name}_s": max(0.0, seconds) for name, seconds in self._spent.items()},
            wall_s=wall,
            goodput=min(1.0, productive / trained) if trained > 0 else 0.0,
        )

    def _take(self, now: float) -> float:
        passed = max(0.0, now - self._last)
        self._last = max(now, self._last)
        return passed
