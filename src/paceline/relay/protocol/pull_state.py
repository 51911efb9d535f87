"""The state of a session's pulls: which pieces are verified, in flight (and from where) or wanted.

It holds the pull tasks of the current lanes, the open streams with their requests, and the side
requests: repairs, a hedge, failback probes. It chooses no sources; ``pulling`` does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.relay.protocol.deadlines import Deadlines
from paceline.relay.protocol.events import Fetch, SessionAction
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.recovery import Repairs
from paceline.relay.protocol.source_selection import PullTask, SourceSelector, SourceStream
from paceline.schemas import Source, WorkerLanes


class PullTasks:
    """A plan's lanes as pull tasks: disjoint runs that tile the model, in the order of pieces.

    Empty where no lane names a source.
    """

    def __init__(self, tasks: list[PullTask]) -> None:
        self._all = sorted(tasks, key=lambda task: task.extent.first)
        self._starts = [task.extent.first for task in self._all]

    @classmethod
    def of(cls, lanes: WorkerLanes, pieces: PieceMap) -> PullTasks:
        """Return the pull tasks of ``lanes``. Pieces that no lane names may come from any source of
        the lanes: this worker may hold fewer durable pieces than the planner assumed, and a held
        piece may become corrupt.
        """
        tasks: list[PullTask] = []
        covered = Extents()
        sources: dict[str, Source] = {}
        for lane in lanes.lanes:
            candidates = _ordered_candidates((lane.source, *lane.spares), lanes.worker_id)
            sources |= {each.key: each for each in candidates}
            extent = pieces.chunk_range(lane.first_chunk, lane.last_chunk)
            if candidates and extent.size:
                for run in list(covered.gaps(extent)):
                    tasks.append(PullTask(run, candidates, lane.expected_bytes_s))
                    covered.add(run)
        if sources:
            last_origin = tuple(sorted(sources.values(), key=lambda each: each.kind == "origin"))
            rest = covered.gaps(Extent(0, pieces.count))
            tasks += [PullTask(run, last_origin) for run in rest]
        return cls(tasks)

    def __iter__(self) -> Iterator[PullTask]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def parts(self, extent: Extent) -> Iterator[tuple[PullTask, Extent]]:
        """Yield the pull tasks that overlap ``extent``, each with its part of it."""
        first, stop = extent
        for at in range(max(0, bisect_right(self._starts, first) - 1), len(self._all)):
            task = self._all[at]
            begin, end = task.extent
            if begin >= stop:
                return
            if first >= begin and stop <= end:
                yield task, extent
                return
            if first < end:
                yield task, Extent(max(first, begin), min(stop, end))

    def sharing(self, task: PullTask) -> int:
        """Return how many pull tasks share this one's source and still want pieces, with itself."""
        others = (each for each in self._all if each is not task and each.active == task.active)
        return 1 + sum(each.unrequested > 0 for each in others)


def _ordered_candidates(candidates: tuple[Source, ...], worker_id: str) -> tuple[Source, ...]:
    """Return the candidates once each, without the worker itself, origins last."""
    unique = {each.key: each for each in reversed(candidates) if each.worker_id != worker_id}
    ordered = list(reversed(unique.values()))
    return (*ordered[:1], *sorted(ordered[1:], key=lambda each: each.kind == "origin"))


# Hedged requests (A10): at the end of a transfer one slow source would delay everything. Once
# nothing is left to request, the oldest pieces in flight are requested from a spare too. The first
# copy wins, the other is dropped.


@dataclass(slots=True, eq=False)
class Hedge:
    """Pieces requested from a second source while they are in flight from the first."""

    key: str
    pieces: Extents
    requested_s: float


