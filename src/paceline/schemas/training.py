"""What crosses to and from a training job: the job, what ranks say, what came out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config import DataSettings, EvaluationSettings, TrainingSettings
from paceline.schemas.base import Name, Record, Sha256


def _unset(value: object) -> bool:
    """Return whether a field that an older record lacks stays unwritten, so that the record keeps
    its bytes and its digest."""
    return value is None


class TaskSize(Record):
    """What a codeRef's task is built for: the profile's model as the job began."""

    context: int = Field(ge=1)  # tokens of a row
    parameters: int = Field(ge=1)


class TrainJob(Record):
    """Everything a rank needs to know; the same JSON goes to every rank of the gang."""

    job_id: Name
    run_id: str
    state_dir: str  # where the rank finds runtime.json
    model_id: Name
    version: Name  # the base: loaded from the rank's own node, <store>/models/<model_id>/<version>
    manifest_digest: Sha256
    snapshot_url: str
    snapshot_digest: Sha256
    purpose: str
    checkpoint_url: str  # s3://bucket/prefix; this job's generations live below it
    settings: TrainingSettings
    labels: Literal["true", "shuffled"] = "true"  # "shuffled" is the control that must not pass
    deterministic: bool = True
    data: DataSettings = DataSettings()  # how samples become batches
    task: TaskSize | None = None  # of a codeRef, which no base model says it of
    data_readers: int = Field(default=1, ge=1)  # shares of a batch as the job began: `data.columns`
    skip_batches: tuple[int, ...] = ()  # global batches that made training go wrong: passed over
    failures: int = 0  # of this job before the attempt,
    running_s: float = 0.0  # in so many seconds: what an `auto` checkpoint interval is made from


class RankEvent(Record):
    """One line of a rank's standard output."""

    event: Literal[
        "started", "resumed", "step", "checkpoint", "trace", "said", "result", "failed"
    ]  # "said": a line that user code printed
    rank: int = Field(ge=0)
    attempt: int = Field(ge=1)
    step: int = Field(default=0, ge=0)
    data: dict[str, object] = {}


class Restart(Record):
    """A gang that was stopped and started again."""

    attempt: int
    failed_rank: int | None
    worker_id: str | None
    reason: str
    resumed_step: int
    lost_steps: int
    seconds: float  # failure seen to first new step
    kind: Literal["failed", "hung", "lost", "preempted", "bad-step", "returned"] = "failed"
    ranks: int = 0  # of the gang that went on
    stacks_url: str = ""  # where every rank was when the gang hung


class TimeLedger(Record):
    """Where the time of a job went; the accounts sum to ``wall_s``."""

    start_s: float  # to the first step
    productive_s: float
    data_wait_s: float
    checkpoint_stall_s: float
    lost_work_s: float  # steps made again because no checkpoint held them
    detection_s: float  # from the last step to the failure being noticed
    restart_s: float  # from then to the next step
    finish_s: float  # from the last step to the stored result
    wall_s: float
    goodput: (
        float  # productive, as a share of the time from the first step's start to the last's end
    )


class Failures(Record):
    """What failed how often in one job."""

    job: int = 0
    hosts: dict[str, int] = {}
    shards: dict[str, int] = {}  # by digest
    left_out: tuple[str, ...] = ()  # hosts that failed too often


class CheckpointRef(Record):
    step: int
    url: str
    digest: Sha256
    bytes: int


class TrainResult(Record):
    """What a finished job left behind."""

    job_id: Name
    steps: int
    resumed_from_step: int
    first_loss: float | None  # nats per byte at the first step of this job
    final_loss: float | None
    tokens_per_second: float
    data_wait_share: float
    checkpoint_stall_share: float
    export_url: str  # s3://…/export: safetensors and config, ready to publish
    weights_digest: Sha256
    checkpoints: tuple[CheckpointRef, ...]
    restarts: tuple[Restart, ...]
    seconds: float
    config_digest: Sha256
    code_version: str = ""
    # shards, and samples as "shard#row"; not empty: the job needs review
    quarantined_shards: tuple[str, ...] = ()
    quarantined_why: dict[str, str] = {}
    skipped_batches: tuple[int, ...] = ()  # not empty: the job needs review
    ranks: int = 0  # at the end
    environment: dict[str, object] = {}  # of rank 0: packages, machine, code
    held_out: dict[str, float] = {}  # the last evaluation
    ledger: TimeLedger | None = None
    failures: Failures = Failures()
    # what it was learned from; None in a result of an older version
    snapshot_url: str | None = Field(default=None, exclude_if=_unset)
    snapshot_digest: Sha256 | None = Field(default=None, exclude_if=_unset)
    base_manifest_digest: Sha256 | None = Field(default=None, exclude_if=_unset)

    @property
    def passed_over(self) -> list[str]:
        """Return a line for each shard or sample in quarantine: its name, shortened, and why."""
        found = []
        for name in self.quarantined_shards:
            shard, mark, row = name.partition("#")
            why = self.quarantined_why.get(name, "")
            found.append(f"{shard[:12]}{mark}{row}{': ' if why else ''}{why}")
        return found


