"""Which sources of a work may be asked now, and which of them is best.

It remembers who failed and when each may be tried again, and what the origin's budget allows. Who
has delivered is asked on; what to ask for is decided in ``pulling``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from paceline.errors import OriginBudgetExceeded, PacelineError, ServiceUnavailable
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.schemas.plan import Source

# A session's view of its sources and lanes: what is in flight, and who may be asked again when.
#
# Plain state with no decisions about pieces; ``pulling`` and ``session`` decide.

JUDGED_RUNS = 16  # of a stream, over which its corrupt share is taken, at least,
JUDGED_MOST = 256  # and so many at most, where runs differ in length
FORGIVEN_PIECES = 16  # good ones in a row, after which earlier failures of a source are forgotten


@dataclass(slots=True, eq=False)
class Feed:
    """One open stream. A piece is ``in_flight`` in one feed at most; ``aside`` are pieces asked on
    the side, for a repair or a hedge, which belong to those.
    """

    source: Source
    stream: int
    heard_s: float  # last sign of life, or when waiting began
    moved_s: float  # last bytes, or when the stream was opened
    vouched_s: float = 0.0  # until when somebody vouches that bytes move
    good: int = 0  # pieces that it delivered
    in_flight: Extents = field(default_factory=Extents)
    aside: Extents = field(default_factory=Extents)
    asked: deque[tuple[float, Extent]] = field(default_factory=deque)  # oldest first
    judged: deque[tuple[int, int]] = field(default_factory=deque)
    judged_pieces: int = 0  # of these runs,
    judged_worst: int = 0  # and the longest corrupt one

    @property
    def waiting(self) -> bool:
        """Return whether anything is asked of it that is not here."""
        return self.in_flight.count > 0 or self.aside.count > 0

    @property
    def corrupt(self) -> int:
        """Return how many pieces of the runs judged last were corrupt."""
        return sum(corrupt for _, corrupt in self.judged)

    def judge(self, pieces: int, corrupt: int) -> None:
        """Take note of a run that came, all of it corrupt or none.

        Runs differ in length: beside a corrupt run of a hundred pieces, sixteen repairs of one or
        two tell nothing. So there are sixteen times the longest corrupt one, in pieces.
        """
        judged = self.judged
        judged.append((pieces, corrupt))
        self.judged_pieces += pieces
        self.judged_worst = max(self.judged_worst, corrupt)
        while len(judged) > JUDGED_RUNS:
            oldest, bad = judged[0]
            enough = self.judged_pieces - oldest >= JUDGED_RUNS * self.judged_worst
            if not enough and len(judged) <= JUDGED_MOST:
                break
            judged.popleft()
            self.judged_pieces -= oldest
            if bad and bad == self.judged_worst:
                self.judged_worst = max(each for _, each in judged)

    def is_bad(self, limits: SessionLimits) -> bool:
        """Return whether this stream's share of corrupt pieces makes it not worth reading on.

        With one transfer in a hundred corrupt, seven in sixteen come once in ten thousand million
        pieces by chance, four among the first ten of a stream once in 500,000; from a sender of
        garbage they come at once.
        """
        runs = sum(corrupt > 0 for _, corrupt in self.judged)
        if runs < limits.corrupt_before_lost:
            return False
        return self.corrupt >= limits.corrupt_share * self.judged_pieces

    def oldest(self) -> tuple[float, Extent] | None:
        """Return the oldest request that is not wholly here, and when it was made."""
        while self.asked:
            at_s, extent = self.asked[0]
            run = next(self.in_flight.common(extent), None)
            if run is not None:
                return at_s, run
            self.asked.popleft()
        return None


@dataclass(slots=True)
class Health:
    """What is remembered of a source that was given up."""

    failures: int = 0
    good: int = 0  # pieces since the last failure
    retry_at_s: float = 0.0

    def failed(self, now_s: float, limits: SessionLimits, random: Random) -> None:
        """Leave it alone for a while: longer each time."""
        self.failures += 1
        self.good = 0
        self.retry_at_s = now_s + backoff_s(self.failures, limits, random)


@dataclass(slots=True, eq=False)
class Probe:
    """A piece asked on the side of the source that the plan names; see ``returning``."""

    piece: Extent
    asked_s: float
    held: int  # pieces of the work that were here when it was asked,
    due: int  # and that the spare has brought by when it would have brought this one


@dataclass(slots=True, eq=False)
class Away:
    """What is remembered of a planned source for which a spare stands in, or stood in before."""

    absent: bool = False  # whether a spare stands in now
    next_s: float = 0.0  # when the planned source may be asked for a piece on the side
    times: int = 0  # probes in vain, and returns
    probe: Probe | None = None
    behind: int | None = None  # pieces, by the first of two probes,
    behind_at: int = 0  # and where the spare had brought us by then


@dataclass(slots=True, eq=False)
class Work:
    """One lane: the pieces it covers, and who may be asked for them, best first."""

    extent: Extent
    candidates: tuple[Source, ...]
    expected_bytes_s: float = 0.0
    missing: int = 0  # pieces not verified
    taken: Extents = field(default_factory=Extents)  # verified, in flight, or under repair
    asked_pieces: int = 0  # in flight
    asked_bytes: int = 0
    window_bytes: int = 0
    window_pieces: int = 0
    progress_s: float = 0.0  # last verified piece, or when waiting began
    active: str | None = None  # key of the source in use
    hurry_s: float = 0.0  # how long a spare may have nothing while others are left; 0: no hurry
    behind: dict[str, Health] = field(default_factory=dict)  # sources that had nothing for us
    away: Away | None = None  # once a spare stood in for the planned source

    @property
    def held(self) -> int:
        """Return how many pieces are here."""
        return self.extent.size - self.missing

    @property
    def wanting(self) -> int:
        """Return how many pieces are missing that nobody was asked for."""
        return self.extent.size - self.taken.count

    def is_first_choice(self, key: str) -> bool:
        """Return whether the plan names ``key`` as this lane's source."""
        return bool(self.candidates) and self.candidates[0].key == key


def backoff_s(failures: int, limits: SessionLimits, random: Random) -> float:
    """Return how long to leave a source alone after its n-th failure: exponential, jittered."""
    full = min(limits.backoff_max_s, limits.backoff_s * 2.0 ** min(failures - 1, 16))
    return full * (0.5 + random.random())


# This worker's share of the origin fuse: what it may still ask of the source (I6).


@dataclass(slots=True)
class OriginBudget:
    """Bytes granted by the plan, and bytes asked for since."""

    granted_bytes: int = 0
    spent_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Return what may still be asked for."""
        return self.granted_bytes - self.spent_bytes

    def may_afford(self, source: Source, extent: Extent, pieces: PieceMap) -> bool:
        """Return whether the first piece of ``extent`` may be asked of ``source``."""
        if source.kind != "origin":
            return True
        return pieces.bytes_of(Extent(extent.first, extent.first + 1)) <= self.left_bytes

    def exceeded(self) -> PacelineError:
        """Return why a worker whose budget is spent waits."""
        return OriginBudgetExceeded(
            "no living peer has the missing pieces and the origin's budget is spent",
            got=f"{self.spent_bytes} bytes asked of the origin",
            wanted=f"at most {self.granted_bytes}",
            do="Bring a holder back, or raise the budget with a new plan.",
        )


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
