"""Layout of a sharded checkpoint: the boxes of each tensor that a rank writes, and those it reads.

torch.distributed.checkpoint computes the local box of a DTensor and how saved boxes intersect
wanted ones. A box that several ranks hold is written once, by the least loaded of them. Pure: no
I/O, and every rank computes the same result from the same lists.
"""

from __future__ import annotations

import heapq
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from paceline.errors import TrainingFailed
from paceline.training.checkpoint.records import Index, Sizes, StoredChunk, StoredTensor, key_of

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that a rank holds or writes."""

    tensor: str
    dtype: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes

    @property
    def key(self) -> str:
        """Return the box's name in a file."""
        return key_of(self.tensor, self.offsets)

    @property
    def bytes(self) -> int:
        """Return the box's size in bytes."""
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize


def name_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of ``dtype``; raises TrainingFailed where there is none."""
    try:
        return _NAMES[dtype]
    except KeyError as error:
        raise TrainingFailed("tensor cannot be saved", got=dtype, wanted=list(DTYPES)) from error


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` in this process's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: Tensor) -> tuple[Sizes, Sizes]:
    """Return offsets and sizes of the local box."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call] # DCP's protocol
    return tuple(chunk.offsets), tuple(chunk.sizes)


def chunks_of(tensors: Mapping[str, Tensor]) -> list[Chunk]:
    """Return this rank's boxes, sorted by name, without empty ones."""
    found = []
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue
        offsets, sizes = box_of(tensor)
        if math.prod(sizes):
            found.append(Chunk(name, name_of(tensor.dtype), tuple(tensor.shape), offsets, sizes))
    return found


@dataclass(frozen=True)
class HeldChunks:
    """The boxes that every rank holds; replicas share one list."""

    lists: tuple[tuple[Chunk, ...], ...]
    of_rank: tuple[int, ...]  # index into ``lists``, by rank

    @classmethod
    def of(cls, held: Sequence[Sequence[Chunk]]) -> HeldChunks:
        """Return it from the boxes of each rank."""
        numbers: dict[tuple[Chunk, ...], int] = {}
        of_rank = tuple(numbers.setdefault(tuple(each), len(numbers)) for each in held)
        return cls(tuple(numbers), of_rank)


def share_out(held: HeldChunks) -> list[list[Chunk]]:
    """Return the boxes that each rank writes, so that every box is written once.

    A box that several ranks hold goes to the least loaded of them, the largest first. Raises
    TrainingFailed unless the boxes of each tensor tile it.
    """
    owners: dict[Chunk, list[int]] = {}
    for number, chunks in enumerate(held.lists):
        for chunk in chunks:
            owners.setdefault(chunk, []).append(number)
    _require_tiling(owners)
    # A heap of (load, rank) for each list. A rank is in one list only.
    loads: list[list[tuple[int, int]]] = [[] for _ in held.lists]
    for rank, number in enumerate(held.of_rank):
        loads[number].append((0, rank))
    written: list[list[Chunk]] = [[] for _ in held.of_rank]

    def choices(chunk: Chunk) -> int:
        return sum(len(loads[number]) for number in owners[chunk])

    order = sorted(owners, key=lambda c: (choices(c) > 1, -c.bytes, c.tensor, c.offsets))
    for chunk in order:
        heap = min((loads[number] for number in owners[chunk]), key=lambda each: each[0])
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + chunk.bytes, rank))
        written[rank].append(chunk)
    return written


def file_of(rank: int, world_size: int) -> str:
    """Return the name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def index_of(written: Sequence[Sequence[Chunk]]) -> Index:
    """Return the index of a checkpoint in which rank i writes ``written[i]``."""
    found: dict[str, tuple[Chunk, list[StoredChunk]]] = {}
    for rank, chunks in enumerate(written):
        file = file_of(rank, len(written))
        for chunk in chunks:
            stored = StoredChunk(file=file, offsets=chunk.offsets, sizes=chunk.sizes)
            found.setdefault(chunk.tensor, (chunk, []))[1].append(stored)
    return Index(
        tensors={
            name: StoredTensor(
                dtype=chunk.dtype,
                shape=chunk.shape,
                chunks=tuple(sorted(chunks, key=lambda each: each.offsets)),
            )
            for name, (chunk, chunks) in found.items()
        }
    )


def _require_tiling(chunks: Mapping[Chunk, object]) -> None:
    shapes: dict[str, tuple[str, Sizes]] = {}
    volumes: dict[str, int] = {}
    for chunk in chunks:
        of_it = (chunk.dtype, chunk.shape)
        if shapes.setdefault(chunk.tensor, of_it) != of_it:
            raise TrainingFailed(
                "ranks disagree about a tensor",
                got=of_it,
                wanted=shapes[chunk.tensor],
                where=chunk.tensor,
            )
        volumes[chunk.tensor] = volumes.get(chunk.tensor, 0) + math.prod(chunk.sizes)
    for name, (_, shape) in shapes.items():
        if volumes[name] != math.prod(shape):
            raise TrainingFailed(
                "the parts of a tensor do not make it up",
                got=f"{volumes[name]} elements",
                wanted=f"{math.prod(shape)}, shape {shape}",
                where=name,
            )


@dataclass(frozen=True)
class BoxRead:
    """Copy a part of a saved box to a part of a local one; offsets are relative to each box."""

    file: str
    key: str
    source: Sizes
    target: Sizes
    lengths: Sizes


def reads_for(name: str, stored: StoredTensor, wanted: Tensor) -> Iterator[BoxRead]:
    """Yield the reads that fill the local part of ``wanted`` from the saved tensor."""
    if isinstance(wanted, DTensor) and wanted.device_mesh.get_coordinate() is None:
        return
    offsets, sizes = box_of(wanted)
    if not math.prod(sizes):
        return
    saved = [
        ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
        for each in stored.chunks
    ]
    metadata = TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[stored.dtype]), torch.Size(stored.shape), saved
    )
    here = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
    for item in create_read_items_for_chunk_list(name, metadata, here):
        assert item.storage_index.index is not None
        chunk = stored.chunks[item.storage_index.index]
        yield BoxRead(
            chunk.file,
            key_of(name, chunk.offsets),
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )


def to_bytes(chunks: Sequence[Chunk]) -> bytes:
    """Return ``chunks`` as compressed JSON, for another rank."""
    rows = [[c.tensor, c.dtype, c.shape, c.offsets, c.sizes] for c in chunks]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode())


def from_bytes(raw: bytes) -> tuple[Chunk, ...]:
    """Return the chunks that ``to_bytes`` serialised."""
    return tuple(
        Chunk(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))
        for name, dtype, shape, offsets, sizes in json.loads(zlib.decompress(raw))
    )
