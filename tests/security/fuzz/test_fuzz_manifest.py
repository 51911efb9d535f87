"""Any bytes are a manifest or ``InvalidManifest``, and a manifest that is read is written alike."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings, strategies as st

from paceline.errors import InvalidManifest
from paceline.manifest import Chunk, FileEntry, Manifest, parse_manifest
from paceline.schemas import canonical_json, digest_of

H = "0123456789abcdef" * 4
P = 1024
VALID = Manifest(
    model_id="m",
    version="1",
    piece_bytes=P,
    chunk_bytes=2 * P,
    files=(FileEntry("a/b", 3 * P + 5, H, (H,) * 4), FileEntry("e", 0, H, ())),
    chunks=(Chunk(0, 0, 2 * P, H), Chunk(1, 2 * P, P + 5, H)),
).to_bytes()
TOKENS = [b'"', b'\\"', b"\\", b"\\u", b"{", b"}", b"[", b"]", b",", b":", b"1", b"-", b"e", b"."]
TOKENS += [b"NaN", b"null", b"true", b'"files"', b'"a"', b"\xff", "\u0301".encode(), b"\0", b" "]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


def read(raw: bytes) -> None:
    with contextlib.suppress(InvalidManifest):
        manifest = parse_manifest(raw)
        assert parse_manifest(manifest.to_bytes()) == manifest


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300) | st.lists(st.sampled_from(TOKENS), max_size=80).map(b"".join))
def test_any_bytes(raw: bytes) -> None:
    read(raw)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, len(VALID)), st.integers(0, 40), st.lists(st.sampled_from(TOKENS), max_size=6)
)
def test_a_manifest_with_a_part_replaced(at: int, length: int, tokens: list[bytes]) -> None:
    read(VALID[:at] + b"".join(tokens) + VALID[at + length :])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_sealed_manifest_with_a_value_replaced(data: st.DataObject) -> None:
    body: Any = json.loads(VALID)
    at: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(values)
        break
    covered = {key: value for key, value in body.items() if key != "global_checksum"}
    with contextlib.suppress(ValueError):  # what canonical JSON cannot say: NaN, half a surrogate
        read(canonical_json({**body, "global_checksum": digest_of(covered)}))
