"""What the flows return, typed, and what commands print of it with --json.

What the next flow takes is a field of the result itself: Prefect draws the edges of a run's graph
by such values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from paceline.schemas.base import Record, Sha256, is_none
from paceline.schemas.evaluation import Evaluated, GateDecision, Interval
from paceline.schemas.training import Trained


class Result(BaseModel):
    """A flow's result; a ledger of another version may have more or fewer fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name, as results were dicts before."""
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(name) from error


class FlowAnswer(Result):
    """What a command that ran a flow prints with --json, and ``FlowRun.wait`` returns: beside the
    flow's result its run, and the problems that were recovered from (``notes``).

    Further fields of another version's result are kept.
    """

    model_config = Result.model_config | {"extra": "allow"}

    status: Literal["complete"] = "complete"
    run_id: str
    notes: tuple[str, ...] = ()


class StageLine(Record):
    stage: str
    seconds: float = Field(ge=0)
    already_done: bool  # found in the ledger: not run again


class Movement(Record):
    """What a relay moved."""

    deployment_id: str
    topology: str
    epoch: int  # 1: never re-planned
    workers: int  # complete, with a receipt
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
    slow: tuple[str, ...] = ()  # workers at the tail of the line at the end
    quarantined: tuple[str, ...] = ()


class DistributionSummary(Movement):
    """Distribution of one version to its targets."""

    verified: int  # workers that read every byte of their copy again
    already_done: bool


class ModelFigures(Record):
    model_id: str
    parameters: int | None  # None: of a base that was published before
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
    difference_to: dict[str, Interval]  # paired: candidate minus the other; lower is better


class RegistryFigures(Record):
    model_id: str
    version: str  # as published
    registry_version: str = ""  # MLflow's own number of it
    alias: str
    previous: str | None  # MLflow's number of the champion before
    evidence_digest: Sha256


class RunSummary(FlowAnswer, Record):
    """Result of a whole run, from a bucket to a promoted model on every node."""

    already_done: bool  # the ledger had every stage
    stages: tuple[StageLine, ...]
    model: ModelFigures
    data: DataFigures
    distribution: DistributionSummary
    rollout: DistributionSummary
    training: TrainingFigures
    evaluation: EvaluationFigures
    gate: GateDecision
    registry: RegistryFigures
    links: dict[str, str]
    notes: tuple[str, ...]  # also policy exceptions
    ready_seconds: float | None = None  # demo only: until every server was ready
    total_seconds: float | None = None  # demo only


class SnapshotMade(DataFigures, Result):
    """An immutable data snapshot."""

    url: str
    tokens: int
    format: str = "text"
    skipped: int = 0  # samples left out
    skipped_examples: tuple[str, ...] = ()
    duplicates: int = 0  # samples left out because another has the same content
    cut_at_bytes: int | None = None


class PublishedModel(Result):
    """A version of a model in the installation's bucket."""

    model_id: str
    version: str
    url: str
    manifest_digest: str
    bytes: int | None = None
    chunks: int | None = None
    pieces: int | None = None
    source: str | None = None  # of an import
    parameters: int | None = None


class Inputs(Result):
    """What a lifecycle starts from."""

    snapshot: SnapshotMade
    base: PublishedModel
    model_id: str
    version: str
    snapshot_url: str


class Moved(Movement, Result):
    """What a relay moved, and who has the model now."""

    workers_failed: tuple[str, ...] = ()
    plan: dict[str, Any] | None = None
    receipts_digest: str | None = None
    reused_result: bool
    holders: tuple[str, ...]  # targets that have it


class Verified(Result):
    """Nodes that read their copies again, and those whose agent vouches for them."""

    verified: int
    vouched: int = 0
    nodes: tuple[str, ...]
    seconds: float
    manifest_digest: str


class Activated(Result):
    """Nodes that switched."""

    activated: tuple[str, ...]
    seconds: float
    deployment_id: str


class Distributed(Result):
    """One version on its targets."""

    model_id: str
    version: str
    manifest_digest: str
    url: str
    targets: tuple[str, ...]
    plan: dict[str, Any] | None
    relay: Moved
    verify: Verified
    activate: Activated | None


class Champion(Result):
    """The champion in MLflow's registry."""

    model_id: str
    version: str | None = None  # as published; ``registry_version`` is MLflow's own number
    registry_version: str
    alias: str
    previous: str | None
    evidence_digest: str
    url: str


class Promoted(Result):
    """A candidate that is champion by now."""

    model_id: str
    version: str
    gate: GateDecision
    registry: Champion
    published: PublishedModel


class Restored(Result):
    """The version that is champion again, or the base where there was no champion before."""

    model_id: str
    version: str
    url: str
    registry_version: str | None
    stepped_down: str  # MLflow's number of the version that was champion


class RolledBack(Result):
    """The previous champion, in the registry and on the nodes."""

    registry: Restored
    distribution: Distributed


# Output of commands: a result and its run.


class PublishAnswer(PublishedModel, FlowAnswer):
    """Output of `paceline publish --json` where it ran as a flow of the installation."""


class SnapshotAnswer(SnapshotMade, FlowAnswer):
    """Output of `paceline snapshot --json`."""


class DistributeAnswer(Distributed, FlowAnswer):
    """Output of `paceline distribute --json` on an installation, and result of
    ``Client.distribute``. Where no flow ran, each node's agent vouches for its copy."""

    @computed_field  # type: ignore[prop-decorator] # of pydantic
    @property
    def activated(self) -> int | None:
        """Return how many workers switched to it; None where it was not activated."""
        return None if self.activate is None else len(self.activate.activated)


class VerifyAnswer(Verified, FlowAnswer):
    """Output of `paceline verify --json`."""


class TrainAnswer(Trained, FlowAnswer):
    """Output of `paceline train --json`."""

    mlflow_run_id: str | None = Field(default=None, exclude_if=is_none)  # of one on this machine


class EvaluateAnswer(Evaluated, FlowAnswer):
    """Output of `paceline evaluate --json`."""


class PromoteAnswer(Promoted, FlowAnswer):
    """Output of `paceline promote --json`."""


class RollbackAnswer(RolledBack, FlowAnswer):
    """Output of `paceline model rollback MODEL_ID --json`."""


ANSWERS: dict[str, type[FlowAnswer]] = {  # by the flow's name in Prefect
    "lifecycle": RunSummary,
    "publish-model": PublishAnswer,
    "build-snapshot": SnapshotAnswer,
    "distribute-model": DistributeAnswer,
    "verify-model": VerifyAnswer,
    "train-model": TrainAnswer,
    "evaluate-model": EvaluateAnswer,
    "promote-model": PromoteAnswer,
    "rollback-model": RollbackAnswer,
}


def flow_answer(flow: str, run_id: str, notes: Any, result: Mapping[str, Any]) -> FlowAnswer:
    """Return the result of ``flow`` with its run; a plain FlowAnswer where another version's lacks
    fields, or where the ledger kept nothing of it."""
    given = json.dumps({**result, "run_id": run_id, "notes": notes or []})
    try:
        return ANSWERS.get(flow, FlowAnswer).model_validate_json(given)
    except ValidationError:
        return FlowAnswer.model_validate_json(given)
