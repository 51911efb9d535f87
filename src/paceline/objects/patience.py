"""How long a failing S3 server is tried again: jittered waits within a budget, then the error.

Botocore tries each request a few times by itself; this is the longer breath around it, for bodies
that break off and servers that say "slow down". Progress fills the budget up again.
"""

from __future__ import annotations

import random
import time

from paceline.errors import ServiceUnavailable

ATTEMPTS = 8
BUDGET_S = 45.0  # below the relay's own deadline for an origin, so that the error is told in words
BACKOFF_S = 0.1  # doubles with each attempt, times a jitter of 0.5 to 1.5
BACKOFF_MAX_S = 5.0


class Patience:
    """Counts the failures of one transfer since it last moved a byte."""

    def __init__(self) -> None:
        self.progressed()

    def progressed(self) -> None:
        """Take note that bytes moved."""
        self._failures = 0
        self._since = time.monotonic()

    def failed(self, error: ServiceUnavailable) -> None:
        """Wait before the next attempt; raises ``error`` when attempts or budget are used up."""
        self._failures += 1
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** (self._failures - 1))
        wait_s *= random.uniform(0.5, 1.5)
        waited_s = time.monotonic() - self._since
        if self._failures >= ATTEMPTS or waited_s + wait_s > BUDGET_S:
            raise ServiceUnavailable(
                error.what,
                got=f"{error.got}, {self._failures} times in {waited_s:.0f} s",
                wanted=error.wanted,
                where=error.where,
                do=error.do,
            ) from error
        time.sleep(wait_s)
