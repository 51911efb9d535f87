"""Interoperability with torch.distributed.checkpoint (DCP): a reader, and a directory export.

``PacelineReader`` is a ``StorageReader``: ``dcp.load(state, storage_reader=PacelineReader(place))``
fills plain tensors and DTensors of any layout, from a disk or S3. A file is verified whole against
its committed SHA-256 before any of its bytes are returned; files that no rank needs are not read.
``export_dcp`` writes a standard DCP directory.

Names are those of plain PyTorch: ``model.<parameter>``, ``optimizer.state.<parameter>.exp_avg`` and
``optimizer.param_groups.…``, flattened or nested as in ``get_optimizer_state_dict``;
``paceline.step`` and ``paceline.job_id`` identify the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.errors import (
    Conflict,
    InvalidInput,
    PacelineError,
    StorageFailed,
    StorageFull,
    TrainingFailed,
)
from paceline.storage import ObjectStore
from paceline.system.files import make_directories, sync_directory, sync_tree
from paceline.training.checkpoint.generations import Generation, Generations, generation_at
from paceline.training.checkpoint.layout import DTYPES
from paceline.training.checkpoint.records import Commit, Index, StoredTensor, key_of
from paceline.training.checkpoint.resume import VerifiedFiles, box_in
from paceline.training.checkpoint.stateful import EXTRA, KEPT, MODEL

_PREFIX = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)?")


@dataclass(frozen=True)
class DcpPrefixes:
    """Prefixes of weights and optimizer state in a DCP state; "" is the root of the state."""

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
        """Return the path of an optimizer moment of a parameter."""
        return (*self._of(self.optimizer), "state", parameter, moment)

    def told(self, *rest: str | int) -> tuple[str | int, ...]:
        """Return the path of an optimizer setting (a parameter group's entry)."""
        return (*self._of(self.optimizer), *rest)

    @staticmethod
    def _of(prefix: str) -> tuple[str, ...]:
        return (prefix,) if prefix else ()


@dataclass(frozen=True)
class DcpContents:
    """The tensors and values of a generation, by their names in a DCP state."""

    commit: Commit
    tensors: dict[str, tuple[str, StoredTensor]]  # → (name in the generation, its chunks)
    values: dict[str, object]  # entries that are not tensors
    paths: dict[str, tuple[str | int, ...]]  # name → path in a nested state

    @classmethod
    def of(
        cls,
        generations: Generations,
        generation: Generation,
        names: DcpPrefixes,
        weights_only: bool,
    ) -> DcpContents:
        """Read marker and index of ``generation``; raises CorruptData where either is damaged."""
        commit = generations.commit_of(generation)
        index = generations.index_of(generation, commit)
        found = cls(commit, {}, {}, {})
        models = [name.removeprefix(MODEL) for name in index.tensors if name.startswith(MODEL)]
        trained: dict[str, int] = {}  # an ordered set: parameters with moments
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

    def _tell(self, index: Index, names: DcpPrefixes, trained: list[str]) -> None:
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
        """Return DCP's metadata of each name."""
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
    """Return a value that is not a tensor, serialised as DCP stores it."""
    raw = io.BytesIO()
    torch.save(value, raw)
    raw.seek(0)
    return raw


class PacelineReader(StorageReader):
    """Reads a committed generation for ``dcp.load``.

    ``place`` is a directory or s3:// URL: of one generation, of a job (its newest is read), or the
    output directory of a local training. S3's endpoint and credentials come from the environment,
    or from ``store``. ``model`` and ``optimizer`` are the keys in your state; "" is its root, where
    torchtitan has its weights.

    Raises SourceMissing where there is no checkpoint. Errors inside ``dcp.load`` (CorruptData for a
    damaged file) arrive as DCP's CheckpointException, by rank.
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
        self._names = DcpPrefixes(model, optimizer)
        self._store, self._work_dir = store, work_dir
        self._contents: DcpContents | None = None
        self._at: tuple[Generations, Generation] | None = None

    @property
    def checkpoint_id(self) -> str:
        """Return the URL of the generation."""
        generations, generation = self._found()
        return generations.url_of(generation)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the chosen generation; with ``checkpoint_id``, read from there instead."""
        if checkpoint_id is not None:
            self._place, self._step = str(checkpoint_id), None
        self._contents = self._at = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return DCP's metadata; it names the generation, so that every rank reads the same."""
        generations, generation = self._found()
        contents = DcpContents.of(generations, generation, self._names, weights_only=False)
        return Metadata(
            state_dict_metadata=contents.metadata(),
            planner_data=dict(contents.paths),
            storage_data=str(generation),
            storage_meta=StorageMeta(checkpoint_id=generations.url_of(generation)),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """Use the generation that the coordinator chose."""
        del is_coordinator
        generations, _ = self._found()
        chosen = Generation.named(str(metadata.storage_data))
        assert chosen is not None
        self._at = (generations, chosen)
        self._contents = DcpContents.of(generations, chosen, self._names, weights_only=False)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan`` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans`` unchanged: each rank reads on its own."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and values of ``plan``, file by file, each verified first."""
        contents = self._contents
        assert contents is not None
        generations, generation = self._found()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, saved_value(contents.values[item.storage_index.fqn]))
        with VerifiedFiles(generations, generation, contents.commit, self._work_dir) as files:
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
        """Return whether the id is a local directory or an S3 URL."""
        return str(checkpoint_id).startswith("s3://") or Path(checkpoint_id).is_dir()

    def _found(self) -> tuple[Generations, Generation]:
        if self._at is None:
            self._at = generation_at(self._place, self._step, self._store)
        return self._at


def _by_file(plan: LoadPlan, contents: DcpContents) -> dict[str, list[tuple[ReadItem, str]]]:
    """Return the reads of each file: the item, and the key of the box that contains it."""
    found: dict[str, list[tuple[ReadItem, str]]] = {}
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            continue
        name, stored = contents.tensors[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset or ())
        chunk = next(each for each in stored.chunks if each.offsets == offsets)
        found.setdefault(chunk.file, []).append((item, key_of(name, chunk.offsets)))
    return found


# Export as a standard DCP directory (``.metadata`` and ``__0_0.distcp``) through DCP's own
# ``FileSystemWriter`` and planner, box by box: memory holds one box at a time, whatever the model's
# size. ``SHA256SUMS`` (DCP stores no digests) and, if given, the model's ``config.json`` are added.
# The directory appears whole or not at all.

SUMS_FILE = "SHA256SUMS"
CONFIG_FILE = "config.json"


def export_dcp(
    generations: Generations,
    generation: Generation,
    directory: Path,
    *,
    names: DcpPrefixes | None = None,
    weights_only: bool = False,
    config: bytes = b"",
) -> tuple[Commit, int]:
    """Write ``generation`` into the new ``directory``, every byte verified; return its marker and
    the number of tensors.

    ``config``: the model's config.json to add, b"" for none. Raises CorruptData where a file does
    not match its commit, Conflict where ``directory`` is not empty.
    """
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Conflict(
            "there is something already",
            got=directory,
            wanted="a new or empty directory",
            do="Name another one.",
        )
    contents = DcpContents.of(generations, generation, names or DcpPrefixes(), weights_only)
    making = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        with _disk(directory):
            make_directories(directory.parent)
            making.mkdir()
        with (
            VerifiedFiles(generations, generation, contents.commit) as files,
            _translated(directory),
        ):
            writer = FileSystemWriter(making)
            save({}, storage_writer=writer, planner=_Planner(contents, files), no_dist=True)
        with _disk(directory):
            if config:
                (making / CONFIG_FILE).write_bytes(config)
            _sum(making)
            sync_tree(making)
            if directory.exists():
                directory.rmdir()
            making.rename(directory)
            sync_directory(directory.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return contents.commit, len(contents.tensors)


class _Planner(SavePlanner):
    """Plans the write of a generation; reads each box when DCP requests it."""

    def __init__(self, contents: DcpContents, files: VerifiedFiles) -> None:
        self._contents, self._files = contents, files

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: there is no state in memory to plan for."""
        del state_dict, storage_meta, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return every value and every box, boxes in the order of their files."""
        items = [
            WriteItem(
                index=MetadataIndex(name),
                type=WriteItemType.BYTE_IO,
                bytes_io_data=BytesIOWriteData(nbytes=saved_value(value).getbuffer().nbytes),
            )
            for name, value in self._contents.values.items()
        ]
        every = [
            (stored.chunks[number].file, name, number)
            for name, (_, stored) in self._contents.tensors.items()
            for number in range(len(stored.chunks))
        ]
        for _, name, number in sorted(every):
            _, stored = self._contents.tensors[name]
            chunk = stored.chunks[number]
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            whole = torch.Size(stored.shape)
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties(dtype=DTYPES[stored.dtype]),
                size=whole,
            )
            kind = WriteItemType.TENSOR if sizes == whole else WriteItemType.SHARD
            items.append(WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return DCP's default plan, with the path of each name in a nested state."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = dict(self._contents.paths)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the bytes of a value, or a box from its verified file."""
        if write_item.type == WriteItemType.BYTE_IO:
            return saved_value(self._contents.values[write_item.index.fqn])
        name, stored = self._contents.tensors[write_item.index.fqn]
        offsets = tuple(write_item.index.offset or ())
        chunk = next(each for each in stored.chunks if each.offsets == offsets)
        key, opened = key_of(name, chunk.offsets), self._files.opened(chunk.file)
        return box_in(opened, key, [0] * len(chunk.sizes), chunk.sizes)


@contextlib.contextmanager
def _translated(where: Path) -> Iterator[None]:
    """Translate DCP's collected errors to ours; suppress its warning about a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        cause: BaseException = next(iter(error.failures.values()))[0]
        if isinstance(cause, PacelineError):
            raise cause from error
        if isinstance(cause, OSError):
            raise _of_disk(cause, where) from error
        raise TrainingFailed(
            "DCP cannot go through this checkpoint", got=repr(cause)[:500], where=where
        ) from error


@contextlib.contextmanager
def _disk(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _of_disk(error, where) from error


def _of_disk(error: OSError, where: Path) -> PacelineError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = StorageFull if full else StorageFailed
    return kind("checkpoint cannot be written or read", got=error.strerror or error, where=where)


def _sum(directory: Path) -> None:
    """Write the SHA-256 of every file in the format of ``sha256sum --check``."""
    lines = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    with (directory / SUMS_FILE).open("w", encoding="ascii") as file:
        file.writelines(lines)
