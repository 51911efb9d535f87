"""Any bytes as a checkpoint's marker or index are read or refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from paceline.errors import CorruptData
from paceline.schemas import canonical_json, digest_of
from paceline.storage import DiskStore
from paceline.training.checkpoint import (
    COMMIT_FILE,
    INDEX_FILE,
    Commit,
    Generation,
    Generations,
    Index,
    SavedFile,
    StoredChunk,
    StoredTensor,
)

STEP = Generation(3, 7)
FILE = "rank-00000-of-00001.safetensors"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([FILE, "../x", "a" * 64, "F32", [2, 3], [0, 0]]),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=8,
)


def index() -> Index:
    boxes = tuple(StoredChunk(file=FILE, offsets=(at, 0), sizes=(1, 3)) for at in range(2))
    return Index(tensors={"model.w": StoredTensor(dtype="F32", shape=(2, 3), chunks=boxes)})


def commit(raw: bytes) -> dict[str, Any]:
    """Return a marker over the index ``raw``."""
    found = Commit(
        job_id="job",
        step=STEP.step,
        position={"batch": 3},
        config_digest="a" * 64,
        code_version="test",
        world_size=1,
        layout={},
        metrics={},
        environment={},
        extra={},
        files={
            FILE: SavedFile(sha256="b" * 64, bytes=9),
            INDEX_FILE: SavedFile(sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw)),
        },
    )
    sealed: dict[str, Any] = json.loads(canonical_json(found.sealed()))
    return sealed


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in entries:
        yield (*above, key)
        if isinstance(each, dict | list):
            yield from places(each, (*above, key))


def changed(document: Any, data: st.DataObject) -> None:
    *parents, last = data.draw(st.sampled_from(list(places(document))))
    for part in parents:
        document = document[part]
    document[last] = copy.deepcopy(data.draw(JSON))  # a sampled list is one object for all draws


def read(marker: bytes, raw: bytes) -> Index:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / str(STEP)
        place.mkdir()
        (place / COMMIT_FILE).write_bytes(marker)
        (place / INDEX_FILE).write_bytes(raw)
        generations = Generations(DiskStore(), DiskStore.url_of(directory))
        return generations.index_of(STEP, generations.commit_of(STEP))


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_a_changed_index_is_read_or_refused(data: st.DataObject) -> None:
    document = json.loads(canonical_json(index()))
    for _ in range(data.draw(st.integers(1, 2))):
        changed(document, data)
    raw = json.dumps(document).encode()
    with contextlib.suppress(CorruptData):
        for tensor in read(canonical_json(commit(raw)), raw).tensors.values():
            volume = sum(torch.Size(each.sizes).numel() for each in tensor.chunks)
            assert volume == torch.Size(tensor.shape).numel()


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_a_changed_marker_is_read_or_refused(data: st.DataObject) -> None:
    raw = canonical_json(index())
    document = commit(raw)
    changed(document, data)
    with contextlib.suppress(ValueError):  # no canonical form
        document["digest"] = digest_of(document | {"digest": ""})
    with contextlib.suppress(CorruptData):
        read(json.dumps(document, sort_keys=True, separators=(",", ":")).encode(), raw)


@settings(deadline=None, max_examples=15)
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(str.encode),
    st.binary(min_size=1, max_size=60),
)
def test_any_bytes_as_marker_and_index_are_refused(marker: bytes, raw: bytes) -> None:
    with pytest.raises(CorruptData):
        read(marker, raw)
    with contextlib.suppress(CorruptData):
        read(canonical_json(commit(raw)), raw)


def test_what_is_not_changed_is_read() -> None:
    raw = canonical_json(index())
    assert read(canonical_json(commit(raw)), raw) == index()
