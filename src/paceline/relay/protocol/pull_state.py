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

    def __init__(self, works: list[PullTask]) -> None:
        self._all = sorted(works, key=lambda work: work.extent.first)
        self._starts = [work.extent.first for work in self._all]

    @classmethod
    def of(cls, lanes: WorkerLanes, pieces: PieceMap) -> PullTasks:
        """Return the pull tasks of ``lanes``. Pieces that no lane names may come from any source of
        the lanes: this worker may hold fewer durable pieces than the planner assumed, and a held
        piece may become corrupt.
        """
        works: list[PullTask] = []
        covered = Extents()
        sources: dict[str, Source] = {}
        for lane in lanes.lanes:
            candidates = _ordered_candidates((lane.source, *lane.spares), lanes.worker_id)
            sources |= {each.key: each for each in candidates}
            extent = pieces.chunk_range(lane.first_chunk, lane.last_chunk)
            if candidates and extent.size:
                for run in list(covered.gaps(extent)):
                    works.append(PullTask(run, candidates, lane.expected_bytes_s))
                    covered.add(run)
        if sources:
            last_origin = tuple(sorted(sources.values(), key=lambda each: each.kind == "origin"))
            rest = covered.gaps(Extent(0, pieces.count))
            works += [PullTask(run, last_origin) for run in rest]
        return cls(works)

    def __iter__(self) -> Iterator[PullTask]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def parts(self, extent: Extent) -> Iterator[tuple[PullTask, Extent]]:
        """Yield the pull tasks that overlap ``extent``, each with its part of it."""
        first, stop = extent
        for at in range(max(0, bisect_right(self._starts, first) - 1), len(self._all)):
            work = self._all[at]
            begin, end = work.extent
            if begin >= stop:
                return
            if first >= begin and stop <= end:
                yield work, extent
                return
            if first < end:
                yield work, Extent(max(first, begin), min(stop, end))

    def sharing(self, work: PullTask) -> int:
        """Return how many pull tasks share this one's source and still want pieces, with itself."""
        others = (each for each in self._all if each is not work and each.active == work.active)
        return 1 + sum(each.wanting > 0 for each in others)


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
    asked_s: float


