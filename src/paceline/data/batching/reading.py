"""The shards that a stream has open: opened ahead on threads, closed when their group is over.

Nothing is copied here: a shard's samples are views into the cached file where the format allows.
A shard that cannot be read is put in quarantine and its pieces get weight 0. Knows no order.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.samples import ShardSamples
from paceline.data.snapshot import Shard
from paceline.errors import CorruptData, DataRejected, InvalidInput

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

LENGTHS_AT_ONCE = 4  # for each shard that is opened at once


class Shards(Protocol):
    """What a stream needs of a shard cache; its methods are called on several threads."""

    quarantined: dict[str, str]  # sha256 of a shard, or sha256#sample → why

    def lengths(self, shard: Shard) -> npt.NDArray[np.int32]: ...
    def samples(self, shard: Shard) -> ShardSamples: ...
    def prefetch(self, shards: Sequence[Shard]) -> None: ...


class OpenShard:
    """One shard's framed token stream: separator, document, separator, …, document, separator."""

    def __init__(self, shard: Shard, samples: ShardSamples, lengths: Array) -> None:
        self.shard = shard
        self.samples = samples
        self.bad: dict[int, str] = {}  # document → why
        if len(samples) != len(lengths):
            raise CorruptData(
                "shard and its index disagree",
                got=f"{len(samples)} samples",
                wanted=len(lengths),
                where=shard.sha256,
            )
        offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)])
        if shard.tokens and int(offsets[-1]) + 1 != shard.stream_bytes:
            raise CorruptData(
                "shard is not as long as the snapshot says",
                got=f"{int(offsets[-1]) + 1} tokens with separators",
                wanted=shard.stream_bytes,
                where=shard.sha256,
            )
        self._offsets: list[int] = offsets.tolist()  # of each document's separator; and the last

    def copy(self, start: int, out: Array) -> list[tuple[int, int]]:
        """Copy tokens from ``start`` on into ``out``, which is full of separators already.

        Return the stretches of ``out``, as (first, one past the last), whose document is bad.
        """
        offsets = self._offsets
        document = bisect_right(offsets, start) - 1
        size, column, spoiled = len(out), 0, []
        while column < size and document < len(offsets) - 1:
            inside = start + column - offsets[document]  # 0: its separator
            count = min(offsets[document + 1] - offsets[document] - inside, size - column)
            skip = 1 if inside == 0 else 0
            if count > skip:
                tokens = self.tokens(document)
                if tokens is None:
                    spoiled.append((column, column + count))
                elif len(tokens):
                    first = inside + skip - 1
                    out[column + skip : column + count] = tokens[first : first + count - skip]
            column += count
            document += 1
        return spoiled

    def features(self, document: int) -> dict[str, Array] | None:
        """Return the document's features, or None where it is bad."""
        try:
            return self.samples.features(document)
        except CorruptData as error:
            self.bad.setdefault(document, error.what)
            return None

    def tokens(self, document: int) -> Array | None:
        """Return the document's tokens, none for one of features only; None where it is bad."""
        try:
            tokens = self.samples.tokens(document)
        except CorruptData as error:
            self.bad.setdefault(document, error.what)
            return None
        wanted = self._offsets[document + 1] - self._offsets[document] - 1
        if len(tokens) not in (0, wanted):  # 0: a sample of features only
            raise InvalidInput(
                "a transform changed a sample's length",
                got=len(tokens),
                wanted=f"{wanted}, as its shard's index says",
                where=f"{self.shard.sha256}#{document}",
                do="Change lengths when the snapshot is built; batches are planned from them.",
            )
        return tokens


