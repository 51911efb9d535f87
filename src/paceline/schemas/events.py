"""Event names, and the items of the event stream ``GET /events/stream``.

The fleet page and ``paceline watch`` read the same items; ``watch --json`` prints one per line and
an Outcome at the end. A watcher receives a full Moment first; later ones contain only changes,
which the reader applies to its state. ``event`` items carry the Event's number as the message id: a
reader that reconnects sends it as ``Last-Event-ID`` and receives all later events, or a ``missed``
item if some are no longer held.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, RootModel

from paceline.schemas.base import ModelId, Name, Record, Text
from paceline.schemas.plan import Topology
from paceline.schemas.records import DeploymentStatus, Failure, Findings, Inventory, WorkerStatus

# Event names, shared by logs, watchers, the fleet page and Prefect's events.


class EventName(StrEnum):
    """Names of events; dotted, past tense."""

    WORKER_REGISTERED = "worker.registered"  # an agent joined the fleet
    WORKER_LOST = "worker.lost"  # no heartbeat for relay.lost_after_beats intervals
    WORKER_RETURNED = "worker.returned"  # an agent registered again, as a new incarnation
    WORKER_FORGOTTEN = "worker.forgotten"  # lost a month ago
    DEPLOYMENT_CREATED = "deployment.created"  # accepted and stored
    DEPLOYMENT_PLANNED = "deployment.planned"  # the first plan was sent to its workers
    DEPLOYMENT_REPLANNED = "deployment.replanned"  # workers got new sources after a loss or return
    DEPLOYMENT_STATUS_CHANGED = "deployment.status_changed"  # its data have the old and the new one
    DEPLOYMENT_SWITCHING = "deployment.switching"  # a quorum is ready: commands are sent
    DEPLOYMENT_SWITCH_REFUSED = "deployment.switch_refused"  # no commands were sent
    DEPLOYMENT_SWITCH_LATE = "deployment.switch_late"  # commanded long ago, without a quorum yet
    DEPLOYMENT_ACTIVATED = "deployment.activated"  # a quorum of workers switched to the version
    DEPLOYMENT_ROLLED_BACK = "deployment.rolled_back"  # a quorum switched to the version before
    DEPLOYMENT_FORGOTTEN = "deployment.forgotten"  # closed long ago; only the audit history has it
    BUDGET_RAISED = "deployment.budget_raised"  # more bytes may be read from the origin
    FLOW_STARTED = "deployment.flow_started"  # a Prefect flow run drives it
    FLOW_DELAYED = "deployment.flow_delayed"  # Prefect is unavailable: the start is retried
    FLOW_ENDED = "deployment.flow_ended"  # failed or crashed, while the deployment continued
    WORKER_COMPLETED = "deployment.worker_completed"  # it verified the whole model
    WORKER_FAILED = "deployment.worker_failed"  # its data have the reason; other workers go on
    SOURCE_LOST = "relay.source_lost"  # a worker's source closed the connection or stopped sending
    PIECE_CORRUPT = "relay.piece_corrupt"  # a digest did not match; its data name the sender
    WORKER_SLOW = "relay.worker_slow"  # it moved to the tail, where no worker waits for it
    WORKER_QUARANTINED = "relay.worker_quarantined"  # it sent corrupt pieces: a source no longer
    CHANGE_ACCEPTED = "change.accepted"  # a call that changed state, with the token that made it
    CHANGE_REFUSED = "change.refused"  # a call that was not allowed or not valid, with the reason
    STAGE_FINISHED = "run.stage_finished"  # a stage of a run is in the run's ledger
    JOB_CHANGED = "job.state_changed"  # its data have the new state and its reason


class Event(Record):
    """One event, numbered by the coordinator."""

    seq: int = Field(ge=1)  # the event's number; it grows by one
    name: EventName  # what happened
    at: float  # seconds since the Unix epoch
    deployment_id: str | None = None
    worker_id: str | None = None
    data: dict[str, object] = {}  # what else belongs to it; its fields depend on the name


ChunkRun = tuple[int, int]  # chunks [first, last], both inclusive


class LeaderView(Record):
    """The responding replica, and the leader it has seen."""

    replica_id: str = ""  # of the replica that responds
    url: str = ""  # of that replica
    leads: bool = True  # whether it is the leader
    leader_url: str | None = None  # None: no known leader
    epoch: int = Field(default=0, ge=0)


class PartMoment(Record):
    """One worker's part of one deployment."""

    worker_id: Name
    status: WorkerStatus
    alive: bool  # whether its heartbeats arrive
    chunks: tuple[ChunkRun, ...] = ()  # complete chunks, ascending
    bytes_held: int = Field(default=0, ge=0)  # verified
    rate_bytes_s: float = Field(default=0.0, ge=0)  # over the last seconds
    upstream_worker: str | None = None  # a source key: a worker, or "origin:URL"
    standing: str = "line"  # or "tail", "quarantined"
    verified: bool = False  # it sent a receipt
    activated: bool = False  # it switched to the version
    failure: Failure | None = None


