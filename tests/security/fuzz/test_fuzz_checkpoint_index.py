"""Any bytes as a checkpoint's metadata, tensor file, marker or index are read or refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import pickle
import pickletools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import CorruptData, InvalidInput
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
    read_dcp,
    read_metadata,
)

WEIGHTS = {"w": torch.arange(12.0).reshape(4, 3), "s": torch.tensor(2.0)}
WANTED = {name: torch.empty_like(each, device="meta") for name, each in WEIGHTS.items()}
DATA, METADATA = "__0_0.distcp", ".metadata"
REFUSED = (CorruptData, InvalidInput)

OPCODES = [each.code.encode("latin-1") for each in pickletools.opcodes]
ARGUMENTS = st.sampled_from(
    [b"", b"\0", b"\1", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\3\0\0\0abc", b"torch\nSize\n"]
)
PICKLES = st.lists(
    st.tuples(st.sampled_from(OPCODES), ARGUMENTS).map(b"".join) | st.binary(max_size=4),
    max_size=40,
).map(b"".join)
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1), st.integers(0, 8), PICKLES | st.binary(max_size=12)
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def edited(raw: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    changed = bytearray(raw)
    for at, length, by in edits:
        first = int(at * len(changed))
        changed[first : first + length] = by
    return bytes(changed)


@pytest.fixture(scope="module")
def there() -> Iterator[Path]:
    """A directory that dcp.save wrote."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(WEIGHTS), checkpoint_id=directory, no_dist=True)
        yield Path(directory)


@contextlib.contextmanager
def instead(path: Path, raw: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(before)


@settings(deadline=None, max_examples=30)
@given(PICKLES)
def test_any_pickle_is_data_or_refused(there: Path, raw: bytes) -> None:
    with instead(there / METADATA, raw + b"."), contextlib.suppress(*REFUSED):
        read_metadata(there)


@settings(deadline=None, max_examples=30)
@given(EDITS)
def test_edited_metadata_are_read_or_refused(there: Path, edits: Any) -> None:
    raw = edited((there / METADATA).read_bytes(), edits)
    with instead(there / METADATA, raw), contextlib.suppress(*REFUSED):
        read_dcp(there, WANTED)


@settings(deadline=None, max_examples=30)
@given(EDITS)
def test_an_edited_tensor_file_is_read_or_refused(there: Path, edits: Any) -> None:
    raw = edited((there / DATA).read_bytes(), edits)
    with instead(there / DATA, raw), contextlib.suppress(*REFUSED):
        found = read_dcp(there, WANTED)
        assert found.weights["w"].shape == (4, 3)


@settings(deadline=None, max_examples=20)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(),
        lambda each: (
            st.lists(each, max_size=4)
            | st.tuples(each, each)
            | st.dictionaries(st.text(max_size=5), each, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_any_value_as_metadata_is_refused(there: Path, value: object) -> None:
    for protocol in (2, 4, 5):
        raw = pickle.dumps(value, protocol)
        with instead(there / METADATA, raw), pytest.raises(REFUSED):
            read_metadata(there)


# ── our own marker and index ─────────────────────────────────────────────────────────────────────

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


@settings(deadline=None, max_examples=25)
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


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_changed_marker_is_read_or_refused(data: st.DataObject) -> None:
    raw = canonical_json(index())
    document = commit(raw)
    changed(document, data)
    with contextlib.suppress(ValueError):  # no canonical form
        document["digest"] = digest_of(document | {"digest": ""})
    with contextlib.suppress(CorruptData):
        read(json.dumps(document, sort_keys=True, separators=(",", ":")).encode(), raw)


@settings(deadline=None, max_examples=25)
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(str.encode),
    st.binary(min_size=1, max_size=60),
)
def test_any_bytes_as_marker_and_index_are_refused(marker: bytes, raw: bytes) -> None:
    with pytest.raises(CorruptData):
        read(marker, raw)
    with contextlib.suppress(CorruptData):
        read(canonical_json(commit(raw)), raw)


def test_what_is_not_changed_is_read(there: Path) -> None:
    found = read_dcp(there, WANTED).weights
    assert all(torch.equal(found[name], each) for name, each in WEIGHTS.items())
    raw = canonical_json(index())
    assert read(canonical_json(commit(raw)), raw) == index()
