"""The end of a run as one record: what `paceline demo --json` prints and Prefect's page shows.

``python -m paceline.wire.schemas`` writes its JSON schema to docs/schemas/.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.wire.base import Record, Sha256
from paceline.wire.training import GateDecision, Interval


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