class DeploymentMoment(Record):
    """One deployment's figures, and the parts of workers that changed."""

    deployment_id: str
    model_id: ModelId
    version: Name
    status: DeploymentStatus
    topology: Topology
    epoch: int = Field(ge=0)
    progress: float = Field(ge=0, le=1)  # share of bytes held by living targets
    rate_bytes_s: float = Field(default=0.0, ge=0)  # sum over all targets
    eta_s: float | None = None  # until the last living target is complete; None: unknown
    workers: int = Field(ge=0)  # targets
    workers_complete: int = Field(ge=0)  # that verified the whole model
    workers_failed: tuple[Name, ...] = ()  # their names
    # whether the workers switched to it
    activation: Literal["none", "switching", "active"] = "none"
    total_bytes: int = Field(ge=0)  # of the model
    total_chunks: int = Field(ge=1)  # of the model
    origin_bytes: int = Field(default=0, ge=0)  # read from the origin so far, by all workers
    predicted_seconds: float = 0.0  # of the plan, by the cost model
    bound_seconds: float = 0.0  # that no plan can beat: size / link
    started_at: float  # seconds since the Unix epoch
    completed_at: float | None = None
    seconds: float | None = None  # that it took; None: not complete
    failure: Failure | None = None
    flow_run_id: Text | None = None
    flow_wanted: bool = False  # the coordinator starts (or started) that flow run
    parts: tuple[PartMoment, ...] = ()  # of workers, those that changed


class WorkerMoment(Record):
    """One agent of the fleet."""

    worker_id: Name
    hostname: Text = ""
    rack: Text = ""
    zone: Text = ""
    alive: bool  # whether its heartbeats arrive
    bandwidth_in: float = Field(default=0.0, ge=0)  # bytes per second
    bandwidth_out: float = Field(default=0.0, ge=0)  # bytes per second
    available_storage: int = Field(default=0, ge=0)  # free bytes of the store's disk
    findings: Findings = ()  # of the node's last `paceline doctor`
    inventory: Inventory | None = None  # what the machine has; None: not read


class Moment(Record):
    """State of the fleet: everything (``full``), or the changes since the previous Moment."""

    kind: Literal["moment"] = "moment"
    at: float  # seconds since the Unix epoch
    full: bool  # false: only what changed
    leader: LeaderView  # and the replica that responds
    deployments: tuple[DeploymentMoment, ...] = ()  # that changed, or all
    workers: tuple[WorkerMoment, ...] = ()  # that changed, or all
    gone: tuple[str, ...] = ()  # deployments no longer shown


class EventItem(Record):
    """An event; event numbers have no gaps over the whole installation."""

    kind: Literal["event"] = "event"
    event: Event  # the event itself


class Missed(Record):
    """Events between ``after`` and ``first`` are no longer held; the audit history has them."""

    kind: Literal["missed"] = "missed"
    after: int = Field(ge=0)  # number of the last event that was sent
    first: int = Field(ge=0)  # number of the oldest event still held


class Dropped(Record):
    """The connection ends, with the reason; the reader may resume with ``Last-Event-ID``."""

    kind: Literal["dropped"] = "dropped"
    reason: Text


class Outcome(Record):
    """Final state of a watched deployment: the last line of ``paceline watch --json``."""

    kind: Literal["outcome"] = "outcome"
    deployment_id: str
    status: DeploymentStatus
    seconds: float | None = None
    workers_complete: int = 0
    workers_failed: tuple[Name, ...] = ()
    failure: Failure | None = None
    exit_code: int


class StreamItem(
    RootModel[Annotated[Moment | EventItem | Missed | Dropped, Field(discriminator="kind")]]
):
    """One message of the stream."""


class WatchLine(
    RootModel[
        Annotated[Moment | EventItem | Missed | Dropped | Outcome, Field(discriminator="kind")]
    ]
):
    """One line of ``paceline watch --json``."""


def chunk_runs(chunks: tuple[int, ...]) -> tuple[ChunkRun, ...]:
    """Return ascending chunk ids as runs of consecutive ids."""
    runs: list[ChunkRun] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], chunk)
        elif not runs or chunk > runs[-1][1]:
            runs.append((chunk, chunk))
    return tuple(runs)
