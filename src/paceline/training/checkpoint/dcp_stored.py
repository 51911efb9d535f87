"""Safe reader of a DCP directory of unknown origin: its index and its tensors, without unpickling.

``.metadata`` is parsed once as data (``pickled``) into the records below; torch's own readers,
which unpickle, are not used. Each box of a tensor is in a ``.distcp`` file as torch.save wrote it:
a zip archive of uncompressed entries with a small pickle (also parsed as data) that gives entry,
dtype, shape and strides. Values that are not tensors are not read.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CorruptData, InvalidInput, StorageFailed
from paceline.training.checkpoint.layout import DTYPES
from paceline.training.checkpoint.pickled import PERSISTENT, PickledCall, PickledGlobal, parse
from paceline.training.checkpoint.records import Sizes, key_of

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 128 * 1024 * 1024  # about a million boxes
MAX_NAME = 4096  # characters of a tensor's name
MAX_SIZE = 1 << 48  # of an axis
MAX_AXES = 64
MAX_HEAD_BYTES = 128 * 1024  # of an archive's directory, and of its pickle

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DTYPES = {str(each).removeprefix("torch."): each for each in DTYPES.values()}
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
}  # fmt: skip
_ALL_DTYPES = {("torch", n) for n, each in vars(torch).items() if isinstance(each, torch.dtype)}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath"}
_IN_METADATA = _ALL_DTYPES | {
    (module, name)
    for module, names in {
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "pathlib": _PATHS,
        "pathlib._local": _PATHS,
        "collections": {"OrderedDict"},
    }.items()
    for name in names
}  # fmt: skip
_HEADER = struct.Struct("<4s22xHH")  # of an entry: magic, lengths of name and of extra
_IN_TENSOR = _ALL_DTYPES | {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch.storage", "UntypedStorage"),
    ("collections", "OrderedDict"),
    *(("torch", each) for each in _STORAGES),
}


@dataclass(frozen=True)
class DcpBox:
    """A part of a tensor, and the bytes of the file that hold it."""

    offsets: Sizes
    sizes: Sizes
    file: str
    at: int
    bytes: int


@dataclass(frozen=True)
class DcpTensor:
    """A whole tensor of a DCP directory."""

    dtype: torch.dtype
    shape: Sizes
    boxes: tuple[DcpBox, ...]


def read_metadata(directory: Path) -> dict[str, DcpTensor]:
    """Return the tensors in ``directory`` by name; raises CorruptData, InvalidInput.

    Every file that a box refers to exists, and its name has no directory part.
    """
    path = directory / METADATA_FILE
    try:
        if (size := path.stat().st_size) > MAX_METADATA_BYTES:
            raise InvalidInput(
                "metadata are too large",
                got=size,
                wanted=f"≤ {MAX_METADATA_BYTES} bytes",
                where=path,
                do="Save it again from fewer ranks (dcp.load, dcp.save).",
            )
        with path.open("rb") as file:
            raw = file.read(size)
    except OSError as error:
        raise StorageFailed("metadata cannot be read", got=error, where=path) from error
    found = parse(raw, _IN_METADATA, path)
    try:
        tensors = _tensors(found)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(
            "DCP's metadata are not as DCP writes them",
            got=f"{type(error).__name__}: {error}"[:300],
            where=path,
            do="Export or copy the checkpoint again.",
        ) from error
    for name in sorted({box.file for each in tensors.values() for box in each.boxes}):
        if not _FILE.fullmatch(name):
            raise InvalidInput("metadata name a file elsewhere", got=name[:200], where=path)
        if not (directory / name).is_file():
            raise CorruptData("checkpoint file is missing", got=name, where=directory)
    return tensors


def fill(target: Tensor, stored: DcpTensor, directory: Path, name: str) -> None:
    """Read every box of ``stored`` into ``target``, which has its shape; ``name`` is for errors.

    Raises CorruptData unless the boxes tile the tensor and each matches the metadata.
    """
    boxes = [each for each in stored.boxes if math.prod(each.sizes)]
    whole, volume = target.numel(), sum(math.prod(each.sizes) for each in boxes)
    if volume != whole:
        raise _damaged(f"boxes of {volume} elements", f"{whole} of {name}", directory)
    filled = torch.zeros(target.shape, dtype=torch.bool) if len(boxes) > 1 else None
    for box in boxes:
        part = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        path = directory / box.file
        try:
            with path.open("rb") as file:
                target[part].copy_(_tensor_in(_View(file, box.at, box.bytes), stored.dtype, box))
        except OSError as error:
            raise StorageFailed("checkpoint cannot be read", got=error, where=path) from error
        except (zipfile.BadZipFile, NotImplementedError, struct.error, *_BAD_DATA) as error:
            got = f"{name}: {type(error).__name__}: {error}"[:300]
            raise _damaged(got, "a tensor as torch.save writes it", path) from error
        if filled is not None:
            filled[part] = True
    if filled is not None and not bool(filled.all()):
        raise _damaged(f"boxes of {name} overlap", "boxes that tile it", directory)


_BAD_DATA = (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def _damaged(got: str, wanted: str, where: Path) -> CorruptData:
    return CorruptData(
        "checkpoint holds no such tensor",
        got=got,
        wanted=wanted,
        where=where,
        do="Export or copy the checkpoint again.",
    )


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────


def _tensors(found: Any) -> dict[str, DcpTensor]:
    described, stored = _fields(found, "Metadata", "state_dict_metadata", "storage_data")
    places: dict[str, tuple[str, int, int]] = {}
    for index, info in _items(stored):
        name, offset = _fields(index, "MetadataIndex", "fqn", "offset")
        if offset is None:
            continue  # not a tensor
        file, at, size, how = _fields(
            info, "_StorageInfo", "relative_path", "offset", "length", "transform_descriptors"
        )
        if how:
            raise ValueError("tensors are compressed by an extension of DCP")
        key = key_of(_of(str, name), _sizes(offset))  # a str: its hash cannot be made to collide
        if key in places:
            raise ValueError("two places for one box")
        places[key] = (_of(str, file), _count(at), _count(size))
    tensors = {}
    for name, each in _items(described):
        if _kind(each) == "BytesStorageMetadata":
            continue
        if len(_of(str, name)) > MAX_NAME:
            raise ValueError(f"a name of {len(name)} characters")
        properties, size, chunks = _fields(
            each, "TensorStorageMetadata", "properties", "size", "chunks"
        )
        boxes = tuple(_boxes(name, _sizes(size), _of(list, chunks), places))
        tensors[name] = DcpTensor(_dtype(properties), _sizes(size), boxes)
    return tensors


def _boxes(
    name: str, shape: Sizes, chunks: list[Any], places: dict[str, tuple[str, int, int]]
) -> Iterator[DcpBox]:
    for each in chunks:
        offsets, sizes = map(_sizes, _fields(each, "ChunkStorageMetadata", "offsets", "sizes"))
        inside = zip(offsets, sizes, shape, strict=True)
        if any(at + size > whole for at, size, whole in inside):
            raise ValueError(f"a box outside of {name[:100]}")
        yield DcpBox(offsets, sizes, *places[key_of(name, offsets)])


def _dtype(properties: Any) -> torch.dtype:
    if _kind(properties) != "TensorProperties":
        raise TypeError("no properties of a tensor")
    found = _of(PickledGlobal, _of(tuple, properties.state)[0])
    if found not in _ALL_DTYPES:
        raise TypeError(f"{found.name[:100]} where a dtype belongs")
    dtype: torch.dtype = getattr(torch, found.name)
    return dtype


def _kind(value: Any) -> str:
    name: str = _of(PickledCall, value).by.name
    return name


def _fields(value: Any, kind: str, *names: str) -> list[Any]:
    """Return these fields of a record of type ``kind``; None for a field that it lacks."""
    if _kind(value) != kind:
        raise TypeError(f"{_kind(value)[:100]} where {kind} belongs")
    state = _of(dict, value.state)
    return [state.get(each) for each in names]


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(_of(dict, value).items())


def _of(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value


def _count(value: Any) -> int:
    found: int = _of(int, value)
    if not 0 <= found < MAX_SIZE:
        raise ValueError("a number below 0 or far above any file's size")
    return found


def _sizes(value: Any) -> Sizes:
    if isinstance(value, PickledCall) and value.by.name == "Size" and len(value.args) == 1:
        (value,) = value.args
    if len(_of(tuple, value)) > MAX_AXES:
        raise ValueError(f"{len(value)} axes")
    return tuple(map(_count, value))


# ── a tensor ─────────────────────────────────────────────────────────────────────────────────────


def _tensor_in(view: _View, dtype: torch.dtype, box: DcpBox) -> Tensor:
    """Return the tensor in ``view``, an archive that torch.save wrote."""
    with zipfile.ZipFile(view) as archive:
        entries = {each.filename: each for each in archive.infolist()}
    (pickled,) = (each for each in entries if each.endswith("/data.pkl"))
    root = pickled.removesuffix("data.pkl")
    if (order := entries.get(f"{root}byteorder")) is not None:
        at, size = _entry(view, order)
        if view.bytes(at, size) != b"little":
            raise ValueError("bytes of its numbers are in another order")
    head = parse(view.bytes(*_entry(view, entries[pickled])), _IN_TENSOR, Path(view.name))
    key, first, strides = _layout(head, dtype, box.sizes)
    at, size = _entry(view, entries[f"{root}data/{key}"])
    span = 1 + sum((n - 1) * step for n, step in zip(box.sizes, strides, strict=True))
    if (first + span) * dtype.itemsize > size:
        raise ValueError(f"a tensor of {span} elements in {size} bytes")
    numbers = bytearray(span * dtype.itemsize)
    view.fill(at + first * dtype.itemsize, numbers)
    return torch.frombuffer(numbers, dtype=dtype).as_strided(box.sizes, strides)


def _layout(head: Any, dtype: torch.dtype, sizes: Sizes) -> tuple[str, int, Sizes]:
    """Return the entry that holds the tensor, its first element there, and its strides."""
    args = _of(PickledCall, head).args
    untyped = head.by.name == "_rebuild_tensor_v3"
    if head.state is not None or not (untyped or head.by.name == "_rebuild_tensor_v2"):
        raise ValueError("no plain tensor")
    if _of(PickledCall, args[0]).by != PERSISTENT:
        raise TypeError("a tensor without its storage")
    word, storage, key, *_ = args[0].args
    its = _STORAGES.get(_of(PickledGlobal, storage).name)
    if untyped:
        its = _DTYPES.get(_of(PickledGlobal, args[6]).name)
    if word != "storage" or its != dtype or _sizes(args[2]) != sizes:
        raise ValueError(f"another tensor than the metadata say: {its}, not {dtype}, or its shape")
    strides = _sizes(args[3])
    if len(strides) != len(sizes):
        raise ValueError(f"{len(strides)} strides for {len(sizes)} axes")
    return _of(str, key), _count(args[1]), strides


def _entry(view: _View, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return offset and size of an entry's bytes; raises ValueError for a compressed entry."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError("an entry is compressed")
    magic, name, extra = _HEADER.unpack(view.bytes(entry.header_offset, _HEADER.size))
    if magic != b"PK\3\4":
        raise ValueError("an entry has no header")
    return entry.header_offset + _HEADER.size + name + extra, entry.file_size


class _View(io.RawIOBase):
    """A window of a file, ``size`` bytes from ``at``; bounds what zipfile reads at once."""

    def __init__(self, file: io.BufferedReader, at: int, size: int) -> None:
        super().__init__()
        self.name = file.name
        self._file, self._first, self._size, self._at = file, at, size, 0
        if file.seek(0, io.SEEK_END) < at + size:
            raise ValueError(f"{at + size} bytes wanted, {file.tell()} in the file")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if not 0 <= at <= self._size:
            raise ValueError("a place outside of the archive")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._at
        found = self.bytes(self._at, left if size < 0 else min(size, left))
        self._at += len(found)
        return found

    def bytes(self, at: int, size: int) -> bytes:
        """Return ``size`` bytes from ``at``, at most MAX_HEAD_BYTES (a directory or a pickle)."""
        if size > MAX_HEAD_BYTES:
            raise ValueError(f"a part of {size} bytes, ≤ {MAX_HEAD_BYTES} wanted")
        found = bytearray(size)
        self.fill(at, found)
        return bytes(found)

    def fill(self, at: int, into: bytearray) -> None:
        """Fill ``into`` with the bytes from ``at``."""
        if at < 0 or at + len(into) > self._size:
            raise ValueError("a part outside of the archive")
        self._file.seek(self._first + at)
        if self._file.readinto(into) != len(into):
            raise ValueError("the file ends midway")
