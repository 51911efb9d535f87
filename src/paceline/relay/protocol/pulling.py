"""Who is asked for which pieces, and when somebody else is: the session's view of its sources.

``RelaySession`` decides what an event means; this half keeps streams full, notices silence and
standstill, and leaves sources. What is on its way is in ``flights``, who may be asked in
``choosing``; repairs, hedges and the way back are in ``aside``. No I/O and no clock, like the
session itself.

Lanes become *works*: disjoint runs that tile the model, each with its own candidates. A work asks
one source at a time; several works may share a source, its stream and its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from paceline.errors import PacelineError, PeerLost, TemporaryError
from paceline.relay.protocol.deadlines import Patience, is_half_full, size_window
from paceline.relay.protocol.events import Abandon, ReportSourceLost, SessionAction
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.pull_state import Flights, Hedging, Works
from paceline.relay.protocol.recovery import Repair, Repairs
from paceline.relay.protocol.side_requests import Aside, Asking
from paceline.relay.protocol.source_selection import Choice, Feed, OriginBudget, Work
from paceline.schemas.plan import WorkerLanes


class Puller:
    """Pulls what ``verified`` lacks from the sources of the lanes it was given last."""

    def __init__(
        self, pieces: PieceMap, verified: Extents, limits: SessionLimits, random: Random
    ) -> None:
        self._pieces = pieces
        self._limits = limits
        self._patience = Patience(limits, pieces.piece_bytes, random)
        repairs, hedging = Repairs(limits, random), Hedging(limits, pieces, self._patience)
        self._choice = Choice(pieces, limits, random)
        self._flights = Flights(pieces, verified, repairs, hedging)
        self._asking = Asking(pieces, self._flights, self._choice)
        self._aside = Aside(
            pieces,
            limits,
            self._patience,
            self._choice,
            self._flights,
            self._asking,
            repairs,
            hedging,
        )
        self._steady = False  # nothing but the lanes' own windows needs looking at
        self._repairing = False  # when that was looked at last
        self.checked_s = float("-inf")  # when deadlines were last looked at
        self.lost: dict[str, None] = {}  # an ordered set of source keys, for reports
        self.last_error: PacelineError | None = None

    @property
    def stalled(self) -> PacelineError | None:
        """Return why nothing can be asked just now, or None."""
        return self._choice.stalled

    @property
    def hopeless(self) -> Repair | None:
        """Return pieces that arrived corrupt from everybody, or None."""
        return self._aside.hopeless

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def assign(
        self, lanes: WorkerLanes, read: int, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Go over to ``lanes``; streams whose source stays are kept with what is in flight.
        ``read`` are the bytes that came from the origin so far.
        """
        works, flights = Works.of(lanes, self._pieces), self._flights
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
        # The plan knows what had been told of; what came since, or is on its way, it paid for.
        counted = lanes.origin_counted_bytes
        untold = 0 if counted is None else max(0, read - counted)
        spent = flights.origin_flying_bytes + untold
        self._choice.begin(OriginBudget(lanes.origin_budget_bytes, spent))
        if self._choice.woke:
            self.sleep(woke=True)  # these lanes may have been under way while we stood still
        self.lost.clear()

    def sleep(self, *, woke: bool) -> None:
        """Take note that this process stood still, or that its lanes were confirmed since.

        Until then the origin is asked for nothing more: somebody else may have been told to read
        there in our place, and the fuse is one for all (I6). What is in flight still comes.
        """
        self._choice.woke = woke
        for work in self._flights.works if woke else ():
            feed = self._flights.feed_of(work)
            if feed is not None and feed.source.kind == "origin":
                work.active = None

    def is_first_choice(self, key: str) -> bool:
        """Return whether the lanes name this source first for pieces that are still missing."""
        return any(work.missing and work.is_first_choice(key) for work in self._flights.works)

    @property
    def origin_spent(self) -> int:
        """Return how many bytes were asked of the origin under the present lanes."""
        return self._choice.budget.spent_bytes

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def feed(self, key: str, stream: int) -> Feed | None:
        """Return the stream, or None where it was given up already."""
        return self._flights.feed(key, stream)

    def arrived(self, key: str, stream: int, extent: Extent, now_s: float) -> int:
        """Count verified pieces, whoever they came from; return how many are new."""
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
        """Count pieces as verified that nobody sent just now; return how many are new."""
        return self._flights.hold(extent, now_s)

    def missing_again(self, extent: Extent) -> None:
        """Ask anew for pieces that were here and are not any more."""
        self._flights.missing_again(extent)

    def rejected(
        self, key: str, stream: int, extent: Extent, now_s: float
    ) -> tuple[Feed | None, bool]:
        """Take note of corrupt pieces; return their stream if it is open, and whether its share of
        them is so bad that it should be left.

        What is neither here nor on its way from elsewhere is set aside, to be fetched on its own.
        """
        feed = self._flights.feed(key, stream)
        if feed is None:
            return None, False  # what it owed was asked of somebody else already
        feed.heard_s = feed.moved_s = now_s
        self._aside.rejected(feed, extent, now_s)
        return feed, feed.is_bad(self._limits)

    # ── leaving sources ──────────────────────────────────────────────────────────────────────────

    def lose(
        self,
        feed: Feed,
        error: PacelineError,
        now_s: float,
        actions: list[SessionAction],
        *,
        for_good: bool = False,
    ) -> None:
        """Give a stream up, and its source for a while; what was in flight is wanted again."""
        key, idle = feed.source.key, not feed.waiting
        self._aside.end_probes(key, now_s)
        self._forget(feed, actions)
        if idle:
            return  # a stream closed while nothing was asked of it is no loss
        self._choice.failed(key, now_s, for_good=for_good)
        self._report_lost(key, error, actions)

    def broke(
        self, feed: Feed, error: PacelineError, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Take note that a stream ended by itself, and go on.

        One from a worker that has delivered is opened again at once: connections break while both
        ends live, and a spare would be a second reader at somebody else's link for good. A crashed
        worker refuses within a round trip, and then counts as lost.
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

    def _forget(self, feed: Feed, actions: list[SessionAction]) -> None:
        """End a stream; what was in flight is wanted again."""
        self._flights.close(feed)
        actions.append(Abandon(feed.source.key, feed.stream))

    def _leave(self, work: Work, key: str, error: PacelineError, now_s: float) -> bool:
        """Take ``work`` away from a source that lives but has nothing for it; return whether the
        plan meant it to have. Others may go on reading there.
        """
        self._choice.fell_behind(key, work, now_s)
        self._flights.leave(work, key)
        self.last_error = error
        return work.is_first_choice(key)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which something here may have to change."""
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
        """Give up who is silent or stands still, and what was asked on the side in vain."""
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

    def _check_progress(self, work: Work, now_s: float, actions: list[SessionAction]) -> None:
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
        lives = feed is not None and feed.moved_s > work.progress_s  # for other lanes
        if self._leave(work, key, error, now_s) and not lives:
            self._report_lost(key, error, actions)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def pump(self, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for whatever can be asked for now; close streams that nothing is left for."""
        works = self._flights.works
        self._aside.ask_repairs(now_s, actions)
        for work in works:
            if work.away is not None and not work.wanting:
                self._aside.end_probe(work, now_s)  # the last pieces wait for nobody
        wanting = [work for work in works if work.wanting > 0]
        sources = [self._source_for(work, now_s) for work in wanting]  # all, as they share windows
        for work, feed in zip(wanting, sources, strict=True):
            if feed is not None:
                self._size_window(work)  # others may have left the source they shared
                self._top_up(feed, work, now_s, actions)
                if work.active is None and (other := self._source_for(work, now_s)) is not None:
                    self._top_up(other, work, now_s, actions)  # the origin's budget is spent
            if work.away is not None:
                self._aside.probe(work, now_s, actions)
        self._aside.hedge(now_s, actions, is_drained=not any(work.wanting for work in wanting))
        for feed in list(self._flights.feeds.values()):
            if self._flights.is_idle(feed):
                self._forget(feed, actions)
        self._aside.ask_repairs(now_s, actions)  # some may have been asked of a stream just closed
        self._repairing = self._aside.is_repairing
        self._steady = self._aside.is_quiet and all(
            work.active is not None for work in works if work.wanting
        )

    def keep_full(self, extent: Extent, now_s: float, actions: list[SessionAction]) -> bool:
        """Do for the lanes of ``extent``, which has just arrived, what ``pump`` would do for all;
        return whether that is certain to be the same.
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
        # A stream may have nothing left to bring; and with the last repair hedges become possible.
        mended = self._repairing and not self._aside.is_repairing
        return not mended and all(feed.waiting for feed in self._flights.feeds.values())

    def ask_again(self, extent: Extent, now_s: float, actions: list[SessionAction]) -> bool:
        """Ask for the pieces of ``extent``, which have just come corrupt, and do for their lanes
        what ``pump`` would do for all; return whether that is certain to be the same.
        """
        if not self._steady or self.hopeless is not None:
            return False
        self._aside.ask_repairs(now_s, actions)
        if self.hopeless is not None or not self._aside.is_quiet:
            self._steady = False
            return False
        self._repairing = self._aside.is_repairing
        return self.keep_full(extent, now_s, actions)

    def _source_for(self, work: Work, now_s: float) -> Feed | None:
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

    def _size_window(self, work: Work) -> None:
        sharing = self._flights.works.sharing(work)
        size_window(work, self._flights.feed_of(work), sharing, self._limits, self._pieces)

    def _top_up(self, feed: Feed, work: Work, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for more once half of the window has drained: few requests, never an empty pipe."""
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
                    work.active = None  # the fuse: others may still be asked
                    self._choice.refuse()
            if extent.size == 0:
                return
            self._asking.ask(feed, extent, now_s, actions)