class Reader:
    """The open shards of one stream; close it. All but ``close`` is for one thread only.

    Raises DataRejected once more than ``max_bad_share`` of the shards is in quarantine.
    """

    def __init__(
        self, shards: Sequence[Shard], cache: Shards, *, threads: int, max_bad_share: float
    ) -> None:
        self.shards = shards
        self._cache = cache
        self._max_bad_share = max_bad_share
        self._digests = {each.sha256 for each in shards}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="data-open")
        # Lengths are small files, and a plan waits for all of a group's: apart, and more at once.
        self._small = ThreadPoolExecutor(
            LENGTHS_AT_ONCE * threads, thread_name_prefix="data-lengths"
        )
        self._open: dict[int, Future[OpenShard]] = {}
        self._ready: dict[int, OpenShard | None] = {}  # of those, the ones that came out

    def lengths(self, indexes: Sequence[int]) -> list[Array]:
        """Return the lengths of each shard's documents; for the thread that plans ahead."""
        return list(self._small.map(lambda each: self._lengths(self.shards[each]), indexes))

    def expect(self, indexes: Sequence[int]) -> None:
        """Open these shards ahead, in this order, and close all others."""
        wanted = set(indexes)
        for index in [each for each in self._open if each not in wanted]:
            self._forget(index)
        # What is being opened is named again: a cache lets go of what it is no longer told of.
        coming = [each for each in indexes if not self._is_open(each)]
        self._cache.prefetch([self.shards[each] for each in coming])
        for index in indexes:
            self._submit(index)

    def get(self, index: int) -> OpenShard | None:
        """Return the shard once it is open, or None where it is in quarantine."""
        if index not in self._ready:
            self._ready[index] = self._get(index)
        return self._ready[index]

    def close(self) -> None:
        """Close every shard and end the threads."""
        for index in list(self._open):
            self._forget(index)
        for pool in (self._small, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)

    def _get(self, index: int) -> OpenShard | None:
        try:
            return self._submit(index).result()
        except CorruptData as error:
            shard = self.shards[index]
            if shard.sha256 not in self._cache.quarantined:
                self._cache.quarantined[shard.sha256] = error.what
            self._refuse_if_too_many(error)
            return None

    def _is_open(self, index: int) -> bool:
        return index in self._open and self._open[index].done()

    def _submit(self, index: int) -> Future[OpenShard]:
        if index not in self._open:
            self._open[index] = self._pool.submit(self._opened, self.shards[index])
        return self._open[index]

    def _opened(self, shard: Shard) -> OpenShard:
        try:
            samples = self._cache.samples(shard)
            try:
                return OpenShard(shard, samples, self._lengths_beside(shard, samples))
            except CorruptData:
                samples.close()
                raise
        except CorruptData:
            log.warning("shard quarantined, going on without it shard=%s", shard.sha256[:12])
            raise

    def _lengths(self, shard: Shard) -> Array:
        if shard.lengths_sha256 is not None:
            return self._cache.lengths(shard)
        with self._cache.samples(shard) as samples:
            return _byte_lengths(samples)

    def _lengths_beside(self, shard: Shard, samples: ShardSamples) -> Array:
        if shard.lengths_sha256 is not None:
            return self._cache.lengths(shard)
        return _byte_lengths(samples)

    def _forget(self, index: int) -> None:
        def close(done: Future[OpenShard]) -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().samples.close()

        self._ready.pop(index, None)
        future = self._open.pop(index)
        future.cancel()
        future.add_done_callback(close)

    def _refuse_if_too_many(self, error: CorruptData) -> None:
        bad = len(self._digests & set(self._cache.quarantined))
        if bad > self._max_bad_share * len(self._digests):
            raise DataRejected(
                "too many data shards are corrupt",
                got=f"{bad} of {len(self._digests)}",
                wanted=f"at most {self._max_bad_share:.0%}",
                do="Build the snapshot again from its source.",
            ) from error


def _byte_lengths(samples: ShardSamples) -> Array:
    """Return the lengths of a shard of version 1, which has no index and a token a byte."""
    return np.array([len(samples.text_bytes(i)) for i in range(len(samples))], dtype=np.int64)
