"""Records of a training: job, rank events, restarts, what it took, result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config import DataSettings, TrainingSettings
from paceline.schemas.base import ModelId, Name, Record, Sha256, is_empty, is_none


class TaskSize(Record):
    """Sizes that the base does not say itself (a ``code_ref``, a model of transformers): the
    profile's model at the start of the job."""

    context: int = Field(ge=1)  # tokens per row
    parameters: int | None = Field(default=None, ge=1)  # of the model that a ``code_ref`` makes


class Continued(Record):
    """The checkpoint of another job at which a job begins."""

    job_id: Name
    step: int = Field(ge=0)
    config_digest: Sha256  # of that job


class TrainJob(Record):
    """Input of a training job; every rank of the gang receives the same JSON."""

    job_id: Name
    run_id: str
    state_dir: str = ""  # contains runtime.json; "": each node's own
    model_id: ModelId
    version: Name  # the base: loaded from the rank's own node, <store>/models/<model_id>/<version>
    manifest_digest: Sha256
    base_bytes: int = Field(default=0, ge=0, exclude_if=is_empty)  # 0: not known
    base_parameters: int = Field(default=0, ge=0, exclude_if=is_empty)  # 0: not known
    snapshot_url: str
    snapshot_digest: Sha256
    purpose: str
    # The label of the snapshot where it is not the purpose, and the flow, which asked the table of
    # purposes, took it all the same. Nodes cannot read the table: they check that the snapshot is
    # the one of that decision, by digest, label and project. None: the purpose.
    data_label: str | None = Field(default=None, exclude_if=is_none)
    checkpoint_url: str  # s3://bucket/prefix of this job's generations
    settings: TrainingSettings
    labels: Literal["true", "shuffled"] = "true"  # "shuffled" is the control that must not pass
    deterministic: bool = True  # where the settings leave it open, on a CPU
    data: DataSettings = DataSettings()  # how samples become batches
    task: TaskSize | None = None  # of a ``code_ref`` without a base model
    continues: Continued | None = Field(default=None, exclude_if=is_none)
    data_readers: int = Field(default=1, ge=1)  # `data.columns` at the job's start
    skip_batches: tuple[int, ...] = ()  # global batches to skip, because they spoiled training
    failures: int = 0  # of this job before the attempt
    running_s: float = 0.0  # time in which they occurred; for an `auto` interval


class RankEvent(Record):
    """One line of a rank's standard output."""

    event: Literal[
        "started", "resumed", "step", "checkpoint", "trace", "said", "result", "failed",
        "score", "unscored", "lost",
    ]  # fmt: skip
    # "said": a line that user code printed; "score", "unscored": of judging; "lost": from the
    # driver, the gang ended early: why (a Restart's kind and reason), and on which worker_id
    rank: int = Field(ge=0)
    attempt: int = Field(ge=1)
    step: int = Field(default=0, ge=0)
    data: dict[str, object] = {}


class Restart(Record):
    """One restart of a gang."""

    attempt: int
    failed_rank: int | None
    worker_id: str | None
    reason: str
    resumed_step: int
    lost_steps: int
    seconds: float  # from failure detected to the first new step
    kind: Literal["failed", "hung", "lost", "preempted", "bad-step", "returned"] = "failed"
    ranks: int = 0  # of the gang that continued
    stacks_url: str = ""  # stack traces of all ranks when the gang hung


class TimeLedger(Record):
    """Breakdown of a job's time; the accounts sum to ``wall_s``."""

    start_s: float  # to the first step
    productive_s: float
    data_wait_s: float
    checkpoint_stall_s: float
    lost_work_s: float  # steps repeated because no checkpoint had them
    detection_s: float  # from the last step to the detection of the failure
    restart_s: float  # from then to the next step
    finish_s: float  # from the last step to the stored result
    wall_s: float
    goodput: float  # productive, as a share of the time from the first step to the last's end


