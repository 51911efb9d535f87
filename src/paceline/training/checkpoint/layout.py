"""State of a training as flat named tensors, and the boxes of each that a rank writes and reads.

``model.<name>`` for the model, ``<moment>.<name>`` for the optimizer's state of each parameter,
``ema.<name>`` for a parameter's moving average, ``extra.<name>`` for what the caller adds,
``kept.<name>`` for further state (``Stateful``). A sharded tensor stays a DTensor.

torch.distributed.checkpoint computes the local box of a DTensor and how saved boxes intersect
wanted ones. A box that several ranks hold is written once, by the least loaded of them. Pure: no
I/O, and every rank computes the same result from the same lists.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.errors import TrainingFailed
from paceline.training.checkpoint.records import (
    Index,
    ParameterGroup,
    Sizes,
    StoredChunk,
    StoredTensor,
    key_of,
)
from paceline.training.loop import Group


class Stateful(Protocol):
    """State beside model and optimizer that a checkpoint must contain; names are unique in a job.

    For example the rows of a recurrent task (``examples/carried_state``), or gradients that a
    compression hook has not sent yet (``parallel.data_parallel``). Both change while a batch is
    computed, and a checkpoint is saved in the middle of the next batch: the loop calls ``snapshot``
    between two batches, and the last snapshot is what is saved.
    """

    def snapshot(self) -> None:
        """Take a snapshot: the present state is the one between two batches."""

    def roll_back(self) -> None:
        """Discard the state of the batch since the last ``snapshot``: its update was not taken."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the snapshot, by name; several ranks may hold the same under one name."""

    def wants(self, name: str) -> bool:
        """Return whether this rank, on any layout, needs the saved tensor ``name``."""

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Load the saved tensors that were wanted; ``found`` may be empty."""


def stateful_of(*owners: object) -> list[Stateful]:
    """Return the ``Stateful`` objects of ``owners`` and of the workloads that they wrap."""
    found: list[Stateful] = []
    for each in owners:
        its: Sequence[Stateful] = getattr(each, "keeps", ())
        found += its
        if not its and (inner := getattr(each, "workload", None)) is not None:
            found += stateful_of(inner)
    return found


MODEL, EXTRA, KEPT = "model.", "extra.", "kept."
EMA = "ema"  # in the place of a moment
NAMES_TAKEN = ("model", "extra", "kept", EMA)  # that no moment may have
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, recompute


@dataclass
class TrainState:
    """All state on this rank that a checkpoint contains."""

    modules: Sequence[nn.Module]  # this rank's parts of the model
    optimizer: Optimizer
    group: Group
    mesh: Any = None  # its ``spec`` (dp, shard, tp, pp, cp) is recorded
    position: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # tensors and JSON values
    keeps: Sequence[Stateful] = ()
    averages: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # moving, of weights
    without_frozen: bool = False  # each start loads frozen weights from the base

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor to save by name: the live tensors, not copies."""
        found: dict[str, Tensor] = {}
        for module in self.modules:
            named = module.named_parameters(remove_duplicate=False) if self.without_frozen else ()
            frozen = {name for name, each in named if not each.requires_grad}
            for name, tensor in module.state_dict().items():
                if name not in frozen:
                    found[MODEL + clean(name)] = tensor.detach()
        for name, parameter in self.parameters():
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{moment}.{name}"] = value.detach()
            if parameter in self.averages:
                found[f"{EMA}.{name}"] = self.averages[parameter]
        for name, value in self.extra.items():
            if isinstance(value, Tensor):
                found[EXTRA + name] = value.detach()
        for each in self.keeps:
            found |= {KEPT + name: tensor.detach() for name, tensor in each.tensors().items()}
        return found

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter under every name it has (tied ones have several)."""
        for module in self.modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield clean(name), parameter

    def members(self) -> list[list[str]]:
        """Return the names of this rank's parameters in each of the optimizer's groups."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.parameters():
            names.setdefault(parameter, []).append(name)
        groups = self.optimizer.param_groups
        return [[name for each in group["params"] for name in names[each]] for group in groups]

    def groups(self, members: Sequence[Sequence[str]]) -> tuple[ParameterGroup, ...]:
        """Return the optimizer's groups with their present settings (rates, decay), as JSON values;
        ``members`` are those of all ranks."""
        found = []
        for group, names in zip(self.optimizer.param_groups, members, strict=True):
            settings = {
                name: value
                for name, value in group.items()
                if name != "params" and isinstance(value, bool | int | float | str | tuple | None)
            }
            found.append(ParameterGroup(settings=settings, parameters=tuple(names)))
        return tuple(found)

    def layout(self) -> dict[str, int]:
        """Return dp, shard, tp, pp and cp, as far as the mesh has them."""
        spec = getattr(self.mesh, "spec", None)
        names = ("dp", "shard", "tp", "pp", "cp")
        return {name: int(getattr(spec, name)) for name in names if hasattr(spec, name)}


