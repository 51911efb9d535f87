"""Any bytes as JSONL: samples, and bad lines by number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from paceline.data import SkippedSamples
from paceline.data.formats import Fields, Sample, UnusableSample, read_jsonl
from tests.security.fuzz.mutations import check, mutated

VALID = b"\n".join(
    json.dumps(each).encode()
    for each in [
        {"key": "a", "text": "één \U0001f600", "n": [[1, 2], [3, 4.5]], "label": 3},
        {"key": 7, "text": "two", "tags": ["x", "yy"], "ok": [True, False]},
        {"text": "half \ud800", "deep": [[[[[[1]]]]]]},
    ]
)


def read(path: Path) -> Iterator[Sample | UnusableSample]:
    return read_jsonl(path, path.name, Fields())


few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fuzzed"


@given(raw=mutated(VALID))
@few
def test_mutated_lines_raise_nothing(path: Path, raw: bytes) -> None:
    check(read, path, raw)


ANY_TEXT = st.text(st.characters() | st.sampled_from("\ud800\0\x1b"), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(
    lines=st.lists(
        st.dictionaries(ANY_TEXT | st.sampled_from(["text", "key", "a", "a.ends"]), VALUES)
        | VALUES,
        max_size=6,
    )
)
@few
def test_any_values_raise_nothing_and_can_be_listed(path: Path, lines: list[object]) -> None:
    raw = b"\n".join(json.dumps(each).encode() for each in lines)
    check(read, path, raw)
    found = list(read(path))
    assert len(found) == len(lines)
    skipped = SkippedSamples()
    for each in found:
        if isinstance(each, UnusableSample):
            skipped.add(each)
    assert all(each.isprintable() and each.encode() for each in skipped.examples)
