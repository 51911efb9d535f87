"""Any bytes as a tar: samples, named bad ones, or a named error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from paceline.data.formats import Fields, Sample, UnusableSample, read_tar
from tests.security.archives import block, header, npy, npy_of, tar_of
from tests.security.fuzz.mutations import check, mutated

NUMBERS = npy_of(np.arange(6, dtype=np.float32).reshape(2, 3))
VALID = tar_of(
    [
        ("a.txt", b"one"),
        ("a.x.npy", NUMBERS),
        ("a.json", json.dumps({"n": [[1, 2], [3, 4.5]], "text": "no"}).encode()),
        ("b" * 150 + ".txt", b"with a long name"),
        ("c.cls", b"7"),
    ]
)
KINDS = [bytes([each]) for each in b"01234567LKSxgXVND"]


def read(path: Path) -> Iterator[Sample | UnusableSample]:
    return read_tar(path, path.name, Fields())


few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fuzzed"


@given(raw=mutated(VALID), packed=st.booleans())
@few
def test_a_mutated_tar_raises_nothing_else(path: Path, raw: bytes, packed: bool) -> None:
    check(read, path, gzip.compress(raw, 1) if packed else raw)


@given(raw=mutated(gzip.compress(VALID, 1)))
@few
def test_a_mutated_gzip_raises_nothing_else(path: Path, raw: bytes) -> None:
    check(read, path, raw)


@given(raw=mutated(NUMBERS))
@few
def test_a_mutated_array_costs_its_sample_only(path: Path, raw: bytes) -> None:
    path.write_bytes(tar_of([("a.txt", b"one"), ("b.x.npy", raw), ("c.txt", b"two")]))
    found = list(read(path))
    assert [each.key for each in found] == ["a", "b", "c"]
    assert isinstance(found[0], Sample)
    assert isinstance(found[2], Sample)


HEADERS = st.text("{}()[],':<>f48Oi-0129 descrfortan_ohpTuFlse\\\"\n", max_size=200)


@given(text=HEADERS)
@few
def test_any_header_of_an_array_costs_its_sample_only(path: Path, text: str) -> None:
    path.write_bytes(tar_of([("a.x.npy", npy(text)), ("b.txt", b"two")]))
    assert [each.key for each in read(path)] == ["a", "b"]


SIZES = st.integers(0, 5000) | st.sampled_from([2**20, 2**31, 2**33 - 1])
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["path", "size", "GNU.sparse.major", "hdrcharset", "mtime"]),
        st.text(st.characters(codec="utf-8"), max_size=20) | st.integers(-5, 2**80).map(str),
    ),
    max_size=4,
)


def pax(records: list[tuple[str, str]]) -> bytes:
    lines = [f" {keyword}={value}\n".encode() for keyword, value in records]
    return b"".join(str(len(each) + 2).encode() + each for each in lines)


@given(
    members=st.lists(
        st.tuples(st.sampled_from(KINDS), SIZES, st.binary(max_size=700) | RECORDS.map(pax)),
        max_size=8,
    )
)
@few
def test_any_headers_in_any_order_raise_nothing_else(
    path: Path, members: list[tuple[bytes, int, bytes]]
) -> None:
    parts = [
        header(f"m{number}.txt", size if size % 2 else len(body), kind) + block(body)
        for number, (kind, size, body) in enumerate(members)
    ]
    check(read, path, b"".join([*parts, header("z.txt", 1), block(b"z")]))
