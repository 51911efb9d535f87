"""A session's view of its sources: what is in flight from each, and which may be asked again when.

Plain state with no decisions about pieces; ``session`` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from paceline.errors import PacelineError
from paceline.relay.extents import Extent, Extents
from paceline.relay.limits import SessionLimits
from paceline.wire.plan import Source


@dataclass(slots=True)
class Feed:
    """One open stream."""

    source: Source
    stream: int
    heard_s: float  # last sign of life, or when waiting began
    progress_s: float  # last verified piece, or when waiting began
    in_flight: Extents = field(default_factory=Extents)
    in_flight_bytes: int = 0
    corrupt: int = 0

    def deadline_s(self, silence_s: float, standstill_s: float) -> float | None:
        """Return when this stream counts as lost, or None while nothing is asked of it."""
        if not self.in_flight:
            return None
        return min(self.heard_s + silence_s, self.progress_s + standstill_s)


@dataclass(slots=True)
class Health:
    """What is remembered of a source between streams."""

    failures: int = 0
    retry_at_s: float = 0.0
    error: PacelineError | None = None


@dataclass(slots=True)
class Repair:
    """A piece that arrived corrupt and is fetched on its own."""

    attempts: int = 0
    senders: list[str] = field(default_factory=list)  # who sent it corrupt
    avoid: set[str] = field(default_factory=set)  # peers not to ask again while another is left
    retry_at_s: float = 0.0
    asked: str | None = None  # key of the source it is in flight from
    asked_s: float = 0.0


@dataclass(slots=True)
class Work:
    """One lane: the pieces it covers, and who may be asked for them, best first."""

    extent: Extent
    candidates: tuple[Source, ...]
    active: str | None = None  # key of the source in use


def backoff_s(failures: int, limits: SessionLimits, random: Random) -> float:
    """Return how long to leave a source alone after its n-th failure: exponential, jittered."""
    full = min(limits.backoff_max_s, limits.backoff_s * 2.0 ** min(failures - 1, 16))
    return full * (0.5 + random.random())