def clean(name: str) -> str:
    """Return a parameter's name in the plain model, without the prefixes of wrappers."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


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


class Chunk(NamedTuple):
    """A box of a tensor that a rank holds or writes."""

    tensor: str
    dtype: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes

    @property
    def key(self) -> str:
        return key_of(self.tensor, self.offsets)

    @property
    def bytes(self) -> int:
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
        offsets, sizes = box_of(tensor)
        if math.prod(sizes):
            found.append(Chunk(name, name_of(tensor.dtype), tuple(tensor.shape), offsets, sizes))
    return found


def assign_writes(held: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Return the boxes that each rank writes, so that every box is written once.

    ``held[i]`` are the boxes of rank i; replicas share one list object. A box that several ranks
    hold goes to the least loaded of them, the largest first.
    """
    replicas: dict[int, list[int]] = {}  # ranks with the same list
    for rank, chunks in enumerate(held):
        replicas.setdefault(id(chunks), []).append(rank)
    owners: dict[Chunk, list[int]] = {}
    for ranks in replicas.values():
        for chunk in held[ranks[0]]:
            owners[chunk] = owners[chunk] + ranks if chunk in owners else ranks
    loads = [0] * len(held)
    written: list[list[Chunk]] = [[] for _ in held]
    order = sorted(owners, key=lambda c: (len(owners[c]) > 1, -c.bytes, c.tensor, c.offsets))
    for chunk in order:
        rank = min(owners[chunk], key=loads.__getitem__)
        loads[rank] += chunk.bytes
        written[rank].append(chunk)
    return written


def file_of(rank: int, world_size: int) -> str:
    """Return the name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def index_of(written: Sequence[Sequence[Chunk]]) -> Index:
    """Return the index of a checkpoint in which rank i writes ``written[i]``.

    Raises TrainingFailed unless the boxes of each tensor tile it.
    """
    boxes: dict[str, list[StoredChunk]] = {}
    whole: dict[str, tuple[str, Sizes]] = {}
    for rank, chunks in enumerate(written):
        file = file_of(rank, len(written))
        for each in chunks:
            kind = (each.dtype, each.shape)
            if whole.setdefault(each.tensor, kind) != kind:
                raise TrainingFailed(
                    "ranks disagree about a tensor",
                    got=kind,
                    wanted=whole[each.tensor],
                    where=each.tensor,
                )
            stored = StoredChunk(file=file, offsets=each.offsets, sizes=each.sizes)
            boxes.setdefault(each.tensor, []).append(stored)
    tensors = {}
    for name, (dtype, shape) in whole.items():
        its = tuple(sorted(boxes[name], key=lambda each: each.offsets))
        try:
            tensors[name] = StoredTensor(dtype=dtype, shape=shape, chunks=its)
        except ValidationError as error:
            raise TrainingFailed(
                "the parts of a tensor do not make it up",
                got=[each.sizes for each in its[:10]],
                wanted=f"shape {shape}",
                where=name,
            ) from error
    return Index(tensors=tensors)


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
    offsets, sizes = box_of(wanted)
    if not math.prod(sizes):
        return
    here = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
    saved = TensorStorageMetadata(  # DCP's form; its chunks have the order of ours
        TensorProperties(dtype=DTYPES[stored.dtype]),
        torch.Size(stored.shape),
        [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks],
    )
    for item in create_read_items_for_chunk_list(name, saved, here):
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
    return zlib.compress(json.dumps(chunks, separators=(",", ":")).encode())


def from_bytes(raw: bytes) -> tuple[Chunk, ...]:
    """Return the chunks that ``to_bytes`` serialised."""
    return tuple(
        Chunk(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))
        for name, dtype, shape, offsets, sizes in json.loads(zlib.decompress(raw))
    )
