"""Parquet reader: each row is a sample; one column is its text or tokens, one its key.

A row without text is a conversation if it has ``messages``, or ``prompt`` and ``completion``. Other
columns of numbers are features: scalars, lists (events), lists of lists (frames). A few rows
are in memory at a time. Runs in a separate process (``parquet_process``) with limited memory: a
page of a few bytes can decode to gigabytes of rows, and pyarrow's decoder has no other limit.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.child_process import DONE, FAILED, serve
from paceline.data.formats.parquet_process import pack_samples
from paceline.data.formats.sample import (
    CHAT_FIELDS,
    EXPANSION_SLACK_BYTES,
    MAX_EXPANSION,
    PAIR_FIELDS,
    Array,
    Fields,
    Sample,
    UnusableSample,
    check_sample,
    clean_array,
    conversation_of,
    is_conversation,
    parsed_json,
)
from paceline.errors import InvalidInput

ROWS = 256  # decoded at once
BATCH_BYTES = 16 * 1024 * 1024  # or this much, by the row group's mean row size
ROW_BYTES = 32  # a row counts as at least this much
MEMORY_BYTES = 1024 * 1024 * 1024  # beyond what the libraries use: for pages, and for one row
MAX_FOOTER_BYTES = 16 * 1024 * 1024  # 100,000 column chunks
BUFFER_BYTES = 1024 * 1024


class _Json(bytes):
    """Lists and structs of a nested column, as JSON."""


_Cell = Array | bytes | UnusableSample | None


def start_reader(_: str) -> Callable[[bytes], tuple[bytes, bytes]]:
    """Return the function that answers a request of ``parquet_process``, after limiting memory."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    limit_memory(MEMORY_BYTES)
    reading: Iterator[Sample | UnusableSample] = iter(())

    def answer(request: bytes) -> tuple[bytes, bytes]:
        nonlocal reading
        try:
            if request:
                reading = _reading(*json.loads(request))
            return DONE, pack_samples(reading)
        except InvalidInput as error:
            said = {each: getattr(error, each) for each in ("what", "got", "wanted", "where", "do")}
            return FAILED, json.dumps(said, default=str).encode()

    return answer


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much more memory than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _reading(
    path: str, name: str, fields: list[str], features: bool
) -> Iterator[Sample | UnusableSample]:
    try:
        yield from read_parquet(Path(path), name, Fields(*fields), features=features)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(name, str(error)[:300]) from error
    except MemoryError as error:
        got = f"more than {MEMORY_BYTES >> 20} MiB for a page or a row"
        raise _unreadable(name, got) from error


def read_parquet(
    path: Path, name: str, fields: Fields, *, features: bool = False
) -> Iterator[Sample | UnusableSample]:
    """Yield the file's samples. Raises pyarrow's exceptions and MemoryError.

    ``features``: each row must have a key, and numbers in every other column.
    """
    number = 0
    for columns, rows in _batches(path, name, of_ours=not features):
        for row in range(rows):
            cells = {each: values[row] for each, values in columns.items()}
            where = f"{name}:{number}"
            if features:
                yield _features(cells, where, fields.key)
            else:
                yield _sample(cells, where, fields)
            number += 1


def _features(cells: dict[str, _Cell], where: str, key_field: str) -> Sample | UnusableSample:
    key = _name(cells.pop(key_field, None))
    arrays = {each: cell for each, cell in cells.items() if isinstance(cell, np.ndarray)}
    if key is None:
        return UnusableSample(where, f"no key in column {key_field!r}")
    if len(arrays) != len(cells) or not arrays:
        return UnusableSample(where, f"no numbers in {sorted(set(cells) - set(arrays))}")
    return check_sample(Sample(key, None, None, arrays))


def _batches(
    path: Path, name: str, *, of_ours: bool = False
) -> Iterator[tuple[dict[str, list[_Cell]], int]]:
    """Yield the file's rows in order, a few at a time: their cells by column, and their number.

    ``of_ours``: read only columns of usable types, if there are any.
    """
    with path.open("rb") as raw:
        size = raw.seek(0, os.SEEK_END)
        raw.seek(max(0, size - 8))
        footer = int.from_bytes(raw.read(4), "little")
    if footer > min(MAX_FOOTER_BYTES, size):
        raise _unreadable(name, f"a footer of {footer} bytes in a file of {size}")
    made, most = 0, EXPANSION_SLACK_BYTES + MAX_EXPANSION * size
    # buffered reads: otherwise a row group's whole column would be in memory
    with closing(pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)) as file:
        nested = {"messages", "tools"}
        if set(PAIR_FIELDS) <= set(file.schema_arrow.names):
            nested |= set(PAIR_FIELDS)
        columns = [
            str(each.name)
            for each in file.schema_arrow
            if not of_ours or _is_ours(each.type) or each.name in nested
        ]
        for group in range(file.num_row_groups):
            for cells, rows, nbytes in _of_group(file, group, columns or None):
                made += max(nbytes, ROW_BYTES * rows)
                if made > most:
                    raise _unreadable(name, f"it grows to more than {MAX_EXPANSION} times its size")
                yield cells, rows


