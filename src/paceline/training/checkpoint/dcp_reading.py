"""Import of the weights in a DCP directory of unknown origin.

Nothing is unpickled: torch's own readers are not used. ``.metadata`` is parsed once as data
(``pickled``) into the records below. Each box of a tensor is in a ``.distcp`` file as torch.save
wrote it: a zip archive of uncompressed entries with a small pickle (also parsed as data) that gives
entry, dtype, shape and strides. Values that are not tensors are not read. Where the directory has a
``SHA256SUMS`` (our export writes one), every file is verified first.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import ModelSettings
from paceline.errors import CorruptData, InvalidInput, SourceMissing, StorageFailed
from paceline.models import CONFIG_FILE, Transformer, config_for, read_config, save_model
from paceline.training.checkpoint.layout import DTYPES
from paceline.training.checkpoint.pickled import PERSISTENT, PickledCall, PickledGlobal, parse
from paceline.training.checkpoint.records import Sizes, key_of

METADATA_FILE = ".metadata"
SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 64 * 1024 * 1024
_SUM = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]+)")
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
_IN_TENSOR = _ALL_DTYPES | {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch.storage", "UntypedStorage"),
    ("collections", "OrderedDict"),
    *(("torch", each) for each in _STORAGES),
}


@dataclass(frozen=True)
class ImportedCheckpoint:
    """Tensors read from a DCP directory."""

    weights: dict[str, Tensor]  # by name in our model
    prefix: str = ""  # of the weights' names in the directory
    cast: int = 0  # number of weights stored with another dtype


def import_dcp(source: Path, directory: Path, settings: ModelSettings) -> ImportedCheckpoint:
    """Write the weights in the DCP directory ``source`` as a model into ``directory``.

    The shape comes from ``source``'s config.json, else from ``settings``. Raises InvalidInput where
    weights and shape do not match, CorruptData where ``source`` is damaged.
    """
    if (source / CONFIG_FILE).is_file():
        config = read_config(source)
    else:
        config = config_for(settings.parameters, settings.context)
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(getattr(torch, config.torch_dtype))
    found = read_dcp(source, model.state_dict())
    model = model.to_empty(device="cpu")
    model.load_state_dict(found.weights)
    save_model(model, config, directory)
    return found


def read_dcp(directory: Path, wanted: Mapping[str, Tensor]) -> ImportedCheckpoint:
    """Return the weights that ``wanted`` names (its tensors may be on the meta device), in its
    dtypes.

    The prefix of the weights' names is detected (``model.``, or none). Raises InvalidInput where a
    weight is missing or has another shape, CorruptData for damaged files.
    """
    if not (directory / METADATA_FILE).is_file():
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
    for name, tensor in weights.items():
        fill(tensor, there[prefix + name], directory, prefix + name)
    cast = sum(there[prefix + n].dtype != each.dtype for n, each in weights.items())
    return ImportedCheckpoint(weights, prefix, cast)


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


# ── the index, and a tensor's boxes ──────────────────────────────────────────────────────────────


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
                if os.fstat(file.fileno()).st_size < box.at + box.bytes:
                    raise ValueError(f"the file ends before byte {box.at + box.bytes}")
                file.seek(box.at)
                raw = file.read(box.bytes)
            target[part].copy_(_tensor_in(raw, stored.dtype, box, path))
        except OSError as error:
            raise StorageFailed("checkpoint cannot be read", got=error, where=path) from error
        except (*_BAD_ARCHIVE, IndexError, KeyError, TypeError, ValueError) as error:
            got = f"{name}: {type(error).__name__}: {error}"[:300]
            raise _damaged(got, "a tensor as torch.save writes it", path) from error
        if filled is not None:
            filled[part] = True
    if filled is not None and not bool(filled.all()):
        raise _damaged(f"boxes of {name} overlap", "boxes that tile it", directory)


_BAD_ARCHIVE = (
    EOFError, NotImplementedError, OverflowError, RuntimeError, struct.error, zipfile.BadZipFile
)  # fmt: skip


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


def _tensor_in(raw: bytes, dtype: torch.dtype, box: DcpBox, path: Path) -> Tensor:
    """Return the tensor in ``raw``, an archive that torch.save wrote."""
    if len(raw) != box.bytes:
        raise ValueError(f"{box.bytes} bytes wanted, {len(raw)} left in the file")
    stream = _Limited(raw)
    with zipfile.ZipFile(stream) as archive:
        stream.limit = len(raw)
        entries = {each.filename: each for each in archive.infolist()}
        if any(each.compress_type != zipfile.ZIP_STORED for each in entries.values()):
            raise ValueError("an entry is compressed")
        (pickled,) = (each for each in entries if each.endswith("/data.pkl"))
        if entries[pickled].file_size > MAX_HEAD_BYTES:
            raise ValueError(f"a pickle of {entries[pickled].file_size} bytes")
        root = pickled.removesuffix("data.pkl")
        order = f"{root}byteorder"  # older versions of torch wrote none
        if order in entries and archive.read(order) != b"little":
            raise ValueError("bytes of its numbers are in another order")
        head = parse(archive.read(pickled), _IN_TENSOR, path)
        key, first, strides = _layout(head, dtype, box.sizes)
        numbers = bytearray(archive.read(f"{root}data/{key}"))
    span = 1 + sum((n - 1) * step for n, step in zip(box.sizes, strides, strict=True))
    if (first + span) * dtype.itemsize > len(numbers):
        raise ValueError(f"a tensor of {span} elements in {len(numbers)} bytes")
    flat = torch.frombuffer(numbers, dtype=dtype, count=first + span)
    return flat.as_strided(box.sizes, strides, first)


class _Limited(io.BytesIO):
    """A stream that refuses a large read at once: zipfile reads an archive's directory so."""

    limit = MAX_HEAD_BYTES

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if len(found) > self.limit:
            raise ValueError(f"an archive's directory of {len(found)} bytes")
        return found


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
