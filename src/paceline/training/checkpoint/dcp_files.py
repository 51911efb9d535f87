"""A generation as a standard DCP directory: ``.metadata`` and ``__0_0.distcp``.

Written through DCP's own ``FileSystemWriter`` and planner, box by box: memory holds one box at a
time, whatever the model's size. Beside them lie ``SHA256SUMS`` (DCP keeps no digests) and, where it
is known, the model's ``config.json``. The directory appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import Conflict, PacelineError, StorageFailed, StorageFull, TrainingFailed
from paceline.system.files import make_directories, sync_directory, sync_tree
from paceline.training.checkpoint.dcp import Contents, Names, saved_value
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import DTYPES
from paceline.training.checkpoint.reading import Files, box_in
from paceline.training.checkpoint.records import Commit, key_of

SUMS_FILE = "SHA256SUMS"
CONFIG_FILE = "config.json"


def export_dcp(
    generations: Generations,
    generation: Generation,
    directory: Path,
    *,
    names: Names | None = None,
    weights_only: bool = False,
    config: bytes = b"",
) -> tuple[Commit, int]:
    """Write ``generation`` into the new ``directory``, every byte checked; return its marker, and
    how many tensors there are.

    ``config``: a model's config.json to put beside it, b"" for none. Raises CorruptData where a
    file is not what was committed, Conflict where something is in ``directory`` already.
    """
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Conflict(
            "there is something already",
            got=directory,
            wanted="a new or empty directory",
            do="Name another one.",
        )
    contents = Contents.of(generations, generation, names or Names(), weights_only)
    making = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        with _disk(directory):
            make_directories(directory.parent)
            making.mkdir()
        with Files(generations, generation, contents.commit) as files, _translated(directory):
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
    """Plans to write what a generation holds; reads each box when it is asked for."""

    def __init__(self, contents: Contents, files: Files) -> None:
        self._contents, self._files = contents, files

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: what is written is no state in memory."""
        del state_dict, storage_meta, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return every value and every box, in the order of the files that they lie in."""
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
        """Return DCP's own plan, with the path of each name in a nested state."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = dict(self._contents.paths)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the bytes of a value, or a box as its checked file holds it."""
        if write_item.type == WriteItemType.BYTE_IO:
            return saved_value(self._contents.values[write_item.index.fqn])
        name, stored = self._contents.tensors[write_item.index.fqn]
        offsets = tuple(write_item.index.offset or ())
        chunk = next(each for each in stored.chunks if each.offsets == offsets)
        key, opened = key_of(name, chunk.offsets), self._files.opened(chunk.file)
        return box_in(opened, key, [0] * len(chunk.sizes), chunk.sizes)


@contextlib.contextmanager
def _translated(where: Path) -> Iterator[None]:
    """Raise what DCP collected as one of our errors; keep its warnings to one process back."""
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
    """Write the SHA-256 of every file, as ``sha256sum --check`` reads it."""
    lines = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    with (directory / SUMS_FILE).open("w", encoding="ascii") as file:
        file.writelines(lines)
