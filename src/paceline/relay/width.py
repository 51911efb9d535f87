"""How many ranges of the origin to read at once, learned from what they bring.

One connection of an object store carries a fraction of a fast link; on a slow link several only get
into each other's way. Pure arithmetic over bytes and a time that somebody else keeps.
"""

from __future__ import annotations

FEWEST = 2  # one asks while the other one reads
MOST = 16
LOOK_S = 0.5
WORTH_IT = 1.25  # what twice as many must bring
ENOUGH = 0.9  # of what the plan counts on: more would come out of other readers' share
HOLD_S = 10.0  # until the next try after one in vain, then twice that, …


class Width:
    """Twice as many ranges for as long as that brings a quarter more.

    And only below the rate that the plan counts on: where several workers share the origin's link,
    each would get more by more connections, all of them together nothing.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, min(MOST, most))
        self.now = min(FEWEST, self._most)
        self.rate = 0.0  # bytes per second over the last look; 0: not known yet
        self._trial: tuple[int, float] | None = None  # ranges and rate before it
        self._hold_s = HOLD_S
        self._try_at_s = float("-inf")
        self._looks_from_s: float | None = None
        self._bytes = 0

    def arrived(self, count: int, now_s: float, expected_rate: float = 0.0) -> bool:
        """Count bytes; return whether ``now`` has changed.

        ``expected_rate`` is the plan's, in bytes per second; 0: unknown.
        """
        if self._looks_from_s is None:
            self._looks_from_s = now_s + LOOK_S  # connections are young: what they bring grows
        if now_s < self._looks_from_s:
            return False
        self._bytes += count
        took_s = now_s - self._looks_from_s
        if took_s < LOOK_S:
            return False
        self.rate = self._bytes / took_s
        self._bytes, self._looks_from_s = 0, now_s
        was = self.now
        if self._trial is not None:
            fewer, rate = self._trial
            self._trial = None
            if self.rate < WORTH_IT * rate:
                self.now, self._try_at_s = fewer, now_s + self._hold_s
                self._hold_s *= 2
                return True
            self._hold_s = HOLD_S
        enough = 0 < ENOUGH * expected_rate <= self.rate
        if self.now < self._most and now_s >= self._try_at_s and not enough:
            self._trial = self.now, self.rate
            self.now = min(2 * self.now, self._most)
        return self.now != was