class Failures(Record):
    """Failure counts of one job."""

    job: int = 0
    hosts: dict[str, int] = {}
    shards: dict[str, int] = {}  # by digest
    left_out: tuple[str, ...] = ()  # hosts that failed too often


class CheckpointRef(Record):
    step: int
    url: str
    digest: Sha256
    bytes: int


class ProgramCheck(Record):
    """A ``torch.export`` program beside an export's safetensors, and how the training compared it
    with the model."""

    file: str
    sha256: Sha256
    bytes: int
    max_difference: float  # of its logits from the model's own, on a batch of random tokens
    rows: int  # of that batch
    tokens: int  # of a row
    torch: str  # version that wrote it


class TrainResult(Record):
    """Result of a finished training job."""

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
    held_out: dict[str, float] = {}  # of the weights that were exported; {}: no evaluation
    ledger: TimeLedger | None = None
    failures: Failures = Failures()
    # why it ended before its steps; None where it did not
    stopped_early: str | None = Field(default=None, exclude_if=is_none)
    # then: whose weights were exported, the best evaluated one's; None: no such checkpoint was kept
    exported_step: int | None = Field(default=None, ge=0, exclude_if=is_none)
    # of the average of the weights that was exported; None: the weights of the last step
    ema_decay: float | None = Field(default=None, exclude_if=is_none)
    # False: by a GPU's faster kernels, whose bits differ from run to run
    deterministic: bool | None = Field(default=None, exclude_if=is_none)
    # inputs of the training; None in a result of an older version
    snapshot_url: str | None = Field(default=None, exclude_if=is_none)
    snapshot_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    base_manifest_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    purpose: str | None = Field(default=None, exclude_if=is_none)
    continues: Name | None = Field(default=None, exclude_if=is_none)  # the job that it went on from
    # of the nodes that the job held, by kind; "cpu" counts nodes without. Empty: not recorded
    accelerators: dict[str, int] = Field(default={}, exclude_if=is_empty)
    # by its ranks, from the object store; None in a result of an older version
    read_bytes: int | None = Field(default=None, exclude_if=is_none)
    tokens_per_step: float | None = Field(default=None, exclude_if=is_none)  # of the last attempt
    epoch_tokens: int | None = Field(default=None, exclude_if=is_none)  # of the training split
    epoch_bytes: int | None = Field(default=None, exclude_if=is_none)  # likewise, of its text
    epoch_documents: int | None = Field(default=None, exclude_if=is_none)  # likewise
    program: ProgramCheck | None = Field(default=None, exclude_if=is_none)  # of export_program

    @property
    def exported(self) -> str:
        """Return which weights a training that ended early exported; "" for others."""
        if not self.stopped_early:
            return ""
        if self.exported_step is not None:
            return f"step {self.exported_step}, the best evaluated one"
        return (
            f"step {self.steps}, the last one: no checkpoint of the best is kept "
            "(training.checkpoints.keep_best, every_steps)"
        )

    @property
    def passed_over(self) -> str:
        """Return how much bad data the training passed over; "": none."""
        shards, batches = len(self.quarantined_shards), len(self.skipped_batches)
        counts = {"shards or samples": shards, "batches": batches}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)

    @property
    def quarantine_lines(self) -> list[str]:
        """Return a line per shard or sample in quarantine: its shortened name and the reason."""
        found = []
        for name in self.quarantined_shards:
            shard, mark, row = name.partition("#")
            why = self.quarantined_why.get(name, "")
            found.append(f"{shard[:12]}{mark}{row}{': ' if why else ''}{why}")
        return found


class Trained(TrainResult):
    """A training result and the digest under which the installation recorded it, and that of its
    evaluation where the flow has judged it."""

    status: Literal["complete"] = "complete"
    training_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    report_digest: Sha256 | None = Field(default=None, exclude_if=is_none)


class TrainingData(Record):
    """A snapshot whose training split a candidate, or a version before it, was trained on."""

    snapshot_url: str
    snapshot_digest: Sha256
    quarantined_shards: tuple[str, ...] = ()  # not read by the training
