"""Parquet: each row is a sample; one column its text (or its tokens), one its key, numbers its
features: scalars, lists (events), lists of lists (frames). A few rows are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.formats.sample import Array, Sample, Unusable, checked, clean_array
from paceline.errors import InvalidInput

ROWS = 256  # decoded at once

_Cell = Array | bytes | str | None


def read_parquet(path: Path, name: str, fields: Any) -> Iterator[Sample | Unusable]:
    """Yield the file's samples; ``fields``: see ``formats.Fields``."""
    number = 0
    for columns, rows in _batches(path, name):
        for row in range(rows):
            cells = {each: values[row] for each, values in columns.items()}
            yield _sample(cells, f"{name}:{number}", fields)
            number += 1


def read_features(path: Path, key_field: str) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the key and the arrays of each row; raises InvalidInput for a row without them."""
    number = 0
    for columns, rows in _batches(path, path.name):
        if key_field not in columns:
            got = f"columns {', '.join(columns)}"
            raise _bad("has no key column", path, got, key_field, "Name it with data.key_field.")
        for row in range(rows):
            cells = {each: values[row] for each, values in columns.items()}
            key = _name(cells.pop(key_field))
            arrays = {each: cell for each, cell in cells.items() if isinstance(cell, np.ndarray)}
            if key is None or len(arrays) != len(cells) or not arrays:
                missing = sorted(set(cells) - set(arrays)) or [key_field]
                raise _bad("has a row without numbers", path, f"row {number}: {missing}", "numbers")
            yield key, arrays
            number += 1


def _batches(path: Path, name: str) -> Iterator[tuple[dict[str, list[_Cell]], int]]:
    try:
        with closing(pq.ParquetFile(path, pre_buffer=False)) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield (
                    {
                        str(each): _cells(column)
                        for each, column in zip(batch.schema.names, batch.columns, strict=True)
                    },
                    batch.num_rows,
                )
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(
            "Parquet file cannot be read", got=str(error)[:300], where=name, do="Write it again."
        ) from error


def _sample(cells: dict[str, _Cell], where: str, fields: Any) -> Sample | Unusable:
    key = _name(cells.pop(fields.key, None)) or where
    text: bytes | None = None
    tokens: Array | None = None
    content = cells.pop(fields.text, None)
    if isinstance(content, str | bytes):
        text = content.encode() if isinstance(content, str) else content
    elif content is not None and content.ndim == 1 and content.dtype.kind in "iu":
        tokens = content
    elif content is not None:
        return Unusable(key, f"its {fields.text!r} is neither text nor a list of tokens")
    features = {each: cell for each, cell in cells.items() if isinstance(cell, np.ndarray)}
    return checked(Sample(key, text, tokens, features))


def _name(cell: _Cell) -> str | None:
    if isinstance(cell, np.ndarray):
        return str(cell) if cell.ndim == 0 and cell.dtype.kind in "iu" else None
    if isinstance(cell, bytes):
        return cell.decode("utf-8", errors="backslashreplace")
    return cell or None


def _cells(column: Any) -> list[_Cell]:
    """Return one value a row: an array, text, or None for what is null or neither."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return list(column.to_pylist())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(column.to_pylist())
    if _is_number(kind):
        return [None if each is None else _number(each, kind) for each in column.to_pylist()]
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or _is_fixed(kind)):
        return [None] * len(column)
    fast = _lists(column)
    return fast if fast is not None else [_nested(each, kind) for each in column.to_pylist()]


def _lists(column: Any) -> list[_Cell] | None:
    """Return lists of plain numbers as views; None where there are nulls or deeper lists."""
    inner = column.type.value_type
    if column.null_count or not _is_number(inner):
        return None
    if _is_fixed(column.type):
        flat = column.flatten()
        if flat.null_count:
            return None
        shaped = flat.to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size)
        return [clean_array(each) for each in shaped]
    if column.values.null_count:
        return None
    values = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy()
    return [clean_array(values[a:b]) for a, b in pairwise(ends)]


def _nested(value: Any, kind: Any) -> Array | None:
    leaf = kind
    while not _is_number(leaf):
        leaf = getattr(leaf, "value_type", None)
        if leaf is None:
            return None
    try:
        return clean_array(np.array(value, dtype=leaf.to_pandas_dtype()))
    except (ValueError, TypeError):  # null, or rows of differing lengths
        return None


def _number(value: Any, kind: Any) -> Array:
    return clean_array(np.array(value, dtype=kind.to_pandas_dtype()))


def _is_number(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _is_fixed(kind: Any) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _bad(what: str, path: Path, got: object, wanted: object, do: str | None = None) -> InvalidInput:
    return InvalidInput(f"feature file {what}", got=got, wanted=wanted, where=path, do=do)
