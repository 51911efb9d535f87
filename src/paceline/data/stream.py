"""The training stream: which sample comes when, and its bytes, fetched ahead on a thread.

The order is a pure function of (seed, epoch, cursor); the cursor counts samples since the start of
training over all ranks, so that it means the same to any number of ranks. Batch ``k`` of a job is
samples ``[k·G, (k+1)·G)``; rank ``r`` takes its slice. Each sample comes exactly once an epoch, or
is listed as skipped with its shard (I9).

A sample is a window of ``context + 1`` bytes of one shard's token stream (separator, document,
separator, …); windows overlap by one byte, so that each byte is predicted once. A shard's last
``< context + 1`` bytes make no window: ``SampleOrder.tail_bytes`` counts them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.data.shards import SEPARATOR, ShardCache
from paceline.data.snapshot import Shard, Snapshot, Split, require_purpose
from paceline.errors import CorruptData, DataRejected, InvalidInput, InvalidSnapshot

log = logging.getLogger(__name__)

SHUFFLE_SHARDS = 16  # samples are mixed within groups of so many shards: bounds memory and fetching
MAX_BAD_SHARE = 0.5  # more bad shards than this and training on the rest would mislead

Tokens = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """Where one sample is."""

    epoch: int
    shard: int  # index into the split's shards
    window: int  # index within the shard


class SampleOrder:
    """The order of samples: pure, holds no bytes, and needs only the shards' stream lengths."""

    def __init__(
        self,
        stream_bytes: Sequence[int],
        context: int,
        seed: int,
        shuffle_shards: int = SHUFFLE_SHARDS,
    ) -> None:
        if context < 1 or shuffle_shards < 1:
            raise InvalidInput("bad stream settings", got=f"context {context}", wanted="≥ 1")
        self.context = context
        self.seed = seed
        self.windows = np.array([max(0, (size - 1) // context) for size in stream_bytes])
        self.tail_bytes = int(sum(stream_bytes)) - int(self.windows.sum()) * context
        self.samples = int(self.windows.sum())  # of one epoch
        self._shuffle_shards = shuffle_shards
        self._groups: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()
        self._epoch: tuple[int, list[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None = None
        if self.samples == 0:
            raise InvalidSnapshot(
                "snapshot is too small for one sample",
                got=f"{sum(stream_bytes)} bytes in {len(stream_bytes)} shard(s)",
                wanted=f"a shard of at least {context + 1} bytes",
                do="Use more data, or a smaller model.context.",
            )

    def locate(self, cursor: int) -> Sample:
        """Return the sample that comes ``cursor``-th since the start of training."""
        epoch, position = divmod(cursor, self.samples)
        groups, starts = self._epoch_groups(epoch)
        group = int(np.searchsorted(starts, position, side="right")) - 1
        packed = self._permuted(epoch, group, groups[group])[position - int(starts[group])]
        return Sample(epoch, int(packed) >> 32, int(packed) & 0xFFFFFFFF)

    def _epoch_groups(
        self, epoch: int
    ) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
        """Return the epoch's groups of shards, and the position at which each group starts."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = self._generator(epoch, 0).permutation(len(self.windows))
            step = self._shuffle_shards
            groups = [order[start : start + step] for start in range(0, len(order), step)]
            sizes = np.array([int(self.windows[group].sum()) for group in groups])
            self._epoch = (epoch, groups, np.concatenate([[0], np.cumsum(sizes)[:-1]]))
        return self._epoch[1], self._epoch[2]

    def _permuted(
        self, epoch: int, group: int, shards: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        key = (epoch, group)
        if key not in self._groups:
            packed = np.concatenate(
                [
                    (int(each) << 32) + np.arange(self.windows[each], dtype=np.int64)
                    for each in shards
                ]
            )
            self._groups[key] = self._generator(epoch, group + 1).permutation(packed)
            while len(self._groups) > 2:  # this group and, at an edge, its neighbour
                self._groups.popitem(last=False)
        return self._groups[key]

    def _generator(self, epoch: int, stream: int) -> np.random.Generator:
        # Philox is counter-based: its bits for a key are the same on every platform and version.
        seeds = np.random.SeedSequence([self.seed & 0xFFFFFFFFFFFFFFFF, epoch, stream])
        return np.random.Generator(np.random.Philox(seeds))


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch; T is the context."""

    step: int
    cursor: int  # of the whole job, before this batch
    inputs_BT: Tokens  # noqa: N815 - tensors carry shape letters
    targets_BT: Tokens  # noqa: N815
    weights_B: npt.NDArray[np.float32]  # noqa: N815 - 0 for a sample of a quarantined shard
    rows: range  # this part's rows within the global batch
    skipped: tuple[str, ...] = ()  # shards whose samples were passed over


@dataclass
class SampleStream:
    """Batches for one rank, from any cursor on; use as a context manager, it owns a thread.

    ``tokens`` gives a shard's token stream (``ShardCache.token_bytes`` in production).
    Raises InvalidSnapshot for the wrong purpose, DataRejected when too many shards are bad.
    """

    shards: Sequence[Shard]
    tokens: Callable[[Shard], bytes]
    context: int
    global_batch: int
    seed: int
    rank: int = 0
    world_size: int = 1
    cursor: int = 0
    prefetch: int = 4
    resident_shards: int = 2 * SHUFFLE_SHARDS
    quarantined: dict[str, str] = field(default_factory=dict)
    data_wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.cursor % self.global_batch:
            raise InvalidInput("cursor is not at a batch's edge", got=self.cursor)
        if not 1 <= self.world_size <= self.global_batch:
            raise InvalidInput(
                "more ranks than samples in a batch",
                got=f"{self.world_size} ranks, {self.global_batch} sequences",
                wanted="at least one sequence for each rank",
                do="Raise training.batch_sequences or lower training.ranks.",
            )
        self.order = SampleOrder(
            [each.stream_bytes for each in self.shards], self.context, self.seed
        )
        self._resident: OrderedDict[int, Tokens | None] = OrderedDict()
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=self.prefetch)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_snapshot(
        cls,
        snapshot: Snapshot,
        split: Split,
        cache: ShardCache,
        *,
        purpose: str,
        context: int,
        global_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        cursor: int = 0,
    ) -> SampleStream:
        """Return the stream of one split of ``snapshot``, read through ``cache``."""
        require_purpose(snapshot, purpose)
        return cls(
            shards=snapshot.of_split(split),
            tokens=cache.token_bytes,
            context=context,
            global_batch=global_batch,
            seed=seed,
            rank=rank,
            world_size=world_size,
            cursor=cursor,
            quarantined=cache.quarantined,
        )

    @property
    def rows(self) -> range:
        """Return which rows of each global batch are this rank's."""
        size, rank, world = self.global_batch, self.rank, self.world_size
        return range(size * rank // world, size * (rank + 1) // world)

    def batch_at(self, cursor: int) -> Batch:
        """Return this rank's part of the batch that starts at ``cursor``; no thread needed."""
        length = self.context + 1
        rows_BL = np.full((len(self.rows), length), SEPARATOR, dtype=np.uint8)
        weights_B = np.ones(len(self.rows), dtype=np.float32)
        skipped: list[str] = []
        for index, row in enumerate(self.rows):
            sample = self.order.locate(cursor + row)
            stream = self._shard_tokens(sample.shard)
            if stream is None:
                weights_B[index] = 0.0
                skipped.append(self.shards[sample.shard].sha256)
                continue
            start = sample.window * self.context
            rows_BL[index] = stream[start : start + length]
        return Batch(
            step=cursor // self.global_batch,
            cursor=cursor,
            inputs_BT=rows_BL[:, :-1],
            targets_BT=rows_BL[:, 1:],
            weights_B=weights_B,
            rows=self.rows,
            skipped=tuple(sorted(set(skipped))),
        )

    def next(self) -> Batch:
        """Return the next batch; the time spent waiting for it is added to ``data_wait_s``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="sample-stream", daemon=True)
            self._thread.start()
        started = time.perf_counter()
        got = self._queue.get()
        self.data_wait_s += time.perf_counter() - started
        if isinstance(got, BaseException):
            raise got
        self.cursor = got.cursor + self.global_batch
        return got

    def close(self) -> None:
        """Stop the thread that reads ahead."""
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    self._thread.join(0.02)

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> None:
        cursor = self.cursor
        try:
            while not self._stop.is_set():
                self._put(self.batch_at(cursor))
                cursor += self.global_batch
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
            self._put(error)

    def _put(self, item: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _shard_tokens(self, index: int) -> Tokens | None:
        if index in self._resident:
            self._resident.move_to_end(index)
            return self._resident[index]
        shard = self.shards[index]
        tokens: Tokens | None
        try:
            tokens = np.frombuffer(self.tokens(shard), dtype=np.uint8)
        except CorruptData as error:
            log.warning("shard quarantined, going on without it shard=%s", shard.sha256[:12])
            self.quarantined.setdefault(shard.sha256, error.what)
            self._refuse_if_too_many(error)
            tokens = None
        self._resident[index] = tokens
        while len(self._resident) > self.resident_shards:
            self._resident.popitem(last=False)
        return tokens

    def _refuse_if_too_many(self, error: CorruptData) -> None:
        ours = {each.sha256 for each in self.shards}
        bad = len(ours & set(self.quarantined))
        if bad > MAX_BAD_SHARE * len(ours):
            raise DataRejected(
                "too many data shards are corrupt",
                got=f"{bad} of {len(ours)}",
                wanted=f"at most {MAX_BAD_SHARE:.0%}",
                do="Build the snapshot again from its source.",
            ) from error
