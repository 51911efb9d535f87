"""Which of several replicas to ask, and which answers to believe.

The first choice is whoever answered last, or whom an answer named as the leader. Whoever did not
answer is left alone for a moment, also when a standby that has not noticed yet still points at it.
An answer out of an older epoch than one seen before is refused: whoever wrote it leads no more.
It makes no calls and never sleeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from paceline.client.connection import Endpoint
from paceline.errors import InvalidInput

SUSPECT_S = 2.0  # how long an endpoint that did not answer is left alone


class Replicas:
    """The endpoints of one coordinator; shared by the threads of a client."""

    def __init__(
        self, urls: Sequence[str], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        endpoints = [Endpoint.of(url) for url in urls]
        self.endpoints = tuple(dict.fromkeys(endpoints))
        if not self.endpoints:
            raise InvalidInput("not a coordinator's URL", got="nothing", wanted="http://host:port")
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._first = self.endpoints[0]
        self._suspect_until_s: dict[Endpoint, float] = {}
        self._epoch = 0

    @property
    def several(self) -> bool:
        """Return whether there is anybody else to turn to."""
        return len(self.endpoints) > 1

    @property
    def first(self) -> Endpoint:
        """Return whom to ask first."""
        return self._first

    @property
    def epoch(self) -> int:
        """Return the highest epoch seen."""
        return self._epoch

    def order(self) -> list[Endpoint]:
        """Return whom to ask, in order: those that did not answer lately come last."""
        with self._lock:
            now_s = self._monotonic()
            first = self.endpoints.index(self._first)
            turned = self.endpoints[first:] + self.endpoints[:first]
            return sorted(turned, key=lambda each: self._suspect_until_s.get(each, 0.0) > now_s)

    def suspect(self, endpoint: Endpoint) -> bool:
        """Return whether ``endpoint`` did not answer lately."""
        with self._lock:
            return self._suspect_until_s.get(endpoint, 0.0) > self._monotonic()

    def silent(self, endpoint: Endpoint) -> None:
        """Take note that ``endpoint`` did not answer."""
        with self._lock:
            self._suspect_until_s[endpoint] = self._monotonic() + SUSPECT_S
            if endpoint == self._first:
                where = self.endpoints.index(endpoint)
                self._first = self.endpoints[(where + 1) % len(self.endpoints)]

    def answered(self, endpoint: Endpoint, leader_url: str | None) -> None:
        """Take note that ``endpoint`` answered, and whom it named as the leader."""
        with self._lock:
            self._suspect_until_s.pop(endpoint, None)
            leader = self.find(leader_url)
            hoped = leader is not None and not (
                self._suspect_until_s.get(leader, 0.0) > self._monotonic()
            )
            self._first = leader if leader is not None and hoped else endpoint

    def find(self, url: str | None) -> Endpoint | None:
        """Return the endpoint at which ``url`` lies, or None: the token goes nowhere else."""
        return next((each for each in self.endpoints if url and each.serves(url)), None)

    def believe(self, epoch: int | None) -> bool:
        """Return whether an answer of ``epoch`` may be believed, and remember the highest one."""
        if epoch is None:
            return True  # it says nothing of leaders: a probe, a refusal before anybody looked
        with self._lock:
            if epoch < self._epoch:
                return False
            self._epoch = epoch
            return True
