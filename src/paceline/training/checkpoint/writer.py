"""The background part of a save: hash, upload, agree with the other ranks, commit.

Every rank writes its own file and sends its result to all; rank 0 writes index and marker, and its
result counts for every rank. A failure of any kind on any rank reaches all ranks, so none of them
blocks. The files of a save that failed permanently are removed: on a full disk they would block the
next one. Does not decide when to save.

``Staging`` is a rank's part as one safetensors file in memory, laid out once a layout and reused:
tensors are copied into place, so a save needs no second copy and no serialisation. It is anonymous
memory with a file descriptor, so it can be uploaded part by part like any file. Where the source is
a GPU, the memory is pinned. ``Exchange`` is the ranks' process group for saves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import (
    NotSaved,
    PacelineError,
    PermanentError,
    ServiceUnavailable,
    StorageFull,
    TrainingFailed,
    from_record,
    to_record,
)
from paceline.schemas import CheckpointRef, Record, canonical_json
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import (
    DTYPES,
    Chunk,
    file_of,
    from_bytes,
    local_of,
    to_bytes,
)
from paceline.training.checkpoint.records import Commit, Index, SavedFile
from paceline.training.loop import Group, as_peer_lost

log = logging.getLogger(__name__)

ALIGN = 64
FINITE_BLOCK = 1 << 15  # elements checked at once: torch runs so few on the calling thread


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
        descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        os.truncate(descriptor, self.bytes)
        self.path = Path(f"/proc/self/fd/{descriptor}")  # this process can open it
        self.view = memoryview(mmap.mmap(descriptor, self.bytes))
        self.view[: len(header)] = header
        whole = torch.frombuffer(self.view, dtype=torch.uint8)
        if pin:
            self._pin(whole)
        self._room: list[tuple[Chunk, Tensor]] = []
        at = len(header)
        for chunk in self.chunks:
            room = whole[at : at + chunk.bytes].view(DTYPES[chunk.dtype]).view(chunk.sizes)
            self._room.append((chunk, room))
            at += chunk.bytes

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
            if room.is_floating_point() and not _finite(room):
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


def _finite(tensor: Tensor) -> bool:
    """Return whether every number is finite.

    A sum shows infinity and NaN in one pass; where the sum overflows, each number is checked.
    """
    for block in torch.split(tensor.view(-1), FINITE_BLOCK):
        wide = block if block.itemsize >= 4 else block.float()
        if not math.isfinite(wide.sum()) and not wide.isfinite().all():
            return False
    return True


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
        with as_peer_lost():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._process_group)
            longest = max(int(each) for each in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            if mine:
                padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._ranks)]
            dist.all_gather(parts, padded, group=self._process_group)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor in host memory to rank ``to``."""
        with as_peer_lost():
            dist.send(tensor, to, group=self._process_group)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor in host memory with what rank ``source`` sends."""
        with as_peer_lost():
            dist.recv(tensor, source, group=self._process_group)

    def chunks(self, mine: Sequence[Chunk]) -> list[tuple[Chunk, ...]]:
        """Return the boxes of each rank; equal lists (of replicas) are one object."""
        every = self.all(to_bytes(mine))
        lists = {raw: from_bytes(raw) for raw in set(every)}
        return [lists[raw] for raw in every]


# Of an error: final, no other save can succeed; permanent, an operator must change something; full,
# an operator must free space; temporary, the same save may succeed later.
Kind = Literal["final", "permanent", "full", "temporary"]
_WORST_FIRST: tuple[Kind, ...] = ("final", "permanent", "full", "temporary")


@dataclass
class SaveResult:
    """The result of a save; the same on every rank."""

    step: int
    seconds: float = 0.0  # in the background
    ref: CheckpointRef | None = None
    kept: Sequence[int] | None = None  # steps that still have a checkpoint; None: unknown
    error: PacelineError | None = None
    kind: Kind = "final"  # of the error


class _Failure(Record):
    """An error of one rank, as sent to the others."""

    kind: Kind
    record: dict[str, str | None]  # of the error

    @classmethod
    def of(cls, error: BaseException, size: int, *, final: bool = False) -> _Failure:
        """Return ``error``, raised while ``size`` bytes were written."""
        if not isinstance(error, PacelineError):
            error = TrainingFailed("its writer failed", got=repr(error))
        kind: Kind = "permanent" if isinstance(error, PermanentError) else "temporary"
        if isinstance(error, StorageFull):
            kind, error = "full", error.as_kind(StorageFull, wanted=f"room for {size} bytes")
        return cls(kind="final" if final else kind, record=to_record(error))

    def error(self, step: int, rank: int) -> PacelineError:
        """Return the error to raise on every rank."""
        kinds: dict[Kind, type[PacelineError]] = {
            "temporary": ServiceUnavailable,
            "final": TrainingFailed,
        }
        found, at = from_record(self.record), f"step {step}, rank {rank}"
        return found.as_kind(
            kinds.get(self.kind, NotSaved),
            what=f"checkpoint was not saved: {found.what}",
            where=at if found.where is None else f"{found.where}, {at}",
        )


class _Part(Record):
    """The result of one rank's part of a save."""

    files: dict[str, SavedFile] = {}
    failure: _Failure | None = None