class Hedging:
    """The current hedged request, if any, and the rest of this plan's allowance. Sends nothing."""

    def __init__(self, limits: SessionLimits, pieces: PieceMap, deadlines: Deadlines) -> None:
        self._limits = limits
        self._pieces = pieces
        self._deadlines = deadlines
        self._left = 0  # pieces
        self.hedge: Hedge | None = None
        self.due_s: float | None = None  # when the oldest piece in flight is late; set at the end

    def reset(self) -> None:
        """Reset the allowance for a new plan: a small share of all pieces."""
        self.hedge = self.due_s = None
        share = int(self._pieces.count * self._limits.hedge_share)
        self._left = max(self._limits.least_hedges, share)

    @property
    def is_possible(self) -> bool:
        """Return whether a hedged request may start now."""
        return self.hedge is None and self._left > 0

    def oldest(
        self, open_streams: Iterable[SourceStream], tasks: PullTasks
    ) -> tuple[PullTask, Extent] | None:
        """Return the pieces in flight from a worker that become late first; sets ``due_s``.

        Pieces from the origin are excluded: it retries by itself, and no other source has them.
        """
        due: list[tuple[float, PullTask, Extent]] = []
        for stream in open_streams:
            if stream.source.kind == "worker" and (oldest := stream.oldest()) is not None:
                requested_s, run = oldest
                task, part = next(tasks.parts(run))
                due.append((self._deadlines.late_at_s(task, requested_s), task, part))
        if not due:
            return None
        self.due_s, task, part = min(due, key=lambda each: each[0])
        return task, part

    def start(self, key: str, run: Extent, now_s: float) -> Extent:
        """Record a hedge of the first pieces of ``run`` at source ``key``; return these pieces."""
        most = min(self._limits.hedge_pieces, self._left)
        fits = self._pieces.fitting(run, self._limits.window_bytes, most)
        extent = Extent(run.first, max(fits.stop, run.first + 1))
        self._left -= extent.size
        self.hedge = Hedge(key, Extents([extent]), now_s)
        return extent

    def arrived(self, extent: Extent) -> None:
        """Remove pieces that arrived, or that the hedge will not deliver."""
        if self.hedge is not None:
            self.hedge.pieces.remove(extent)
            if not self.hedge.pieces:
                self.hedge = None


