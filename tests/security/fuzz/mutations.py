"""Valid files with some bytes changed, cut out, repeated or put in, and what reading may do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

from hypothesis import strategies as st

from paceline.data.formats import MAX_SAMPLE_BYTES, Sample, UnusableSample
from paceline.errors import InvalidInput

MEMORY_BYTES = 256 * 1024 * 1024
BYTES = [b"\0", b"\xff", b"\x80" * 4, b"9" * 12, b"\x7f\xff\xff\xff", b"-1", b"\n", b"\xf0\x9f"]


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """``valid`` with up to six changes."""
    raw = bytearray(valid)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        kind = draw(st.sampled_from(["set", "put", "cut", "repeat"]))
        new = draw(st.sampled_from(BYTES) | st.binary(min_size=1, max_size=16))
        if kind == "set":
            raw[at : at + len(new)] = new
        elif kind == "put":
            raw[at:at] = new
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 600))]
        else:
            raw[at:at] = raw[at : at + draw(st.integers(1, 1024))] * draw(st.integers(1, 3))
    return bytes(raw)


def check(
    read: Callable[[Path], Iterable[Sample | UnusableSample]], path: Path, raw: bytes
) -> None:
    """Reading gives samples, names bad ones, or ends with the named error; in bounded memory."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        for each in read(path):
            if isinstance(each, Sample):
                assert each.key.encode()
                assert each.payload_bytes <= MAX_SAMPLE_BYTES
                for array in each.features.values():
                    assert array.dtype.kind in "biuf"
            else:
                assert each.reason
    except InvalidInput as error:
        assert path.name in error.one_line()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY_BYTES
