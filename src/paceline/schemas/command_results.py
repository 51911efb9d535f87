"""Records that commands print with --json: plan, simulate, publish, distribute --into, status, …

``python -m paceline.schemas.json_schemas docs/schemas`` writes their JSON schemas.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.schemas.base import (
    ModelId,
    Name,
    PieceHash,
    Record,
    Sha256,
    Text,
    digest_of,
    is_empty,
)
from paceline.schemas.clients import ApprovalRequest
from paceline.schemas.events import DeploymentMoment, WorkerMoment
from paceline.schemas.plan import Topology
from paceline.schemas.records import Difference, Failure, Receipt


class ProblemFigures(Record):
    code: str
    message: str
    got: str | None
    wanted: str | None
    where: str | None
    do: str | None


class Failed(Record):
    """Output of every failed command with --json."""

    status: Literal["failed"]
    error: ProblemFigures


# Forecasts: output of `plan` and `simulate` with --json.


class PlanRow(Record):
    """Forecast of one topology; reference rows are schemes that Paceline does not use."""

    topology: str
    reference: bool = False
    predicted_seconds: float = Field(ge=0)
    ratio: float = Field(ge=0)  # predicted / bound
    expected_seconds: float = Field(default=0.0, ge=0)  # with the worker deaths that `auto` assumes
    cross_rack_bytes: int = Field(ge=0)
    origin_bytes: int = Field(ge=0)
    depth: int = Field(ge=1)  # longest path from the origin, in hops
    limited_by: str = "link"  # "link", "origin", "uplink", "disk", "depth"


class PlanTable(Record):
    """Forecast of every topology for one fleet and model; `auto` selects ``chosen``."""

    status: Literal["complete"] = "complete"
    size_bytes: int = Field(ge=0)
    workers: int = Field(ge=1)
    racks: int = Field(ge=1)
    link_mbit: float = Field(gt=0)
    external_mbit: float = Field(gt=0)
    oversubscription: float = Field(ge=1)
    piece_bytes: int = Field(ge=1)
    chunk_bytes: int = Field(ge=1)
    bound_seconds: float = Field(ge=0)
    rows: tuple[PlanRow, ...]
    chosen: str
    disk_mbit: float = Field(default=0.0, ge=0)  # 0: no bound
    origins: dict[str, str] = {}  # of link and disk: given, assumed, reported or measured


class SimulationReport(Record):
    """Result of one simulated deployment; the same seed gives the same report to the byte."""

    status: Literal["complete"] = "complete"
    seconds: float = Field(ge=0)  # accepted plan to the last survivor's verified rename
    bound_seconds: float = Field(ge=0)
    predicted_seconds: float = Field(ge=0)  # the plan's own estimate, with nothing failing
    ratio: float = Field(ge=0)  # seconds / bound_seconds
    survivors_complete: bool
    workers: int = Field(ge=1)
    survivors: int = Field(ge=0)
    topology: str
    seed: int
    origin_bytes: int = Field(ge=0)
    origin_ratio: float = Field(ge=0)  # origin_bytes / size
    cross_rack_bytes: int = Field(ge=0)
    corrupt_pieces: int = Field(ge=0)
    killed: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()  # violated invariants
    events: int = Field(ge=0)  # number of events that the sessions handled


# Output of `paceline publish URL` and `paceline distribute --into` with --json.


class Published(Record):
    """One version of a model in object storage."""

    status: Literal["complete"] = "complete"
    model_id: ModelId
    version: Name
    url: str
    manifest_digest: Sha256
    bytes: int = Field(ge=0)
    files: int = Field(ge=1)
    chunks: int = Field(ge=1)
    pieces: int = Field(ge=1)
    chunk_size: int = Field(ge=1)
    piece_size: int = Field(ge=1)
    piece_hash: PieceHash
    uploaded_files: int = Field(ge=0)  # 0: all were stored already
    resumed_bytes: int = Field(ge=0)  # of parts uploaded by an earlier, interrupted attempt
    signed_by: Sha256 | None = None  # public key
    seconds: float = Field(ge=0)


class Distribution(Record):
    """Distribution of one model to all workers of one machine, without a coordinator."""

    status: Literal["complete"] = "complete"
    deployment_id: str
    model_id: ModelId
    version: Name
    manifest_digest: Sha256
    source_url: str
    topology: Topology  # as chosen by `auto`
    epochs: int = Field(ge=1)  # 1: never re-planned
    workers: int = Field(ge=1)
    workers_complete: int = Field(ge=1)
    workers_failed: dict[str, Failure]
    racks: int = Field(ge=1)
    total_bytes: int = Field(ge=1)
    seconds: float = Field(ge=0)  # accepted plan, workers ready, to the last verified rename
    predicted_seconds: float | None = None  # None: the link has no limit
    bound_seconds: float | None = None
    ratio: float | None = None  # seconds / bound_seconds
    origin_bytes: int = Field(ge=0)  # by all workers, with origin_before_bytes
    origin_before_bytes: int = Field(default=0, ge=0)  # by earlier, resumed calls; upper bound
    origin_ratio: float = Field(ge=0)  # origin_bytes / total_bytes
    received_bytes: int = Field(ge=0)  # from peers, over all workers
    reused_bytes: int = Field(ge=0)  # already on the workers' disks
    refetched_bytes: int = Field(ge=0)
    corrupt_from: dict[str, int]  # source → number of its corrupt pieces
    cross_rack_bytes: int = Field(ge=0)
    activated: bool = False
    receipts: tuple[Receipt, ...]
    notices: tuple[str, ...] = ()  # silent workers, and the reaction


# Output of `paceline checkpoints`.


class CheckpointShown(Record):
    """One checkpoint generation, as described by its marker."""

    name: str
    step: int = Field(ge=0)
    status: Literal["committed", "verified", "damaged", "rejected", "unfinished"]
    url: str
    bytes: int | None = None  # None: no readable marker
    world_size: int | None = None
    held_out_loss: float | None = None
    why: str = ""  # reason of damaged or rejected


class CheckpointsShown(Record):
    """The generations of one job, newest first."""

    status: Literal["complete"] = "complete"
    url: str
    job_id: Name | None  # None: no readable marker
    checkpoints: tuple[CheckpointShown, ...]


class CheckpointExported(Record):
    """A checkpoint generation exported as a standard DCP directory."""

    status: Literal["complete"] = "complete"
    url: str
    step: int = Field(ge=0)
    directory: str
    bytes: int
    tensors: int
    seconds: float


class Generated(Record):
    """Output of `paceline generate --json`."""

    status: Literal["complete"] = "complete"
    model: str
    prompt: str
    text: str  # what the model added to the prompt, or answered
    seconds: float = Field(ge=0)


# Output of `paceline reproduce`.


class Reproduction(Record):
    """Comparison of a repeated training job with the original.

    ``checked`` compares without running anything.
    """

    run_id: str
    job_id: Name
    again_job_id: Name | None  # None if nothing was run
    status: Literal["identical", "different", "checked"]
    differences: tuple[Difference, ...]
    steps: int  # losses compared
    first_different_step: int | None = None
    loss_then: float | None = None  # at that step
    loss_now: float | None = None
    weights_then: str = ""
    weights_now: str = ""
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """Return whether losses and weights are the same, bit for bit."""
        return self.status == "identical"


# Output of ``paceline status --json``: servers, replicas, fleet.


class ServiceStatus(Record):
    """State of one service."""

    name: str
    state: Literal["waiting", "starting", "ready", "done", "restarting", "failed", "stopped"]
    pid: int = 0  # of the service's process
    session: int = 0  # of its guard process, the session leader
    restarts: int = 0
    ready_s: float | None = None  # from its own start
    rss_bytes: int = 0
    processes: int = 0
    log: str = ""
    problem: Text = ""


class InstallationStatus(Record):
    """State of the installation in a state directory."""

    running: bool
    ready: bool = False
    pid: int = 0  # of the supervisor
    started_at: float = 0.0  # seconds since the Unix epoch
    ready_s: float | None = None  # from the supervisor's start until all blocking services ran
    services: tuple[ServiceStatus, ...] = ()
    rss_bytes: int = 0
    problem: Text = ""


class ReplicaStatus(Record):
    """One replica of the coordinator."""

    url: str
    answers: bool
    leads: bool = False
    leader_url: str | None = None  # as reported by this replica
    epoch: int = 0
    problem: Text = ""


class StatusReport(InstallationStatus):
    """The servers of this machine, and the fleet as reported by the coordinator's replicas."""

    status: Literal["running", "stopped"] = "stopped"  # stopped: nothing here, no coordinator
    replicas: tuple[ReplicaStatus, ...] = ()
    leader_url: str | None = None
    workers: tuple[WorkerMoment, ...] = ()
    deployments: tuple[DeploymentMoment, ...] = ()  # running and newest, without parts
    approvals: tuple[ApprovalRequest, ...] = ()  # promotions that wait for a person