class PullState:
    """The state of every piece: verified, in flight from one source, in a side request, or wanted.

    Also the pull tasks and the open streams of the session.
    """

    def __init__(
        self,
        pieces: PieceMap,
        verified: Extents,
        choice: SourceSelector,
        repairs: Repairs,
        hedging: Hedging,
    ) -> None:
        self.pieces = pieces
        self.verified = verified  # the session's own set, updated here
        self.choice = choice
        self.repairs = repairs
        self.hedging = hedging
        self._streams = 0
        self.tasks = PullTasks([])
        self.open_streams: dict[str, SourceStream] = {}

    # ── lanes and streams ────────────────────────────────────────────────────────────────────────

    def set_tasks(self, tasks: PullTasks, now_s: float) -> None:
        """Switch to the pull tasks of a new plan; streams that stay keep their requests."""
        self.tasks = tasks
        for task in tasks:
            self._count_pieces(task, now_s)
        for stream in self.open_streams.values():
            stream.side_requests = Extents()
            for repair in self.repairs.requested_at(stream.source.key):
                stream.side_requests.add(repair.piece)

    def _count_pieces(self, task: PullTask, now_s: float) -> None:
        """Count the pieces of ``task`` that are verified, in flight, or under repair."""
        held = list(self.verified.common(task.extent))
        task.missing = task.extent.size - sum(run.size for run in held)
        for run in held:
            task.claimed.add(run)
        for repair in self.repairs:
            if task.extent.first <= repair.piece.first < task.extent.stop:
                task.claimed.add(repair.piece)
        for key, stream in self.open_streams.items():
            for run in list(stream.in_flight.common(task.extent)):
                if task.is_first_choice(key):
                    task.claimed.add(run)
                    task.requested_pieces += run.size
                    task.requested_bytes += self.pieces.bytes_of(run)
                else:
                    stream.in_flight.remove(run)  # the stream continues with other lanes only
        if task.candidates[0].key in self.open_streams:
            task.active = task.candidates[0].key
        task.progress_s = now_s

    @property
    def origin_in_flight_bytes(self) -> int:
        """Return how many bytes are in flight from the origin."""
        origins = [
            stream for stream in self.open_streams.values() if stream.source.kind == "origin"
        ]
        runs = (
            run
            for stream in origins
            for extents in (stream.in_flight, stream.side_requests)
            for run in extents
        )
        return sum(map(self.pieces.bytes_of, runs))

    def find_stream(self, key: str, stream_id: int) -> SourceStream | None:
        """Return the stream, or None if it was abandoned."""
        stream = self.open_streams.get(key)
        return stream if stream is not None and stream.stream_id == stream_id else None

    def stream_of(self, task: PullTask) -> SourceStream | None:
        """Return the stream that ``task`` uses now."""
        return None if task.active is None else self.open_streams.get(task.active)

    def open(self, source: Source, now_s: float) -> SourceStream:
        """Return the open stream from ``source``, or a new one."""
        stream = self.open_streams.get(source.key)
        if stream is None:
            self._streams += 1
            stream = SourceStream(source, self._streams, now_s, now_s)
            self.open_streams[source.key] = stream
        return stream

    def close(self, stream: SourceStream) -> None:
        """Remove a stream; its pieces in flight are wanted again."""
        key = stream.source.key
        del self.open_streams[key]
        for run in list(stream.in_flight):
            self.requeue(stream, run)
        for repair in self.repairs.requested_at(key):
            repair.unanswered()
        if self.hedging.hedge is not None and self.hedging.hedge.key == key:
            self.hedging.hedge = None
        for task in self.tasks:
            if task.active == key:
                task.active = None
            if task.failback_state is not None and task.is_first_choice(key):
                self.end_probe(task, takes_over=False)

    def is_idle(self, stream: SourceStream) -> bool:
        """Return whether nothing is in flight from ``stream`` and nothing more is wanted from
        it."""
        key = stream.source.key
        return not stream.waiting and not any(
            task.active == key and task.unrequested for task in self.tasks
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def request(
        self,
        stream: SourceStream,
        extent: Extent,
        now_s: float,
        actions: list[SessionAction],
        *,
        is_side_request: bool = False,
        charge: bool = True,
    ) -> None:
        """Request ``extent`` from ``stream``; ``is_side_request`` for a repair, hedge or
        probe; ``charge`` the origin budget for it.
        """
        actions.append(Fetch(stream.source, stream.stream_id, extent))
        if charge and stream.source.kind == "origin":
            self.choice.budget.spent_bytes += self.pieces.bytes_of(extent)
        if not stream.waiting:
            stream.last_signal_s = now_s
        if is_side_request:
            stream.side_requests.add(extent)
            return
        for task, part in self.tasks.parts(extent):
            if not task.requested_pieces:
                task.progress_s = now_s
            self._mark_in_flight(stream, task, part, now_s)

    def _mark_in_flight(
        self, stream: SourceStream, task: PullTask, part: Extent, requested_s: float
    ) -> None:
        """Record ``part`` of ``task`` as in flight from ``stream``."""
        task.claimed.add(part)
        task.requested_pieces += stream.in_flight.add(part)
        task.requested_bytes += self.pieces.bytes_of(part)
        stream.requests.append((requested_s, part))

    def requeue(self, stream: SourceStream, extent: Extent) -> None:
        """Mark ``extent`` as no longer in flight; hedged pieces become in flight from the spare."""
        hedge = self.hedging.hedge
        other = self.open_streams.get(hedge.key) if hedge is not None else None
        for task, part in self.tasks.parts(extent):
            self.drop_from(stream, task, part)
            task.claimed.remove(part)
            if hedge is None or other is None or other is stream:
                continue
            for run in list(hedge.pieces.common(part)):
                self.hedging.arrived(run)
                other.side_requests.remove(run)
                self._mark_in_flight(other, task, run, hedge.requested_s)
                task.active, task.progress_s = hedge.key, hedge.requested_s

    def leave_source(self, task: PullTask, key: str) -> None:
        """Stop using source ``key`` for ``task``; its pieces in flight are wanted again."""
        if (stream := self.open_streams.get(key)) is not None:
            for run in list(stream.in_flight.common(task.extent)):
                self.requeue(stream, run)
        task.active = None if task.active == key else task.active

    def end_probe(self, task: PullTask, *, takes_over: bool) -> None:
        """End the failback probe of ``task``. With ``takes_over`` its piece counts as in flight
        from the planned source, otherwise it is wanted again.
        """
        if task.failback_state is None or (probe := task.failback_state.probe) is None:
            return
        stream, task.failback_state.probe = (self.open_streams.get(task.candidates[0].key), None)
        if stream is not None:
            stream.side_requests.remove(probe.piece)
        if takes_over and stream is not None:
            self._mark_in_flight(stream, task, probe.piece, probe.requested_s)
        elif not self.verified.covers(probe.piece):
            task.claimed.remove(probe.piece)

    def cancel_side_request(self, stream: SourceStream, extent: Extent) -> None:
        """Withdraw side requests of ``stream``, except pieces that another side request there
        needs: a piece that was hedged and then arrived corrupt is under repair at the same source.
        """
        stream.side_requests.remove(extent)
        key, hedge = stream.source.key, self.hedging.hedge
        others = Extents(each.piece for each in self.repairs.requested_at(key))
        if hedge is not None and hedge.key == key:
            for run in hedge.pieces:
                others.add(run)
        for run in others.common(extent):
            stream.side_requests.add(run)

    # ── arrivals and losses ──────────────────────────────────────────────────────────────────────

    def record_verified(
        self, extent: Extent, now_s: float, sender: SourceStream | None = None
    ) -> int:
        """Record pieces as verified and end every request for them; return how many are new."""
        if not self.tasks:
            return self.verified.add(extent)
        new = 0
        for task, part in self.tasks.parts(extent):
            fresh = self.verified.add(part)
            if fresh:
                new += fresh
                task.missing -= fresh
                task.progress_s = now_s
                if task.stalled_sources and sender is not None:
                    task.stalled_sources.pop(sender.source.key, None)
            if not self._drop(task, part, sender):
                task.claimed.add(part)
        if self.repairs:
            self.repairs.arrived(extent)
        return new

    def mark_missing(self, extent: Extent) -> None:
        """Mark pieces that were verified and are lost as wanted."""
        for task, part in self.tasks.parts(extent):
            for run in list(self.verified.common(part)):
                task.missing += self.verified.remove(run)
                task.claimed.remove(run)
        self.verified.remove(extent)

    def corrupt(self, stream: SourceStream, extent: Extent) -> Iterator[tuple[PullTask, Extent]]:
        """Remove the pieces of ``extent`` requested from ``stream``; yield each part with its
        task.

        Only requested pieces count: the same report twice is one corrupt arrival.
        """
        owed = Extents([*stream.in_flight.common(extent), *stream.side_requests.common(extent)])
        for run in owed:
            stream.record_run(run.size, run.size)
            for task, part in self.tasks.parts(run):
                self.drop_from(stream, task, part)
                if self.hedging.hedge is not None and self.hedging.hedge.key == stream.source.key:
                    self.hedging.arrived(part)
                yield task, part

    def unassigned(self, extent: Extent) -> list[Extent]:
        """Return the runs of ``extent`` that are neither verified nor in flight."""
        flying = Extents(run for each in self.open_streams.values() for run in each.in_flight)
        return [run for gap in list(self.verified.gaps(extent)) for run in flying.gaps(gap)]

    def requested_from(self, extent: Extent) -> set[str]:
        """Return the keys of the sources that pieces of ``extent`` are in flight from."""
        return {
            key
            for key, stream in self.open_streams.items()
            if next(stream.in_flight.common(extent), None)
        }

    def _drop(self, task: PullTask, part: Extent, sender: SourceStream | None) -> bool:
        """Remove ``part`` of ``task`` from every stream; return whether all of it was in flight
        from ``sender`` (the usual case), and so nowhere else.
        """
        here = sender is not None and self.drop_from(sender, task, part)
        if here and self.hedging.hedge is None:
            return True
        for stream in self.open_streams.values():
            if stream is not sender:
                self.drop_from(stream, task, part)
        self.hedging.arrived(part)
        return False

    def drop_from(self, stream: SourceStream, task: PullTask, part: Extent) -> bool:
        """Remove ``part`` from one stream; return whether all of it was in flight there."""
        if stream.side_requests:
            stream.side_requests.remove(part)
        if stream.in_flight.covers(part):
            stream.in_flight.remove(part)
            task.requested_pieces -= part.size
            task.requested_bytes -= self.pieces.bytes_of(part)
            return True
        for run in list(stream.in_flight.common(part)):
            stream.in_flight.remove(run)
            task.requested_pieces -= run.size
            task.requested_bytes -= self.pieces.bytes_of(run)
        return False
