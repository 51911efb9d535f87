"""What the flows return, typed. What the next flow takes is a field of the result itself: Prefect
draws the edges of a run's graph by such values."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.schemas import DataFigures, GateDecision, Movement


class Result(BaseModel):
    """A flow's result; a ledger of another version may have more or fewer fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Snapshot(DataFigures, Result):
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

    snapshot: Snapshot
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


class Registered(Result):
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
    registry: Registered
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
