"""The coordinator's REST, call by call (MISSION.md A7; names stay, more fields may follow).

POST   /deployments                      CreateDeployment   → CreatedDeployment   (Idempotency-Key)
GET    /deployments?newest=N                                 → DeploymentList
GET    /deployments/{id}                                     → DeploymentView
DELETE /deployments/{id}                                     → Success
GET    /deployments/{id}/workers                             → WorkerProgressList
GET    /deployments/{id}/manifest                            → the manifest's bytes
GET    /deployments/{id}/lanes?worker_id=W                   → WorkerLanes
GET    /deployments/{id}/plan                                → Plan
POST   /deployments/{id}/activate?allow_older=B             → Success (once a quorum is ready)
POST   /deployments/{id}/rollback                            → Success (likewise)
GET    /deployments/{id}/switch                              → SwitchView
POST   /deployments/{id}/budget          RaiseOriginBudget  → Success             (Idempotency-Key)
POST   /workers/register                 RegisterWorker     → Registered
POST   /workers/heartbeat?wait_s=S       Heartbeat          → HeartbeatAnswer (long poll)
GET    /workers                                              → WorkerList
GET    /ledger/{stage}/{input_digest}                        → StageRecord | 404
PUT    /ledger/{stage}/{input_digest}    StageRecord        → StageRecord
GET    /events?after=N&wait_s=S                              → EventList (long poll)
GET    /events/stream?deployment=ID                          → wire.stream's items (SSE)
GET    /healthz, /readyz, /metrics, /fleet (page)

Every call but /healthz and /readyz carries ``Authorization: Bearer TOKEN``.
Errors are RFC 9457 problem documents (``Problem``) with the error's class name as ``code``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from paceline.schemas.base import COUNT_MAX, Count, Name, Record, Text
from paceline.schemas.events import Event
from paceline.schemas.plan import Labels, Topology
from paceline.schemas.records import (
    Deployment,
    DeploymentStatus,
    Failure,
    Receipt,
    Worker,
    WorkerProgress,
    WorkerStatus,
)

NEWS_S = 0.02  # between two beats of one agent, however much there is to tell
SourceKey = Annotated[str, Field(max_length=2200)]  # a worker id, or "origin:URL"
# Of one deployment, each once; as many as a manifest may have.
Chunks = Annotated[tuple[int, ...], Field(max_length=2**16)]
SourceKeys = Annotated[tuple[SourceKey, ...], Field(max_length=20_000)]  # as many as targets


class CreateDeployment(Record):
    """Bring ``version`` of ``model_id`` from ``source_url`` to every target worker."""

    model_id: Name
    version: Name
    source_url: str = Field(min_length=1, max_length=2048)
    target_workers: tuple[Name, ...] = Field(min_length=1, max_length=20_000)
    topology: Topology = Topology.AUTO
    max_failed: float = Field(default=0.05, ge=0, le=1)
    seed: int = Field(default=0, ge=-COUNT_MAX, le=COUNT_MAX)
    allow_older: bool = False  # than the version that is active on a target; else a Conflict
    flow_run_id: Text | None = Field(default=None, max_length=64)
    run_id: Text | None = Field(default=None, max_length=64)


class CreatedDeployment(Record):
    deployment_id: str
    status: DeploymentStatus
    estimated_time_seconds: float


class DeploymentView(Record):
    """A deployment with its progress; ``progress`` is the share of bytes held by living targets."""

    deployment_id: str
    status: DeploymentStatus
    progress: float = Field(ge=0, le=1)
    workers_complete: tuple[Name, ...]
    workers_failed: tuple[Name, ...]
    deployment: Deployment


class DeploymentList(Record):
    deployments: tuple[Deployment, ...]


class WorkerProgressList(Record):
    workers: tuple[WorkerProgress, ...]


class Success(Record):
    success: bool = True


class RaiseOriginBudget(Record):
    """Let a deployment read so many bytes more from the origin than its fuse allows."""

    extra_bytes: int = Field(gt=0, le=2**60)


class SwitchKind(StrEnum):
    """Which way the fleet goes."""

    ACTIVATE = "activate"  # to the deployment's version
    ROLLBACK = "rollback"  # from it, to what was active before


class SwitchPhase(StrEnum):
    """How far a switch is; nobody switches before a quorum has said that it can."""

    PREPARING = "preparing"  # workers are asked whether they hold what they are to switch to
    SWITCHING = "switching"  # decided: they are told, and who returns late is told then
    SWITCHED = "switched"  # every living worker has, or a quorum when the time was up
    REFUSED = "refused"  # no quorum in time, or another switch came between; nobody was told
    SUPERSEDED = "superseded"  # another switch was decided before everybody had


class WorkerSwitch(Record):
    """What became of one worker in a switch."""

    worker_id: Name
    # other: another version has become active there, or nothing was before.
    state: Literal["waiting", "ready", "told", "switched", "failed", "lost", "other"]
    deployment_id: str | None = None  # what it switches to
    version: str | None = None
    failure: Failure | None = None


class SwitchView(Record):
    """The newest switch of a deployment, worker by worker."""

    deployment_id: str
    kind: SwitchKind
    phase: SwitchPhase
    quorum: int = Field(ge=0)  # workers that must be ready before anybody is told
    ready: int = Field(ge=0)
    switched: int = Field(ge=0)
    failure: Failure | None = None
    workers: tuple[WorkerSwitch, ...]


class RegisterWorker(Record):
    worker_id: Name
    hostname: Text = Field(max_length=255)
    rack: Text = Field(max_length=255)
    available_storage: Count
    labels: Labels = Labels()
    address: Text = Field(default="", max_length=300)
    link_mbit: float = Field(default=10_000, ge=1e-3, le=1e9)  # what plans can be made with
    incarnation: int = Field(default=1, ge=1, le=COUNT_MAX)
    pid: int = Field(default=0, ge=0, le=2**32)
    process: Text = Field(default="", max_length=64)  # random: in containers pids come again


class Registered(Record):
    registered: bool = True
    worker_id: Name
    incarnation: int


class EdgeTally(Record):
    """What passed from ``source`` to ``reader`` in one deployment, counted from its beginning.

    The source counts ``bytes`` and ``busy_s`` (the time in which it had something to send, so that
    bytes / busy_s is what the edge can carry); the reader counts ``pieces`` and ``corrupt``, and
    for the origin, which counts nothing, all four.
    """

    source: SourceKey
    reader: Name
    bytes: Count = 0
    busy_s: float = Field(default=0.0, ge=0, le=1e9)
    pieces: Count = 0  # that matched
    corrupt: Count = 0  # that did not


class DeploymentBeat(Record):
    """What an agent says in each beat about one deployment it takes part in."""

    deployment_id: str
    epoch: Count
    status: WorkerStatus
    pieces_held: Count
    bytes_held: Count
    chunks_received: Chunks = ()
    origin_bytes: Count = 0
    lost_sources: SourceKeys = ()  # that this worker gave up since its last lanes
    corrupt_sources: SourceKeys = ()
    edges: tuple[EdgeTally, ...] = Field(default=(), max_length=512)
    failure: Failure | None = None
    receipt: Receipt | None = None
    activated: bool = False


class Heartbeat(Record):
    worker_id: Name
    status: WorkerStatus
    chunks_received: Chunks = ()  # of the deployment in progress, if one
    bandwidth_in: float = Field(default=0.0, ge=0, le=1e15)  # bytes per second
    bandwidth_out: float = Field(default=0.0, ge=0, le=1e15)
    incarnation: int = Field(default=1, ge=1, le=COUNT_MAX)
    number: Count = 0  # grows with each beat of a process; 0: it does not count
    available_storage: Count = 0
    deployments: tuple[DeploymentBeat, ...] = Field(default=(), max_length=2_000)


class Command(Record):
    """What the coordinator wants of an agent; agents only pull, so commands ride on answers."""

    kind: Literal["fetch_lanes", "activate", "cancel"]
    deployment_id: str
    epoch: int = Field(ge=0)


class HeartbeatAnswer(Record):
    """``continue`` (a keyword, hence the alias) is false when the agent must re-register."""

    model_config = Record.model_config | {"populate_by_name": True}

    go_on: bool = Field(default=True, alias="continue")
    epoch: int = Field(ge=0)  # the leader's
    next_beat_s: float = Field(gt=0)
    commands: tuple[Command, ...] = ()
    # Whose identity was taken back: the agent serves them no more. The newest of them, if many.
    barred: tuple[Name, ...] = Field(default=(), max_length=1000)


class WorkerList(Record):
    workers: tuple[Worker, ...]


class EventList(Record):
    events: tuple[Event, ...]
    last: int = Field(ge=0)  # give this as ``after`` in the next call
    first: int = Field(default=0, ge=0)  # the oldest that is still held; before it: the history


class Problem(Record):
    """RFC 9457, plus Paceline's own fields."""

    type: str = "about:blank"
    title: Text
    status: int
    detail: Text
    code: Text
    got: Text | None = None
    wanted: Text | None = None
    where: Text | None = None
    do: Text | None = None
