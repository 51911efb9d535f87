"""Records of cost: what a training used, what that cost, and what the next one would cost.

None, and an empty table, mean "not recorded" or "no price", never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from paceline.config import PriceSettings
from paceline.schemas.base import Record, is_empty, is_none
from paceline.schemas.training import TrainResult

# class of a training's time → the accounts of TimeLedger in it
TIME_CLASSES: dict[str, tuple[str, ...]] = {
    "useful": ("productive_s",),
    "data_wait": ("data_wait_s",),
    "checkpoint": ("checkpoint_stall_s",),
    "recovery": ("lost_work_s", "detection_s", "restart_s"),
    "idle": ("start_s", "finish_s"),
}


def seconds_by_class(accounts: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each class; {} where they were not recorded."""
    if "productive_s" not in accounts:
        return {}
    return {name: sum(accounts[each] for each in parts) for name, parts in TIME_CLASSES.items()}


class Range(Record):
    """A figure and the range that it may have."""

    value: float
    low: float
    high: float


class CostEstimate(Record):
    """What a training would take and cost, and what that is based on."""

    currency: str
    steps: int  # of the training
    tokens: float  # that its steps read
    accelerators: dict[str, int]  # by kind; "cpu": nodes without any
    tokens_per_second: Range  # of the whole gang
    hours: Range  # of wall-clock time
    accelerator_hours: Range | None  # None: the time is unknown
    energy_kwh: Range | None  # None: a kind has no [prices] watts
    price: Range | None  # None: a kind has no price
    based_on: tuple[str, ...]  # where each figure comes from, in words


class TrainingUsage(Record):
    """What one finished training, or one attempt of a job, used. A training's time is that of the
    process that ended it; attempts before it are in rows of their own where a job made them."""

    run_id: str = ""
    job_id: str
    model_id: str = ""
    started_at: float | None = None  # of its run, seconds since the Unix epoch
    steps: int  # without those before ``began_at_step``
    began_at_step: int = 0  # 0: from the beginning
    seconds: float  # of wall-clock time
    by_class: dict[str, float] = {}  # the same by class, as rank 0 saw it
    restarts: int = 0  # of its gang
    accelerators: dict[str, int] = {}  # held all the time, by kind
    ranks: int = Field(default=0, exclude_if=is_empty)  # of an attempt; 0: not recorded
    # of its nodes without accelerators, which other jobs share; None: all of them
    node_share: float | None = Field(default=None, exclude_if=is_none)
    # of its accelerators that were on spot nodes; None: not recorded
    spot_share: float | None = Field(default=None, exclude_if=is_none)
    tokens_per_step: float | None = None  # of the whole gang
    tokens_per_second: float | None = None  # of the whole gang
    epoch_tokens: int | None = None  # of one epoch of the data
    checkpoint_bytes: int | None = None  # of the generations that were kept
    # of the job so far, in which its checkpoints were kept; None: as long as this attempt ran
    kept_s: float | None = Field(default=None, exclude_if=is_none)
    egress_bytes: int | None = None  # that its ranks and relays read from the object store
    # as checkpoints to the object store, by this attempt, those that are gone too
    written_bytes: int | None = Field(default=None, exclude_if=is_none)
    queued_job_id: str = ""  # tj-…; "": no job of the queue is recorded for it
    attempt: int = 0  # of that job
    state: str = ""  # of an attempt: what the job became, or is
    team: str = ""  # that pays; "": none was said
    project: str = ""
    queue_s: float | None = None  # that it waited for its nodes, besides ``seconds``
    # of the whole job as it was submitted, in the row of its newest attempt
    estimate: CostEstimate | None = Field(default=None, exclude_if=is_none)

    @classmethod
    def of(cls, result: TrainResult) -> TrainingUsage:
        ledger = result.ledger
        return cls(
            job_id=result.job_id,
            steps=result.steps - result.resumed_from_step,
            began_at_step=result.resumed_from_step,
            seconds=result.seconds,
            by_class={} if ledger is None else seconds_by_class(ledger.model_dump()),
            restarts=len(result.restarts),
            accelerators=result.accelerators,
            tokens_per_step=result.tokens_per_step,
            tokens_per_second=result.tokens_per_second,
            epoch_tokens=result.epoch_tokens,
            checkpoint_bytes=sum(each.bytes for each in result.checkpoints),
            egress_bytes=result.read_bytes,
        )

    @property
    def tokens(self) -> float | None:
        """Return the tokens of its steps, each counted once."""
        return None if self.tokens_per_step is None else self.tokens_per_step * self.steps

    @property
    def useful_share(self) -> float | None:
        """Return the share of its time in steps that are in the result."""
        return self.by_class["useful"] / self.seconds if self.by_class and self.seconds else None


