"""The training stream: one rank's share of batch after batch, made ahead of time on a thread.

What comes when is a Plan's (``paceline.data.batching``), a pure function of (seed, epoch, group);
the position counts global batches, so that it means the same to any number of ranks. Rank ``r`` of
``n`` takes rows ``[G·r/n, G·(r+1)/n)`` of each global batch of ``G`` rows. Each sample comes once
an epoch, or is listed as skipped (I9). The last batch of an epoch goes on into the next one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from paceline.data.batch import Batch, Tokens
from paceline.data.batching import Plan, Rows, WindowPlan
from paceline.data.batching.fill import fill
from paceline.data.batching.rows import identity
from paceline.data.position import Position
from paceline.data.shards import SEPARATOR
from paceline.data.snapshot import Shard, Snapshot, Split
from paceline.errors import CorruptData, DataRejected, InvalidInput, NotReady
from paceline.profile import DataSettings

log = logging.getLogger(__name__)

NEXT_DEADLINE_S = 1800.0  # for one batch: the guard's deadline of a step ends the rank long before
Transform = Callable[[Batch], Batch]


class Shards(Protocol):
    """What a stream needs of a shard cache."""

    quarantined: dict[str, str]  # sha256 → why

    def token_bytes(self, shard: Shard) -> bytes: ...


class Stream(Protocol):
    """What a training loop needs; a context manager, for it owns threads."""

    context: int
    global_batch: int
    data_wait_s: float
    quarantined: dict[str, str]

    @property
    def position(self) -> dict[str, Any]: ...
    def next(self) -> Batch: ...
    def close(self) -> None: ...
    def __enter__(self) -> Stream: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_stream(
    snapshot: Snapshot,
    split: Split,
    cache: Shards,
    settings: DataSettings,
    *,
    context: int,
    global_batch: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    position: Mapping[str, Any] | None = None,
    skip: Collection[int] = (),
    transform: Transform | None = None,
) -> PlannedStream:
    """Return the stream of one split of ``snapshot``; ``rank`` and ``world_size`` count data ranks.

    ``position`` is what an earlier stream's ``position`` was, on any number of ranks; ``skip`` are
    numbers of global batches to pass over; ``transform`` runs on each batch, off the training
    thread. Raises InvalidInput for a position of other settings or more ranks than rows,
    InvalidSnapshot for too little data.
    """
    shards = snapshot.of_split(split)
    return PlannedStream(
        plan_of(shards, settings, context=context, global_batch=global_batch, seed=seed),
        shards,
        cache,
        rank=rank,
        world_size=world_size,
        position=position,
        skip=skip,
        transform=transform,
        prefetch_batches=settings.prefetch_batches,
        max_bad_share=settings.max_bad_share,
    )


def plan_of(
    shards: Sequence[Shard],
    settings: DataSettings,
    *,
    context: int,
    global_batch: int,
    seed: int,
) -> Plan:
    """Return the plan that ``settings.batching`` names."""
    if settings.batching != "windows":
        raise InvalidInput(
            "this batching is not there yet", got=settings.batching, wanted="windows"
        )
    return WindowPlan([each.stream_bytes for each in shards], context, global_batch, seed)


class PlannedStream:
    """A Stream of the batches of a Plan, its tokens read through a cache of shards.

    Raises DataRejected when too many shards are bad, and whatever reading raised.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Shard],
        cache: Shards,
        *,
        rank: int = 0,
        world_size: int = 1,
        position: Mapping[str, Any] | None = None,
        skip: Collection[int] = (),
        transform: Transform | None = None,
        prefetch_batches: int = 4,
        max_bad_share: float = 0.5,
    ) -> None:
        if not 1 <= world_size <= plan.global_batch:
            raise InvalidInput(
                "more ranks than samples in a batch",
                got=f"{world_size} ranks, {plan.global_batch} sequences",
                wanted="at least one sequence for each rank",
                do="Raise training.batch_sequences or lower training.ranks.",
            )
        self.plan = plan
        self.shards = shards
        self.context = plan.context
        self.global_batch = plan.global_batch
        self.quarantined = cache.quarantined
        self.data_wait_s = 0.0
        size = plan.global_batch
        self.rows = range(size * rank // world_size, size * (rank + 1) // world_size)
        self._cache = cache
        self._skip = frozenset(skip)
        self._transform = transform
        self._max_bad_share = max_bad_share
        self._digests = {each.sha256 for each in shards}
        self._position = Position(**identity(plan)).resumed(position)
        self._planned: OrderedDict[tuple[int, int], Rows] = OrderedDict()
        self._resident: OrderedDict[int, Tokens | None] = OrderedDict()
        self._queue: queue.Queue[tuple[Batch, Position] | BaseException] = queue.Queue(
            maxsize=prefetch_batches
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def position(self) -> dict[str, Any]:
        """Return where the batch after the last one handed over starts."""
        return self._position.to_json()

    def next(self) -> Batch:
        """Return the next batch; the time spent waiting for it is added to ``data_wait_s``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="data-stream", daemon=True)
            self._thread.start()
        started = time.perf_counter()
        try:
            got = self._queue.get(timeout=NEXT_DEADLINE_S)
        except queue.Empty as error:
            raise NotReady("no batch of data came", wanted=f"one in {NEXT_DEADLINE_S} s") from error
        finally:
            self.data_wait_s += time.perf_counter() - started
        if isinstance(got, BaseException):
            raise got
        batch, self._position = got
        return batch

    def make(self, position: Position) -> tuple[Batch, Position]:
        """Return this rank's share of the batch at ``position``, and the position after it."""
        passed: list[str] = []
        while position.batch in self._skip:
            taken, after = self._take(position)
            passed.append(self._listed(position.batch, taken))
            position = after
        taken, after = self._take(position)
        batch = self._filled(position.batch, taken)
        if passed:
            batch = replace(batch, skipped=(*batch.skipped, *passed))
            if batch.carries_B is not None:  # the model has not seen what these rows would go on
                batch = replace(batch, carries_B=np.zeros_like(batch.carries_B))
        return (batch if self._transform is None else self._transform(batch)), after

    def close(self) -> None:
        """Stop the thread that makes batches ahead."""
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    self._thread.join(0.02)

    def __enter__(self) -> PlannedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> None:
        position = self._position
        try:
            while not self._stop.is_set():
                batch, position = self.make(position)
                self._put((batch, position))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
            self._put(error)

    def _put(self, item: tuple[Batch, Position] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _take(self, position: Position) -> tuple[list[tuple[Rows, int, int]], Position]:
        """Return the rows of the whole global batch at ``position``, and the position after it."""
        taken: list[tuple[Rows, int, int]] = []
        missing = self.global_batch
        epoch, group, item = position.epoch, position.group, position.item
        while missing:
            rows = self._rows(epoch, group)
            if item > len(rows):
                raise InvalidInput(
                    "position is beyond its group", got=item, wanted=f"at most {len(rows)}"
                )
            stop = min(item + missing, len(rows))
            if stop > item:
                taken.append((rows, item, stop))
                missing -= stop - item
                item = stop
            if missing:
                group, item = group + 1, 0
                if group == self.plan.groups:
                    epoch, group = epoch + 1, 0
        after = replace(position, batch=position.batch + 1, epoch=epoch, group=group, item=item)
        return taken, after

    def _filled(self, number: int, taken: list[tuple[Rows, int, int]]) -> Batch:
        tokens = sum(
            int(rows.tokens_R1[stop] - rows.tokens_R1[start]) for rows, start, stop in taken
        )
        rows, start, _ = taken[0]
        width = self.context if rows.width_R is None else int(rows.width_R[start])
        ours = _of_rows(taken, self.rows)
        filled = fill(ours, width, self._stream, SEPARATOR, np.uint8)
        return Batch(
            step=number,
            inputs_BT=filled.inputs_BT,
            targets_BT=filled.targets_BT,
            weights_BT=filled.weights_BT,
            rows=self.rows,
            global_tokens=float(tokens),
            documents_BT=filled.documents_BT,
            positions_BT=filled.positions_BT,
            carries_B=filled.carries_B,
            skipped=tuple(sorted(self.shards[each].sha256 for each in filled.missing)),
        )

    def _listed(self, number: int, taken: list[tuple[Rows, int, int]]) -> str:
        found = []
        for rows, start, stop in taken:
            pieces = slice(int(rows.first_R1[start]), int(rows.first_R1[stop]))
            found += [
                f"{self.shards[shard].sha256}[{at}:{at + length}]"
                for shard, at, length in zip(
                    rows.shard_P[pieces].tolist(),
                    rows.start_P[pieces].tolist(),
                    rows.length_P[pieces].tolist(),
                    strict=True,
                )
            ]
        return f"batch {number}: {' '.join(found)}"

    def _rows(self, epoch: int, group: int) -> Rows:
        key = (epoch, group)
        if key not in self._planned:
            self._planned[key] = self.plan.rows(epoch, group)
            while len(self._planned) > 2:  # this group and, at an edge, its neighbour
                self._planned.popitem(last=False)
        return self._planned[key]

    def _stream(self, index: int) -> Tokens | None:
        if index in self._resident:
            self._resident.move_to_end(index)
            return self._resident[index]
        shard = self.shards[index]
        tokens: Tokens | None
        try:
            tokens = np.frombuffer(self._cache.token_bytes(shard), dtype=np.uint8)
        except CorruptData as error:
            log.warning("shard quarantined, going on without it shard=%s", shard.sha256[:12])
            self.quarantined.setdefault(shard.sha256, error.what)
            self._refuse_if_too_many(error)
            tokens = None
        self._resident[index] = tokens
        while len(self._resident) > self._resident_limit():
            self._resident.popitem(last=False)
        return tokens

    def _resident_limit(self) -> int:
        return 2 * max(len(self.plan.shards(*key)) for key in self._planned)

    def _refuse_if_too_many(self, error: CorruptData) -> None:
        bad = len(self._digests & set(self.quarantined))
        if bad > self._max_bad_share * len(self._digests):
            raise DataRejected(
                "too many data shards are corrupt",
                got=f"{bad} of {len(self._digests)}",
                wanted=f"at most {self._max_bad_share:.0%}",
                do="Build the snapshot again from its source.",
            ) from error


def _of_rows(taken: list[tuple[Rows, int, int]], wanted: range) -> list[tuple[Rows, int, int]]:
    """Return the part of a global batch's rows that ``wanted`` names."""
    found = []
    first = 0
    for rows, start, stop in taken:
        low = max(wanted.start, first)
        high = min(wanted.stop, first + stop - start)
        if low < high:
            found.append((rows, start + low - first, start + high - first))
        first += stop - start
    return found
