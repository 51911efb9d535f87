"""Which sources of a work may be asked now, and which of them is best.

It remembers who failed and when each may be tried again, and what the origin's budget allows. Who
has delivered is asked on; what to ask for is decided in ``pulling``.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from paceline.errors import PacelineError, ServiceUnavailable
from paceline.relay.session.budget import OriginBudget
from paceline.relay.session.extents import Extent
from paceline.relay.session.feeds import FORGIVEN_PIECES, Health, Work
from paceline.relay.session.limits import PieceMap, SessionLimits
from paceline.wire.plan import Source


class Choice:
    """The sources' health under the present lanes."""

    def __init__(self, pieces: PieceMap, limits: SessionLimits, random: Random) -> None:
        self._pieces = pieces
        self._limits = limits
        self._random = random
        self._health: dict[str, Health] = {}
        self._broken: set[str] = set()  # sources whose streams broke under the present lanes
        # This process stood still or was cut off, and nobody confirmed its lanes since.
        self.woke = False
        self.budget = OriginBudget()
        self.stalled: PacelineError | None = None  # why nothing can be asked just now

    def begin(self, budget: OriginBudget) -> None:
        """Start anew with new lanes: the coordinator knows more than our last failures.

        That we stood still it may not know yet.
        """
        self._broken.clear()
        self._health.clear()
        self.budget = budget
        self.stalled = None

    # ── what happened ────────────────────────────────────────────────────────────────────────────

    def delivered(self, key: str, pieces: int) -> None:
        """Take note of good pieces: after some in a row, earlier failures are forgotten."""
        if key in self._health:
            health = self._health[key]
            health.good += pieces
            if health.good >= FORGIVEN_PIECES:
                del self._health[key]

    def failed(self, key: str, now_s: float, *, for_good: bool = False) -> None:
        """Leave a source alone for a while: longer each time."""
        health = self._health.setdefault(key, Health())
        health.failed(now_s, self._limits, self._random)
        if for_good:
            health.retry_at_s = float("inf")

    def broke(self, key: str) -> None:
        """Take note that a stream of a source that delivers ended by itself."""
        self._broken.add(key)

    def fell_behind(self, key: str, work: Work, now_s: float) -> None:
        """Leave a source alone for ``work``, for which it has nothing; others may read there."""
        work.behind.setdefault(key, Health()).failed(now_s, self._limits, self._random)

    # ── who may be asked ─────────────────────────────────────────────────────────────────────────

    def may_ask(self, source: Source, extent: Extent, work: Work, now_s: float) -> bool:
        """Return whether ``source`` may be asked for the first piece of ``extent`` now."""
        return now_s >= self.rested_s(source, work) and self.may_afford(source, extent)

    def may_afford(self, source: Source, extent: Extent) -> bool:
        """Return whether the origin's budget allows to ask ``source``."""
        if self.woke and source.kind == "origin":
            return False
        return self.budget.may_afford(source, extent, self._pieces)

    def refuse(self) -> None:
        """Take note that the origin is not asked, and why."""
        self.stalled = self._refusal()

    def _refusal(self) -> PacelineError:
        if self.woke:
            return ServiceUnavailable(
                "this node stood still or was cut off: another may read the origin in its place",
                wanted="an answer of the coordinator since",
                do="Wait: the next answered heartbeat confirms the lanes, or brings others.",
            )
        return self.budget.exceeded()

    def rested_s(self, source: Source, work: Work) -> float:
        """Return when ``source`` has been left alone for long enough."""
        rests = (self._health.get(source.key), work.behind.get(source.key))
        return max((rest.retry_at_s for rest in rests if rest is not None), default=0.0)

    def retries(self, work: Work) -> Iterator[float]:
        """Yield the times at which a source that was left alone may be asked again."""
        for rests in (self._health, work.behind):
            for source in work.candidates:
                if (rest := rests.get(source.key)) is not None:
                    yield rest.retry_at_s

    def is_gone(self, source: Source) -> bool:
        """Return whether ``source`` was given up for good."""
        health = self._health.get(source.key)
        return health is not None and health.retry_at_s == float("inf")

    def was_given_up(self, source: Source, work: Work) -> bool:
        """Return whether ``source`` failed under the present lanes, lately at least."""
        return source.key in self._broken or self.failures(source, work) > 0

    def failures(self, source: Source, work: Work) -> int:
        """Return how often a source was given up of late: the untried come first.

        The origin that a lane names is asked before its spares all the same: they get the pieces
        from us. As a spare it is asked when a few others had nothing: then we are ahead of them.
        """
        if source.kind != "origin":
            rests = (self._health.get(source.key), work.behind.get(source.key))
            return sum(rest.failures for rest in rests if rest is not None)
        vain = sum(self.failures(each, work) > 0 for each in work.candidates if each != source)
        return -1 if work.is_first_choice(source.key) or vain >= self._limits.spares_first else 0

    def best(self, able: list[Source], work: Work) -> Source:
        """Return who of ``able`` failed least; of equals the one that the plan names first."""
        return min(able, key=lambda each: self.failures(each, work))