class TrainingCost(TrainingUsage):
    """What one training used, with prices."""

    currency: str
    accelerator_hours: float | None
    energy_kwh: float | None
    price_by_class: dict[str, float] = {}
    # machines, energy where it has a price of its own, egress and storage where they have one;
    # None: an accelerator has no price
    total: float | None
    per_step: float | None
    per_1k_tokens: float | None
    per_epoch: float | None
    egress: float | None
    storage: float | None = None  # of the checkpoints so far
    storage_a_month: float | None  # besides the total: of the checkpoints, as long as they are kept
    unknown: tuple[str, ...] = ()  # why a figure is missing, or is not exact


class CostGroup(Record):
    """Trainings of one model, job, team, project or day."""

    name: str
    trainings: int
    accelerator_hours: float | None
    useful_hours: float | None  # of these, in steps
    energy_kwh: float | None
    queue_hours: float | None = None  # that jobs waited; not paid for
    price: float | None  # None: no training of the group has a price
    egress: float | None = None  # of this price, where it is known
    storage: float | None = None  # likewise
    without_price: int  # trainings that ``price`` does not contain
    # of a job as it was submitted; None for other groups
    estimate: CostEstimate | None = Field(default=None, exclude_if=is_none)


class MeshEstimate(Record):
    """What a training on one mesh would take, by the model of a step."""

    mesh: str  # "shard8xtp8", as in `--mesh`
    ranks: int
    batch_sequences: int  # of the whole gang
    step_s: float  # without checkpoints
    seconds: dict[str, float]  # of a step: products, bubble, tensor, context, …
    checkpoint_share: float  # of the time, in which checkpoints stop the steps
    tokens_per_second: float  # of the whole gang, with checkpoints
    efficiency: float  # share of a step that the batch's arithmetic alone would take
    mfu: float  # model FLOPs over the accelerators' peak
    memory: dict[str, float]  # bytes of the rank that needs most, by what they hold
    memory_bytes: float  # their sum
    fits: bool
    hours: float | None = None  # of ``tokens``
    energy_kwh: float | None = None
    price: float | None = None


class MeshEstimates(Record):
    """Output of `paceline estimate --json`: a model on several meshes and numbers of ranks."""

    status: Literal["complete"] = "complete"
    model: str
    parameters: int
    accelerator: str
    memory_gb: float  # of one accelerator
    precision: str
    context: int  # tokens of a row
    tokens: float | None = None  # of the whole training
    currency: str
    rows: tuple[MeshEstimate, ...]  # by ranks, the fastest that fits first
    based_on: tuple[str, ...]


class TrainingCosts(Record):
    """What trainings and attempts of jobs used, and the installation's prices."""

    prices: PriceSettings  # by which the sums were made
    usages: tuple[TrainingUsage, ...]  # newest first
    left_out: int = 0  # older ones, because the answer would be too large
    without_result: int = 0  # trainings of MLflow that no job is recorded for
    notes: tuple[str, ...] = ()  # why figures are missing


class CostsShown(Record):
    """Output of `paceline cost --json`."""

    status: Literal["complete"] = "complete"
    currency: str
    trainings: tuple[TrainingCost, ...] = ()  # newest first
    without_result: int = Field(default=0, ge=0)  # trainings that run or failed, of no known job
    groups: tuple[CostGroup, ...] = ()  # with --by
    estimate: CostEstimate | None = None  # with --steps
