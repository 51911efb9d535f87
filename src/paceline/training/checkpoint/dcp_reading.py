"""Import of a standard DCP directory as a training's starting point: weights, and moments if any.

Nothing is unpickled (``dcp_stored``). Where the directory has a ``SHA256SUMS`` (our export writes
one), every file is verified first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CorruptData, InvalidInput, SourceMissing
from paceline.training.checkpoint.dcp_export import SUMS_FILE
from paceline.training.checkpoint.dcp_stored import METADATA_FILE, DcpTensor, fill, read_metadata

MAX_SUMS_BYTES = 64 * 1024 * 1024
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW; our optimizers have no others
_STATE = re.compile(r"(?<![^.])state\.")
_SUM = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]+)")


@dataclass(frozen=True)
class ImportedCheckpoint:
    """Tensors read from a DCP directory."""

    weights: dict[str, Tensor]  # by name in our model
    moments: dict[str, Tensor] = field(default_factory=dict)  # "<moment>.<parameter>"
    prefix: str = ""  # of the weights' names in the directory
    cast: int = 0  # number of weights stored with another dtype

    @property
    def trained(self) -> int:
        """Return the number of parameters with all of AdamW's moments."""
        return len({name.partition(".")[2] for name in self.moments})


def is_dcp(directory: Path) -> bool:
    """Return whether ``directory`` is a checkpoint written by ``dcp.save``."""
    return (directory / METADATA_FILE).is_file()


def read_dcp(
    directory: Path, wanted: Mapping[str, Tensor], *, weights_only: bool = False
) -> ImportedCheckpoint:
    """Return the weights that ``wanted`` names (its tensors may be on the meta device), in its
    dtypes, and AdamW's moments of the parameters that have all three.

    The prefix of the weights' names is detected (``model.``, or none). Raises InvalidInput where a
    weight is missing or has another shape, CorruptData for damaged files.
    """
    if not is_dcp(directory):
        raise SourceMissing("no DCP checkpoint here", wanted=METADATA_FILE, where=directory)
    _check_sums(directory)
    there = read_metadata(directory)
    prefix = _prefix_of(there, list(wanted), directory)
    for name, tensor in wanted.items():
        if (got := there[prefix + name].shape) != tuple(tensor.shape):
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
    if not weights_only:
        endings = _states_in(there, wanted)
        for name, tensor in wanted.items():
            found = _moments_of(name, tuple(tensor.shape), there, endings, state)
            moments |= {f"{moment}.{name}": each for moment, each in found.items()}
    for name, tensor in state.items():
        fill(tensor, there[name], directory, name)
    cast = sum(there[prefix + n].dtype != each.dtype for n, each in weights.items())
    return ImportedCheckpoint(weights, moments, prefix, cast)


def _states_in(
    there: Mapping[str, DcpTensor], wanted: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Return the names that end in ``state.<parameter>.<moment>``, by that end without state."""
    found: dict[str, list[str]] = {f"{name}.{each}": [] for name in wanted for each in MOMENTS}
    longest = max(map(len, found)) + len("state.")
    for name in there:
        for match in _STATE.finditer(name, max(0, len(name) - longest)):
            if (ending := name[match.end() :]) in found:
                found[ending].append(name)
    return found


def _moments_of(
    name: str,
    shape: tuple[int, ...],
    there: Mapping[str, DcpTensor],
    endings: Mapping[str, list[str]],
    state: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Allocate the moments of a parameter and add them to ``state``; {} unless all match."""
    found: dict[str, tuple[str, Tensor]] = {}
    for moment in MOMENTS:
        keys = endings[f"{name}.{moment}"]
        if len(keys) != 1:
            return {}
        its = there[keys[0]]
        if its.shape != (() if moment == "step" else shape):
            return {}
        found[moment] = keys[0], torch.empty(its.shape, dtype=its.dtype)
    state |= dict(found.values())
    return {moment: tensor for moment, (_, tensor) in found.items()}


def _prefix_of(there: Mapping[str, Any], names: list[str], where: Path) -> str:
    """Return the shortest prefix under which all ``names`` exist ("" for none of them prefixed);
    raises InvalidInput where there is no such prefix.
    """
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


def _check_sums(directory: Path) -> None:
    """Raise CorruptData where a file does not match SHA256SUMS; without that file, do nothing."""
    path = directory / SUMS_FILE
    if not path.is_file():
        return
    if path.stat().st_size > MAX_SUMS_BYTES:
        raise CorruptData("SHA256SUMS is too large", wanted=f"≤ {MAX_SUMS_BYTES}", where=path)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
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
