"""Any bytes as Parquet: samples, named bad ones, or a named error; its process may not hang."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from paceline.data.formats import Fields, open_reader
from tests.security.fuzz.mutations import check, mutated


def valid(**how: object) -> bytes:
    table = pa.table(
        {
            "key": [f"k{n}" for n in range(20)],
            "text": [f"text number {n % 5}" for n in range(20)],
            "flat": pa.array([[n] * (n % 4) for n in range(20)], pa.list_(pa.int16())),
            "deep": pa.array([[[n, 1], [2, 3]] for n in range(20)], pa.list_(pa.list_(pa.int8()))),
            "fixed": pa.array([[n, n] for n in range(20)], pa.list_(pa.float32(), 2)),
            "ok": [n % 2 == 0 for n in range(20)],
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=8, **how)
    return file.getvalue()


FILES = [
    valid(),
    valid(compression="zstd", data_page_version="2.0"),
    valid(compression="none", use_dictionary=False),
]
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def reading() -> Iterator[object]:
    with open_reader("parquet") as reader:
        yield reader


@given(raw=st.sampled_from(FILES).flatmap(mutated))
@few
def test_a_mutated_file_raises_nothing_else(tmp_path: Path, reading: object, raw: bytes) -> None:
    assert callable(reading)
    check(lambda path: reading(path, path.name, Fields()), tmp_path / "fuzzed", raw)


NUMBERS = st.sampled_from([pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_()])
TYPES = st.recursive(
    NUMBERS | st.sampled_from([pa.string(), pa.large_binary(), pa.date32(), pa.null()]),
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(lambda kind: pa.list_(kind, 2))
        | inner.map(lambda kind: pa.struct({"x": kind}))
    ),
    max_leaves=4,
)


@given(kind=TYPES, name=st.sampled_from(["text", "key", "x", "a.b", ""]), rows=st.integers(0, 9))
@settings(few, max_examples=25)
def test_any_type_of_column_raises_nothing_else(
    tmp_path: Path, reading: object, kind: pa.DataType, name: str, rows: int
) -> None:
    assert callable(reading)
    path = tmp_path / "typed"
    columns = {"text": pa.array([f"text {n}" for n in range(rows)], pa.string())}
    pq.write_table(pa.table(columns | {name: pa.nulls(rows, kind)}), path)
    check(lambda at: reading(at, at.name, Fields()), path, path.read_bytes())


def test_one_process_reads_one_file_after_another(tmp_path: Path, reading: object) -> None:
    assert callable(reading)
    (tmp_path / "good").write_bytes(FILES[0])
    for _ in range(3):
        found = list(reading(tmp_path / "good", "good", Fields()))
        assert [each.key for each in found] == [f"k{n}" for n in range(20)]
        assert np.array_equal(found[7].features["deep"], [[7, 1], [2, 3]])
