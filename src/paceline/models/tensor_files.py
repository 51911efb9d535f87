"""The tensors of a directory's safetensors files: names, shapes and dtypes, and parts of them.

Headers alone say what is there; a part of a tensor is read without the rest of it. A directory has
either one ``model.safetensors`` or several files and an index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CorruptData, InvalidInput
from paceline.models.files import INDEX_FILE, read_index, weight_files

SINGLE_FILE = "model.safetensors"
HEADER_BYTES = 128  # of a file's header, and of each tensor in it besides its name, at most
SCAN_BYTES = 64 * 1024 * 1024  # of a tensor, in memory at once while values are checked


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file; ``dtype`` is the file's name for it (F32, BF16, …)."""

    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the model in ``directory`` by name, from the headers of its files.

    Raises InvalidInput for pickled weights or an index that does not match its files, SourceMissing
    without weights, CorruptData for a file that is not safetensors.
    """
    files = {each.name: each for each in weight_files(directory)}
    if (directory / INDEX_FILE).is_file():
        wanted = set(read_index(directory).values())
    elif SINGLE_FILE in files:
        wanted = {SINGLE_FILE}
    else:
        raise InvalidInput(
            "weights have no index",
            got=", ".join(sorted(files)[:3]),
            wanted=f"{SINGLE_FILE}, or several files and {INDEX_FILE}",
            where=directory,
        )
    found: dict[str, StoredTensor] = {}
    for file in sorted(wanted):
        if file not in files:
            raise InvalidInput("weights file is missing", got=f"no {file}", where=directory)
        with _opened(files[file]) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                if name in found:
                    raise InvalidInput(
                        "two weights files have the same tensor",
                        got=name,
                        where=f"{found[name].file.name}, {file}",
                    )
                found[name] = StoredTensor(
                    files[file], name, str(part.get_dtype()), tuple(part.get_shape())
                )
    if (directory / INDEX_FILE).is_file():
        named = {name: files[file] for name, file in read_index(directory).items()}
        odd = sorted(set(named.items()) ^ {(name, each.file) for name, each in found.items()})
        if odd:
            raise InvalidInput(
                "weights index does not match its files",
                got=f"{odd[0][0]} in {odd[0][1].name}",
                where=directory / INDEX_FILE,
            )
    return found


def fill(
    parts: Mapping[str, tuple[Tensor, Sequence[int]]], stored: Mapping[str, StoredTensor]
) -> int:
    """Copy stored values into ``parts``; return the number of bytes read.

    A part is the box of the tensor that begins at these offsets and has the destination's shape;
    nothing else of the tensor is read. Values are converted to the destination's dtype.
    """
    read = 0
    for file in sorted({stored[name].file for name in parts}):
        with _opened(file) as opened, torch.no_grad():
            for name, (into, offsets) in parts.items():
                if stored[name].file != file or not into.numel():
                    continue
                box = zip(offsets, into.shape, strict=True)
                values: Tensor = opened.get_slice(stored[name].name)[
                    tuple(slice(start, start + size) for start, size in box)
                ]
                read += values.numel() * values.element_size()
                into.copy_(values)
    return read


def cut_groups(
    groups: Iterable[Sequence[str]], sizes: Mapping[str, int], file_bytes: int
) -> list[list[str]]:
    """Return ``groups`` of tensors, of these ``sizes`` in bytes, each cut so that no file is larger
    than ``file_bytes``, with its header; a larger tensor has a file of its own."""
    found: list[list[str]] = []
    for names in groups:
        held = file_bytes
        for name in names:
            size = sizes[name] + len(name.encode()) + HEADER_BYTES
            if held + size > file_bytes:
                found.append([])
                held = HEADER_BYTES
            found[-1].append(name)
            held += size
    return found


def require_finite(stored: Mapping[str, StoredTensor]) -> None:
    """Raise InvalidInput where a value is NaN or infinite; reads everything, a part at a time."""
    for file in sorted({each.file for each in stored.values()}):
        with _opened(file) as opened:
            for name in sorted(each.name for each in stored.values() if each.file == file):
                if not all(bool(each.isfinite().all()) for each in _rows(opened, name)):
                    raise not_finite(name, file)


def not_finite(name: str, where: Path) -> InvalidInput:
    """Return the error of a model whose tensor ``name`` has NaN or infinity."""
    return InvalidInput(
        "weights are not finite",
        got=f"NaN or infinity in {name}",
        where=where,
        do="Take another checkpoint of this model.",
    )


def require_equal(one: StoredTensor, other: StoredTensor) -> None:
    """Raise InvalidInput unless two tensors, which the config ties, have the same values."""
    with _opened(one.file) as first, _opened(other.file) as second:
        pairs = zip(_rows(first, one.name), _rows(second, other.name), strict=True)
        if one.shape != other.shape or not all(a.equal(b) for a, b in pairs):
            raise InvalidInput(
                "tied weights differ",
                got=f"{one.name} is not {other.name}",
                wanted="the same values, or tie_word_embeddings false",
                where=one.file.parent,
            )


def _rows(opened: Any, name: str) -> Iterator[Tensor]:
    part = opened.get_slice(name)
    shape = part.get_shape()
    if not shape:
        yield opened.get_tensor(name)
        return
    row_bytes = 8 * max(1, torch.Size(shape[1:]).numel())
    step = max(1, SCAN_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield part[start : start + step]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CorruptData("weights file cannot be read", got=error, where=path) from error
