"""What a relay session is told and what it asks for: small frozen records, no behaviour.

A *stream* is one attempt to pull from one source; its number tells late news of an attempt that was
given up from news of the present one.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.relay.protocol.extents import Extent
from paceline.schemas.plan import Source, WorkerLanes
from paceline.schemas.records import Failure, WorkerStatus

# ── events: what happened ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LanesAssigned:
    """A plan for this worker; an epoch that is not newer than the present one changes nothing.

    ``origin_read_bytes`` is what this process has read from the origin for it so far.
    """

    lanes: WorkerLanes
    origin_read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PieceVerified:
    """Pieces arrived from a source, matched their digests, and may be forwarded."""

    source_key: str
    stream: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class PieceRejected:
    """A source sent bytes that do not match their digests, for each piece of a run."""

    source_key: str
    stream: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class SourceAlive:
    """A source gave a sign of life: bytes of an unfinished piece (it is ``moving``), or word that
    it waits itself.

    A driver that knows the future vouches that bytes move ``until_s``, or until it says otherwise:
    a simulator then need not repeat itself a million times.
    """

    source_key: str
    stream: int
    moving: bool = False
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A stream ended: refused, reset, closed, or not our protocol."""

    source_key: str
    stream: int
    error: PacelineError


@dataclass(frozen=True, slots=True)
class PiecesDurable:
    """Verified pieces whose bytes and marks are on the disk."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class PiecesRotten:
    """Pieces that were held and no longer match their digests on this disk."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class LocalFailed:
    """This worker cannot go on: its disk is full or refuses writes."""

    error: PacelineError


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time passed."""


@dataclass(frozen=True, slots=True)
class Woke:
    """This process stood still for ``slept_s``: whatever it waits for has that much longer.

    ``replaced``: for SLEPT_S or longer, so that others may stand in its place by now.
    """

    slept_s: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The coordinator was heard since then: the present lanes stand."""


SLEPT_S = 2.0  # less than after which a coordinator counts anybody as lost


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The deployment was cancelled; nothing is fetched any more."""


SessionEvent = (
    LanesAssigned
    | PieceVerified
    | PieceRejected
    | SourceAlive
    | SourceFailed
    | PiecesDurable
    | PiecesRotten
    | LocalFailed
    | Tick
    | Woke
    | Confirmed
    | Cancelled
)

# ── actions: what should be done ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask ``source`` for the pieces of ``extent``; a new ``stream`` number is a new connection."""

    source: Source
    stream: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Abandon:
    """Close a stream; what it still delivers is no longer waited for."""

    source_key: str
    stream: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Every piece is durable: publish. Asked once."""


@dataclass(frozen=True, slots=True)
class ReportSourceLost:
    """Tell the coordinator at the next beat that this worker gave a source up."""

    source_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    """Tell the coordinator at the next beat who sent bytes that do not match; said once a run."""

    source_key: str
    piece: int  # the first of the run
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Fail:
    """This worker gives up; lanes of a newer epoch may still revive it."""

    error: PacelineError


SessionAction = Fetch | Abandon | Complete | ReportSourceLost | ReportCorrupt | Fail


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """Where a session stands, as its worker reports it in each beat."""

    deployment_id: str
    epoch: int
    status: WorkerStatus
    pieces_held: int  # durable
    bytes_held: int
    pieces_verified: int
    chunks_received: tuple[int, ...]
    refetched_pieces: int
    corrupt_pieces: int
    origin_spent_bytes: int  # in this epoch, as asked for; the agent counts what really arrived
    lost_sources: tuple[str, ...]
    corrupt_sources: tuple[str, ...]
    failure: Failure | None
