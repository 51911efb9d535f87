"""A rank's part of a checkpoint as one safetensors file in memory, reused for each save.

The file's image is laid out once a layout (header, then a slot for each box), and tensors are
copied into place, so a save needs no second copy and no serialisation. It is anonymous memory with
a file descriptor, so it can be uploaded part by part like any file. Where the source is a GPU, the
memory is pinned. ``Exchange`` is the ranks' process group for saves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLost, TrainingFailed
from paceline.training.checkpoint.layout import (
    DTYPES,
    Chunk,
    HeldChunks,
    from_bytes,
    local_of,
    to_bytes,
)
from paceline.training.loop.group import Group

log = logging.getLogger(__name__)

ALIGN = 64
FINITE_BLOCK = 1 << 18  # elements checked at once: fits the cache
# Exponent bits of each floating dtype, and an integer of its size: all ones means inf or NaN.
_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_SUMMED = {"F64": "<f8", "F32": "<f4"}


def header_of(entries: Sequence[tuple[str, str, Sequence[int], int]], align: int = ALIGN) -> bytes:
    """Return a safetensors header for ``(name, dtype, shape, bytes)`` in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(len(raw) + 8) % align)
    return len(raw).to_bytes(8, "little") + raw


class Staging:
    """The image of one file with a slot for each of ``chunks``; reused while they are the same."""

    def __init__(self, chunks: Sequence[Chunk], *, pin: bool = False) -> None:
        self.chunks = sorted(chunks, key=lambda c: (-DTYPES[c.dtype].itemsize, c.key))
        header = header_of([(c.key, c.dtype, c.sizes, c.bytes) for c in self.chunks])
        self.bytes = len(header) + sum(each.bytes for each in self.chunks)
        self._descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.truncate(self._descriptor, self.bytes)
        self._map = mmap.mmap(self._descriptor, self.bytes)
        self._map[: len(header)] = header
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        if pin:
            self._pin(whole)
        self._room: list[tuple[Chunk, Tensor]] = []
        at = len(header)
        for chunk in self.chunks:
            room = whole[at : at + chunk.bytes].view(DTYPES[chunk.dtype]).view(chunk.sizes)
            self._room.append((chunk, room))
            at += chunk.bytes

    @property
    def path(self) -> Path:
        """Return a path under which this process can open the image."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def view(self) -> memoryview:
        """Return the image."""
        return memoryview(self._map)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the live tensors in; they may change after it returns."""
        devices = set()
        for chunk, room in self._room:
            source = local_of(tensors[chunk.tensor])
            room.copy_(source, non_blocking=True)
            if source.device.type == "cuda":
                devices.add(source.device)
        for device in devices:
            torch.cuda.synchronize(device)

    def require_finite(self, step: int) -> None:
        """Raise TrainingFailed where the image contains infinity or NaN."""
        for chunk, room in self._room:
            if chunk.dtype not in _EXPONENTS:
                continue
            raw = room.view(-1).view(torch.uint8).numpy()
            size = FINITE_BLOCK * DTYPES[chunk.dtype].itemsize
            if not all(
                _finite(raw[start : start + size], chunk.dtype)
                for start in range(0, len(raw), size)
            ):
                raise TrainingFailed(
                    "state is not finite and was not saved",
                    got=chunk.tensor,
                    where=f"step {step}",
                    do="Lower training.learning_rate; the last checkpoint is intact.",
                )

    def _pin(self, whole: Tensor) -> None:
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cuda.cudaHostRegister(whole.data_ptr(), self.bytes, 0))
        if code:  # copies still work, only slower
            log.warning("memory for checkpoints is not pinned error=%d bytes=%d", code, self.bytes)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # consumes CUDA's sticky error, so no step meets it
            return
        weakref.finalize(self, cuda.cudaHostUnregister, whole.data_ptr())


def _finite(raw: np.ndarray[tuple[int], np.dtype[np.uint8]], dtype: str) -> bool:
    """Return whether every number in ``raw`` is finite.

    A sum shows infinities and NaN in one pass over the bytes; where the sum is not finite, it may
    have overflowed, and the exponents are checked.
    """
    if dtype in _SUMMED:
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(raw.view(_SUMMED[dtype]).sum()):
                return True
    kind, mask = _EXPONENTS[dtype]
    return not bool(np.any((raw.view(kind) & np.array(mask, kind)) == mask))


class Exchange:
    """All-gather of bytes, and point-to-point tensors, on a process group of its own.

    Created on every rank at the same time; then used by one thread of each rank at a time. Its
    collectives never mix with the training's, so a save can end while steps continue. Nothing is
    pickled. The group ends with the default one: destroying it alone could wait for ever for a
    dead peer.
    """

    def __init__(self, group: Group, deadline_s: float) -> None:
        self._ranks = group.world_size
        self.rank = group.rank
        self._process_group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
            if group.world_size > 1
            else None
        )

    def all(self, mine: bytes) -> list[bytes]:
        """Return each rank's bytes, by rank; raises PeerLost where a rank is gone or too late."""
        if self._process_group is None:
            return [mine]
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks)]
            size = torch.tensor([len(mine)], dtype=torch.int64)
            dist.all_gather(sizes, size, group=self._process_group)
            longest = max(int(each) for each in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            if mine:
                padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._ranks)]
            dist.all_gather(parts, padded, group=self._process_group)
        except RuntimeError as error:
            raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor in host memory to rank ``to``."""
        try:
            dist.send(tensor, to, group=self._process_group)
        except RuntimeError as error:
            raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor in host memory with what rank ``source`` sends."""
        try:
            dist.recv(tensor, source, group=self._process_group)
        except RuntimeError as error:
            raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error


def agree_on_held(exchange: Exchange, mine: Sequence[Chunk]) -> HeldChunks:
    """Return the boxes of every rank; of equal lists, only the first holder sends one."""
    raw = to_bytes(mine)
    digests = exchange.all(hashlib.sha256(raw).digest())
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    of_rank = tuple(numbers[digest] for digest in digests)
    sends = of_rank.index(of_rank[exchange.rank]) == exchange.rank
    told = exchange.all(raw if sends else b"")
    return HeldChunks(tuple(from_bytes(each) for each in told if each), of_rank)
