"""The parts of an in-memory fleet: nodes, streams between them, and how often what goes wrong.

Plain state; ``network`` and ``fleet`` move it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.relay.protocol.events import SessionEvent
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.session import RelaySession
from paceline.schemas.plan import WorkerLanes


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often things go wrong, as shares of the pieces sent."""

    corrupt: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0  # events reach the session up to this much later, out of order
    late_failure_s: float = 0.0  # word of a broken connection comes up to this much later
    corrupt_from: frozenset[str] = frozenset()  # these nodes send only bad pieces


@dataclass(eq=False, slots=True)
class Stream:
    """One open connection: what its reader still wants of its source, in the order it asked."""

    reader: Node
    source: Node
    key: str
    number: int
    session: RelaySession
    wanted: deque[Extent] = field(default_factory=deque)
    busy: bool = False
    open: bool = True
    told_s: float = -math.inf  # when its reader last heard of a good piece
    corrupted: bool = False
    watched: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """A worker, or the origin (which has no session and everything)."""

    name: str
    link_bytes_s: float
    session: RelaySession | None = None
    everything: Extents | None = None  # what the origin has
    durable: Extents = field(default_factory=Extents)
    pending: Extents = field(default_factory=Extents)  # good, and not durable yet
    bad: set[int] = field(default_factory=set)  # pieces whose bytes here are not the model's
    rotten: set[int] = field(default_factory=set)  # pieces that went bad on this disk unseen
    distrusted: Extents = field(default_factory=Extents)  # found rotten: not served
    streams: dict[str, Stream] = field(default_factory=dict)  # by source key
    readers: list[Stream] = field(default_factory=list)
    backlog: list[SessionEvent] = field(default_factory=list)  # while it is frozen
    alive: bool = True
    frozen: bool = False
    frozen_s: float = 0.0  # since when
    complete: bool = False
    error: PacelineError | None = None
    in_free_s: float = 0.0
    out_free_s: float = 0.0
    received_pieces: int = 0
    received_s: float = 0.0  # when the last one came
    origin_bytes: int = 0  # asked of the origin under the present lanes
    origin_budget_bytes: int = 0
    corrupt_seen: dict[str, int] = field(default_factory=dict)
    corrupt_sent: set[str] = field(default_factory=set)  # who really sent bad pieces here
    next_tick_s: float = math.inf
    events: int = 0
    epoch: int = 0
    lanes: WorkerLanes | None = None

    @property
    def verified(self) -> Extents:
        """Return what it may serve."""
        if self.everything is not None:
            return self.everything
        return self.session.verified if self.session else self.durable
