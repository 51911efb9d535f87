"""A generation as torch.distributed.checkpoint (DCP) reads one.

``PacelineReader`` is a ``StorageReader``: ``dcp.load(state, storage_reader=PacelineReader(place))``
fills plain tensors and DTensors of any layout, from a disk or S3, and gives out no byte of a file
whose SHA-256 is not the committed one. Names are those of plain PyTorch: ``model.<parameter>``,
``optimizer.state.<parameter>.exp_avg`` and ``optimizer.param_groups.…``, flattened or not, as
``get_optimizer_state_dict`` has them; ``paceline.step`` and ``paceline.job_id`` say whose it is.

A file is checked whole by whoever needs a box of it; what nobody asks for is not read.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.errors import InvalidInput
from paceline.objects import ObjectStore
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import DTYPES
from paceline.training.checkpoint.places import generation_at
from paceline.training.checkpoint.reading import Files, box_in
from paceline.training.checkpoint.records import Commit, Index, StoredTensor, key_of
from paceline.training.checkpoint.state import EXTRA, KEPT, MODEL

_PREFIX = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)?")


@dataclass(frozen=True)
class Names:
    """What weights and the optimiser are called in a DCP state; "": at its root."""

    model: str = "model"
    optimizer: str = "optimizer"

    def __post_init__(self) -> None:
        for each in (self.model, self.optimizer):
            if not _PREFIX.fullmatch(each):
                raise InvalidInput(
                    "not a prefix of names", got=repr(each), wanted="words joined by dots, or ''"
                )
        if self.model == self.optimizer:
            raise InvalidInput(
                "weights and optimizer share a prefix", got=repr(self.model), wanted="two prefixes"
            )

    def weight(self, parameter: str) -> tuple[str, ...]:
        """Return the path of a weight."""
        return (*self._of(self.model), parameter)

    def moment(self, moment: str, parameter: str) -> tuple[str, ...]:
        """Return the path of what the optimiser keeps of a parameter."""
        return (*self._of(self.optimizer), "state", parameter, moment)

    def told(self, *rest: str | int) -> tuple[str | int, ...]:
        """Return the path of what the optimiser is told."""
        return (*self._of(self.optimizer), *rest)

    @staticmethod
    def _of(prefix: str) -> tuple[str, ...]:
        return (prefix,) if prefix else ()


@dataclass(frozen=True)
class Contents:
    """What a generation holds, by the names of a DCP state."""

    commit: Commit
    tensors: dict[str, tuple[str, StoredTensor]]  # → its name in the generation, and where it lies
    values: dict[str, object]  # what is no tensor
    paths: dict[str, tuple[str | int, ...]]  # of each name in a nested state

    @classmethod
    def of(
        cls, generations: Generations, generation: Generation, names: Names, weights_only: bool
    ) -> Contents:
        """Read marker and index of ``generation``; raises CorruptData unless both are whole."""
        commit = generations.commit_of(generation)
        index = generations.index_of(generation, commit)
        found = cls(commit, {}, {}, {})
        models = [name.removeprefix(MODEL) for name in index.tensors if name.startswith(MODEL)]
        trained: dict[str, int] = {}  # parameters that the optimiser keeps something of
        for name, stored in index.tensors.items():
            kind, _, of = name.partition(".")
            path: tuple[str | int, ...]
            if name.startswith(MODEL):
                path = names.weight(of)
            elif weights_only:
                continue
            elif name.startswith((EXTRA, KEPT)):
                path = (name,)
            else:
                path = names.moment(kind, of)
                trained[of] = 1
            joined = ".".join(map(str, path))
            found.tensors[joined], found.paths[joined] = (name, stored), path
        if not weights_only:
            found._tell(index, names, [each for each in models if each in trained])
        return found

    def _tell(self, index: Index, names: Names, trained: list[str]) -> None:
        self._value(("paceline", "step"), self.commit.step)
        self._value(("paceline", "job_id"), self.commit.job_id)
        if index.groups is None:
            return
        shapes = {each: index.tensors[MODEL + each].shape for each in trained}
        parted = [
            (index.groups.matrices, [each for each in trained if len(shapes[each]) >= 2]),
            (index.groups.vectors, [each for each in trained if len(shapes[each]) < 2]),
        ]
        for number, (told, members) in enumerate(each for each in parted if each[1]):
            for key, raw in told.items():
                value = tuple(raw) if isinstance(raw, list) else raw  # JSON has no tuples
                self._value(names.told("param_groups", number, key), value)
                for each in members:
                    self._value(names.told(f"param_groups.{each}.{key}"), value)
            self._value(names.told("param_groups", number, "params"), members)

    def _value(self, path: tuple[str | int, ...], value: object) -> None:
        joined = ".".join(map(str, path))
        self.values[joined], self.paths[joined] = value, path

    def metadata(self) -> dict[str, STORAGE_TYPES]:
        """Return what DCP is told of each name."""
        found: dict[str, STORAGE_TYPES] = {name: BytesStorageMetadata() for name in self.values}
        for name, (_, stored) in self.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                for each in stored.chunks
            ]
            properties = TensorProperties(dtype=DTYPES[stored.dtype])
            shape = torch.Size(stored.shape)
            found[name] = TensorStorageMetadata(properties, shape, chunks)
        return found


def saved_value(value: object) -> io.BytesIO:
    """Return a value that is no tensor as DCP keeps it."""
    raw = io.BytesIO()
    torch.save(value, raw)
    raw.seek(0)
    return raw


class PacelineReader(StorageReader):
    """Reads a committed generation for ``dcp.load``.

    ``place`` is a directory or s3:// URL: of one generation, of a job (its newest is read), or a
    local training's output. S3's endpoint and credentials are those of the environment, or
    ``store``'s. ``model`` and ``optimizer`` are the keys in your state; "" for its root, as
    torchtitan has its weights.

    Raises SourceMissing where there is none; what fails within ``dcp.load`` (CorruptData for a
    damaged file) comes as DCP's CheckpointException, by rank.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        step: int | None = None,
        model: str = "model",
        optimizer: str = "optimizer",
        store: ObjectStore | None = None,
        work_dir: Path | None = None,
    ) -> None:
        self._place, self._step = str(place), step
        self._names = Names(model, optimizer)
        self._store, self._work_dir = store, work_dir
        self._contents: Contents | None = None
        self._at: tuple[Generations, Generation] | None = None

    @property
    def checkpoint_id(self) -> str:
        """Return the URL of what is read."""
        generations, generation = self._found()
        return generations.url_of(generation)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another place from now on, where one is given; look again at what is newest."""
        if checkpoint_id is not None:
            self._place, self._step = str(checkpoint_id), None
        self._contents = self._at = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return what there is, and which generation it is: every rank reads that one."""
        generations, generation = self._found()
        contents = Contents.of(generations, generation, self._names, weights_only=False)
        return Metadata(
            state_dict_metadata=contents.metadata(),
            planner_data=dict(contents.paths),
            storage_data=str(generation),
            storage_meta=StorageMeta(checkpoint_id=generations.url_of(generation)),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """Take the generation that the coordinator chose."""
        del is_coordinator
        generations, _ = self._found()
        chosen = Generation.named(str(metadata.storage_data))
        assert chosen is not None
        self._at = (generations, chosen)
        self._contents = Contents.of(generations, chosen, self._names, weights_only=False)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan``: nothing is to be added."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans``: ranks read by themselves."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what ``plan`` asks for, file by file, each checked before."""
        contents = self._contents
        assert contents is not None
        generations, generation = self._found()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, saved_value(contents.values[item.storage_index.fqn]))
        with Files(generations, generation, contents.commit, self._work_dir) as files:
            for file, reads in _by_file(plan, contents).items():
                opened = files.opened(file)
                for item, key in reads:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(box_in(opened, key, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this could be one of ours: a directory here, or an S3 URL."""
        return str(checkpoint_id).startswith("s3://") or Path(checkpoint_id).is_dir()

    def _found(self) -> tuple[Generations, Generation]:
        if self._at is None:
            self._at = generation_at(self._place, self._step, self._store)
        return self._at


def _by_file(plan: LoadPlan, contents: Contents) -> dict[str, list[tuple[ReadItem, str]]]:
    """Return what to read of each file: the item, and the key of the box it is in."""
    found: dict[str, list[tuple[ReadItem, str]]] = {}
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            continue
        name, stored = contents.tensors[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset or ())
        chunk = next(each for each in stored.chunks if each.offsets == offsets)
        found.setdefault(chunk.file, []).append((item, key_of(name, chunk.offsets)))
    return found
