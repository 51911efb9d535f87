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
from paceline.relay.protocol.recovery import Repairs
from paceline.relay.protocol.side_requests import SideRequests
from paceline.relay.protocol.source_selection import (
    OriginBudget,
    PullTask,
    SourceSelector,
    SourceStream,
)
from paceline.schemas import WorkerLanes


class Puller:
    """Pulls the pieces missing in ``verified`` from the sources of the current lanes."""

    def __init__(
        self, pieces: PieceMap, verified: Extents, limits: SessionLimits, random: Random
    ) -> None:
        self._pieces = pieces
        self._limits = limits
        self._deadlines = Deadlines(limits, pieces.piece_bytes, random)
        repairs, hedging = Repairs(limits, random), Hedging(limits, pieces, self._deadlines)
        self.choice = SourceSelector(pieces, limits, random)
        self.state = PullState(pieces, verified, self.choice, repairs, hedging)
        self.side_requests = SideRequests(limits, self._deadlines, self.state)
        self.checked_s = float("-inf")  # when deadlines were last checked
        self.lost: dict[str, None] = {}  # an ordered set of source keys, for reports
        self.last_error: PacelineError | None = None

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def assign(
        self, lanes: WorkerLanes, read: int, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Switch to ``lanes``; streams whose source stays are kept with their requests.
        ``read`` is the number of bytes read from the origin so far.
        """
        works, state = PullTasks.of(lanes, self._pieces), self.state
        planned = {work.candidates[0].key: work.candidates[0] for work in works}
        for key, feed in list(state.feeds.items()):
            if planned.get(key) != feed.source:
                self._forget(feed, actions)
        self._deadlines.is_first_plan = not state.works
        self._deadlines.piece_deadline_s = lanes.piece_deadline_s
        self.side_requests.begin()
        state.follow(works, now_s)
        for work in works:
            self._size_window(work)
        # The budget accounts for the origin bytes reported before the plan was made. Bytes read
        # since then and bytes in flight count as spent.
        counted = lanes.origin_counted_bytes
        unreported = 0 if counted is None else max(0, read - counted)
        spent = state.origin_flying_bytes + unreported
        self.choice.begin(OriginBudget(lanes.origin_budget_bytes, spent))
        if self.choice.unconfirmed:
            self.sleep(unconfirmed=True)  # these lanes may have been sent during a suspension
        self.lost.clear()

    def sleep(self, *, unconfirmed: bool) -> None:
        """Record that this process was suspended (True), or that its lanes were confirmed (False).

        In between, nothing is requested from the origin: another worker may be planned to read it
        instead, and the origin budget is one for the fleet (I6). Requests in flight continue.
        """
        self.choice.unconfirmed = unconfirmed
        for work in self.state.works if unconfirmed else ():
            feed = self.state.feed_of(work)
            if feed is not None and feed.source.kind == "origin":
                work.active = None

    def is_first_choice(self, key: str) -> bool:
        """Return whether it is the planned source of pieces that are still missing."""
        return any(work.missing and work.is_first_choice(key) for work in self.state.works)

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────

    def arrived(self, key: str, stream: int, extent: Extent, now_s: float) -> int:
        """Record verified pieces from any stream, open or not; return how many are new."""
        feed = self.state.feed(key, stream)
        new = self.state.hold(extent, now_s, feed)
        self.choice.stalled = None
        if feed is not None:
            feed.heard_s = feed.moved_s = now_s
            feed.judge(extent.size, 0)
            feed.good += extent.size
            self.choice.delivered(key, extent.size)
        self.side_requests.check_probes(extent, now_s)
        return new

    def rejected(
        self, key: str, stream: int, extent: Extent, now_s: float
    ) -> tuple[SourceStream | None, bool]:
        """Record corrupt pieces; return their stream if it is open, and whether its share of
        corrupt pieces is so high that it should be abandoned.

        Pieces that are neither verified nor in flight from elsewhere become a repair.
        """
        feed = self.state.feed(key, stream)
        if feed is None:
            return None, False  # its pieces were requested from another source already
        feed.heard_s = feed.moved_s = now_s
        self.side_requests.rejected(feed, extent, now_s)
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
        self.side_requests.end_probes(key, now_s)
        self._forget(feed, actions)
        if idle:
            return  # nothing was requested from it: no loss
        self.choice.failed(key, now_s, for_good=for_good)
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
            self.side_requests.end_probes(feed.source.key, now_s)
            self._forget(feed, actions)
            self.choice.broken.add(feed.source.key)
            self.last_error = error
        else:
            self.lose(feed, error, now_s, actions)

    def _report_lost(self, key: str, error: PacelineError, actions: list[SessionAction]) -> None:
        self.last_error = error
        self.lost[key] = None
        actions.append(ReportSourceLost(key, error.one_line()))

    def close_all(self, actions: list[SessionAction]) -> None:
        for feed in list(self.state.feeds.values()):
            self._forget(feed, actions)

    def _forget(self, feed: SourceStream, actions: list[SessionAction]) -> None:
        """Close a stream; its pieces in flight are wanted again."""
        self.state.close(feed)
        actions.append(Abandon(feed.source.key, feed.stream))

    def _leave(self, work: PullTask, key: str, error: PacelineError, now_s: float) -> bool:
        """Detach ``work`` from a source that is alive but has nothing for it; return whether it is
        the planned source. Other pull tasks may continue to use it.
        """
        self.choice.task_stalled(key, work, now_s)
        self.state.leave(work, key)
        self.last_error = error
        return work.is_first_choice(key)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``check_deadlines`` or ``pump`` may have to act."""
        for feed in self.state.feeds.values():
            if feed.waiting:
                yield self._deadlines.silent_at_s(feed)
        for work in self.state.works:
            if work.active is not None:
                if work.asked_pieces:
                    yield self._deadlines.stalls_at_s(work, self.state.feed_of(work))
            elif work.wanting:
                yield from self.choice.retries(work)
        yield from self.side_requests.deadlines()

    def check_deadlines(self, now_s: float, actions: list[SessionAction]) -> None:
        """Abandon silent sources, stalled pull tasks' sources and unanswered side requests."""
        self.checked_s = now_s
        for feed in list(self.state.feeds.values()):
            if feed.waiting and now_s >= self._deadlines.silent_at_s(feed):
                silence_s = self._deadlines.silence_s(feed.source)
                error = PeerLost(
                    "source went silent",
                    got=f"{now_s - feed.heard_s:.2f} s",
                    wanted=f"a sign of life within {silence_s:.2f} s",
                    where=feed.source.key,
                )
                self.lose(feed, error, now_s, actions)
        for work in self.state.works:
            self._check_progress(work, now_s, actions)
        self.side_requests.check_deadlines(now_s)

    def _check_progress(self, work: PullTask, now_s: float, actions: list[SessionAction]) -> None:
        key, feed = work.active, self.state.feed_of(work)
        if key is None or not work.asked_pieces:
            return
        if now_s < self._deadlines.stalls_at_s(work, feed):
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

    def waits_for(self, now_s: float) -> str:
        """Return what the first missing piece waits for, for logs."""
        gap = next(self.state.verified.gaps(Extent(0, self._pieces.count)), None)
        if gap is None:
            return "the disk: every piece has arrived"
        piece = Extent(gap.first, gap.first + 1)
        for feed in self.state.feeds.values():
            if feed.in_flight.covers(piece) or feed.side_requests.covers(piece):
                return (
                    f"piece {piece.first} from {feed.source.key}, whose last sign of life came "
                    f"{now_s - feed.heard_s:.1f} s ago and last bytes {now_s - feed.moved_s:.1f} s "
                    f"ago; {feed.in_flight.count} pieces in flight"
                )
        reason = self.choice.stalled or self.last_error
        why = reason.one_line() if reason is not None else "no reason is known"
        return f"piece {piece.first}, which is requested from no source: {why}"

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def pump(self, now_s: float, actions: list[SessionAction]) -> None:
        """Send every request that is possible now; close streams with nothing left to deliver."""
        works = self.state.works
        self.side_requests.ask_repairs(now_s, actions)
        for work in works:
            if work.away is not None and not work.wanting:
                self.side_requests.end_probe(work, now_s)  # the last pieces do not wait for a probe
        wanting = [work for work in works if work.wanting > 0]
        sources = [self._source_for(work, now_s) for work in wanting]  # first, for shared windows
        for work, feed in zip(wanting, sources, strict=True):
            if feed is not None:
                self._size_window(work)  # other tasks may have left the shared source
                self._top_up(feed, work, now_s, actions)
                if work.active is None and (other := self._source_for(work, now_s)) is not None:
                    self._top_up(other, work, now_s, actions)  # the origin's budget is spent
            if work.away is not None:
                self.side_requests.probe(work, now_s, actions)
        self.side_requests.hedge(
            now_s, actions, is_drained=not any(work.wanting for work in wanting)
        )
        for feed in list(self.state.feeds.values()):
            if self.state.is_idle(feed):
                self._forget(feed, actions)
        # Some may have been on a stream that just closed.
        self.side_requests.ask_repairs(now_s, actions)

    def is_supplied(self, extent: Extent) -> bool:
        """Return whether the tasks of ``extent``, which has just arrived, need no request now:
        more than half of their windows is in flight. Before the next deadline, ``pump`` then has
        nothing to do.
        """
        return all(
            work.active is not None and is_half_full(work)
            for work, _ in self.state.works.parts(extent)
        )

    def _source_for(self, work: PullTask, now_s: float) -> SourceStream | None:
        if (feed := self.state.feed_of(work)) is not None:
            return feed
        work.active = None
        choice, missing = self.choice, next(work.taken.gaps(work.extent))
        able = [each for each in work.candidates if choice.may_ask(each, missing, work, now_s)]
        if not choice.is_within_budget(work.candidates[0], missing) or (
            not able and not all(choice.is_within_budget(each, missing) for each in work.candidates)
        ):
            choice.refuse()
        if not able:
            return None
        best = choice.best(able, work)
        work.active, work.progress_s = best.key, now_s
        failed = best.key in choice.broken or choice.failures(best, work) > 0
        fresh = work.is_first_choice(best.key) and not failed
        hurry = len(able) > 1 and best.kind == "worker" and not fresh
        work.spare_stall_s = self._deadlines.spare_stall_s(work) if hurry else 0.0
        if not work.is_first_choice(best.key):
            self.side_requests.failback.spare_chosen(work, now_s)
        elif work.away is not None:
            self.state.end_probe(work, takes_over=True)
            work.away.absent = False
        return self.state.open(best, now_s)

    def _size_window(self, work: PullTask) -> None:
        sharing = self.state.works.sharing(work)
        size_window(work, self.state.feed_of(work), sharing, self._limits, self._pieces)

    def _top_up(
        self, feed: SourceStream, work: PullTask, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Request more once half of the window has drained: few requests, never an empty pipe."""
        if is_half_full(work):
            return
        self._size_window(work)
        budget = self.choice.budget
        while (gap := next(work.taken.gaps(work.extent), None)) is not None:
            room_bytes = work.window_bytes - work.asked_bytes
            room_pieces = work.window_pieces - work.asked_pieces
            extent = self._pieces.fitting(gap, room_bytes, room_pieces)
            if feed.source.kind == "origin":
                extent = self._pieces.fitting(extent, budget.left_bytes, extent.size)
                if extent.size == 0 and not work.asked_pieces:
                    work.active = None  # the origin budget is spent; other sources may still serve
                    self.choice.refuse()
            if extent.size == 0:
                return
            self.state.ask(feed, extent, now_s, actions)
