"""Records of training jobs: what was submitted, where it stands, and what its flow reports.

A *job* is a request to train that waits in the queue and is admitted as a gang. The *training*
that it runs has an id of its own (``job-…``), which follows from its configuration: two identical
jobs are two jobs with one training, so the second finds the result of the first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, RootModel, StringConstraints, model_validator

from paceline.config import CheckpointSettings
from paceline.schemas.access import Team
from paceline.schemas.base import (
    RUN_ID,
    Count,
    ModelId,
    Name,
    Record,
    Sha256,
    Text,
    Url,
    canonical_json,
    is_empty,
    is_none,
)
from paceline.schemas.cost import CostEstimate
from paceline.schemas.plan import NodeLabels

TRAINING_JOBS = "training-job"  # the ledger's stage in which the release before kept jobs
QUEUED_JOB_ID = r"^tj-[0-9a-f]{12}$"
MOST_PARAMETER_BYTES = 16 * 1024
KEPT_CHANGES = 100  # of a job's states; the oldest one has the number of those before it
KEPT_USAGES = 100  # of a job's attempts; older ones are added up

# In the currency of the profile's [prices]; None and 0: none.
Budget = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Why an attempt of a job ended before its time.
LossCause = Literal["", "lost-flow", "passing-failure", "node", "preempted"]

QueuedJobId = Annotated[str, StringConstraints(pattern=QUEUED_JOB_ID)]


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    ADMITTED = "admitted"  # its gang's hosts are reserved
    STARTING = "starting"  # its flow runs: the base is relayed, the ranks start
    RUNNING = "running"  # steps are made
    PAUSING = "pausing"  # every rank saves its state and ends
    PAUSED = "paused"
    PREEMPTED = "preempted"  # saved, and in the queue again
    RECOVERING = "recovering"  # its flow was lost or met a passing failure: in the queue again
    CANCELLING = "cancelling"
    NEEDS_REVIEW = "needs_review"  # trained, but bad data were passed over: a person decides
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}

    @property
    def waits(self) -> bool:
        return self in {JobState.QUEUED, JobState.PREEMPTED, JobState.RECOVERING}

    @property
    def holds_hosts(self) -> bool:
        return self in {
            JobState.ADMITTED,
            JobState.STARTING,
            JobState.RUNNING,
            JobState.PAUSING,
            JobState.CANCELLING,
        }


class Resources(Record):
    """What a gang needs; all of its ranks are on hosts of one accelerator kind."""

    ranks: int = Field(
        default=0, ge=0, le=65_536, description="Processes in all; 0: the profile's.", examples=[8]
    )
    ranks_per_node: int = Field(
        default=0, ge=0, le=1024, description="0: one for each accelerator, else one.", examples=[8]
    )
    accelerator: Text = Field(
        default="", max_length=100, description="A kind, or a part of its name; empty: any.",
        examples=["a100"],
    )  # fmt: skip
    memory_bytes: int = Field(
        default=0, ge=0, le=2**60, description="Of each accelerator, at least.",
        examples=[80_000_000_000],
    )  # fmt: skip
    capacity: Literal["", "on-demand", "spot"] = Field(default="", description="Empty: any.")
    within: Literal["host", "domain", "rack", "zone", "fleet"] = Field(
        default="fleet", description="What the gang may not leave."
    )
    node_labels: NodeLabels = Field(
        default={}, exclude_if=is_empty, description="That each of its nodes has.",
        examples=[{"pool": "a100"}],
    )  # fmt: skip
    queue: Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][-\w.]{0,62})?$")] = Field(
        default="", exclude_if=is_empty, examples=["training"],
        description="Where Slurm or Kubernetes admits jobs: the partition, or Kueue's LocalQueue; "
        "empty: the team's, else the profile's.",
    )  # fmt: skip
    time_limit_s: float = Field(
        default=0, ge=0, le=366 * 86_400, exclude_if=is_empty, examples=[43_200],
        description="There too: seconds after which the nodes are taken back; 0: the profile's.",
    )  # fmt: skip


class SubmitJob(Record):
    """Submit a training job: a published model, a data snapshot, and what the gang needs.

    Fields with a title are in the form of the flow train-model, too.
    """

    model_id: ModelId
    version: Name
    # s3://…, as `paceline snapshot` prints it
    data_snapshot: Url = Field(
        min_length=1,
        max_length=2000,
        validation_alias=AliasChoices("data_snapshot", "dataSnapshot"),
    )
    # "": the profile's; else a pinned function of security.code_sources
    code_ref: Url = Field(
        default="", max_length=1000, validation_alias=AliasChoices("code_ref", "codeRef")
    )
    # likewise, of its optimiser
    optimizer_ref: Url = Field(
        default="",
        max_length=1000,
        validation_alias=AliasChoices("optimizer_ref", "optimizerRef"),
        exclude_if=is_empty,
    )
    resources: Resources = Field(
        default=Resources(), title="Resources", description="What the gang needs."
    )
    checkpoint_policy: CheckpointSettings | None = Field(
        default=None,
        validation_alias=AliasChoices("checkpoint_policy", "checkpointPolicy"),
        title="Checkpoints",
        description="When they are written, and how many are kept; default: the profile's.",
    )
    parameters: dict[str, object] = Field(default={}, max_length=64)  # settings of this training
    seed: int | None = Field(
        default=None, ge=0, le=2**31, title="Seed", examples=[17],
        description="Of weights, order of the data and dropout; default: the profile's.",
    )  # fmt: skip
    labels: Literal["true", "shuffled"] = "true"  # "shuffled" is the control
    continue_from: Annotated[str, StringConstraints(max_length=128)] = ""  # a finished training
    name: Text = Field(
        default="", max_length=100, title="Name", description="For lists and pages.",
        examples=["lr 3e-4"],
    )  # fmt: skip
    team: Team | Literal[""] = ""  # "": the token's, else "default"
    project: Text = Field(default="", max_length=100)
    # what the data are used for; "": the profile's data.purpose
    purpose: Name | Literal[""] = Field(default="", exclude_if=is_empty)
    priority: int = Field(
        default=0, ge=-100, le=100, title="Priority", description="Higher goes first.",
        examples=[10],
    )  # fmt: skip
    budget: Budget | None = Field(
        default=None, exclude_if=is_empty, title="Budget", examples=[200],
        description="The most that the whole job may cost, in the currency of the profile's "
        "prices; then it is paused. Empty or 0: no limit.",
    )  # fmt: skip
    # The snapshot on whose held-out split the result is judged; "": it is not judged; None: as the
    # profile's evaluation.after_training has it.
    evaluate_on: Url | None = Field(
        default=None,
        max_length=2000,
        validation_alias=AliasChoices("evaluate_on", "evaluateOn"),
        exclude_if=is_none,
    )
    # the run id of the sweep whose trial it is: its run in MLflow is below the sweep's
    sweep: Annotated[str, StringConstraints(pattern=f"{RUN_ID}|^$")] = Field(
        default="", exclude_if=is_empty
    )

    @model_validator(mode="after")
    def _parameters_are_small(self) -> SubmitJob:
        if len(canonical_json(self.parameters)) > MOST_PARAMETER_BYTES:
            raise ValueError(f"parameters are larger than {MOST_PARAMETER_BYTES} bytes")
        return self

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings of this training by their keys in a profile."""
        made = dict(self.parameters)
        for name in ("ranks", "ranks_per_node"):
            if wanted := getattr(self.resources, name):
                made[f"training.{name}"] = wanted
        if self.seed is not None:
            made["training.seed"] = self.seed
        policy = self.checkpoint_policy
        for key, value in (policy.model_dump(exclude_unset=True) if policy else {}).items():
            made[f"training.checkpoints.{key}"] = value
        return made


