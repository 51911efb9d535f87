"""A cache of shards in memory: what a stream reads, without a disk or a server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.config import DataSettings
from paceline.data import Column, PlannedStream, Shard
from paceline.data.batching import Rows
from paceline.data.formats import ShardSamples
from paceline.data.loading import Batch, Position


def shard_of(documents: Sequence[bytes], number: int = 0) -> Shard:
    """The record of a shard of these documents; ``number`` sets equal ones apart."""
    text = b"\n".join(documents)
    return Shard(
        split="train",
        sha256=hashlib.sha256(b"%d:" % number + text).hexdigest(),
        bytes=max(1, len(text)),
        documents=len(documents),
        text_bytes=sum(map(len, documents)),
        token_count=sum(map(len, documents)),
        lengths_sha256="0" * 64,
    )


class MemorySamples(ShardSamples):
    """Texts as the samples of a shard; ``keys`` default to their numbers."""

    def __init__(self, texts: Sequence[bytes], keys: Sequence[str] | None = None) -> None:
        names = keys or [str(n) for n in range(len(texts))]
        columns = {"tokens": texts, "keys": [each.encode() for each in names]}
        arrays = {}
        for name, parts in columns.items():
            arrays[name] = np.frombuffer(b"".join(parts), np.uint8)
            arrays[f"{name}.ends"] = np.cumsum([len(each) for each in parts], dtype=np.int64)
        super().__init__(arrays, len(texts))


class MemoryCache:
    """Shards by digest; ``broken`` says what reading some of them raises."""

    def __init__(
        self, contents: Sequence[Sequence[bytes]], broken: dict[int, Exception] | None = None
    ) -> None:
        self.quarantined: dict[str, str] = {}
        self.shards = [shard_of(documents, n) for n, documents in enumerate(contents)]
        self.closed = 0
        self.read: list[str] = []  # digests of shards that were opened, in order
        self._contents = {
            shard.sha256: documents for shard, documents in zip(self.shards, contents, strict=True)
        }
        self._broken = {self.shards[n].sha256: error for n, error in (broken or {}).items()}

    def index(self, shard: Shard) -> np.ndarray:
        return np.array([[len(each) for each in self._contents[shard.sha256]]], dtype=np.int32)

    def samples(self, shard: Shard) -> ShardSamples:
        if shard.sha256 in self._broken:
            raise self._broken[shard.sha256]
        self.read.append(shard.sha256)
        found = MemorySamples(self._contents[shard.sha256])
        found.close = self._close
        return found

    def _close(self) -> None:
        self.closed += 1


def padding_share(rows: Rows, context: int) -> float:
    """The fraction of a group's token positions that hold no token."""
    width = len(rows) * context if rows.width_R is None else int(np.sum(rows.width_R))
    return 1.0 - float(rows.tokens_R1[-1]) / width if width else 0.0


def stream_by(
    cache: MemoryCache,
    kind: str,
    context: int,
    global_batch: int,
    seed: int = 5,
    columns: int = 0,
    *,
    features: Sequence[Column] = (),
    token_features: Sequence[str] = (),
    max_bad_share: float = 0.5,
    **changes: Any,
) -> PlannedStream:
    """A stream of ``cache``, batched in the way that a profile would name."""
    fields = {"batching": kind, "columns": columns, "token_features": token_features}
    settings = DataSettings.model_validate({**fields, "max_bad_share": max_bad_share})
    shape: dict[str, Any] = {"context": context, "global_batch": global_batch, "seed": seed}
    return PlannedStream(cache.shards, cache, settings, columns=features, **shape, **changes)


def made(stream: PlannedStream, count: int) -> list[Batch]:
    """The next batches, made here and now."""
    position = Position(**stream.position)
    found = []
    for _ in range(count):
        batch, position = stream.make(position)
        found.append(batch)
    return found
