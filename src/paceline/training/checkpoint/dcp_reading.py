"""A standard DCP directory as what a training of ours starts from: weights, and moments if any.

``.metadata`` is a pickle, and so are the values beside the tensors: here only the few classes that
describe tensors are ever made of it, and values that are no tensors are not read. Where a
``SHA256SUMS`` lies beside (our own export writes one) every file is checked first.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.errors import CorruptData, InvalidInput, PacelineError, SourceMissing
from paceline.training.checkpoint.dcp_files import SUMS_FILE, translated

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1024 * 1024 * 1024
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, and all that our optimisers keep
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SUM = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]+)")
# All that DCP writes into .metadata itself.
_KNOWN = {
    "torch": {
        "Size",
        *(str(each).removeprefix("torch.") for each in vars(torch).values()
          if isinstance(each, torch.dtype)),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "complex", "bytearray"},
}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """What was read of a DCP directory."""

    weights: dict[str, Tensor]  # by the name in our model
    moments: dict[str, Tensor] = field(default_factory=dict)  # "<moment>.<parameter>"
    prefix: str = ""  # that weights have there
    cast: int = 0  # weights that have another dtype there

    @property
    def trained(self) -> int:
        """Return how many parameters bring all that AdamW keeps of them."""
        return len({name.partition(".")[2] for name in self.moments})


def is_dcp(directory: Path) -> bool:
    """Return whether ``directory`` is a checkpoint as ``dcp.save`` writes it."""
    return (directory / METADATA_FILE).is_file()


def read_dcp(
    directory: Path, wanted: Mapping[str, Tensor], *, weights_only: bool = False
) -> Imported:
    """Return the weights that ``wanted`` (tensors on the meta device will do) names, as dtype there
    says, and AdamW's moments of those parameters that have all three.

    Whatever stands before the names of weights is found out (``model.``, or nothing). Raises
    InvalidInput where a weight is missing or has another shape, CorruptData for damaged files.
    """
    if not is_dcp(directory):
        raise SourceMissing("no DCP checkpoint here", wanted=METADATA_FILE, where=directory)
    _check_sums(directory)
    reader = _Reader(directory)
    metadata = reader.read_metadata()
    there = {
        name: each
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    prefix = _prefix_of(there, list(wanted), directory)
    for name, tensor in wanted.items():
        if (got := tuple(there[prefix + name].size)) != tuple(tensor.shape):
            raise InvalidInput(
                "checkpoint is of another model",
                got=f"{prefix + name}: {got}",
                wanted=tuple(tensor.shape),
                where=directory,
                do="Set model.parameters and model.context as it was trained, or put the model's "
                "config.json beside its .metadata.",
            )
    weights = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in wanted.items()}
    state = {prefix + name: tensor for name, tensor in weights.items()}
    moments: dict[str, Tensor] = {}
    for name in [] if weights_only else wanted:
        found = _moments_of(name, tuple(wanted[name].shape), there, state)
        moments |= {f"{moment}.{name}": tensor for moment, tensor in found.items()}
    with translated(directory, CorruptData):
        load(state, storage_reader=reader, planner=DefaultLoadPlanner(False), no_dist=True)
    cast = sum(there[prefix + n].properties.dtype != each.dtype for n, each in weights.items())
    return Imported(weights, moments, prefix, cast)


def _moments_of(
    name: str,
    shape: tuple[int, ...],
    there: Mapping[str, TensorStorageMetadata],
    state: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return room for the moments of a parameter, and put it into ``state``; {} unless all fit."""
    found: dict[str, tuple[str, Tensor]] = {}
    for moment in MOMENTS:
        ending = f"state.{name}.{moment}"
        keys = [key for key in there if key == ending or key.endswith(f".{ending}")]
        if len(keys) != 1:
            return {}
        its = there[keys[0]]
        if tuple(its.size) != (() if moment == "step" else shape):
            return {}
        found[moment] = keys[0], torch.empty(its.size, dtype=its.properties.dtype)
    state |= dict(found.values())
    return {moment: tensor for moment, (_, tensor) in found.items()}


def _prefix_of(there: Mapping[str, Any], names: list[str], where: Path) -> str:
    """Return what stands before all ``names``; the shortest such, "" where nothing does."""
    longest = max(names, key=len)
    prefixes = sorted(
        (key.removesuffix(longest) for key in there if f".{key}".endswith(f".{longest}")), key=len
    )
    for prefix in prefixes:
        if all(prefix + name in there for name in names):
            return prefix
    prefix = prefixes[0] if prefixes else ""
    missing = [name for name in names if prefix + name not in there]
    raise InvalidInput(
        "checkpoint is of another model",
        got=f"{len(there)} tensors, e.g. {', '.join(sorted(there)[:3])}",
        wanted=f"{missing[0]} (and {len(missing) - 1} more)",
        where=where,
        do="Names must be those of our model (Llama's, as in Hugging Face's files), whatever "
        "stands before all of them.",
    )


class _Reader(FileSystemReader):
    """DCP's own, but for what it would unpickle and where it would look."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = self._directory / METADATA_FILE
        try:
            if path.stat().st_size > MAX_METADATA_BYTES:
                raise InvalidInput("metadata are too large", got=path.stat().st_size, where=path)
            with path.open("rb") as file:
                found = _Metadata(file).load()
            files = {each.relative_path for each in found.storage_data.values()}
        except PacelineError:
            raise
        except Exception as error:  # a pickle that is damaged raises whatever it comes upon
            raise CorruptData(
                "DCP's metadata cannot be read",
                got=repr(error)[:300],
                where=path,
                do="Export or copy the checkpoint again.",
            ) from error
        for each in sorted(map(str, files)):
            if not _FILE.fullmatch(each):
                raise InvalidInput("metadata name a file elsewhere", got=each[:200], where=path)
            if not (self._directory / each).is_file():
                raise CorruptData("checkpoint file is missing", got=each, where=self._directory)
        found.storage_meta = StorageMeta()
        checked: Metadata = found
        return checked


class _Metadata(pickle.Unpickler):
    """Makes nothing but what describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that may stand in .metadata; raises InvalidInput for any other."""
        if name not in _KNOWN.get(module, ()):
            raise InvalidInput(
                "metadata want to run what is no part of a checkpoint",
                got=f"{module}.{name}",
                wanted="DCP's own records only",
                do="Do not open it with other tools either, unless you know who made it.",
            )
        return super().find_class(module, name)


def _check_sums(directory: Path) -> None:
    """Raise CorruptData where a file is not what SHA256SUMS says; without it, nothing is known."""
    path = directory / SUMS_FILE
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _SUM.fullmatch(line)
        if match is None or not (directory / match[2]).is_file():
            raise CorruptData("checkpoint file is missing", got=line[66:300], where=directory)
        with (directory / match[2]).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != match[1]:
            raise CorruptData(
                "checkpoint file does not match its hash",
                got=found,
                wanted=match[1],
                where=directory / match[2],
                do="Export or copy the checkpoint again.",
            )
