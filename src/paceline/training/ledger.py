"""Where the time of a job went: each second in exactly one account, so that they sum to the wall.

A pure object: times go in, accounts come out. Work that a failure undid moves from ``productive``
to ``lost_work`` when the job resumes before it.
"""

from __future__ import annotations

from collections import deque

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


class Ledger:
    """The accounts of one job, from ``now`` on (seconds of any one clock that goes forward)."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._phase = "start"
        self._spent = dict.fromkeys(ACCOUNTS, 0.0)
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS_KEPT)
        self._first_step: float | None = None
        self._last_step: float | None = None

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
        self._steps.append((step, worked))
        self._phase, self._last_step = "productive", now

    def noticed(self, now: float) -> None:
        """The failure was noticed; since the last word the gang may have been dead."""
        passed = self._take(now)
        self._spent["detection" if self._phase == "productive" else self._phase] += passed
        self._phase = "restart"

    def stopping(self, now: float) -> None:
        """The gang ended as asked: nothing was to be detected."""
        self._spent["restart"] += self._take(now)
        self._phase = "restart"

    def resumed(self, step: int) -> None:
        """The job goes on after ``step``: what was done beyond it is lost."""
        while self._steps and self._steps[-1][0] > step:
            _, worked = self._steps.pop()
            self._spent["productive"] -= worked
            self._spent["lost_work"] += worked

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
