"""Records that the coordinator stores: deployments, workers, receipts, stages, approvals."""

from __future__ import annotations

import time
from collections import Counter
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field

from paceline.schemas.base import Count, ModelId, Name, Record, Sha256, Text, digest_of, is_empty
from paceline.schemas.plan import Labels, Topology


class DeploymentStatus(StrEnum):
    """State of a deployment."""

    INIT = "init"  # until every target has acknowledged manifest and readiness
    DOWNLOADING = "downloading"  # the head of the line reads the origin; no worker is complete
    DISTRIBUTING = "distributing"  # the origin is read; pieces still travel
    VERIFYING = "verifying"  # every piece has arrived; workers verify
    COMPLETE = "complete"
    FAILED = "failed"
    STALLED = "stalled"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (type(self).COMPLETE, type(self).FAILED, type(self).CANCELLED)


class WorkerStatus(StrEnum):
    """State of a worker in a deployment (or, without one, in the fleet)."""

    IDLE = "idle"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"
    VERIFICATION_FAILED = "verification_failed"

    @property
    def is_final(self) -> bool:
        """Return whether the worker neither waits nor receives any more."""
        return self not in (WorkerStatus.IDLE, WorkerStatus.RECEIVING)


class Failure(Record):
    """Reason why a worker or a whole deployment failed."""

    code: Text = Field(max_length=100)  # name of the error class
    message: Text = Field(max_length=2000)  # what was got, wanted and to do


class Receipt(Record):
    """A worker's confirmation that it verified the whole model and published it at ``path``."""

    deployment_id: str
    worker_id: Name
    incarnation: int
    model_id: ModelId
    version: Name
    manifest_digest: Sha256
    path: Text = Field(max_length=4096)  # where the model lies on the node
    total_bytes: Count  # of the model
    received_bytes: Count  # from peers, counted at the socket
    origin_bytes: Count  # from the source
    reused_bytes: Count  # already on this disk
    reused_pieces: Count  # already on this disk
    refetched_bytes: Count  # received again after loss or corruption
    sent_bytes: Count  # to peers
    corrupt_pieces: Count  # received, and refused
    seconds: float = Field(ge=0)  # from its first lanes to the rename


class WorkerProgress(Record):
    """One worker's part of one deployment, as it last reported."""

    worker_id: Name
    status: WorkerStatus = WorkerStatus.IDLE
    chunks_received: tuple[int, ...] = ()  # complete chunks, ascending
    pieces_held: int = Field(default=0, ge=0)  # verified
    bytes_held: int = Field(default=0, ge=0)  # verified
    upstream_worker: str | None = None  # it reads from it, or from "origin:URL"
    downstream_worker: str | None = None  # that reads from it; None: none
    failure: Failure | None = None
    receipt: Receipt | None = None  # None: not verified yet
    activated: bool = False  # this version is the one that is served there
    standing: str = Field(default="line", max_length=20)  # or "tail", "quarantined": plan.inputs


class Deployment(Record):
    """Distribution of one model version to a set of workers."""

    deployment_id: str
    model_id: ModelId
    version: Name
    status: DeploymentStatus
    source_url: Text  # where the origin's bytes are read
    manifest_digest: Sha256
    total_bytes: int = Field(ge=0)  # of the model
    total_chunks: int = Field(ge=1)  # of the model
    total_pieces: int = Field(ge=1)  # of the model; a piece is what is verified and passed on
    target_workers: tuple[Name, ...]  # by name, as selected at the start
    topology: Topology
    epoch: int = Field(ge=0)
    max_failed: float = Field(ge=0, le=1)  # share of targets that may die
    started_at: float  # seconds since the Unix epoch, for display; not used by deadlines
    completed_at: float | None = None
    seconds: float | None = None  # accepted plan to last verified rename, by the monotonic clock
    predicted_seconds: float = 0.0  # of the plan, by the cost model
    bound_seconds: float = 0.0  # that no plan can beat: size / link
    origin_bytes: int = 0  # read from the origin so far, by all workers
    failure: Failure | None = None
    flow_run_id: Text | None = None  # of the Prefect flow run that drives it
    flow_wanted: bool = False  # the coordinator starts (or started) that flow run
    run_id: Text | None = None


