"""The open shards of a stream: opened ahead on threads, closed when their group is finished.

Copies nothing: samples are views into the cached file where the format allows it. A shard that
cannot be read is put in quarantine and its pieces get weight 0. Does not decide the order of
shards.

A shard's framed token stream is: separator, document, separator, …, document, separator. Where
samples lie end to end as stored, their tokens are one array from which a batch is cut; where
samples are computed on reading (a transform), they are requested one by one.

Shape letters: D documents of a shard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.data.batching.rows import Ints
from paceline.data.formats import ShardSamples
from paceline.data.loading import close_later
from paceline.data.snapshot import Shard
from paceline.errors import CorruptData, DataRejected, InvalidInput, TemporaryError

if TYPE_CHECKING:
    from paceline.data.loading import ShardCache

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


class OpenShard:
    """A shard's samples and their positions in the shard's framed token stream.

    ``lengths`` are those of the shard's index; None: as stored. ``flat`` holds all tokens end to
    end, document d at ``first_D[d]`` with ``count_D[d]`` tokens (0 for a sample of features only),
    or is None. ``offsets_D1`` are positions in the framed stream: of each document's separator and
    of the last one. Raises CorruptData where shard and index disagree.
    """

    def __init__(self, shard: Shard, samples: ShardSamples, lengths: Array | None) -> None:
        self.shard = shard
        self.samples, self.close = samples, samples.close
        self.flat: Array | None = None
        self.first_D = self.count_D = np.zeros(0, dtype=np.int64)
        if (laid := samples.flat()) is not None:
            self.flat, ends = laid
            self.count_D = np.diff(ends, prepend=0)
            self.first_D = ends - self.count_D
        if lengths is None:
            assert laid is not None, "only stored samples tell their own lengths"
            lengths = self.count_D
        elif len(samples) != len(lengths):
            raise self._disagree(f"{len(samples)} samples", len(lengths))
        elif laid is not None and np.any((self.count_D != lengths) & (self.count_D > 0)):
            document = int(np.flatnonzero((self.count_D != lengths) & (self.count_D > 0))[0])
            raise self._disagree(
                f"{self.count_D[document]} tokens of sample {document}", int(lengths[document])
            )
        self.offsets_D1: Ints = np.concatenate(
            [[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)]
        )
        if shard.tokens and int(self.offsets_D1[-1]) + 1 != shard.stream_bytes:
            raise CorruptData(
                "shard is not as long as the snapshot says",
                got=f"{int(self.offsets_D1[-1]) + 1} tokens with separators",
                wanted=shard.stream_bytes,
                where=shard.sha256,
            )

    def expect(self, documents: Ints) -> None:
        """Announce the documents that are read next, in order; starts computing transformed
        samples."""
        if self.flat is None:
            self.samples.expect(list(dict.fromkeys(documents.tolist())))

    def overlaps(self, start_P: Ints, length_P: Ints) -> tuple[Ints, Ints]:
        """Return each (window, document) pair that overlaps, as two arrays.

        Window p is ``length_P[p]`` tokens of the framed stream from ``start_P[p]`` on.
        """
        low = np.searchsorted(self.offsets_D1, start_P, side="right") - 1
        high = np.searchsorted(self.offsets_D1[:-1], start_P + length_P, side="left")
        count = high - low
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(np.arange(len(start_P)), count), np.repeat(low, count) + within

    def features(self, document: int) -> dict[str, Array] | None:
        """Return the document's features, or None if it cannot be read."""
        try:
            return self.samples.features(document)
        except CorruptData:
            return None

    def tokens(self, document: int) -> Array | None:
        """Return the document's tokens (none for one of features only); None if unreadable."""
        try:
            tokens = self.samples.tokens(document)
        except CorruptData:
            return None
        wanted = int(self.offsets_D1[document + 1] - self.offsets_D1[document]) - 1
        if len(tokens) not in (0, wanted):  # 0: a sample of features only
            raise InvalidInput(
                "a transform changed a sample's length",
                got=len(tokens),
                wanted=f"{wanted}, as its shard's index says",
                where=f"{self.shard.sha256}#{document}",
                do="Change lengths when the snapshot is built; batches are planned from them.",
            )
        return tokens

    def _disagree(self, got: str, wanted: int) -> CorruptData:
        return CorruptData(
            "shard and its index disagree", got=got, wanted=wanted, where=self.shard.sha256
        )


