"""What `paceline checkpoints` answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.wire.base import Name, Record


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
