"""Find NaN, infinity and tied weights that differ while a publish reads weights: no byte is read
for it alone.

A safetensors file is watched front to back. The exponent's bits say what is not finite, so that
numpy is enough; without it nothing is looked for. Of what tensors mean only the names of the two
that a config may tie are known.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000  # that safetensors reads
STEP = 256 * 1024  # bytes: values and their masked copy stay in a core's cache
MASKS = (".masked_bias",)  # a constant of old GPT-NeoX files, infinite in float16; nothing reads it
# dtype of the file → numpy's, all bits but the sign, and the smallest of infinity and NaN
KINDS = {
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}


EMBEDDINGS = ("model.embed_tokens.weight", "gpt_neox.embed_in.weight")
OUTPUTS = ("lm_head.weight", "embed_out.weight")


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Return whether a model of this ``config.json`` has one matrix for embedding and output."""
    family = str(config.get("model_type"))
    return bool(config.get("tie_word_embeddings", family.startswith("gemma")))


class WeightsScan:
    """Takes a file's bytes in order; ``found`` is the first tensor with NaN or infinity, or "", and
    ``ends`` has digests of the values of embedding and output."""

    def __init__(self) -> None:
        self.found = ""
        self.ends: dict[str, blake3] = {}
        self._head: bytearray | None = bytearray()  # None: the header was read
        self._tensors: deque[tuple[str, str, int]] = deque()  # name, dtype, bytes that are left
        self._rest = b""  # begin of a value that a block cuts

    def update(self, block: memoryview) -> None:
        """Take the next bytes. A file that is not safetensors has nothing to be found."""
        if self._head is not None:
            self._head += block
            length = 8 + int.from_bytes(self._head[:8], "little")
            if length > MAX_HEADER_BYTES:
                self._head = None
            if self._head is None or len(self._head) < max(16, length):
                return
            self._read_header(bytes(self._head[8:length]))
            block, self._head = memoryview(self._head)[length:], None
        while block and self._tensors and not self.found:
            name, dtype, left = self._tensors.popleft()
            part, block = block[:left], block[left:]
            if left > len(part):
                self._tensors.appendleft((name, dtype, left - len(part)))
            if name in EMBEDDINGS or name in OUTPUTS:
                self.ends.setdefault(name, blake3()).update(part)
            if dtype in KINDS and not self._are_finite(part, dtype):
                self.found = name
            if left == len(part):
                self._rest = b""  # the next begins a value of its own

    def _read_header(self, header: bytes) -> None:
        try:
            found: dict[str, Any] = json.loads(header)
            found.pop("__metadata__", None)
            at = 0
            for name, its in sorted(found.items(), key=lambda item: item[1]["data_offsets"][0]):
                begin, end = map(int, its["data_offsets"])
                if begin != at or end < begin:
                    break  # a gap: what follows is not known
                dtype = "" if name.endswith(MASKS) else str(its["dtype"])
                if end > begin:
                    self._tensors.append((name, dtype, end - begin))
                at = end
        except (
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ):
            self._tensors.clear()

    def _are_finite(self, part: memoryview, dtype: str) -> bool:
        import numpy as np

        kind, bits, least = KINDS[dtype]
        size = np.dtype(kind).itemsize
        if self._rest:
            needed = size - len(self._rest)
            self._rest, part = self._rest + bytes(part[:needed]), part[needed:]
            if len(self._rest) < size:
                return True
            value: np.ndarray[Any, Any] = np.frombuffer(self._rest, kind)
            if (value & bits).max() >= least:
                return False
        whole = len(part) // size * size
        self._rest = bytes(part[whole:])
        for at in range(0, whole, STEP):
            values = np.frombuffer(part[at : min(at + STEP, whole)], kind)
            if (values & bits).max() >= least:
                return False
        return True


def unequal_ends(scans: Iterable[WeightsScan]) -> str:
    """Return the output and the embedding of a model whose values differ; "" where not both are
    stored, or they are equal."""
    ends = {name: each.digest() for scan in scans for name, each in scan.ends.items()}
    for output in ends.keys() & set(OUTPUTS):
        for embedding in ends.keys() & set(EMBEDDINGS):
            if ends[output] != ends[embedding]:
                return f"{output} is not {embedding}"
    return ""


def scan_of(path: str) -> WeightsScan | None:
    """Return a scan for the file ``path`` of a model; None where there is nothing to look for, or
    no numpy."""
    if not path.endswith(SUFFIX):
        return None
    try:
        import numpy as np  # noqa: F401
    except ImportError:
        return None
    return WeightsScan()
