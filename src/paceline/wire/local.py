"""What `paceline publish URL` and `paceline distribute --into` print with --json."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.wire.base import Name, Record, Sha256
from paceline.wire.plan import Topology
from paceline.wire.records import Failure, Receipt


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
