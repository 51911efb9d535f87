"""Keeps request windows full and switches sources that are silent, stalled or broken.

The half of ``RelaySession`` that manages sources; ``session`` interprets the events. Requests in
flight are in ``pull_state``, the choice of a source in ``source_selection``; repairs, hedges and
failback are in ``side_requests``. No I/O and no clock.

Lanes become *pull tasks*: disjoint runs that tile the model, each with its own candidate sources. A
task uses one source at a time; several tasks may share a source, its stream and its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from paceline.errors import PacelineError, PeerLost, TemporaryError
from paceline.relay.protocol.deadlines import Deadlines, is_half_full, size_window
from paceline.relay.protocol.events import Abandon, ReportSourceLost, SessionAction
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.pull_state import Hedging, PullState, PullTasks
from paceline.relay.protocol.recovery import Repair, Repairs
from paceline.relay.protocol.side_requests import RequestSender, SideRequests
from paceline.relay.protocol.source_selection import (
    OriginBudget,
    PullTask,
    SourceSelector,
    SourceStream,
)
from paceline.schemas.plan import WorkerLanes


class Puller:
    """Pulls the pieces missing in ``verified`` from the sources of the current lanes."""

    def __init__(
        self, pieces: PieceMap, verified: Extents, limits: SessionLimits, random: Random
    ) -> None:
        self._pieces = pieces
        self._limits = limits
        self._patience = Deadlines(limits, pieces.piece_bytes, random)
        repairs, hedging = Repairs(limits, random), Hedging(limits, pieces, self._patience)
        self._choice = SourceSelector(pieces, limits, random)
        self._flights = PullState(pieces, verified, repairs, hedging)
        self._asking = RequestSender(pieces, self._flights, self._choice)
        self._aside = SideRequests(
            pieces,
            limits,
            self._patience,
            self._choice,
            self._flights,
            self._asking,
            repairs,
            hedging,
        )
        self._steady = False  # only the tasks' own windows can need a request
        self._repairing = False  # at the last check
        self.checked_s = float("-inf")  # when deadlines were last checked
        self.lost: dict[str, None] = {}  # an ordered set of source keys, for reports
        self.last_error: PacelineError | None = None

    @property
    def stalled(self) -> PacelineError | None:
        """Return why nothing can be requested now, or None."""
        return self._choice.stalled

    @property
    def hopeless(self) -> Repair | None:
        """Return pieces that arrived corrupt from every source, or None."""
        return self._aside.hopeless

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def assign(
        self, lanes: WorkerLanes, read: int, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Switch to ``lanes``; streams whose source stays are kept with their requests.
        ``read`` is the number of bytes read from the origin so far.
        """
        works, flights = PullTasks.of(lanes, self._pieces), self._flights
        planned = {work.candidates[0].key: work.candidates[0] for work in works}
        for key, feed in list(flights.feeds.items()):
            if planned.get(key) != feed.source:
                self._forget(feed, actions)
        self._patience.is_first_plan = not flights.works
        self._patience.piece_deadline_s = lanes.piece_deadline_s
        self._aside.begin()
        flights.follow(works, now_s)
        for work in works:
            self._size_window(work)
        # The budget accounts for the origin bytes reported before the plan was made. Bytes read
        # since then and bytes in flight count as spent.
        counted = lanes.origin_counted_bytes
        untold = 0 if counted is None else max(0, read - counted)
        spent = flights.origin_flying_bytes + untold
        self._choice.begin(OriginBudget(lanes.origin_budget_bytes, spent))
        if self._choice.woke:
            self.sleep(woke=True)  # these lanes may have been sent while this process was suspended
        self.lost.clear()

    def sleep(self, *, woke: bool) -> None:
        """Record that this process was suspended (True), or that its lanes were confirmed (False).

        In between, nothing is requested from the origin: another worker may be planned to read it
        instead, and the origin budget is one for the fleet (I6). Requests in flight continue.
        """
        self._choice.woke = woke
        for work in self._flights.works if woke else ():
            feed = self._flights.feed_of(work)
            if feed is not None and feed.source.kind == "origin":
                work.active = None

    def is_first_choice(self, key: str) -> bool:
        """Return whether it is the planned source of pieces that are still missing."""
        return any(work.missing and work.is_first_choice(key) for work in self._flights.works)

    @property
    def origin_spent(self) -> int:
        """Return how many bytes were requested from the origin under the current lanes."""
        return self._choice.budget.spent_bytes

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────

    def feed(self, key: str, stream: int) -> SourceStream | None:
        """Return the stream, or None if it was abandoned."""
        return self._flights.feed(key, stream)

    def arrived(self, key: str, stream: int, extent: Extent, now_s: float) -> int:
        """Record verified pieces from any stream, open or not; return how many are new."""
        feed = self._flights.feed(key, stream)
        new = self._flights.hold(extent, now_s, feed)
        self._choice.stalled = None
        if feed is not None:
            feed.heard_s = feed.moved_s = now_s
            feed.judge(extent.size, 0)
            feed.good += extent.size
            self._choice.delivered(key, extent.size)
        if not self._steady:
            self._aside.look_at_probes(extent, now_s)
        return new

    def hold(self, extent: Extent, now_s: float) -> int:
        """Record pieces as verified without a sender; return how many are new."""
        return self._flights.hold(extent, now_s)

    def missing_again(self, extent: Extent) -> None:
        """Mark pieces that were verified and are lost as wanted."""
        self._flights.missing_again(extent)

    def rejected(
        self, key: str, stream: int, extent: Extent, now_s: float
    ) -> tuple[SourceStream | None, bool]:
        """Record corrupt pieces; return their stream if it is open, and whether its share of
        corrupt pieces is so high that it should be abandoned.

        Pieces that are neither verified nor in flight from elsewhere become a repair.
        """
        feed = self._flights.feed(key, stream)
        if feed is None:
            return None, False  # its pieces were requested from another source already
        feed.heard_s = feed.moved_s = now_s
        self._aside.rejected(feed, extent, now_s)
        return feed, feed.is_bad(self._limits)

    # ── leaving sources ──────────────────────────────────────────────────────────────────────────

    def lose(
        self,
        feed: SourceStream,
        error: PacelineError,
        now_s: float,
        actions: list[SessionAction],
        *,
        for_good: bool = False,
    ) -> None:
        """Abandon a stream, back off from its source, and mark its pieces in flight as wanted."""
        key, idle = feed.source.key, not feed.waiting
        self._aside.end_probes(key, now_s)
        self._forget(feed, actions)
        if idle:
            return  # nothing was requested from it: no loss
        self._choice.failed(key, now_s, for_good=for_good)
        self._report_lost(key, error, actions)

    def broke(
        self, feed: SourceStream, error: PacelineError, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Handle a stream that ended by itself.

        A stream from a worker that has delivered is reopened at once: connections break while both
        ends are alive, and switching to a spare would put a second reader on another worker's link
        for good. A crashed worker refuses within a round trip, and then counts as lost.
        """
        temporary = isinstance(error, TemporaryError) and feed.source.kind == "worker"
        if temporary and feed.good > 0:
            self._aside.end_probes(feed.source.key, now_s)
            self._forget(feed, actions)
            self._choice.broke(feed.source.key)
            self.last_error = error
        else:
            self.lose(feed, error, now_s, actions)

    def _report_lost(self, key: str, error: PacelineError, actions: list[SessionAction]) -> None:
        self.last_error = error
        self.lost[key] = None
        actions.append(ReportSourceLost(key, error.one_line()))

    def close_all(self, actions: list[SessionAction]) -> None:
        """End every stream."""
        for feed in list(self._flights.feeds.values()):
            self._forget(feed, actions)

    def _forget(self, feed: SourceStream, actions: list[SessionAction]) -> None:
        """Close a stream; its pieces in flight are wanted again."""
        self._flights.close(feed)
        actions.append(Abandon(feed.source.key, feed.stream))

    def _leave(self, work: PullTask, key: str, error: PacelineError, now_s: float) -> bool:
        """Detach ``work`` from a source that is alive but has nothing for it; return whether it is
        the planned source. Other pull tasks may continue to use it.
        """
        self._choice.fell_behind(key, work, now_s)
        self._flights.leave(work, key)
        self.last_error = error
        return work.is_first_choice(key)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``check_deadlines`` or ``pump`` may have to act."""
        for feed in self._flights.feeds.values():
            if feed.waiting:
                yield self._patience.silent_at_s(feed)
        for work in self._flights.works:
            if work.active is not None:
                if work.asked_pieces:
                    yield self._patience.standstill_at_s(work, self._flights.feed_of(work))
            elif work.wanting:
                yield from self._choice.retries(work)
        yield from self._aside.deadlines()

    def check_deadlines(self, now_s: float, actions: list[SessionAction]) -> None:
        """Abandon silent sources, stalled pull tasks' sources and unanswered side requests."""
        self.checked_s = now_s
        for feed in list(self._flights.feeds.values()):
            if feed.waiting and now_s >= self._patience.silent_at_s(feed):
                silence_s = self._patience.silence_s(feed.source)
                error = PeerLost(
                    "source went silent",
                    got=f"{now_s - feed.heard_s:.2f} s",
                    wanted=f"a sign of life within {silence_s:.2f} s",
                    where=feed.source.key,
                )
                self.lose(feed, error, now_s, actions)
        for work in self._flights.works:
            self._check_progress(work, now_s, actions)
        self._aside.check_deadlines(now_s)

    def _check_progress(self, work: PullTask, now_s: float, actions: list[SessionAction]) -> None:
        key, feed = work.active, self._flights.feed_of(work)
        if key is None or not work.asked_pieces:
            return
        if now_s < self._patience.standstill_at_s(work, feed):
            return
        error = PeerLost(
            "source lives but makes no progress",
            got=f"{now_s - work.progress_s:.2f} s",
            wanted="a piece",
            where=key,
        )
        lives = feed is not None and feed.moved_s > work.progress_s  # it serves other lanes
        if self._leave(work, key, error, now_s) and not lives:
            self._report_lost(key, error, actions)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def pump(self, now_s: float, actions: list[SessionAction]) -> None:
        """Send every request that is possible now; close streams with nothing left to deliver."""
        works = self._flights.works
        self._aside.ask_repairs(now_s, actions)
        for work in works:
            if work.away is not None and not work.wanting:
                self._aside.end_probe(work, now_s)  # the last pieces do not wait for a probe
        wanting = [work for work in works if work.wanting > 0]
        sources = [self._source_for(work, now_s) for work in wanting]  # first, for shared windows
        for work, feed in zip(wanting, sources, strict=True):
            if feed is not None:
                self._size_window(work)  # other tasks may have left the shared source
                self._top_up(feed, work, now_s, actions)
                if work.active is None and (other := self._source_for(work, now_s)) is not None:
                    self._top_up(other, work, now_s, actions)  # the origin's budget is spent
            if work.away is not None:
                self._aside.probe(work, now_s, actions)
        self._aside.hedge(now_s, actions, is_drained=not any(work.wanting for work in wanting))
        for feed in list(self._flights.feeds.values()):
            if self._flights.is_idle(feed):
                self._forget(feed, actions)
        self._aside.ask_repairs(now_s, actions)  # some may have been on a stream that just closed
        self._repairing = self._aside.is_repairing
        self._steady = self._aside.is_quiet and all(
            work.active is not None for work in works if work.wanting
        )

    def keep_full(self, extent: Extent, now_s: float, actions: list[SessionAction]) -> bool:
        """Do what ``pump`` does, but only for the tasks of ``extent``, which has just arrived;
        return whether the result is certainly the same.
        """
        if not self._steady:
            return False
        drained = False
        for work, _ in self._flights.works.parts(extent):
            feed = self._flights.feed_of(work)
            if feed is None:
                return False
            if not work.wanting:
                drained = True
                continue
            self._top_up(feed, work, now_s, actions)
            if work.active is None:
                return False
            if not work.wanting:
                self._steady = False
        if not drained:
            return True
        # A stream may have nothing left to deliver, and after the last repair hedges are possible.
        mended = self._repairing and not self._aside.is_repairing
        return not mended and all(feed.waiting for feed in self._flights.feeds.values())

    def ask_again(self, extent: Extent, now_s: float, actions: list[SessionAction]) -> bool:
        """Request the pieces of ``extent``, which just arrived corrupt, again, and do what ``pump``
        does only for their tasks; return whether the result is certainly the same.
        """
        if not self._steady or self.hopeless is not None:
            return False
        self._aside.ask_repairs(now_s, actions)
        if self.hopeless is not None or not self._aside.is_quiet:
            self._steady = False
            return False
        self._repairing = self._aside.is_repairing
        return self.keep_full(extent, now_s, actions)

    def _source_for(self, work: PullTask, now_s: float) -> SourceStream | None:
        if (feed := self._flights.feed_of(work)) is not None:
            return feed
        work.active = None
        choice, missing = self._choice, next(work.taken.gaps(work.extent))
        able = [each for each in work.candidates if choice.may_ask(each, missing, work, now_s)]
        if not choice.may_afford(work.candidates[0], missing) or (
            not able and not all(choice.may_afford(each, missing) for each in work.candidates)
        ):
            choice.refuse()
        if not able:
            return None
        best = choice.best(able, work)
        work.active, work.progress_s = best.key, now_s
        fresh = work.is_first_choice(best.key) and not choice.was_given_up(best, work)
        hurry = len(able) > 1 and best.kind == "worker" and not fresh
        work.hurry_s = self._patience.hurry_s(work) if hurry else 0.0
        if not work.is_first_choice(best.key):
            self._aside.stands_in(work, now_s)
        elif work.away is not None:
            self._flights.end_probe(work, takes_over=True)
            work.away.absent = False
        return self._flights.open(best, now_s)

    def _size_window(self, work: PullTask) -> None:
        sharing = self._flights.works.sharing(work)
        size_window(work, self._flights.feed_of(work), sharing, self._limits, self._pieces)

    def _top_up(
        self, feed: SourceStream, work: PullTask, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Request more once half of the window has drained: few requests, never an empty pipe."""
        if is_half_full(work):
            return
        self._size_window(work)
        budget = self._choice.budget
        while (gap := next(work.taken.gaps(work.extent), None)) is not None:
            room_bytes = work.window_bytes - work.asked_bytes
            room_pieces = work.window_pieces - work.asked_pieces
            extent = self._pieces.fitting(gap, room_bytes, room_pieces)
            if feed.source.kind == "origin":
                extent = self._pieces.fitting(extent, budget.left_bytes, extent.size)
                if extent.size == 0 and not work.asked_pieces:
                    work.active = None  # the origin budget is spent; other sources may still serve
                    self._choice.refuse()
            if extent.size == 0:
                return
            self._asking.ask(feed, extent, now_s, actions)