# What `paceline doctor` found on a node that needs something, a line each.
Findings = Annotated[
    tuple[Annotated[Text, Field(max_length=300)], ...], Field(default=(), max_length=10)
]


class Accelerator(Record):
    """Accelerators of one kind in a machine."""

    kind: Text = Field(max_length=100)  # as its driver reports it, such as "NVIDIA H100 80GB HBM3"
    count: int = Field(ge=1, le=1024)  # of this kind
    memory_bytes: Count  # of each; 0: the host's
    link: Literal["nvlink", "pcie", ""] = ""  # between them; "": one, or not reported


class Inventory(Record):
    """What a node reads of its machine as it starts; None: not known, never a guess."""

    cores: int = Field(ge=1, le=2**20)  # that its processes may use
    memory_bytes: Count  # of the host
    shared_memory_bytes: Count  # size of /dev/shm
    accelerators: tuple[Accelerator, ...] = Field(default=(), max_length=16)  # by kind; (): none
    interface: Text = Field(default="", max_length=64)  # on the route to the coordinator
    # speed of the interface, as the driver reports it
    interface_mbit: float | None = Field(default=None, gt=0, le=1e9)
    disk_bytes_s: float | None = Field(default=None, gt=0, le=1e15)  # measured: synced writes

    @property
    def like_cards(self) -> tuple[Accelerator, ...]:
        """Return the accelerators of the kind that most are of, the first of equals: ranks run on
        no others, because one gang has one kind."""
        counts: Counter[str] = Counter()
        for each in self.accelerators:
            counts[each.kind] += each.count
        most = max(counts, key=counts.__getitem__, default="")
        return tuple(each for each in self.accelerators if each.kind == most)


class Worker(Record):
    """One registered agent."""

    worker_id: Name
    hostname: Text = Field(max_length=255)
    labels: Labels  # its place, and your own
    address: Text = Field(max_length=300)  # peer port, "host:port"
    available_storage: int = Field(ge=0)  # bytes
    link_mbit: float = Field(gt=0)  # of its network interface
    incarnation: int = Field(ge=1)  # increases with each restart of the worker
    alive: bool = True  # its heartbeats arrive
    last_heartbeat: float = 0.0  # seconds since the Unix epoch
    bandwidth_in: float = 0.0  # bytes per second
    bandwidth_out: float = 0.0  # bytes per second
    pid: int = 0  # of its agent, on its host
    process: Text = ""  # random id of its process; "": use pid and address
    findings: Findings = ()  # of `paceline doctor`; (): nothing to do
    inventory: Inventory | None = None  # None: an agent that does not report it
    version: Text = Field(default="", exclude_if=is_empty)  # of Paceline there


class StageRecord(Record):
    """One ledger entry: the output of a stage for given inputs."""

    stage: Name  # such as relay or train
    input_digest: Sha256  # SHA-256 of the stage's inputs
    output: dict[str, object]  # what the stage returned
    output_digest: Sha256  # SHA-256 of the output
    run_id: str
    seconds: float = Field(ge=0)  # that the stage took
    finished_at: float  # seconds since the Unix epoch

    @classmethod
    def of(
        cls, stage: str, key: str, output: dict[str, object], run_id: str, seconds: float = 0.0
    ) -> Self:
        """Return the entry of ``output``, which has just been made in ``seconds``; ``key`` is the
        digest of the inputs."""
        return cls(
            stage=stage,
            input_digest=key,
            output=output,
            output_digest=digest_of(output),
            run_id=run_id,
            seconds=seconds,
            finished_at=time.time(),
        )


class Approval(Record):
    """A person's decision on a promotion, as the coordinator recorded it; the approver is the owner
    of the token that the call presented."""

    run_id: str
    model_id: ModelId
    evidence_digest: Sha256  # of the evidence without its approver
    approved: bool  # false: rejected
    reason: str = ""
    approver: str  # the token's name
    token_id: str  # of the token that decided
    at: float  # seconds since the Unix epoch
    submitters: tuple[str, ...]  # names of the tokens that submitted the run


# Here, because ranks use it: the records of commands, which they do not need, take 0.2 CPU-seconds
# of each launcher's start.
class Difference(Record):
    """One difference between the original run's environment and the present one."""

    what: str
    then: str
    now: str
    decisive: bool  # may change results: training is refused unless forced
    where: str = ""
    do: str = ""  # how to remove the difference