class Trained(TrainResult):
    """A training result and the digest under which the installation recorded it."""

    training_digest: Sha256 | None = Field(default=None, exclude_if=_unset)


class TrainingData(Record):
    """A snapshot whose training split a candidate, or a version before it, was trained on."""

    snapshot_url: str
    snapshot_digest: Sha256
    quarantined_shards: tuple[str, ...] = ()  # not read by the training


class EvaluationSpec(Record):
    """What an evaluation process is told."""

    run_id: str
    state_dir: str
    snapshot_url: str
    snapshot_digest: Sha256
    models: dict[str, str]  # name → directory or s3://…: "candidate", "base", "champion"
    settings: EvaluationSettings
    trained_on: tuple[TrainingData, ...] = ()


class Interval(Record):
    """A figure with its bootstrap confidence interval over held-out documents."""

    value: float
    low: float
    high: float


class ModelScore(Record):
    """How one model does on the held-out split."""

    name: str
    kind: Literal["transformer", "ngram", "compressor"]
    bits_per_byte: Interval
    gain_over: dict[str, Interval] = {}  # paired: this model's bits minus the named model's
    latency_ms: float | None = None
    weights_digest: str | None = None
    dtype: str | None = None
    format: str | None = None  # of the weights that were loaded: "safetensors"
    model_bytes: int | None = None


class Overlap(Record):
    """How many held-out documents are in the training split of one snapshot, by content."""

    snapshot_digest: Sha256  # of the training snapshot
    held_out_documents: int  # compared
    training_documents: int  # compared with
    found: int  # held-out documents with a copy in the training split
    examples: tuple[str, ...] = ()  # "held-out key = training key"


class EvaluationReport(Record):
    """All scores on one snapshot's held-out split, and worst slices by document."""

    snapshot_digest: Sha256
    documents: int
    bytes: int
    scores: tuple[ModelScore, ...]
    slices: tuple[dict[str, object], ...] = ()
    failures: dict[str, str] = {}  # name of a model without a score → why it has none
    seconds: float
    overlaps: tuple[Overlap, ...] | None = Field(default=None, exclude_if=_unset)

    def score(self, name: str) -> ModelScore | None:
        """Return the score of the model called ``name``, or None where it was not evaluated."""
        return next((each for each in self.scores if each.name == name), None)


class Evaluation(Record):
    """What an evaluation recorded: its report, and what the report is about."""

    model_id: Name
    base_version: str
    base_manifest_digest: Sha256
    training_digest: Sha256  # of the recorded training result
    snapshot_url: str
    models: dict[str, str]  # name → digest of the weights or the manifest
    report: EvaluationReport


class Evaluated(EvaluationReport):
    """A report and the digest of its Evaluation as the installation recorded it."""

    report_digest: Sha256


class GateCheck(Record):
    name: str
    passed: bool
    got: str
    wanted: str


class GateDecision(Record):
    """Whether the candidate earned promotion, and each reason."""

    passed: bool
    checks: tuple[GateCheck, ...]

    @property
    def reasons(self) -> list[str]:
        """Return one line for each failed check."""
        return [
            f"{each.name}: got {each.got}, wanted {each.wanted}"
            for each in self.checks
            if not each.passed
        ]


class Evidence(Record):
    """What is bound to a promoted version: everything needed to trust or reproduce it."""

    run_id: str
    model_id: Name
    manifest_digest: Sha256  # of the published candidate
    weights_digest: Sha256
    base_version: str
    base_manifest_digest: Sha256
    snapshot_digest: Sha256
    job_id: str
    training_config_digest: Sha256
    code_version: str
    evaluation: EvaluationReport
    gate: GateDecision
    approver: str | None = None
    # None in the evidence of an older version
    report_digest: Sha256 | None = Field(default=None, exclude_if=_unset)
    training_digest: Sha256 | None = Field(default=None, exclude_if=_unset)
    training_snapshot_url: str | None = Field(default=None, exclude_if=_unset)
    training_snapshot_digest: Sha256 | None = Field(default=None, exclude_if=_unset)