class JobChange(Record):
    """One change of a job's state."""

    state: JobState
    at: float  # seconds since the Unix epoch
    reason: Text = Field(default="", max_length=500)
    by: Text = Field(default="", max_length=128)  # who asked for it; "": the coordinator
    cause: LossCause = ""  # "": the attempt was not lost
    # that is to be ended in Prefect: it was lost without its end, or is not needed any more
    flow_run_id: Text = Field(default="", max_length=64, exclude_if=is_empty)
    # changes before the oldest one that is kept; the audit history has them
    earlier: Count = Field(default=0, exclude_if=is_empty)


class JobRank(Record):
    """One rank of a job's gang."""

    rank: int = Field(ge=0)  # from 0
    host: Name  # the worker that it runs on
    state: Literal["starting", "running", "ended", "failed"]
    last_heartbeat: float


class JobCheckpoint(Record):
    """A checkpoint of a job that its ranks may resume."""

    step: int = Field(ge=0)  # after which it was saved
    object_ref: Text = Field(max_length=1100)  # the URL of its directory
    metrics: dict[str, float] = Field(default={}, max_length=20)  # of that step, by name
    created_at: float
    bytes: int = Field(default=0, ge=0, exclude_if=is_empty)  # of its files; 0: not recorded


Page = Annotated[Text, StringConstraints(pattern=r"^https?://[!-~]+$", max_length=2000)]


