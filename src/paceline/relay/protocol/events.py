"""Events and actions of a relay session: its inputs and outputs as frozen records, no behaviour.

A *stream* is one attempt to pull from one source. Its number separates late events of an abandoned
attempt from those of the current one.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.relay.protocol.extents import Extent
from paceline.schemas import Failure, Source, WorkerLanes, WorkerStatus

# ── events: the session's inputs ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LanesAssigned:
    """New lanes for this worker; ignored unless their epoch is newer than the current one.

    ``origin_read_bytes`` is what this process has read from the origin for the deployment so far.
    """

    lanes: WorkerLanes
    origin_read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PieceVerified:
    """Pieces that arrived from a source and match their digests; they may be forwarded."""

    source_key: str
    stream: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class PieceRejected:
    """Pieces that arrived from a source and do not match their digests."""

    source_key: str
    stream: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class SourceAlive:
    """A source is alive: it sent bytes of an unfinished piece (``moving``) or a WAITING message.

    ``until_s``: the driver guarantees that bytes move until then, or until its next event. A
    simulator uses it to replace a million repeated events by one.
    """

    source_key: str
    stream: int
    moving: bool = False
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A stream ended: refused, reset, closed, or a protocol violation."""

    source_key: str
    stream: int
    error: PacelineError


@dataclass(frozen=True, slots=True)
class PiecesDurable:
    """Verified pieces whose bytes and durable marks are on disk."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class HeldPiecesCorrupt:
    """Held pieces that no longer match their digests on this disk."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class LocalFailed:
    """This worker cannot continue: its disk is full or refuses writes."""

    error: PacelineError


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """This process was suspended for ``slept_s``; every deadline moves by that time.

    ``replaced``: the pause was SLEPT_S or longer, so the coordinator may have replaced this worker.
    """

    slept_s: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class LanesConfirmed:
    """The coordinator answered after a suspension: the current lanes are still valid."""


REPLACED_AFTER_S = 2.0  # shorter than the coordinator's timeout for a lost worker


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The deployment was cancelled; the session fetches nothing more."""


SessionEvent = (
    LanesAssigned
    | PieceVerified
    | PieceRejected
    | SourceAlive
    | SourceFailed
    | PiecesDurable
    | HeldPiecesCorrupt
    | LocalFailed
    | Tick
    | Resumed
    | LanesConfirmed
    | Cancelled
)

# ── actions: the session's outputs ───────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request the pieces of ``extent`` from ``source``; a new ``stream`` number opens a stream."""

    source: Source
    stream: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Abandon:
    """Close a stream; the session no longer waits for what it still delivers."""

    source_key: str
    stream: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Publish the model: every piece is durable. Returned once."""


@dataclass(frozen=True, slots=True)
class ReportSourceLost:
    """Log that this worker abandoned a source; heartbeats read it from ``SessionProgress``."""

    source_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    """Log which source sent corrupt pieces, once per run of pieces; heartbeats read the counts
    from ``SessionProgress``.
    """

    source_key: str
    piece: int  # the first of the run
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Fail:
    """The session failed; lanes of a newer epoch can restart it."""

    error: PacelineError


SessionAction = Fetch | Abandon | Complete | ReportSourceLost | ReportCorrupt | Fail


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """A session's progress, as its worker reports it in each heartbeat."""

    deployment_id: str
    epoch: int
    status: WorkerStatus
    pieces_held: int  # durable
    bytes_held: int
    pieces_verified: int
    chunks_received: tuple[int, ...]
    corrupt_pieces: int
    lost_sources: tuple[str, ...]
    corrupt_sources: tuple[str, ...]
    failure: Failure | None
