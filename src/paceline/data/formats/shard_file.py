"""The shard format: a safetensors file whose tensors are the columns of its samples.

``tokens``, ``text``, ``keys`` and ``feature.NAME`` hold all samples end to end; ``….ends`` (int64)
hold the end of each sample. Reading returns views into the file's memory: samples are neither
parsed nor copied. Any safetensors reader can open it; we write and read it ourselves, so that its
bytes (and digest) do not change with a library's version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline.data.formats.sample import Array, length_of
from paceline.data.snapshot import (
    BYTE_VOCABULARY,
    LOSS_MASK,
    MASK_COLUMN,
    REJECTED_AT,
    REJECTED_COLUMN,
    Column,
    Vocabulary,
)
from paceline.errors import InvalidInput
from paceline.schemas import parse_json

LAYOUT = "paceline-samples-1"
MAX_HEADER_BYTES = 16 * 1024 * 1024
_CODES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16"},
    **{"uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64"},
    **{"float16": "F16", "float32": "F32", "float64": "F64"},
}
_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items()}


def column_of(name: str, array: Array) -> Column:
    """Return the column of ``array``; its first axis may differ between samples."""
    shape = (None, *array.shape[1:]) if array.ndim else ()
    return Column(name=name, dtype=array.dtype.name, shape=shape)


def counted(mask: Array) -> int:
    """Return how many tokens a loss mask counts: the first one is predicted from nothing."""
    return int(mask[1:].sum())


class ColumnWriter:
    """Collects the samples of one shard; the same samples give the same bytes."""

    def __init__(self, columns: Sequence[Column], token_dtype: str) -> None:
        self._columns = tuple(columns)
        self._token_dtype = np.dtype(token_dtype)
        self._parts: dict[str, list[Array]] = {}
        self._ends: dict[str, list[int]] = {}
        self._lengths: list[int] = []
        self._counted: list[int] = []  # tokens that a loss mask counts, of each sample
        self.nbytes = self.text_bytes = self.tokens = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(
        self,
        key: str,
        tokens: Array,
        features: dict[str, Array],
        text: bytes | None,
        *,
        text_bytes: int,
    ) -> None:
        """Add one sample; ``text`` is stored beside its tokens, ``text_bytes`` is only counted."""
        self._put("keys", np.frombuffer(key.encode(), dtype=np.uint8))
        self._put("tokens", tokens.astype(self._token_dtype, copy=False))
        if text is not None:
            self._put("text", np.frombuffer(text, dtype=np.uint8))
        for column in self._columns:
            array = features[column.name]
            name = f"feature.{column.name}"
            if column.shape:
                self._put(name, array)
            else:
                self._parts.setdefault(name, []).append(array.reshape(1))
                self.nbytes += array.nbytes
        self._lengths.append(length_of(tokens, features))
        if MASK_COLUMN in self._columns:
            self._counted.append(counted(features[LOSS_MASK]))
        self.text_bytes += text_bytes
        self.tokens += len(tokens)

    def lengths(self) -> bytes:
        """Return the content of the lengths file: int32, little endian, one a sample; then of a
        loss mask the number of tokens that count, one a sample."""
        return np.array([*self._lengths, *self._counted], dtype="<i4").tobytes()

    def arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for name, parts in self._parts.items():
            arrays[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
        for name, ends in self._ends.items():
            arrays[f"{name}.ends"] = np.array(ends, dtype="<i8")
        return arrays

    def write(self, path: Path) -> None:
        arrays = self.arrays()
        header: dict[str, Any] = {"__metadata__": {"layout": LAYOUT}}
        # Widest types first, so that every column is aligned to its own width.
        order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
        at = 0
        for name in order:
            array = arrays[name]
            header[name] = {
                "dtype": _CODES[array.dtype.name],
                "shape": list(array.shape),
                "data_offsets": [at, at + array.nbytes],
            }
            at += array.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with path.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little"))
            file.write(raw)
            for name in order:
                file.write(np.ascontiguousarray(arrays[name]).data)  # without a copy

    def _put(self, name: str, array: Array) -> None:
        ends = self._ends.setdefault(name, [])
        ends.append((ends[-1] if ends else 0) + len(array))
        self._parts.setdefault(name, []).append(array)
        self.nbytes += array.nbytes + 8


class ShardSamples:
    """The samples of one shard as views into its columns; ``i`` counts in the shard's own order.

    A context manager: while it is open, its shard stays in the node's cache. Arrays are read-only
    and stay valid after it is closed. Raises ValueError, with the reason, for columns that are not
    of this schema.
    """

    def __init__(
        self,
        arrays: dict[str, Array],
        samples: int,
        vocabulary: Vocabulary = BYTE_VOCABULARY,
        columns: Sequence[Column] = (),
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.close = on_close  # allows the cache to remove the shard
        self._arrays = arrays
        self._samples = samples
        self._columns = tuple(columns)
        self._text = "text" if "text" in arrays else None
        if self._text is None and vocabulary.kind == "bytes":
            self._text = "tokens"
        stored = [f"feature.{each.name}" for each in self._columns]
        for name in ["keys", "tokens", *stored, *(["text"] if "text" in arrays else [])]:
            self._check(name)
        for column in self._columns:
            array = arrays[f"feature.{column.name}"]
            if array.dtype.name != column.dtype or array.shape[1:] != column.shape[1:]:
                got = f"{array.dtype.name}{list(array.shape[1:])}"
                raise ValueError(f"column {column.name!r} is {got}, not {column.dtype}")
        tokens = arrays["tokens"]
        if tokens.ndim != 1 or tokens.dtype.kind != "u":
            raise ValueError(f"tokens are {tokens.dtype.name} with {tokens.ndim} axes")
        # Takes 1 ms per million tokens; a byte cannot exceed a vocabulary of 256.
        if len(tokens) and np.iinfo(tokens.dtype).max >= vocabulary.vocab_size:
            largest, size = int(tokens.max()), vocabulary.vocab_size
            if largest >= size:
                raise ValueError(f"token {largest} is outside the vocabulary of {size}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._samples

    def key(self, i: int) -> str:
        """Return the sample's name within its snapshot."""
        return bytes(self._cut("keys", i)).decode("utf-8", errors="replace")

    def tokens(self, i: int) -> Array:
        """Return the sample's tokens: 1-D, uint8, uint16 or uint32; empty where it has none."""
        return self._cut("tokens", i)

    def sides(self, i: int) -> list[Array]:
        """Return the tokens of both conversations of a pair, the chosen one first; of other samples
        all tokens."""
        tokens = self.tokens(i)
        if REJECTED_COLUMN not in self._columns:
            return [tokens]
        return np.split(tokens, [int(self.features(i)[REJECTED_AT])])

    def features(self, i: int) -> dict[str, Array]:
        """Return the sample's arrays by column name."""
        names = [(each.name, f"feature.{each.name}", each.shape) for each in self._columns]
        return {
            name: self._cut(stored, i) if shape else self._arrays[stored][i]
            for name, stored, shape in names
        }

    @property
    def keeps_text(self) -> bool:
        """Return whether ``text_bytes`` has the samples' text."""
        return self._text is not None

    def text_bytes(self, i: int) -> bytes:
        """Return the sample's text, UTF-8; raises InvalidInput where the snapshot stores none."""
        if self._text is None:
            raise InvalidInput(
                "these samples keep no text, only its tokens",
                got="a shard of the training split, or samples that never had text",
                wanted="a shard of the held-out split of a tokenised snapshot",
            )
        return self._cut(self._text, i).tobytes()

    def flat(self) -> tuple[Array, npt.NDArray[np.int64]] | None:
        """Return all tokens end to end, and the end of each sample, as views.

        Returns None where each sample is computed on request.
        """
        return self._arrays["tokens"], self._arrays["tokens.ends"]

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return each sample's length, as in the lengths file."""
        if not self._columns:
            return np.diff(self._arrays["tokens.ends"], prepend=0).astype(np.int32)
        found = [length_of(self.tokens(i), self.features(i)) for i in range(len(self))]
        return np.array(found, dtype=np.int32)

    def index(self) -> npt.NDArray[np.int32]:
        """Return the content of the lengths file: (1, samples), with a loss mask (2, samples)."""
        rows = [self.lengths()]
        if MASK_COLUMN in self._columns:
            masks = (self.features(i)[LOSS_MASK] for i in range(len(self)))
            rows.append(np.array([counted(each) for each in masks], dtype=np.int32))
        return np.stack(rows)

    def expect(self, samples: Sequence[int]) -> None:
        """Announce which samples are read next; those that must be computed are started now."""

    def _cut(self, name: str, i: int) -> Array:
        ends = self._arrays[f"{name}.ends"]
        return self._arrays[name][int(ends[i - 1]) if i else 0 : int(ends[i])]

    def _check(self, name: str) -> None:
        array, ends = self._arrays.get(name), self._arrays.get(f"{name}.ends")
        if array is None:
            raise ValueError(f"no column {name!r}")
        if ends is None:
            ok = name.startswith("feature.") and array.shape == (self._samples,)
        else:
            ok = ends.dtype == np.int64 and ends.shape == (self._samples,) and array.ndim > 0
            # A hundred thousand ends take 0.1 ms; this check keeps each view inside its column.
            ok = ok and int(ends[-1]) == len(array) and int(ends[0]) >= 0
            ok = ok and bool(np.all(ends[1:] >= ends[:-1]))
        if not ok:
            raise ValueError(f"column {name!r} does not hold {self._samples} samples")


def read_columns(buffer: Any) -> dict[str, Array]:
    """Return each tensor of a safetensors file as a read-only view; raises ValueError."""
    view = memoryview(buffer).cast("B").toreadonly()
    if len(view) < 8:
        raise ValueError("shorter than a header")
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError(f"a header of {size} bytes")
    try:
        header = parse_json(bytes(view[8 : 8 + size]))
        if header.pop("__metadata__", {}).get("layout") != LAYOUT:
            raise ValueError(f"not of the layout {LAYOUT}")
        body = view[8 + size :]
        found: dict[str, Array] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            if not 0 <= start <= stop <= len(body):
                raise ValueError(f"column {name!r} leaves the file")
            array = np.frombuffer(body[start:stop], dtype=dtype)
            found[name] = array.reshape(shape)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its header is malformed: {error!r}"[:200]) from error
    return found
