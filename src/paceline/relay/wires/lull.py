"""Letting bytes gather before they are read: few wake-ups, few acknowledgements.

On a link that is slower than this process every segment would wake the reader, and each read makes
the kernel acknowledge: with 8 hosts at 50 Mbit/s that cost a third of the CPU, and acknowledgements
took 2.5 % of links that carry the model in both directions. A reader sleeps for about as long as
its next block takes instead; SO_RCVLOWAT cannot do that, because below its mark the kernel
acknowledges every other segment. On fast links it never sleeps. It knows no sockets.
"""

from __future__ import annotations

import time

LONGEST_S = 0.03  # below the 40 ms after which the kernel acknowledges by itself
SHORTEST_S = 0.0005  # a shorter sleep costs more than it saves
SHARE = 0.95  # of the expected time: the rest is waited for in the read
BLOCKED_S = 0.0004  # a read that took longer has waited for the link
LEAST_BYTES = 16 * 1024  # less is not worth a sleep


class Lull:
    """How long one reader's next bytes take; one thread uses it."""

    def __init__(self) -> None:
        self._per_byte_s = 0.0  # 0: not known, or faster than is worth a sleep

    def rests(self, count: int) -> bool:
        """Return whether ``count`` bytes take so long that a sleep is worth it, were none here."""
        return count >= LEAST_BYTES and self._per_byte_s * count * SHARE >= SHORTEST_S

    def sleep(self, missing: int) -> bool:
        """Sleep while ``missing`` bytes come, and return whether the rest of them is close."""
        if missing < LEAST_BYTES:
            return True
        wait_s = self._per_byte_s * missing * SHARE
        if wait_s >= SHORTEST_S:
            time.sleep(min(wait_s, LONGEST_S))
        return wait_s <= LONGEST_S

    def read(self, count: int, began_s: float, blocked_s: float) -> None:
        """Learn from ``count`` bytes that were awaited since ``began_s`` (of the monotonic clock),
        the last ``blocked_s`` of it in the read itself.
        """
        if count < LEAST_BYTES:
            return
        if blocked_s < BLOCKED_S:
            self._per_byte_s *= 0.5 if self._per_byte_s * count > LONGEST_S else 0.9
            return
        seen = (time.monotonic() - began_s) / count
        # A pause of the sender is no rate.
        self._per_byte_s = min(seen, 2 * self._per_byte_s) if self._per_byte_s else seen
