"""Request and response records of the coordinator's REST (names are stable).

``api.routes`` has the table of routes; a running coordinator serves it as /docs.
Every call but /healthz and /readyz carries ``Authorization: Bearer TOKEN``.
Errors are RFC 9457 problem documents (``Problem``) with the error's class name as ``code``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.schemas.base import (
    COUNT_MAX,
    Count,
    ModelId,
    Name,
    Record,
    Text,
    is_empty,
    is_none,
    require_no_password,
)
from paceline.schemas.events import Event
from paceline.schemas.plan import Labels, Topology
from paceline.schemas.records import (
    Deployment,
    DeploymentStatus,
    Failure,
    Findings,
    Inventory,
    Receipt,
    Worker,
    WorkerProgress,
    WorkerStatus,
)

MIN_BEAT_INTERVAL_S = 0.02  # least time between two heartbeats of one agent
SourceKey = Annotated[str, Field(max_length=2200)]  # a worker id, or "origin:URL"
# Chunk ids of one deployment, without duplicates; as many as a manifest may have.
Chunks = Annotated[tuple[int, ...], Field(max_length=2**16)]
SourceKeys = Annotated[tuple[SourceKey, ...], Field(max_length=20_000)]  # as many as targets


class CreateDeployment(Record):
    """Distribute ``version`` of ``model_id`` from ``source_url`` to the target workers: those of
    ``target_workers``, or those that ``selector`` selects when the call arrives.

    Where the first two are left out or empty they are what the source's manifest says.
    """

    model_id: ModelId | Literal[""] = ""
    version: Name | Literal[""] = ""
    # s3://bucket/prefix, or a path below security.source_roots
    source_url: Annotated[str, AfterValidator(require_no_password)] = Field(
        min_length=1, max_length=2048
    )
    # by name; (): by selector
    target_workers: tuple[Name, ...] = Field(default=(), max_length=20_000)
    selector: Text | None = Field(default=None, max_length=2000)  # "": all alive
    topology: Topology = Topology.AUTO
    max_failed: float = Field(default=0.05, ge=0, le=1)  # share of targets that may die
    seed: int = Field(default=0, ge=-COUNT_MAX, le=COUNT_MAX)
    allow_older: bool = False  # allow a version older than a target's active one; else Conflict
    # what the source's manifest must be, else CorruptData; left out where it is not given
    manifest_digest: Text | None = Field(default=None, exclude_if=is_none)
    flow_run_id: Text | None = Field(default=None, max_length=64)
    run_id: Text | None = Field(default=None, max_length=64)

    @model_validator(mode="after")
    def _one_kind_of_target(self) -> Self:
        if bool(self.target_workers) == (self.selector is not None):
            raise ValueError("either target_workers, at least one, or a selector")
        return self


class CreatedDeployment(Record):
    deployment_id: str
    status: DeploymentStatus
    estimated_time_seconds: float  # by the cost model


class DeploymentView(Record):
    """A deployment with its progress; ``progress`` is the share of bytes held by living targets."""

    deployment_id: str
    status: DeploymentStatus
    progress: float = Field(ge=0, le=1)  # share of bytes held by living targets
    workers_complete: tuple[Name, ...]  # that have verified the whole model
    workers_failed: tuple[Name, ...]  # that died or gave up
    deployment: Deployment  # all that is stored of it


class DeploymentList(Record):
    deployments: tuple[Deployment, ...]  # oldest first


class WorkerProgressList(Record):
    workers: tuple[WorkerProgress, ...]  # each target


class Success(Record):
    success: bool = True  # always true: a refusal is a Problem


class RaiseOriginBudget(Record):
    """Raise a deployment's origin budget by ``extra_bytes``."""

    extra_bytes: int = Field(gt=0, le=2**60)  # besides those that it had


class SwitchKind(StrEnum):
    """Direction of a switch."""

    ACTIVATE = "activate"  # to the deployment's version
    ROLLBACK = "rollback"  # from it to the version that was active before


class SwitchPhase(StrEnum):
    """Phase of a switch; no worker switches before a quorum is ready."""

    PREPARING = "preparing"  # workers report whether they hold the target version
    SWITCHING = "switching"  # decided: workers get the command, late ones on return
    SWITCHED = "switched"  # every living worker switched, or a quorum at the deadline
    REFUSED = "refused"  # no quorum in time, or another switch came first; no commands sent
    SUPERSEDED = "superseded"  # another switch was decided before all had switched


class WorkerSwitch(Record):
    """State of one worker in a switch."""

    worker_id: Name
    # other: another version became active there, or no version was active before.
    state: Literal["waiting", "ready", "told", "switched", "failed", "lost", "other"]
    deployment_id: str | None = None  # what it switches to
    version: str | None = None
    failure: Failure | None = None


class SwitchView(Record):
    """The newest switch of a deployment, worker by worker."""

    deployment_id: str
    kind: SwitchKind  # which way
    phase: SwitchPhase
    quorum: int = Field(ge=0)  # workers that must be ready before commands are sent
    ready: int = Field(ge=0)  # workers that hold the version
    switched: int = Field(ge=0)  # workers that serve it
    failure: Failure | None = None
    workers: tuple[WorkerSwitch, ...]  # each target

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(x.worker_id for x in self.workers if x.state not in ("switched", "other"))