class _Verdict(Record):
    """The result of a save, as rank 0 sends it."""

    ref: CheckpointRef | None = None
    kept: tuple[int, ...] | None = None
    failure: _Failure | None = None
    rank: int = 0  # that failed


class Writer:
    """Writes one rank's part of each save; ``keep`` and ``keep_best`` are counts of generations."""

    def __init__(
        self,
        generations: Generations,
        group: Group,
        exchange: Exchange,
        *,
        keep: int,
        keep_best: int,
    ) -> None:
        self._generations, self._exchange, self._group = generations, exchange, group
        self._keep, self._keep_best = keep, keep_best

    def run(
        self, generation: Generation, staging: Staging, commit: Commit, index: Index
    ) -> SaveResult:
        """Write a save and return its result; raises nothing. ``commit`` names no files yet."""
        began, step = time.perf_counter(), generation.step
        try:
            ended = self._write(generation, staging, commit, index)
        except PacelineError as error:  # another rank is gone: no agreement is possible
            ended = SaveResult(step, error=error)
        except Exception as error:
            log.exception("checkpoint writer failed step=%d", step)
            failed = TrainingFailed("checkpoint writer failed", got=repr(error))
            failed.__cause__ = error
            ended = SaveResult(step, error=failed)
        ended.seconds = time.perf_counter() - began
        return ended

    def _write(
        self, generation: Generation, staging: Staging, commit: Commit, index: Index
    ) -> SaveResult:
        mine = self._upload(generation, staging) if staging.chunks else _Part()
        raw = self._exchange.all(mine.model_dump_json().encode())
        answer = b""
        if self._group.rank == 0:
            parts = [_Part.model_validate_json(each) for each in raw]
            answer = self._verdict(generation, parts, commit, index).model_dump_json().encode()
        verdict = _Verdict.model_validate_json(self._exchange.all(answer)[0])
        if verdict.failure is None:
            return SaveResult(generation.step, ref=verdict.ref, kept=verdict.kept)
        error = verdict.failure.error(generation.step, verdict.rank)
        return SaveResult(generation.step, error=error, kind=verdict.failure.kind)

    def _upload(self, generation: Generation, staging: Staging) -> _Part:
        step = generation.step
        try:
            staging.require_finite(step)
        except TrainingFailed as error:
            return _Part(failure=_Failure.of(error, staging.bytes, final=True))
        name = file_of(self._group.rank, self._group.world_size)
        saved = SavedFile(sha256=hashlib.sha256(staging.view).hexdigest(), bytes=staging.bytes)
        try:
            self._generations.put_file(generation, name, staging.path, saved)
        except Exception as error:  # noqa: BLE001 - every failure must reach the other ranks
            log.warning("checkpoint part failed step=%d error=%s", step, error)
            return _Part(failure=_Failure.of(error, staging.bytes))
        return _Part(files={name: saved})

    def _verdict(
        self, generation: Generation, parts: Sequence[_Part], commit: Commit, index: Index
    ) -> _Verdict:
        """Commit the save unless a rank failed; called on rank 0."""
        failures = [(part.failure, rank) for rank, part in enumerate(parts) if part.failure]
        if failures:
            worst, rank = min(failures, key=lambda each: _WORST_FIRST.index(each[0].kind))
            verdict = _Verdict(failure=worst, rank=rank)
        else:
            files = {name: saved for part in parts for name, saved in part.files.items()}
            verdict = self._commit(generation, commit.model_copy(update={"files": files}), index)
        # After a temporary failure the next committed save removes the files (``collect``).
        if verdict.failure is not None and verdict.failure.kind != "temporary":
            try:
                self._generations.remove(generation)
            except PacelineError as error:
                log.warning("half a checkpoint was left generation=%s error=%s", generation, error)
        return verdict

    def _commit(self, generation: Generation, commit: Commit, index: Index) -> _Verdict:
        generations = self._generations
        try:
            commit = generations.commit(generation, commit, index)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a result
            log.warning("checkpoint was not committed step=%d error=%s", generation.step, error)
            return _Verdict(failure=_Failure.of(error, len(canonical_json(index))))
        ref = CheckpointRef(
            step=generation.step,
            url=generations.url_of(generation),
            digest=commit.digest,
            bytes=commit.bytes,
        )
        try:
            kept = generations.collect(self._keep, self._keep_best, generation)
        except PacelineError as error:  # the save is committed; the next one collects
            log.warning("old checkpoints were not collected error=%s", error)
            return _Verdict(ref=ref)
        return _Verdict(ref=ref, kept=tuple(sorted({each.step for each in kept})))