class Hedging:
    """The current hedged request, if any, and the rest of this plan's allowance. Sends nothing."""

    def __init__(self, limits: SessionLimits, pieces: PieceMap, deadlines: Deadlines) -> None:
        self._limits = limits
        self._pieces = pieces
        self._deadlines = deadlines
        self._left = 0  # pieces
        self.hedge: Hedge | None = None
        self.due_s: float | None = None  # when the oldest piece in flight is late; set at the end

    def begin(self) -> None:
        """Reset the allowance for a new plan: a small share of all pieces."""
        self.hedge = self.due_s = None
        share = int(self._pieces.count * self._limits.hedge_share)
        self._left = max(self._limits.least_hedges, share)

    @property
    def is_possible(self) -> bool:
        """Return whether a hedged request may start now."""
        return self.hedge is None and self._left > 0

    def oldest(
        self, feeds: Iterable[SourceStream], works: PullTasks
    ) -> tuple[PullTask, Extent] | None:
        """Return the pieces in flight from a worker that become late first; sets ``due_s``.

        Pieces from the origin are excluded: it retries by itself, and no other source has them.
        """
        due: list[tuple[float, PullTask, Extent]] = []
        for feed in feeds:
            if feed.source.kind == "worker" and (oldest := feed.oldest()) is not None:
                asked_s, run = oldest
                work, part = next(works.parts(run))
                due.append((self._deadlines.late_at_s(work, asked_s), work, part))
        if not due:
            return None
        self.due_s, work, part = min(due, key=lambda each: each[0])
        return work, part

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
        self.works = PullTasks([])
        self.feeds: dict[str, SourceStream] = {}

    # ── lanes and streams ────────────────────────────────────────────────────────────────────────

    def follow(self, works: PullTasks, now_s: float) -> None:
        """Switch to the pull tasks of a new plan; streams that stay keep their requests."""
        self.works = works
        for work in works:
            self._settle(work, now_s)
        for feed in self.feeds.values():
            feed.side_requests = Extents()
            for repair in self.repairs.asked_of(feed.source.key):
                feed.side_requests.add(repair.piece)

    def _settle(self, work: PullTask, now_s: float) -> None:
        """Count the pieces of ``work`` that are verified, in flight, or under repair."""
        held = list(self.verified.common(work.extent))
        work.missing = work.extent.size - sum(run.size for run in held)
        for run in held:
            work.taken.add(run)
        for repair in self.repairs:
            if work.extent.first <= repair.piece.first < work.extent.stop:
                work.taken.add(repair.piece)
        for key, feed in self.feeds.items():
            for run in list(feed.in_flight.common(work.extent)):
                if work.is_first_choice(key):
                    work.taken.add(run)
                    work.asked_pieces += run.size
                    work.asked_bytes += self.pieces.bytes_of(run)
                else:
                    feed.in_flight.remove(run)  # the stream continues with other lanes only
        if work.candidates[0].key in self.feeds:
            work.active = work.candidates[0].key
        work.progress_s = now_s

    @property
    def origin_flying_bytes(self) -> int:
        """Return how many bytes are in flight from the origin."""
        origins = [feed for feed in self.feeds.values() if feed.source.kind == "origin"]
        runs = (
            run
            for feed in origins
            for asked in (feed.in_flight, feed.side_requests)
            for run in asked
        )
        return sum(map(self.pieces.bytes_of, runs))

    def feed(self, key: str, stream: int) -> SourceStream | None:
        """Return the stream, or None if it was abandoned."""
        feed = self.feeds.get(key)
        return feed if feed is not None and feed.stream == stream else None

    def feed_of(self, work: PullTask) -> SourceStream | None:
        """Return the stream that ``work`` uses now."""
        return None if work.active is None else self.feeds.get(work.active)

    def open(self, source: Source, now_s: float) -> SourceStream:
        """Return the open stream from ``source``, or a new one."""
        feed = self.feeds.get(source.key)
        if feed is None:
            self._streams += 1
            feed = SourceStream(source, self._streams, now_s, now_s)
            self.feeds[source.key] = feed
        return feed

    def close(self, feed: SourceStream) -> None:
        """Remove a stream; its pieces in flight are wanted again."""
        key = feed.source.key
        del self.feeds[key]
        for run in list(feed.in_flight):
            self.requeue(feed, run)
        for repair in self.repairs.asked_of(key):
            repair.unanswered()
        if self.hedging.hedge is not None and self.hedging.hedge.key == key:
            self.hedging.hedge = None
        for work in self.works:
            if work.active == key:
                work.active = None
            if work.away is not None and work.is_first_choice(key):
                self.end_probe(work, takes_over=False)

    def is_idle(self, feed: SourceStream) -> bool:
        """Return whether nothing is in flight from ``feed`` and nothing more is wanted from it."""
        key = feed.source.key
        return not feed.waiting and not any(
            work.active == key and work.wanting for work in self.works
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def ask(
        self,
        feed: SourceStream,
        extent: Extent,
        now_s: float,
        actions: list[SessionAction],
        *,
        is_side_request: bool = False,
        charge: bool = True,
    ) -> None:
        """Request ``extent`` from ``feed``; ``is_side_request`` for a repair, hedge or probe;
        ``charge`` the origin budget for it.
        """
        actions.append(Fetch(feed.source, feed.stream, extent))
        if charge and feed.source.kind == "origin":
            self.choice.budget.spent_bytes += self.pieces.bytes_of(extent)
        if not feed.waiting:
            feed.heard_s = now_s
        if is_side_request:
            feed.side_requests.add(extent)
            return
        for work, part in self.works.parts(extent):
            if not work.asked_pieces:
                work.progress_s = now_s
            self._mark_in_flight(feed, work, part, now_s)

    def _mark_in_flight(
        self, feed: SourceStream, work: PullTask, part: Extent, asked_s: float
    ) -> None:
        """Record ``part`` of ``work`` as in flight from ``feed``."""
        work.taken.add(part)
        work.asked_pieces += feed.in_flight.add(part)
        work.asked_bytes += self.pieces.bytes_of(part)
        feed.asked.append((asked_s, part))

    def requeue(self, feed: SourceStream, extent: Extent) -> None:
        """Mark ``extent`` as no longer in flight; hedged pieces become in flight from the spare."""
        hedge = self.hedging.hedge
        other = self.feeds.get(hedge.key) if hedge is not None else None
        for work, part in self.works.parts(extent):
            self.drop_from(feed, work, part)
            work.taken.remove(part)
            if hedge is None or other is None or other is feed:
                continue
            for run in list(hedge.pieces.common(part)):
                self.hedging.arrived(run)
                other.side_requests.remove(run)
                self._mark_in_flight(other, work, run, hedge.asked_s)
                work.active, work.progress_s = hedge.key, hedge.asked_s

    def leave(self, work: PullTask, key: str) -> None:
        """Stop using source ``key`` for ``work``; its pieces in flight are wanted again."""
        if (feed := self.feeds.get(key)) is not None:
            for run in list(feed.in_flight.common(work.extent)):
                self.requeue(feed, run)
        work.active = None if work.active == key else work.active

    def end_probe(self, work: PullTask, *, takes_over: bool) -> None:
        """End the failback probe of ``work``. With ``takes_over`` its piece counts as in flight
        from the planned source, otherwise it is wanted again.
        """
        if work.away is None or (probe := work.away.probe) is None:
            return
        feed, work.away.probe = self.feeds.get(work.candidates[0].key), None
        if feed is not None:
            feed.side_requests.remove(probe.piece)
        if takes_over and feed is not None:
            self._mark_in_flight(feed, work, probe.piece, probe.asked_s)
        elif not self.verified.covers(probe.piece):
            work.taken.remove(probe.piece)

    def cancel_side_request(self, feed: SourceStream, extent: Extent) -> None:
        """Withdraw side requests of ``feed``, except pieces that another side request there needs:
        a piece that was hedged and then arrived corrupt is under repair at the same source.
        """
        feed.side_requests.remove(extent)
        key, hedge = feed.source.key, self.hedging.hedge
        others = Extents(each.piece for each in self.repairs.asked_of(key))
        if hedge is not None and hedge.key == key:
            for run in hedge.pieces:
                others.add(run)
        for run in others.common(extent):
            feed.side_requests.add(run)

    # ── arrivals and losses ──────────────────────────────────────────────────────────────────────

    def hold(self, extent: Extent, now_s: float, sender: SourceStream | None = None) -> int:
        """Record pieces as verified and end every request for them; return how many are new."""
        if not self.works:
            return self.verified.add(extent)
        new = 0
        for work, part in self.works.parts(extent):
            fresh = self.verified.add(part)
            if fresh:
                new += fresh
                work.missing -= fresh
                work.progress_s = now_s
                if work.behind and sender is not None:
                    work.behind.pop(sender.source.key, None)
            if not self._drop(work, part, sender):
                work.taken.add(part)
        if self.repairs:
            self.repairs.arrived(extent)
        return new

    def missing_again(self, extent: Extent) -> None:
        """Mark pieces that were verified and are lost as wanted."""
        for work, part in self.works.parts(extent):
            for run in list(self.verified.common(part)):
                work.missing += self.verified.remove(run)
                work.taken.remove(run)
        self.verified.remove(extent)

    def corrupt(self, feed: SourceStream, extent: Extent) -> Iterator[tuple[PullTask, Extent]]:
        """Remove the pieces of ``extent`` requested from ``feed``; yield each part with its task.

        Only requested pieces count: the same report twice is one corrupt arrival.
        """
        owed = Extents([*feed.in_flight.common(extent), *feed.side_requests.common(extent)])
        for run in owed:
            feed.judge(run.size, run.size)
            for work, part in self.works.parts(run):
                self.drop_from(feed, work, part)
                if self.hedging.hedge is not None and self.hedging.hedge.key == feed.source.key:
                    self.hedging.arrived(part)
                yield work, part

    def nowhere(self, extent: Extent) -> list[Extent]:
        """Return the runs of ``extent`` that are neither verified nor in flight."""
        flying = Extents(run for each in self.feeds.values() for run in each.in_flight)
        return [run for gap in list(self.verified.gaps(extent)) for run in flying.gaps(gap)]

    def requested_from(self, extent: Extent) -> set[str]:
        """Return the keys of the sources that pieces of ``extent`` are in flight from."""
        return {
            key for key, feed in self.feeds.items() if next(feed.in_flight.common(extent), None)
        }

    def _drop(self, work: PullTask, part: Extent, sender: SourceStream | None) -> bool:
        """Remove ``part`` of ``work`` from every stream; return whether all of it was in flight
        from ``sender`` (the usual case), and so nowhere else.
        """
        here = sender is not None and self.drop_from(sender, work, part)
        if here and self.hedging.hedge is None:
            return True
        for feed in self.feeds.values():
            if feed is not sender:
                self.drop_from(feed, work, part)
        self.hedging.arrived(part)
        return False

    def drop_from(self, feed: SourceStream, work: PullTask, part: Extent) -> bool:
        """Remove ``part`` from one stream; return whether all of it was in flight there."""
        if feed.side_requests:
            feed.side_requests.remove(part)
        if feed.in_flight.covers(part):
            feed.in_flight.remove(part)
            work.asked_pieces -= part.size
            work.asked_bytes -= self.pieces.bytes_of(part)
            return True
        for run in list(feed.in_flight.common(part)):
            feed.in_flight.remove(run)
            work.asked_pieces -= run.size
            work.asked_bytes -= self.pieces.bytes_of(run)
        return False
