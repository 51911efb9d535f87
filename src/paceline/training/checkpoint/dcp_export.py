"""Export of a generation as a standard torch.distributed.checkpoint (DCP) directory.

DCP's own writer stores the tensors; each file of ours is verified whole against its committed
SHA-256 before any of its bytes are used.

Names are those of plain PyTorch: ``model.<parameter>``, ``optimizer.state.<parameter>.exp_avg`` and
``optimizer.param_groups.…``, flattened or nested as in ``get_optimizer_state_dict``;
``ema.<parameter>`` is the moving average of a weight. ``paceline.step`` and ``paceline.job_id``
identify the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import (
    Conflict,
    InvalidInput,
    PacelineError,
    StorageFailed,
    StorageFull,
    TrainingFailed,
)
from paceline.system import make_directories, sync_directory, sync_tree
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import DTYPES, EMA, EXTRA, KEPT, MODEL, reads_for
from paceline.training.checkpoint.records import Commit, Groups, Index, StoredTensor
from paceline.training.checkpoint.resume import VerifiedFiles

SUMS_FILE = "SHA256SUMS"
CONFIG_FILE = "config.json"
_PREFIX = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)?")

StatePath = tuple[str | int, ...]  # of an entry in a nested state


class DcpContents:
    """The tensors and values of a generation, by their names in a DCP state."""

    def __init__(
        self, commit: Commit, index: Index, model_prefix: str, weights_only: bool = False
    ) -> None:
        self.tensors: dict[str, tuple[str, StoredTensor]] = {}  # → (name in the generation, tensor)
        self.values: dict[str, object] = {}  # entries that are not tensors
        self.paths: dict[str, StatePath] = {}
        weights: StatePath = (model_prefix,) if model_prefix else ()
        trained: dict[str, int] = {}  # parameters with moments → their number of dimensions
        for name, stored in index.tensors.items():
            kind, _, of = name.partition(".")
            if name.startswith(MODEL):
                path = (*weights, of)
            elif weights_only:
                continue
            elif name.startswith((EXTRA, KEPT)):
                path = (name,)
            elif kind == EMA:
                path = (EMA, of)
            else:
                path = ("optimizer", "state", of, kind)
                trained[of] = len(index.tensors[MODEL + of].shape)
            self.tensors[self._named(path)] = (name, stored)
        if weights_only:
            return
        self._value(("paceline", "step"), commit.step)
        self._value(("paceline", "job_id"), commit.job_id)
        if isinstance(index.groups, Groups):
            matrices = [name for name, dimensions in trained.items() if dimensions >= 2]
            vectors = [name for name, dimensions in trained.items() if dimensions < 2]
            self._groups([(index.groups.matrices, matrices), (index.groups.vectors, vectors)])
        for_each = index.groups if isinstance(index.groups, tuple) else ()
        self._groups([(e.settings, [n for n in e.parameters if n in trained]) for e in for_each])

    def _groups(self, groups: list[tuple[dict[str, Any], list[str]]]) -> None:
        for number, (settings, members) in enumerate(each for each in groups if each[1]):
            for key, raw in settings.items():
                value = tuple(raw) if isinstance(raw, list) else raw  # JSON has no tuples
                self._value(("optimizer", "param_groups", number, key), value)
                for each in members:
                    self._value(("optimizer", f"param_groups.{each}.{key}"), value)
            self._value(("optimizer", "param_groups", number, "params"), members)

    def state(self) -> dict[str, Any]:
        """Return the nested state with a tensor without memory for each saved one."""
        state: dict[str, Any] = {}
        for name, path in self.paths.items():
            value = self.values.get(name)
            if name in self.tensors:
                stored = self.tensors[name][1]
                value = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
            set_element(state, path, value)
        return state

    def _value(self, path: StatePath, value: object) -> None:
        self.values[self._named(path)] = value

    def _named(self, path: StatePath) -> str:
        name = ".".join(map(str, path))
        self.paths[name] = path
        return name


class _ReadAsWritten(DefaultSavePlanner):
    """Plans a DCP directory of ``contents``; a tensor is read when DCP's writer stores it."""

    def __init__(self, contents: DcpContents, files: VerifiedFiles) -> None:
        super().__init__()
        self._contents, self._files = contents, files

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value, or the whole tensor, every byte verified."""
        if index.fqn not in self._contents.tensors:
            return super().lookup_object(index)
        name, stored = self._contents.tensors[index.fqn]
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self._files.fill(whole, reads_for(name, stored, whole))
        return whole


def export_dcp(
    generations: Generations,
    generation: Generation,
    directory: Path,
    *,
    model_prefix: str = "model",
    weights_only: bool = False,
    config: bytes = b"",
) -> tuple[Commit, int]:
    """Write ``generation`` into the new ``directory``, every byte verified; return its marker and
    the number of tensors.

    ``model_prefix`` stands before the names of weights; "" is the root of the state, where
    torchtitan has them. ``SHA256SUMS`` (DCP stores no digests) and ``config``, the model's
    config.json (b"": none), are added. Memory holds one tensor at a time. The directory appears
    whole or not at all.

    Raises CorruptData where a file does not match its commit, Conflict where ``directory`` is not
    empty, InvalidInput for a prefix that cannot stand before names.
    """
    if not _PREFIX.fullmatch(model_prefix) or model_prefix == "optimizer":
        raise InvalidInput(
            "not a prefix of weights' names", got=repr(model_prefix), wanted="words joined by dots"
        )
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Conflict(
            "there is something already",
            got=directory,
            wanted="a new or empty directory",
            do="Name another one.",
        )
    commit = generations.commit_of(generation)
    index = generations.index_of(generation, commit)
    contents = DcpContents(commit, index, model_prefix, weights_only)
    making = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        with _translated(directory):
            make_directories(directory.parent)
            making.mkdir()
            scratch = Path(tempfile.mkdtemp("-checkpoint"))
            with VerifiedFiles(generations, generation, commit, scratch) as files:
                planner, writer = _ReadAsWritten(contents, files), FileSystemWriter(making)
                save(contents.state(), storage_writer=writer, planner=planner, no_dist=True)
            if config:
                (making / CONFIG_FILE).write_bytes(config)
            _write_sums(making)
            sync_tree(making)
            if directory.exists():
                directory.rmdir()
            making.rename(directory)
            sync_directory(directory.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return commit, len(contents.tensors)


@contextlib.contextmanager
def _translated(where: Path) -> Iterator[None]:
    """Translate errors of the disk and DCP's collected errors to ours; suppress DCP's warning about
    a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except (CheckpointException, OSError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, PacelineError):
            raise cause from error
        if not isinstance(cause, OSError):
            raise TrainingFailed(
                "DCP cannot go through this checkpoint", got=repr(cause)[:500], where=where
            ) from error
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (StorageFull if full else StorageFailed)(
            "checkpoint cannot be written or read", got=cause.strerror or cause, where=where
        ) from error


def _write_sums(directory: Path) -> None:
    """Write the SHA-256 of every file in the format of ``sha256sum --check``."""
    lines = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    with (directory / SUMS_FILE).open("w", encoding="ascii") as file:
        file.writelines(lines)