class Changed(Record):
    """Result of ``activate``, ``rollback`` and ``cancel``."""

    status: Literal["switched", "cancelled"]
    deployment_id: str
    workers: int = 0  # that switched
    waiting: tuple[str, ...] = ()  # workers that get the command when they return
    seconds: float = 0.0


# Output of short commands.


class Started(Record):
    """Output of `paceline up --json`."""

    status: Literal["running"] = "running"
    state: str  # the directory
    links: dict[str, str]  # pages, logs, credentials


class Stopped(Record):
    """Output of `paceline down --json`."""

    status: Literal["stopped"] = "stopped"
    was_running: bool
    runs: tuple[str, ...] = ()  # interrupted: a command ran them
    state: str


class Links(Record):
    """Output of `paceline where --json`: pages and paths of the installation, or of one run."""

    model_config = Record.model_config | {"extra": "allow"}  # pages that another version has
    __pydantic_extra__: dict[str, str]

    status: Literal["complete"] = "complete"
    prefect: str = ""  # "": there is none
    mlflow: str = ""
    fleet: str = ""
    s3: str = Field(default="", exclude_if=is_empty)
    logs: str = Field(default="", exclude_if=is_empty)
    credentials: str = Field(default="", exclude_if=is_empty)
    run: str = Field(default="", exclude_if=is_empty)  # its id
    state: str = Field(default="", exclude_if=is_empty)  # the directory with the run's records