LENGTHS_AT_ONCE = 16  # small files, and a plan needs those of a whole group


class ShardReader:
    """The open shards of one stream; close it. All methods but ``lengths`` are for one thread only.

    Raises DataRejected once more than ``max_bad_share`` of the shards that this stream reads are in
    quarantine. ``share``: the fraction of the shards that this stream reads.
    ``plans_from_lengths``: the plan is made from document lengths, so that each shard must agree
    with its index. Set both before use.
    """

    def __init__(
        self, shards: Sequence[Shard], cache: ShardCache, *, threads: int, max_bad_share: float
    ) -> None:
        self.shards = shards
        self.share = 1.0
        self.plans_from_lengths = True
        self._cache = cache
        self._max_bad_share = max_bad_share
        self._digests = {each.sha256 for each in shards}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="data-open")
        self._small = ThreadPoolExecutor(LENGTHS_AT_ONCE, thread_name_prefix="data-lengths")
        self._lock = threading.Lock()
        self._known: dict[int, Future[Array]] = {}  # document lengths, for plans
        self._open: dict[int, Future[OpenShard]] = {}
        self._ready: dict[int, OpenShard | None] = {}  # those already returned by ``get``

    def lengths(self, indexes: Sequence[int]) -> list[Array]:
        """Return the index of each shard (see ``ShardCache.index``); for the planning thread."""
        return [each.result() for each in [self._lengths_of(index) for index in indexes]]

    def expect(self, indexes: Sequence[int], planned: Collection[int] = ()) -> None:
        """Open these shards ahead, in this order, and close all others.

        Lengths are kept for these shards and for those in ``planned``.
        """
        wanted = set(indexes)
        remembered = wanted.union(planned)
        with self._lock:
            self._known = {each: its for each, its in self._known.items() if each in remembered}
        for index in [each for each in self._open if each not in wanted]:
            self._forget(index)
        for index in indexes:
            self._submit(index)

    def get(self, index: int) -> OpenShard | None:
        """Return the shard once it is open, or None if it is in quarantine."""
        if index not in self._ready:
            self._ready[index] = self._get(index)
        return self._ready[index]

    def close(self) -> None:
        for index in list(self._open):
            self._forget(index)
        for pool in (self._small, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)

    def _get(self, index: int) -> OpenShard | None:
        try:
            try:
                return self._submit(index).result()
            except TemporaryError as error:  # perhaps long ago: try again
                sha256 = self.shards[index].sha256
                log.warning("opening ahead failed shard=%s error=%s", sha256[:12], error)
                del self._open[index]
                return self._submit(index).result()
        except CorruptData as error:
            self._cache.quarantined.setdefault(self.shards[index].sha256, error.what)
            self._refuse_if_too_many(error)
            return None

    def _submit(self, index: int) -> Future[OpenShard]:
        if index not in self._open:
            self._open[index] = self._pool.submit(self._opened, index)
        return self._open[index]

    def _opened(self, index: int) -> OpenShard:
        shard = self.shards[index]
        try:
            samples = self._cache.samples(shard)
            try:
                needs_none = not self.plans_from_lengths and shard.tokens
                as_stored = needs_none and samples.flat() is not None
                return OpenShard(
                    shard, samples, None if as_stored else self._lengths_of(index).result()[0]
                )
            except BaseException:
                samples.close()
                raise
        except CorruptData:
            log.warning("shard quarantined, going on without it shard=%s", shard.sha256[:12])
            raise

    def _lengths_of(self, index: int) -> Future[Array]:
        with self._lock:
            if index not in self._known:
                self._known[index] = self._small.submit(self._cache.index, self.shards[index])
            return self._known[index]

    def _forget(self, index: int) -> None:
        self._ready.pop(index, None)
        close_later(self._open.pop(index))

    def _refuse_if_too_many(self, error: CorruptData) -> None:
        bad = len(self._digests & set(self._cache.quarantined))
        ours = self.share * len(self._digests)
        # One bad shard of two or three does not stop a stream that has other shards.
        allowed = self._max_bad_share * ours
        if bad > (allowed if self.share == 1.0 else max(1.0, allowed)):
            raise DataRejected(
                "too many data shards are corrupt",
                got=f"{bad} of {ours:.0f}",
                wanted=f"at most {self._max_bad_share:.0%}",
                do="Build the snapshot again from its source.",
            ) from error