class RegisterWorker(Record):
    worker_id: Name
    hostname: Text = Field(max_length=255)
    rack: Text = Field(max_length=255)
    available_storage: Count  # free bytes of the store's disk
    labels: Labels = Labels()  # as `paceline agent --label` gave them
    address: Text = Field(default="", max_length=300)  # host:port on which peers connect
    link_mbit: float = Field(default=10_000, ge=1e-3, le=1e9)  # bounds that plans can compute with
    incarnation: int = Field(default=1, ge=1, le=COUNT_MAX)
    pid: int = Field(default=0, ge=0, le=2**32)  # of the agent's process; 0: not given
    process: Text = Field(default="", max_length=64)  # random id: pids repeat in containers
    findings: Findings = ()  # of the node's last `paceline doctor`
    inventory: Inventory | None = None  # what the machine has; None: not read
    version: Text = Field(default="", max_length=64)  # of Paceline there; "": not reported


class Registered(Record):
    registered: bool = True  # always true
    worker_id: Name
    incarnation: int


class SignRead(Record):
    """Ask for a signed URL of an object that a deployment of the worker is read from."""

    worker_id: Name
    method: Literal["GET", "HEAD"]  # of the request to sign
    url: Text = Field(max_length=2048)  # s3://bucket/key
    # of the object in a bucket with versions; "": the newest
    version_id: Text = Field(default="", max_length=1024)


class SignedRead(Record):
    """A signed URL."""

    url: str  # to read from, without credentials
    valid_s: float  # from now on


class EdgeTally(Record):
    """Totals from ``source`` to ``reader`` since the beginning of one deployment.

    The source counts ``bytes`` and ``busy_s`` (the time in which it had data to send, so that
    bytes / busy_s is the edge's throughput); the reader counts ``pieces`` and ``corrupt``, and all
    four if the source is the origin.
    """

    source: SourceKey  # a worker, or "origin:URL"
    reader: Name  # the worker that received
    bytes: Count = 0  # sent
    busy_s: float = Field(default=0.0, ge=0, le=1e9)  # seconds in which there were data to send
    pieces: Count = 0  # that matched their digest
    corrupt: Count = 0  # that did not match


class DeploymentBeat(Record):
    """An agent's report about one deployment, part of each heartbeat."""

    deployment_id: str
    epoch: Count
    status: WorkerStatus
    pieces_held: Count  # verified
    bytes_held: Count  # of the verified pieces
    chunks_received: Chunks = ()  # complete chunks, ascending
    origin_bytes: Count = 0  # read from the source by this worker
    lost_sources: SourceKeys = ()  # abandoned by this worker since its last lanes
    corrupt_sources: SourceKeys = ()  # that sent a piece with another digest
    # totals of each sender and reader
    edges: tuple[EdgeTally, ...] = Field(default=(), max_length=512)
    failure: Failure | None = None
    receipt: Receipt | None = None  # None: not verified yet
    activated: bool = False  # whether the worker switched to the version


class Heartbeat(Record):
    worker_id: Name
    status: WorkerStatus
    chunks_received: Chunks = ()  # of the running deployment, if there is exactly one
    bandwidth_in: float = Field(default=0.0, ge=0, le=1e15)  # bytes per second
    bandwidth_out: float = Field(default=0.0, ge=0, le=1e15)  # bytes per second
    incarnation: int = Field(default=1, ge=1, le=COUNT_MAX)
    number: Count = 0  # increases with each beat of a process; 0: not counted
    available_storage: Count = 0  # free bytes of the store's disk
    # those that the worker takes part in
    deployments: tuple[DeploymentBeat, ...] = Field(default=(), max_length=2_000)


class Command(Record):
    """A command for an agent; sent in heartbeat answers, because agents only poll."""

    # fetch_lanes: a new plan; activate: switch to the version; cancel: stop receiving
    kind: Literal["fetch_lanes", "activate", "cancel"]
    deployment_id: str
    epoch: int = Field(ge=0)


class HeartbeatAnswer(Record):
    """``continue`` (a keyword, hence the alias) is false when the agent must re-register."""

    model_config = Record.model_config | {"populate_by_name": True}

    go_on: bool = Field(default=True, alias="continue")
    epoch: int = Field(ge=0)  # the leader's
    next_beat_s: float = Field(gt=0)  # seconds until the next heartbeat
    commands: tuple[Command, ...] = ()  # to carry out now
    # Workers with a revoked identity, which agents do not serve; the newest ones if there are many.
    barred: tuple[Name, ...] = Field(default=(), max_length=1000)
    # The worker's identity was issued before the authorities changed: renew it now. Left out where
    # false, because agents of the release before do not take it.
    renew: bool = Field(default=False, exclude_if=is_empty)


class WorkerList(Record):
    workers: tuple[Worker, ...]  # lost ones too


class EventList(Record):
    events: tuple[Event, ...]  # by number
    last: int = Field(ge=0)  # the ``after`` of the next call
    first: int = Field(default=0, ge=0)  # the oldest still held; see /audit for older ones


class Problem(Record):
    """An RFC 9457 problem document with Paceline's own fields."""

    type: str = "about:blank"  # always about:blank
    title: Text  # the phrase of the HTTP status
    status: int
    detail: Text  # what is wrong
    code: Text  # the class of the error, such as NotFound
    got: Text | None = None  # what was found
    wanted: Text | None = None  # what was expected
    where: Text | None = None  # the object, path or address
    do: Text | None = None  # what to do next
