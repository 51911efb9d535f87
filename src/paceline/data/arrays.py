"""Named arrays of numbers as bytes, and back: for a scratch file, for a pipe. Not a file format."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from paceline.data.formats.sample import Array


def packed(arrays: Mapping[str, Array]) -> bytes:
    """Return ``arrays`` in one piece; the same arrays give the same bytes."""
    names = sorted(arrays)
    head = json.dumps([[each, arrays[each].dtype.name, arrays[each].shape] for each in names])
    raw = head.encode()
    return b"".join(
        [len(raw).to_bytes(4, "little"), raw, *(arrays[each].tobytes() for each in names)]
    )


def unpacked(raw: bytes) -> dict[str, Array]:
    """Return what was packed, as read-only views into ``raw``."""
    end = 4 + int.from_bytes(raw[:4], "little")
    found, at = {}, end
    for name, dtype, shape in json.loads(raw[4:end]):
        count = int(np.prod(shape, dtype=np.int64))
        found[name] = np.frombuffer(raw, dtype, count, at).reshape(shape)
        at += found[name].nbytes
    return found
