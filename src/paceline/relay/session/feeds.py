"""A session's view of its sources and lanes: what is in flight, and who may be asked again when.

Plain state with no decisions about pieces; ``pulling`` and ``session`` decide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.limits import SessionLimits
from paceline.wire.plan import Source

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
