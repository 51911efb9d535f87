"""The end of a run as one record: what `paceline demo --json` prints and Prefect's page shows.

``python -m paceline.schemas.json_schemas`` writes its JSON schema to docs/schemas/.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.schemas.base import Name, Record, Sha256, Text
from paceline.schemas.events import DeploymentMoment, WorkerMoment
from paceline.schemas.plan import Topology
from paceline.schemas.records import Failure, Receipt
from paceline.schemas.training import GateDecision, Interval


class StageLine(Record):
    stage: str
    seconds: float = Field(ge=0)
    already_done: bool  # the ledger had it: nothing was done again


class Movement(Record):
    """One relay of one version to its targets."""

    deployment_id: str
    topology: str
    epoch: int  # 1 where nothing had to be re-planned
    workers: int  # complete, with a receipt
    verified: int  # read their own copy again, every byte
    seconds: float  # accepted plan to last verified rename
    predicted_seconds: float
    bound_seconds: float
    total_bytes: int
    origin_bytes: int
    received_bytes: int  # from peers, over all workers
    refetched_bytes: int
    pieces_reused: int
    bytes_reused: int
    cross_rack_bytes: int
    already_done: bool
    slow: tuple[str, ...] = ()  # workers that were fed at the tail, in the end
    quarantined: tuple[str, ...] = ()


class ModelFigures(Record):
    model_id: str
    parameters: int
    base_version: str
    version: str
    manifest_digest: Sha256


class DataFigures(Record):
    documents: int
    bytes: int
    digest: Sha256


class TrainingFigures(Record):
    job_id: str
    steps: int
    resumed_from_step: int
    first_loss: float | None  # nats per byte
    final_loss: float | None
    tokens_per_second: float
    data_wait_share: float
    checkpoint_stall_share: float
    restarts: int
    seconds: float


class EvaluationFigures(Record):
    documents: int
    bytes: int
    bits_per_byte: dict[str, Interval]  # candidate, base, champion, n-gram model, compressors
    gain_over: dict[str, Interval]  # candidate minus the named model, paired; negative is better


class RegistryFigures(Record):
    model_id: str
    version: str  # the registry's
    alias: str
    previous: str | None
    evidence_digest: Sha256


class RunSummary(Record):
    """One run from a bucket to a promoted model on every node."""

    status: Literal["complete"]
    run_id: str
    already_done: bool  # no stage that the ledger keeps was done again
    stages: tuple[StageLine, ...]
    model: ModelFigures
    data: DataFigures
    distribution: Movement
    rollout: Movement
    training: TrainingFigures
    evaluation: EvaluationFigures
    gate: GateDecision
    registry: RegistryFigures
    links: dict[str, str]
    notes: tuple[str, ...]  # what went wrong and was absorbed, what the policy excepts
    ready_seconds: float | None = None  # demo only: until every server was ready
    total_seconds: float | None = None  # demo only


class ProblemFigures(Record):
    code: str
    message: str
    got: str | None
    wanted: str | None
    where: str | None
    do: str | None


class Failed(Record):
    """What every command prints with --json when it fails."""

    status: Literal["failed"]
    error: ProblemFigures


# Forecasts, before a byte moves: what `plan` and `simulate` print with --json.


class PlanRow(Record):
    """What one topology would take. Reference rows are schemes that Paceline does not use."""

    topology: str
    reference: bool = False
    predicted_seconds: float = Field(ge=0)
    ratio: float = Field(ge=0)  # predicted / bound
    expected_seconds: float = Field(default=0.0, ge=0)  # with the deaths that `auto` counts on
    cross_rack_bytes: int = Field(ge=0)
    origin_bytes: int = Field(ge=0)
    depth: int = Field(ge=1)  # longest path from the origin, in hops
    limited_by: str = "link"  # "link", "origin", "uplink", "disk", "depth"


class PlanTable(Record):
    """Every topology for one fleet and model; ``chosen`` is what `auto` takes."""

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


class SimulationReport(Record):
    """What one simulated deployment took; the same seed gives the same report to the byte."""

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
    violations: tuple[str, ...] = ()  # invariants that did not hold; empty when all is well
    events: int = Field(ge=0)  # how many events the sessions were told


# What `paceline publish URL` and `paceline distribute --into` print with --json.


class Published(Record):
    """One version of a model in object storage."""

    status: Literal["complete"] = "complete"
    model_id: Name
    version: Name
    url: str
    manifest_digest: Sha256
    bytes: int = Field(ge=0)
    files: int = Field(ge=1)
    chunks: int = Field(ge=1)
    pieces: int = Field(ge=1)
    chunk_size: int = Field(ge=1)
    piece_size: int = Field(ge=1)
    uploaded_files: int = Field(ge=0)  # 0: everything was there already
    resumed_bytes: int = Field(ge=0)  # of parts that an attempt which died had uploaded
    signed_by: Sha256 | None = None  # public key
    seconds: float = Field(ge=0)


class Distribution(Record):
    """One model on every worker of one machine, brought there without a server."""

    status: Literal["complete"] = "complete"
    deployment_id: str
    model_id: Name
    version: Name
    manifest_digest: Sha256
    source_url: str
    topology: Topology  # what `auto` took
    epochs: int = Field(ge=1)  # 1: nothing had to be planned anew
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
    origin_before_bytes: int = Field(default=0, ge=0)  # by calls that it went on from, at most
    origin_ratio: float = Field(ge=0)  # origin_bytes / total_bytes
    received_bytes: int = Field(ge=0)  # from peers, over all workers
    reused_bytes: int = Field(ge=0)  # that the workers' disks held already
    refetched_bytes: int = Field(ge=0)
    corrupt_from: dict[str, int]  # source → pieces of its that did not match
    cross_rack_bytes: int = Field(ge=0)
    activated: bool = False
    receipts: tuple[Receipt, ...]
    notices: tuple[str, ...] = ()  # who fell silent, and what was done about it


# What `paceline checkpoints` answers.


class CheckpointShown(Record):
    """A generation as its marker tells of it."""

    name: str
    step: int = Field(ge=0)
    status: Literal["committed", "verified", "damaged", "rejected", "unfinished"]
    url: str
    bytes: int | None = None  # None: no marker that could be read
    world_size: int | None = None
    held_out_loss: float | None = None
    why: str = ""  # it is damaged or was rejected


class CheckpointsShown(Record):
    """The generations of one job, newest first."""

    url: str
    job_id: Name | None  # None: no marker says
    checkpoints: tuple[CheckpointShown, ...]


class CheckpointExported(Record):
    """A generation that was written as a standard DCP directory."""

    url: str
    step: int = Field(ge=0)
    directory: str
    bytes: int
    tensors: int
    seconds: float


class ModelImported(Record):
    """A model directory that was made of a standard DCP directory."""

    source: str
    directory: str
    tensors: int
    prefix: str  # that its weights have in the DCP checkpoint
    cast: int  # weights that had another dtype there
    weights_digest: str


# What `paceline reproduce` says: what differs, and whether the same bits came out.


class Differs(Record):
    """One thing that is not as it was when the run was made."""

    what: str
    then: str
    now: str
    decisive: bool  # it may change bits: nothing is trained unless asked to anyway
    where: str = ""
    do: str = ""  # what would make it the same


class Reproduction(Record):
    """A training job that was run again, beside the first one.

    ``checked`` compares without running anything.
    """

    run_id: str
    job_id: Name
    again_job_id: Name | None  # None where nothing was run
    status: Literal["identical", "different", "checked"]
    differences: tuple[Differs, ...]
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


# How an installation does, as ``paceline status --json`` prints it: servers, replicas, fleet.


class ServiceStatus(Record):
    """How one service does."""

    name: str
    state: Literal["waiting", "starting", "ready", "done", "restarting", "failed", "stopped"]
    pid: int = 0  # of the service's process
    session: int = 0  # of its guard, which leads the session
    restarts: int = 0
    ready_s: float | None = None  # from its own start
    rss_bytes: int = 0
    processes: int = 0
    log: str = ""
    problem: Text = ""


class InstallationStatus(Record):
    """How a state directory's installation does."""

    running: bool
    ready: bool = False
    pid: int = 0  # of the supervisor
    started_at: float = 0.0  # seconds since the Unix epoch
    ready_s: float | None = (
        None  # from the start of the supervisor until all blocking services were ready
    )
    services: tuple[ServiceStatus, ...] = ()
    rss_bytes: int = 0
    problem: Text = ""


class ReplicaStatus(Record):
    """One replica of the coordinator."""

    url: str
    answers: bool
    leads: bool = False
    leader_url: str | None = None  # as this replica knows it
    epoch: int = 0
    problem: Text = ""


class StatusReport(InstallationStatus):
    """The servers of this machine, and the fleet as the coordinator's replicas know it."""

    replicas: tuple[ReplicaStatus, ...] = ()
    leader_url: str | None = None
    workers: tuple[WorkerMoment, ...] = ()
    deployments: tuple[DeploymentMoment, ...] = ()  # in flight and the newest, without their parts


class Changed(Record):
    """What ``activate``, ``rollback`` (of a deployment) and ``cancel`` did."""

    status: Literal["switched", "cancelled"]
    deployment_id: str
    workers: int = 0  # that switched
    waiting: tuple[str, ...] = ()  # workers that are told when they return
    seconds: float = 0.0
