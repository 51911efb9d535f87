"""The training stream: one rank's share of each global batch, prepared on a background thread.

A Plan (``paceline.data.batching``), a pure function of (seed, epoch, group), decides the order; the
position counts global batches, so that it is valid for any number of ranks. Rank ``r`` of ``n``
takes rows ``[G·r/n, G·(r+1)/n)`` of each global batch of ``G`` rows. Each sample comes once an
epoch, or is listed as skipped (I9). The last batch of an epoch continues into the next one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.config import DataSettings
from paceline.data.batching import (
    BucketedPlan,
    DocumentPlan,
    GroupPlanner,
    PackedPlan,
    Plan,
    RowFiller,
    Rows,
    ShardReader,
    StatefulPlan,
    WindowPlan,
    identity,
)
from paceline.data.loading.batch import Batch, Position
from paceline.data.loading.columns import columns_by, columns_read, open_concurrency
from paceline.data.loading.shards import ShardCache
from paceline.data.snapshot import (
    BYTE_VOCABULARY,
    Column,
    Shard,
    Snapshot,
    Split,
    Vocabulary,
    require_batching,
)
from paceline.errors import InvalidInput, NotReady

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 60.0  # for the current batch: a user's transform may hang
NEXT_DEADLINE_S = 1800.0  # for one batch; training's deadline of a step is far shorter
MOST_AT_ONCE = 32  # maximum of small batches made at once


def open_stream(
    snapshot: Snapshot,
    split: Split,
    cache: ShardCache,
    settings: DataSettings,
    *,
    context: int,
    global_batch: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    position: Mapping[str, Any] | None = None,
    skip: Collection[int] = (),
    readers: int = 1,
    begin: int | None = None,
) -> PlannedStream:
    """Return the stream of one split of ``snapshot``; ``rank`` and ``world_size`` count data ranks.

    ``position`` is an earlier stream's ``position``, on any number of ranks; ``skip`` are numbers
    of global batches to skip. ``readers``: the number of readers, each with its own disk, at the
    job's start (see ``loading.columns``). ``begin``: the first input of each text, by default the
    separator. Raises InvalidInput for a position of other settings or
    more ranks than rows, InvalidSnapshot for too little data.
    """
    return PlannedStream(
        snapshot.of_split(split),
        cache,
        settings,
        context=context,
        global_batch=global_batch,
        seed=seed,
        vocabulary=snapshot.vocabulary,
        columns=snapshot.columns,
        rank=rank,
        world_size=world_size,
        position=position,
        skip=skip,
        readers=readers,
        begin=begin,
    )


def _plan_of(
    settings: DataSettings,
    shards: Sequence[Shard],
    reader: ShardReader,
    context: int,
    global_batch: int,
    seed: int,
    width: int,
) -> Plan:
    """Return the plan of ``settings.batching`` with ``width`` columns."""
    sizes = [each.stream_bytes for each in shards]
    if settings.batching == "windows":
        return WindowPlan(sizes, context, global_batch, seed, columns=width)
    kinds = {"packed": PackedPlan, "bucketed": BucketedPlan, "carried": StatefulPlan}
    kind: type[DocumentPlan] = kinds[settings.batching]
    counts = [each.samples for each in shards]
    return kind(sizes, reader.lengths, context, global_batch, seed, columns=width, documents=counts)


class PlannedStream:
    """The batches of a Plan, made ahead on a thread; tokens are read through a cache of shards.

    See ``open_stream``. ``next`` raises DataRejected when too many shards are bad, and any error of
    reading.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        cache: ShardCache,
        settings: DataSettings,
        *,
        context: int,
        global_batch: int,
        seed: int,
        vocabulary: Vocabulary = BYTE_VOCABULARY,
        columns: Sequence[Column] = (),
        rank: int = 0,
        world_size: int = 1,
        position: Mapping[str, Any] | None = None,
        skip: Collection[int] = (),
        readers: int = 1,
        begin: int | None = None,
    ) -> None:
        require_batching(settings.batching, [each.name for each in columns])
        if not settings.columns and position is not None:  # keep those that the stream started with
            kept = position.get("columns", 1)
            if type(kept) is int and 0 < kept <= global_batch:
                settings = settings.model_copy(update={"columns": kept})
        if not 1 <= world_size <= global_batch:
            raise InvalidInput(
                "more ranks than samples in a batch",
                got=f"{world_size} ranks, {global_batch} sequences",
                wanted="at least one sequence for each rank",
                do="Raise training.batch_sequences or lower training.ranks.",
            )
        threads = open_concurrency(settings.prefetch_shards, [each.bytes for each in shards])
        self._reader = ShardReader(
            shards, cache, threads=threads, max_bad_share=settings.max_bad_share
        )
        width = columns_by(settings, shards, context, global_batch, readers)
        plan = _plan_of(settings, shards, self._reader, context, global_batch, seed, width)
        self.plan = plan
        self.shards = shards
        self.context = context
        self.global_batch = global_batch
        self.quarantined = cache.quarantined
        self.data_wait_s = 0.0
        edges = [global_batch * each // world_size for each in (rank, rank + 1)]
        self.rows = range(*edges)
        self.columns = columns_read(self.rows, global_batch, plan.columns)
        self._reader.share = len(self.columns) / plan.columns
        self._reader.plans_from_lengths = plan.needs_lengths
        self._ahead = GroupPlanner(plan, self.rows)
        self._filler = RowFiller(
            vocabulary, columns, lambda index: shards[index].sha256, settings.token_features, begin
        )
        self._skip = frozenset(skip)
        self._position = Position(**identity(plan)).resumed(position)
        self._queue: queue.Queue[tuple[Batch, Position] | BaseException] = queue.Queue(
            maxsize=settings.prefetch_batches
        )
        self._stop = threading.Event()
        self._error: BaseException | None = None  # the error that ended the thread
        self._thread: threading.Thread | None = None

    @property
    def position(self) -> dict[str, Any]:
        """Return the position of the batch after the last one returned."""
        return self._position.to_json()

    def start(self) -> None:
        """Start preparing batches before the first ``next``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="data-stream", daemon=True)
            self._thread.start()

    def next(self) -> Batch:
        """Return the next batch; the time spent waiting for it is added to ``data_wait_s``."""
        if self._error is not None:
            raise self._error
        self.start()
        started = time.perf_counter()
        try:
            got = self._queue.get(timeout=NEXT_DEADLINE_S)
        except queue.Empty as error:
            raise NotReady("no batch of data came", wanted=f"one in {NEXT_DEADLINE_S} s") from error
        finally:
            self.data_wait_s += time.perf_counter() - started
        if isinstance(got, BaseException):
            self._error = got
            raise got
        batch, self._position = got
        return batch

    def make(self, position: Position) -> tuple[Batch, Position]:
        """Return this rank's share of the batch at ``position``, and the position after it."""
        return self._make_batches(position, 1)[0]

    def close(self) -> None:
        self._stop.set()
        until_s = time.monotonic() + CLOSE_DEADLINE_S
        if self._thread is not None:
            while self._thread.is_alive():
                if time.monotonic() > until_s:  # a daemon thread
                    log.warning("the thread that makes batches does not end, left behind")
                    break
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    self._thread.join(0.02)
        self._ahead.close()
        self._reader.close()

    def __enter__(self) -> PlannedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> None:
        position = self._position
        at_once = 1  # return the first batch soon
        try:
            while not self._stop.is_set():
                for batch, after in self._make_batches(position, at_once):
                    self._put((batch, after))
                    position = after
                at_once = min(2 * at_once, MOST_AT_ONCE)
        except BaseException as error:  # noqa: BLE001 - raised by ``next``
            self._put(error)

    def _put(self, item: tuple[Batch, Position] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _make_batches(self, position: Position, most: int) -> list[tuple[Batch, Position]]:
        """Return this rank's shares of one to ``most`` batches from ``position`` on.

        Each comes with the position after it; several batches are always of one group.
        """
        self._look_ahead(position)
        passed: list[str] = []
        while position.batch in self._skip:
            taken, after = self._ahead.take(position)
            passed.append(self._listed(position.batch, taken))
            position = after
        planned = self._ahead.next(position, most, self._skip)
        batches = self._filler.fill(planned, self.rows, position.batch, self._reader.get)
        if passed:
            first = batches[0]
            batches[0] = replace(first, skipped=(*first.skipped, *passed))
            if first.carries_B is not None:  # the rows that these continue were skipped
                batches[0] = replace(batches[0], carries_B=np.zeros_like(first.carries_B))
        return list(zip(batches, planned.after_K, strict=True))

    def _listed(self, number: int, taken: list[tuple[Rows, int, int]]) -> str:
        """Return a description of the samples of a skipped batch, by shard."""
        found: dict[int, list[str]] = {}
        for rows, start, stop in taken:
            pieces = slice(int(rows.first_R1[start]), int(rows.first_R1[stop]))
            starts, lengths = rows.start_P[pieces].tolist(), rows.length_P[pieces].tolist()
            names = [f"{at}:{at + length}" for at, length in zip(starts, lengths, strict=True)]
            for shard, name in zip(rows.shard_P[pieces].tolist(), names, strict=True):
                found.setdefault(shard, []).append(name)
        listed = [f"{self.shards[each].sha256}[{','.join(found[each])}]" for each in sorted(found)]
        return f"batch {number}: {' '.join(listed)}"

    def _look_ahead(self, position: Position) -> None:
        """Plan this group and the next, open their shards, and close all others."""
        if not (keys := self._ahead.look(position)):
            return
        indexes = [int(each) for key in keys for each in self.plan.shards(*key, self.columns)]
        planned = [int(each) for key in keys for each in self.plan.shards(*key)]
        self._reader.expect(list(dict.fromkeys(indexes)), planned)