class LoggedOut(Record):
    """Output of `paceline logout --json`."""

    status: Literal["complete"] = "complete"
    was_logged_in: bool


class KeyShown(Record):
    """Output of `paceline keys --json`."""

    status: Literal["complete"] = "complete"
    path: str  # of the private key
    public_key: str


SWEEP = "sweep"  # the ledger's stage of what sweeps have found


def sweep_key(name: str) -> str:
    """Return the ledger's input digest of what the sweep ``name`` has found."""
    return digest_of({"sweep": name})


class SweepTrial(Record):
    """A trial of a sweep: the settings that it tried, its job, and what came of it."""

    number: int = Field(ge=0)
    state: Literal["running", "waiting", "complete", "pruned", "fail"]
    value: float | None = None  # of the sweep's metric; of a pruned trial the last that it reported
    parameters: dict[str, object] = {}
    job_id: str = ""  # "": refused
    step: int = 0
    steps: int = 0  # that it would make
    reason: str = ""  # of a failed trial


class SweepShown(Record):
    """Output of `paceline sweep --json`."""

    status: Literal["complete"] = "complete"
    name: str
    run_id: str = ""  # of its run in MLflow; "": it has none
    metric: str
    maximize: bool
    trials: tuple[SweepTrial, ...]
    left_out: int = 0  # trials that are not in ``trials``, because the record would be too large
    best: SweepTrial | None
    importance: dict[str, float] = {}  # of each parameter, together 1; {}: too few trials
    reproduce: str = ""  # the command that trains the best again
    # why fewer trials than wanted have begun; "": none is missing
    stopped: str = Field(default="", exclude_if=is_empty)


class SweepStarted(Record):
    """Output of `paceline sweep --detach --json`."""

    status: Literal["complete"] = "complete"
    run_id: str
    flow_run_id: str  # Prefect's
    page: str = ""  # in Prefect