def _of_group(
    file: Any, group: int, columns: list[str] | None
) -> Iterator[tuple[dict[str, list[_Cell]], int, int]]:
    """Yield the rows of a row group and their bytes.

    Reads row by row where several together take too much memory. Where one row does, it and the
    rows behind it in its group are unusable.
    """
    about = file.metadata.row_group(group)
    row_bytes = about.total_byte_size // max(1, about.num_rows)
    at_once, done = max(1, min(ROWS, BATCH_BYTES // max(1, row_bytes))), 0
    while done < about.num_rows:
        seen = 0
        try:
            for batch in file.iter_batches(at_once, [group], columns, use_threads=False):
                seen += batch.num_rows
                if seen <= done:
                    continue
                names = map(str, batch.schema.names)
                cells = dict(zip(names, map(_cells, batch.columns), strict=True))
                yield cells, batch.num_rows, batch.nbytes
                done = seen
        except MemoryError:
            if at_once > 1:
                at_once = 1
                continue
            lost = UnusableSample(
                "", "it, or a row before it in its row group, takes too much memory"
            )
            while done < about.num_rows:
                rows = min(ROWS, about.num_rows - done)
                yield {"": [lost] * rows}, rows, 0
                done += rows
        return


def _unreadable(name: str, got: str) -> InvalidInput:
    return InvalidInput("Parquet file cannot be read", got=got, where=name, do="Write it again.")


def _sample(cells: dict[str, _Cell], where: str, fields: Fields) -> Sample | UnusableSample:
    key = _name(cells.pop(fields.key, None)) or where
    key = fields.name(key, lambda column: _name(cells.pop(column, None)))
    for name, cell in cells.items():
        if isinstance(cell, UnusableSample):
            return UnusableSample(key, f"{name[:100]!r}: {cell.reason}" if name else cell.reason)
    text: bytes | None = None
    tokens: Array | None = None
    row = {name: cells[name] for name in CHAT_FIELDS if isinstance(cells.get(name), bytes)}
    if cells.get(fields.text) is None and is_conversation(row):
        return _conversation(key, row)
    content = cells.pop(fields.text, None)
    if isinstance(content, bytes):
        text = content
    elif isinstance(content, np.ndarray) and content.ndim == 1 and content.dtype.kind in "iu":
        tokens = content
    elif content is not None:
        return UnusableSample(key, f"its {fields.text!r} is neither text nor a list of tokens")
    features = {each: cell for each, cell in cells.items() if isinstance(cell, np.ndarray)}
    return check_sample(Sample(key, text, tokens, features))


def _conversation(key: str, row: dict[str, Any]) -> Sample | UnusableSample:
    """Return the conversation of a row: messages, tools and nested columns as JSON, the others as
    text."""
    try:
        found = {
            name: parsed_json(cell)
            if name in ("messages", "tools") or isinstance(cell, _Json)
            else cell.decode()
            for name, cell in row.items()
        }
    except ValueError as error:
        return UnusableSample(key, str(error)[:100])
    return conversation_of(key, found)


def _json(value: Any) -> bytes | UnusableSample | None:
    """Return nested lists and structs as JSON, without fields that are null."""

    def filled(each: Any) -> Any:
        if isinstance(each, dict):
            return {name: filled(its) for name, its in each.items() if its is not None}
        return [filled(its) for its in each] if isinstance(each, list) else each

    try:
        return None if value is None else _Json(json.dumps(filled(value)).encode())
    except TypeError:
        return UnusableSample("", "it holds more than text and numbers")


def _name(cell: _Cell) -> str | None:
    if isinstance(cell, np.ndarray):
        return str(cell) if cell.ndim == 0 and cell.dtype.kind in "iu" else None
    if isinstance(cell, bytes):
        return cell.decode("utf-8", errors="backslashreplace") or None
    return None


def _cells(column: Any) -> list[_Cell]:
    """Return one value a row: an array, text, or None for nulls and unsupported types."""
    kind = column.type
    if pa.types.is_struct(_leaf(kind)):  # messages, or tools
        return [_json(each) for each in column.to_pylist()]
    if not _is_ours(kind):
        return [None] * len(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # as bytes: Parquet does not check that they are UTF-8, ``checked`` does
        binary = pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()
        return list(column.cast(binary).to_pylist())
    if _is_binary(kind):
        return list(column.to_pylist())
    if _is_number(kind):
        dtype = kind.to_pandas_dtype()
        return [
            None if each is None else clean_array(np.array(each, dtype=dtype))
            for each in column.to_pylist()
        ]
    fast = _lists(column)
    return fast if fast is not None else [_nested(each, _leaf(kind)) for each in column]


def _lists(column: Any) -> list[_Cell] | None:
    """Return lists of plain numbers as views; None where there are nulls or deeper lists."""
    if column.null_count or not _is_number(column.type.value_type):
        return None
    if _is_fixed(column.type):
        flat = column.flatten()
        if flat.null_count:
            return None
        shape = (len(column), column.type.list_size)
        return [_array(each) for each in flat.to_numpy(zero_copy_only=False).reshape(shape)]
    if column.values.null_count:
        return None
    values = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy()
    return [_array(values[a:b]) for a, b in pairwise(ends)]


def _array(value: Array) -> Array | UnusableSample:
    try:
        return clean_array(value)
    except ValueError as error:
        return UnusableSample("", str(error))


def _nested(scalar: Any, leaf: Any) -> Array | None:
    try:
        return clean_array(np.array(scalar.as_py(), dtype=leaf.to_pandas_dtype()))
    except (ValueError, TypeError):  # null, or rows of differing lengths
        return None


def _is_ours(kind: Any) -> bool:
    """Return whether a column of this type can hold text or numbers of a sample."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(text or _is_binary(kind) or _is_number(_leaf(kind)))


def _leaf(kind: Any) -> Any:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or _is_fixed(kind):
        kind = kind.value_type
    return kind


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_number(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _is_fixed(kind: Any) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


if __name__ == "__main__":
    serve(start_reader)
