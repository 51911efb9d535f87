"""What a watcher gets: ``GET /events/stream``, one item a message, each a record of this module.

The fleet page and ``paceline watch`` read the same items; ``watch --json`` prints them, one
a line, and one Outcome in the end. A connection begins with a full Moment; each later one holds
only what changed since, so that a reader lays it over what it has. ``event`` items carry the number
of the Event as the message's id: a reader that comes back says it as ``Last-Event-ID``, and hears
everything after it, or in a ``missed`` item that some of it is no longer held.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, RootModel

from paceline.schemas.base import Name, Record, Text
from paceline.schemas.plan import Topology
from paceline.schemas.records import DeploymentStatus, Failure, WorkerStatus

# Names of what happens, shared by logs, watchers, the fleet page and Prefect's events.


class EventName(StrEnum):
    """What can happen; dotted, past tense."""

    WORKER_REGISTERED = "worker.registered"
    WORKER_LOST = "worker.lost"
    WORKER_RETURNED = "worker.returned"
    WORKER_FORGOTTEN = "worker.forgotten"  # lost a month ago
    DEPLOYMENT_CREATED = "deployment.created"
    DEPLOYMENT_PLANNED = "deployment.planned"
    DEPLOYMENT_REPLANNED = "deployment.replanned"
    DEPLOYMENT_STATUS_CHANGED = "deployment.status_changed"
    DEPLOYMENT_SWITCHING = "deployment.switching"  # a quorum is ready: everybody is told
    DEPLOYMENT_SWITCH_REFUSED = "deployment.switch_refused"  # nobody was told
    DEPLOYMENT_SWITCH_LATE = "deployment.switch_late"  # told long ago, and no quorum has yet
    DEPLOYMENT_ACTIVATED = "deployment.activated"
    DEPLOYMENT_ROLLED_BACK = "deployment.rolled_back"
    DEPLOYMENT_FORGOTTEN = "deployment.forgotten"
    BUDGET_RAISED = "deployment.budget_raised"
    FLOW_STARTED = "deployment.flow_started"  # a Prefect flow run drives it
    FLOW_DELAYED = "deployment.flow_delayed"  # Prefect is away: the start is tried again
    FLOW_ENDED = "deployment.flow_ended"  # not well, while the deployment went on
    WORKER_COMPLETED = "deployment.worker_completed"
    WORKER_FAILED = "deployment.worker_failed"
    SOURCE_LOST = "relay.source_lost"
    PIECE_CORRUPT = "relay.piece_corrupt"
    WORKER_SLOW = "relay.worker_slow"
    WORKER_QUARANTINED = "relay.worker_quarantined"
    CHANGE_ACCEPTED = "change.accepted"
    CHANGE_REFUSED = "change.refused"
    STAGE_FINISHED = "run.stage_finished"
    TRAINING_STEP = "training.step"
    TRAINING_CHECKPOINT = "training.checkpoint"
    TRAINING_RANK_LOST = "training.rank_lost"
    TRAINING_RESTARTED = "training.restarted"


class Event(Record):
    """One thing that happened, numbered by the coordinator that saw it."""

    seq: int = Field(ge=1)
    name: EventName
    at: float  # seconds since the Unix epoch
    deployment_id: str | None = None
    worker_id: str | None = None
    data: dict[str, object] = {}


Run = tuple[int, int]  # chunks [first, last], both inclusive


class LeaderView(Record):
    """Which replica speaks, and who leads as far as it knows."""

    replica_id: str = ""
    url: str = ""
    leads: bool = True
    leader_url: str | None = None  # None: nobody is known to lead now
    epoch: int = Field(default=0, ge=0)


class PartMoment(Record):
    """One worker's part of one deployment."""

    worker_id: Name
    status: WorkerStatus
    alive: bool
    chunks: tuple[Run, ...] = ()  # held whole, in order
    bytes_held: int = Field(default=0, ge=0)
    rate_bytes_s: float = Field(default=0.0, ge=0)  # over the last seconds
    upstream_worker: str | None = None  # a source key: a worker, or "origin:URL"
    standing: str = "line"
    verified: bool = False  # it gave a receipt
    activated: bool = False
    failure: Failure | None = None


class DeploymentMoment(Record):
    """One deployment's figures, and the parts of the workers that changed."""

    deployment_id: str
    model_id: Name
    version: Name
    status: DeploymentStatus
    topology: Topology
    epoch: int = Field(ge=0)
    progress: float = Field(ge=0, le=1)  # share of bytes held by living targets
    rate_bytes_s: float = Field(default=0.0, ge=0)  # what all targets together gain
    eta_s: float | None = None  # until the last living target has everything; None: unknown
    workers: int = Field(ge=0)
    workers_complete: int = Field(ge=0)
    workers_failed: tuple[Name, ...] = ()
    activation: Literal["none", "switching", "active"] = "none"
    total_bytes: int = Field(ge=0)
    total_chunks: int = Field(ge=1)
    origin_bytes: int = Field(default=0, ge=0)
    predicted_seconds: float = 0.0
    bound_seconds: float = 0.0
    started_at: float  # seconds since the Unix epoch
    completed_at: float | None = None
    seconds: float | None = None
    failure: Failure | None = None
    flow_run_id: Text | None = None
    flow_wanted: bool = False
    parts: tuple[PartMoment, ...] = ()


class WorkerMoment(Record):
    """One agent of the fleet."""

    worker_id: Name
    hostname: Text = ""
    rack: Text = ""
    zone: Text = ""
    alive: bool
    bandwidth_in: float = Field(default=0.0, ge=0)  # bytes per second
    bandwidth_out: float = Field(default=0.0, ge=0)
    available_storage: int = Field(default=0, ge=0)


class Moment(Record):
    """How things stand now: all of it (``full``), or what changed since the Moment before."""

    kind: Literal["moment"] = "moment"
    at: float  # seconds since the Unix epoch
    full: bool
    leader: LeaderView
    deployments: tuple[DeploymentMoment, ...] = ()
    workers: tuple[WorkerMoment, ...] = ()
    gone: tuple[str, ...] = ()  # deployments that are shown no longer


class Happened(Record):
    """Something happened; the numbers of events have no gaps over the whole installation."""

    kind: Literal["event"] = "event"
    event: Event


class Missed(Record):
    """Events after ``after`` and before ``first`` are held no longer: read the audit history."""

    kind: Literal["missed"] = "missed"
    after: int = Field(ge=0)
    first: int = Field(ge=0)


class Dropped(Record):
    """The connection ends now, and why; the reader may come back with ``Last-Event-ID``."""

    kind: Literal["dropped"] = "dropped"
    reason: Text


class Outcome(Record):
    """How what was watched ended: the last line of ``paceline watch --json``."""

    kind: Literal["outcome"] = "outcome"
    deployment_id: str
    status: DeploymentStatus
    seconds: float | None = None
    workers_complete: int = 0
    workers_failed: tuple[Name, ...] = ()
    failure: Failure | None = None
    exit_code: int


class StreamItem(
    RootModel[Annotated[Moment | Happened | Missed | Dropped, Field(discriminator="kind")]]
):
    """One message of the stream."""


class WatchLine(
    RootModel[
        Annotated[Moment | Happened | Missed | Dropped | Outcome, Field(discriminator="kind")]
    ]
):
    """One line of ``paceline watch --json``."""


def runs_of(chunks: tuple[int, ...]) -> tuple[Run, ...]:
    """Return ascending chunk ids as runs of neighbours."""
    runs: list[Run] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], chunk)
        elif not runs or chunk > runs[-1][1]:
            runs.append((chunk, chunk))
    return tuple(runs)