class JobReport(Record):
    """What a job's flow reports every few seconds; each report is complete."""

    flow_run_id: Text = Field(default="", max_length=64)
    at: float
    training_id: Annotated[str, StringConstraints(max_length=128)] = ""  # job-…
    training_digest: Sha256 | None = None  # of its result as recorded
    # of its evaluation as recorded, which a promotion asks for
    report_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    attempt: int = Field(default=0, ge=0)  # of the job, from 1
    step: int = Field(default=0, ge=0)  # the last one made
    steps: int = Field(default=0, ge=0)  # that it makes in all
    made_steps: int = Field(default=0, ge=0)  # of this flow run, each counted once
    # after which step its first gang went on; None before
    began_step: int | None = Field(default=None, ge=0, exclude_if=is_none)
    # of this flow run so far: useful, data_wait, checkpoint, recovery
    seconds: dict[str, float] = Field(default={}, max_length=10)
    # of the object store, by this flow run so far; None: of an older version
    read_bytes: Count | None = Field(default=None, exclude_if=is_none)  # by its relays and ranks
    written_bytes: Count | None = Field(default=None, exclude_if=is_none)  # as checkpoints
    metrics: dict[str, float] = Field(default={}, max_length=100)  # of the last step
    checkpoints: tuple[JobCheckpoint, ...] = Field(default=(), max_length=32)  # newest last
    workers: tuple[JobRank, ...] = Field(default=(), max_length=4096)  # each rank of the gang
    # host → kind of failure → how often its ranks or the host ended this flow run's gang
    failures: dict[Name, dict[Text, int]] = Field(default={}, max_length=4096, exclude_if=is_empty)
    notes: tuple[Text, ...] = Field(default=(), max_length=50)  # what a person should read
    # how the flow ended; None while it goes on
    outcome: Literal["succeeded", "failed", "cancelled"] | None = None
    error: Text = Field(default="", max_length=2000)  # of a failed flow; "": none
    review: Text = Field(default="", max_length=500)  # why a person must review it; "": no review
    quarantined: int = Field(default=0, ge=0, exclude_if=is_empty)  # shards and samples passed over
    # its ranks have saved and left the hosts; it waits to be admitted again
    waits: bool = Field(default=False, exclude_if=is_empty)
    # what it has shown elsewhere: data (the snapshot's validation), evaluation
    pages: dict[Name, Page] = Field(default={}, max_length=10, exclude_if=is_empty)


class JobPlacement(Record):
    """Which hosts a gang got, and how close they are to each other."""

    hosts: dict[Name, int]  # host → ranks, each on a slot
    slots: dict[Name, int] = {}  # host → slots that it has; a gang of few ranks shares them
    level: Text  # host, domain, rack, zone or fleet: the smallest that holds the gang
    score: float = 0.0  # share of the place's free slots that it takes; 1: nothing left over


class JobAllocation(Record):
    """What Slurm or Kubernetes holds for a job: one Slurm job, or one group of pods."""

    engine: Literal["slurm", "kubernetes"]  # which of them admits jobs
    id: Text = Field(max_length=253)  # Slurm's job id, or the group's name
    state: Text = Field(max_length=100)  # in the engine's words, such as PENDING
    reason: Text = Field(default="", max_length=500)  # in the engine's words, such as Priority


class JobUsage(Record):
    """What one attempt of a job held, from its admission to its end."""

    attempt: int = Field(ge=0)  # of the job, from 1
    accelerators: dict[str, int]  # by kind; "cpu": nodes without any
    ranks: int = Field(default=0, exclude_if=is_empty)  # with spares; 0: of an older version
    # of its nodes without accelerators, which other gangs share; None: all of them
    node_share: float | None = Field(default=None, exclude_if=is_none)
    # of its accelerators that are on spot nodes; None: of an older version
    spot_share: float | None = Field(default=None, exclude_if=is_none)
    since: float  # when its hosts were reserved
    queued_s: float = 0.0  # that it waited for them
    held_s: float | None = None  # None: it holds them still
    by_class: dict[str, float] = {}  # the same by class of time, once it has ended
    steps: int = 0  # made, each counted once
    began_step: int | None = Field(default=None, exclude_if=is_none)  # as its report says
    ended: JobState | None = None  # what the job became
    # of the object store, as its last report says; None: of an older version
    read_bytes: Count | None = Field(default=None, exclude_if=is_none)  # by its relays and ranks
    written_bytes: Count | None = Field(default=None, exclude_if=is_none)  # as checkpoints
    # of which its log is; "": it holds its hosts still (then it is the job's own), or had none
    flow_run_id: Text = Field(default="", max_length=64, exclude_if=is_empty)

    @property
    def slots(self) -> int:
        """Return how many accelerators, or nodes without any, it held."""
        return sum(self.accelerators.values())


