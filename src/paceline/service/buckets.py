"""Token buckets: how often somebody may call, in bounded memory.

Used by the event loop's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MOST = 20_000  # whom it remembers; who was forgotten begins with a full bucket


class Buckets:
    """One bucket for each key: ``rate`` calls a second, ``burst`` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        assert rate > 0
        self.rate, self.burst = rate, max(1.0, burst)
        self._held: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, key: Hashable, now_s: float, cost: float = 1.0) -> float:
        """Take ``cost`` calls of ``key``; return 0, or in how many seconds there are as many."""
        left, at_s = self._held.get(key, (self.burst, now_s))
        left = min(self.burst, left + max(0.0, now_s - at_s) * self.rate)
        wait_s = 0.0 if left >= cost else (cost - left) / self.rate
        self._held[key] = (left if wait_s else left - cost, now_s)
        self._held.move_to_end(key)
        while len(self._held) > MOST:
            self._held.popitem(last=False)
        return wait_s
