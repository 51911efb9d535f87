"""JSON records of a checkpoint generation: commit marker, index of tensors, rejection.

Each carries or is covered by a digest; nothing is pickled. Imports neither torch nor a store.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from paceline.schemas import Name, Record, Sha256, digest_of

COMMIT_FILE = "commit.json"
INDEX_FILE = "index.json"
REJECTED_FILE = "rejected.json"
RANDOMNESS = "a function of (seed, step, row); no generator state"
BEST_METRIC = "held_out_loss"  # key in ``Commit.metrics``; lower is better
MAX_COMMIT_BYTES = 16 * 1024 * 1024
MAX_INDEX_BYTES = 256 * 1024 * 1024  # about three million boxes

FileName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}$")]
MAX_AXES = 64
Sizes = Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 48)], ...], Field(max_length=MAX_AXES)]
DTypeName = Annotated[  # as safetensors names them
    str, StringConstraints(pattern=r"^(F(64|32|16|8_E4M3|8_E5M2)|BF16|I(64|32|16|8)|U8|BOOL)$")
]


class SavedFile(Record):
    sha256: Sha256
    bytes: int = Field(ge=1)


class Commit(Record):
    """The marker that commits a generation; written last."""

    format: int = 2
    job_id: Name
    step: int = Field(ge=0)
    position: dict[str, Any]  # of the data stream, valid for any number of ranks
    config_digest: Sha256
    code_version: str
    randomness: str = RANDOMNESS
    world_size: int = Field(ge=1)
    layout: dict[str, int]  # dp, shard, tp, pp, cp; {} where unknown
    metrics: dict[str, float]
    environment: dict[str, Any]
    extra: dict[str, Any]  # entries of ``TrainState.extra`` that are not tensors
    files: dict[FileName, SavedFile]  # all files but this marker
    digest: str = ""  # of this record with ``digest`` empty

    def sealed(self) -> Commit:
        """Return the commit with its own digest filled in."""
        return self.model_copy(update={"digest": digest_of(self.model_copy(update={"digest": ""}))})

    @property
    def bytes(self) -> int:
        """Return the total bytes of the generation's files."""
        return sum(each.bytes for each in self.files.values())


class StoredChunk(Record):
    """A box of a tensor, and the file that holds it under ``key_of(tensor, offsets)``."""

    file: FileName
    offsets: Sizes
    sizes: Sizes


class StoredTensor(Record):
    """A whole tensor; its boxes tile it."""

    dtype: DTypeName
    shape: Sizes
    chunks: tuple[StoredChunk, ...]

    @model_validator(mode="after")
    def _tiled(self) -> Self:
        volume, corners = 0, set()
        for each in self.chunks:
            if not len(each.offsets) == len(each.sizes) == len(self.shape) or any(
                at + size > whole
                for at, size, whole in zip(each.offsets, each.sizes, self.shape, strict=True)
            ):
                raise ValueError("a box outside of its tensor")
            volume += math.prod(each.sizes)
            corners.add(each.offsets)
        if volume != math.prod(self.shape) or len(corners) != len(self.chunks):
            raise ValueError("boxes do not make up their tensor")
        return self


class ParameterGroup(Record):
    """A parameter group of the optimizer: its settings (rate, decay), and its members' names."""

    settings: dict[str, Any]
    parameters: tuple[str, ...]


class Groups(Record):
    """Two parameter groups as earlier releases stored them; {} for a group without members."""

    matrices: dict[str, Any] = {}  # parameters of two dimensions and more
    vectors: dict[str, Any] = {}


class Index(Record):
    """The location of each tensor of a generation."""

    tensors: dict[str, StoredTensor]
    groups: tuple[ParameterGroup, ...] | Groups | None = None  # None: of a release without them


class Rejected(Record):
    """The reason why a generation was rejected, and its former marker."""

    why: str
    marker: str  # as read, possibly damaged


def key_of(tensor: str, offsets: Sizes) -> str:
    """Return the name of a box in its safetensors file."""
    return f"{tensor}@{','.join(map(str, offsets))}"