class TrainingJob(Record):
    """A training job as stored."""

    job_id: QueuedJobId
    submission_id: Sha256  # of what was submitted: equal for identical jobs
    spec: SubmitJob  # what was submitted
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    state: JobState
    reason: Text = Field(default="", max_length=500)
    wanted: Literal["run", "pause", "yield", "cancel"] = "run"  # what its flow is asked for
    created_at: float
    updated_at: float
    started_at: float | None = None  # the first flow run's start
    ended_at: float | None = None
    submitted_by: Text = ""  # the token's name
    attempt: int = Field(default=0, ge=0)  # flow runs so far
    losses: int = Field(default=0, ge=0)  # of these, lost or ended by a passing failure
    preemptions: int = Field(default=0, ge=0)  # how often it gave its hosts to a more urgent job
    adopted: bool = False  # its flow was started by someone else, and waits for admission itself
    # the adopted flow saves and waits again where it is preempted; one of an older release cannot
    yields: bool = Field(default=False, exclude_if=is_empty)
    flow_run_id: str | None = None
    placement: JobPlacement | None = None  # of its last admission; None: not yet
    # the last one; None: the installation's own admission, or none is requested
    allocation: JobAllocation | None = Field(default=None, exclude_if=is_none)
    kind: Text = Field(default="", max_length=100)  # of its first checkpoint's accelerators
    report: JobReport | None = None  # the last one that was stored
    history: tuple[JobChange, ...] = ()  # oldest first
    usage: tuple[JobUsage, ...] = ()  # oldest first; the last may go on
    budget_warned: bool = False  # most of the budget is spent, or cannot be counted
    # of the whole job, as it was submitted; None: nothing said it
    estimate: CostEstimate | None = Field(default=None, exclude_if=is_none)

    @property
    def decision(self) -> JobChange | None:
        """Return the decision of a person on a job that passed bad data over; None: none."""
        before = self.history[-2:-1]
        reviewed = self.state.is_final and before and before[0].state is JobState.NEEDS_REVIEW
        return self.history[-1] if reviewed else None


class JobView(Record):
    """A job, with its links."""

    job: TrainingJob  # all that is stored of it
    same_submission: tuple[QueuedJobId, ...] = ()  # identical jobs, which share one training
    pages: dict[str, str] = {}  # name → URL
    spent: float | None = None  # so far; None: no price, or it held nothing yet
    currency: str = ""
    estimate: CostEstimate | None = None  # at submission, where something said it
    hours: float = 0.0  # for which its attempts held nodes so far
    energy_kwh: float | None = None  # of these; None: a kind has no [prices] watts


class JobList(Record):
    """Jobs, the newest first."""

    jobs: tuple[TrainingJob, ...]  # one page
    total: int  # that match; ``jobs`` is a page of them


class JobLog(Record):
    """Lines of a job's log, and the number to ask for next."""

    lines: tuple[Text, ...]  # oldest first
    after: int  # of the next call
    is_over: bool  # the flow run has ended, and this is its end


class AdoptJob(Record):
    """A flow that someone else started asks to be admitted as a job."""

    spec: SubmitJob  # what it trains, and on what
    yields: bool = False  # it saves and waits again where it is preempted
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    flow_run_id: Text = Field(default="", max_length=64)


class ResumeJob(Record):
    """Go on with a paused job; ``budget`` replaces its budget, in any state before its end."""

    budget: Budget | None = None  # None: as it was; 0: none any more


class ReviewJob(Record):
    """A person's decision on a job that passed bad data over."""

    accepted: bool  # true: the job succeeded; false: it failed
    reason: str = Field(default="", max_length=500)


class JobsShown(Record):
    """Output of `paceline jobs list --json`."""

    status: Literal["complete"] = "complete"
    jobs: tuple[TrainingJob, ...]
    total: int


class JobShown(JobView):
    """Output of `paceline jobs` submit, show, pause, resume, cancel and review with --json:
    ``status`` is the command's outcome, ``state`` the job's."""

    status: Literal["complete"] = "complete"
    state: JobState


class JobLogShown(Record):
    """Output of `paceline jobs logs --json`."""

    status: Literal["complete"] = "complete"
    job_id: QueuedJobId
    lines: tuple[Text, ...]


class LogLine(Record):
    """A line of the log of the job's flow."""

    kind: Literal["line"] = "line"
    line: Text


class StateLine(Record):
    """The job's state, when it changes."""

    kind: Literal["state"] = "state"
    state: JobState
    reason: Text


class JobOutcome(Record):
    """What a followed job ended as: the last line."""

    kind: Literal["outcome"] = "outcome"
    job_id: QueuedJobId
    state: JobState
    reason: Text
    exit_code: int


class JobLogLine(
    RootModel[Annotated[LogLine | StateLine | JobOutcome, Field(discriminator="kind")]]
):
    """One line of `paceline jobs logs --follow --json`."""
