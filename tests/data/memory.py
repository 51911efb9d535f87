"""A cache of shards in memory: what a stream reads, without a disk or a server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from paceline.config import DataSettings
from paceline.data import PlannedStream, Shard
from paceline.data.loading.batch import Batch, Position
from paceline.data.loading.samples import TextSamples
from paceline.data.loading.stream import PlanFactory, batching


def shard_of(documents: Sequence[bytes], number: int = 0, version: int = 2) -> Shard:
    """The record of a shard of these documents; ``number`` sets equal ones apart.

    Of version 1 it has no index: lengths are found in the shard itself.
    """
    text = b"\n".join(documents)
    return Shard(
        split="train",
        sha256=hashlib.sha256(b"%d:" % number + text).hexdigest(),
        bytes=max(1, len(text)),
        documents=len(documents),
        text_bytes=sum(map(len, documents)),
        lengths_sha256=None if version == 1 else "0" * 64,
    )


class MemoryCache:
    """Shards by digest; ``broken`` says what reading some of them raises."""

    def __init__(
        self,
        contents: Sequence[Sequence[bytes]],
        broken: dict[int, Exception] | None = None,
        version: int = 2,
    ) -> None:
        self.quarantined: dict[str, str] = {}
        self.shards = [shard_of(documents, n, version) for n, documents in enumerate(contents)]
        self.asked: list[str] = []  # digests given to ``prefetch``, in order
        self.opened = 0
        self.closed = 0
        self.read: set[str] = set()  # digests of shards that were opened
        self.measured: set[str] = set()  # and of those whose lengths were asked for
        self._contents = {
            shard.sha256: documents for shard, documents in zip(self.shards, contents, strict=True)
        }
        self._broken = {self.shards[n].sha256: error for n, error in (broken or {}).items()}

    def lengths(self, shard: Shard) -> np.ndarray:
        assert shard.lengths_sha256 is not None, "a shard of version 1 has no index"
        self.measured.add(shard.sha256)
        return np.array([len(each) for each in self._contents[shard.sha256]], dtype=np.int32)

    def samples(self, shard: Shard) -> TextSamples:
        if shard.sha256 in self._broken:
            raise self._broken[shard.sha256]
        self.opened += 1
        self.read.add(shard.sha256)
        documents = list(self._contents[shard.sha256])
        return _Counted(self, [str(n) for n in range(len(documents))], documents)

    def prefetch(self, shards: Sequence[Shard]) -> None:
        self.asked += [each.sha256 for each in shards]


class _Counted(TextSamples):
    def __init__(self, cache: MemoryCache, keys: list[str], texts: list[bytes]) -> None:
        super().__init__(keys, texts)
        self._cache = cache

    def close(self) -> None:
        self._cache.closed += 1


def plan_by(
    kind: str, context: int, global_batch: int, seed: int = 5, columns: int = 0
) -> PlanFactory:
    """The way of batching that a profile would name."""
    settings = DataSettings.model_validate({"batching": kind, "columns": columns})
    return batching(settings, context=context, global_batch=global_batch, seed=seed)


def made(stream: PlannedStream, count: int) -> list[Batch]:
    """The next batches, made here and now."""
    position = Position(**stream.position)
    found = []
    for _ in range(count):
        batch, position = stream.make(position)
        found.append(batch)
    return found
