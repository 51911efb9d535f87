"""Who is asked for which pieces, and when somebody else is: the session's view of its sources.

``RelaySession`` decides what an event means; this half keeps streams full, notices silence and
standstill, leaves sources and returns to them, repairs corrupt runs elsewhere, and hedges the last
pieces. What is on its way is in ``flights``, who may be asked in ``choosing``. No I/O and no clock,
like the session itself.

Lanes become *works*: disjoint runs that tile the model, each with its own candidates. A work asks
one source at a time; several works may share a source, its stream and its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from paceline.errors import PacelineError, PeerLost, TemporaryError
from paceline.relay.session.budget import OriginBudget
from paceline.relay.session.choosing import Choice
from paceline.relay.session.events import Abandon, Fetch, ReportSourceLost, SessionAction
from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.feeds import Feed, Work
from paceline.relay.session.flights import Flights
from paceline.relay.session.hedging import Hedging
from paceline.relay.session.lanes import Works
from paceline.relay.session.limits import PieceMap, SessionLimits
from paceline.relay.session.patience import Patience
from paceline.relay.session.repairs import Repair, Repairs
from paceline.relay.session.returning import Returning
from paceline.relay.session.windows import is_half_full, size_window
from paceline.wire.plan import Source, WorkerLanes


class Puller:
    """Pulls what ``verified`` lacks from the sources of the lanes it was given last."""

    def __init__(
        self, pieces: PieceMap, verified: Extents, limits: SessionLimits, random: Random
    ) -> None:
        self._pieces = pieces
        self._limits = limits
        self._patience = Patience(limits, pieces.piece_bytes, random)
        self._repairs = Repairs(limits, random)
        self._hedging = Hedging(limits, pieces, self._patience)
        self._returning = Returning(limits, self._patience)
        self._choice = Choice(pieces, limits, random)
        self._flights = Flights(pieces, verified, self._repairs, self._hedging)
        self._steady = False  # nothing but the lanes' own windows needs looking at
        self.checked_s = float("-inf")  # when deadlines were last looked at
        self.lost: dict[str, None] = {}  # an ordered set of source keys, for reports
        self.last_error: PacelineError | None = None
        self.stalled: PacelineError | None = None  # why nothing can be asked just now
        self.hopeless: Repair | None = None  # arrived corrupt from everybody

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def assign(self, lanes: WorkerLanes, now_s: float, actions: list[SessionAction]) -> None:
        """Go over to ``lanes``; streams whose source stays are kept with what is in flight."""
        works, flights = Works.of(lanes, self._pieces), self._flights
        planned = {work.candidates[0].key: work.candidates[0] for work in works}
        for key, feed in list(flights.feeds.items()):
            if planned.get(key) != feed.source:
                self._forget(feed, actions)
        self._patience.is_first_plan = not flights.works
        self._patience.piece_deadline_s = lanes.piece_deadline_s
        self._hedging.begin()
        self._repairs.replan(set(flights.feeds))
        flights.follow(works, now_s)
        for work in works:
            self._size_window(work)
        # The plan knows what arrived from the origin; what is on its way is spent of its budget.
        self._choice.begin(OriginBudget(lanes.origin_budget_bytes, flights.origin_flying_bytes))
        if self._choice.woke:
            self.sleep(woke=True)  # these lanes may have been under way while we stood still
        self.lost.clear()
        self.stalled = self.hopeless = None

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
        self.stalled = None
        if feed is not None:
            feed.heard_s = feed.moved_s = now_s
            feed.judged.append((extent.size, 0))
            feed.good += extent.size
            self._choice.delivered(key, extent.size)
        if not self._steady:
            self._look_at_probes(extent, now_s)
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
        for work, part in self._flights.corrupt(feed, extent):
            self._end_probe(work, part, now_s)
            for run in self._flights.nowhere(part):
                work.taken.add(run)
                for repair in self._repairs.rejected(key, run, now_s):
                    self._judge(repair, work)
        return feed, feed.is_bad(self._limits)

    def _judge(self, repair: Repair, work: Work) -> None:
        if self._repairs.is_hopeless(repair, work.candidates, self._choice.is_gone):
            self.hopeless = repair

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
        self._end_probes(key, now_s)
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
            self._end_probes(feed.source.key, now_s)
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
        for repair in self._repairs:
            if repair.asked is None:
                yield repair.retry_at_s
            else:
                yield self._aside_ends_s(repair.asked, repair.asked_s)
        for work in self._flights.works:
            if work.active is not None:
                if work.asked_pieces:
                    yield self._patience.standstill_at_s(work, self._flights.feed_of(work))
            elif work.wanting:
                yield from self._choice.retries(work)
            if work.away is not None:
                yield from self._return_deadlines(work)
        if (hedge := self._hedging.hedge) is not None:
            yield self._aside_ends_s(hedge.key, hedge.asked_s)
        elif self._hedging.due_s is not None:
            yield self._hedging.due_s

    def _return_deadlines(self, work: Work) -> Iterator[float]:
        if work.away is not None and work.away.probe is not None:
            yield self._returning.ends_s(work.away.probe)
        elif (due_s := self._returning.due_s(work)) is not None:
            yield max(due_s, self._choice.rested_s(work.candidates[0], work))

    def _aside_ends_s(self, key: str, asked_s: float) -> float:
        return self._patience.aside_ends_s(self._flights.feeds.get(key), asked_s)

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
            if self._returning.is_over(work, now_s):
                self._in_vain(work, now_s)
        for repair in self._repairs:
            key = repair.asked
            if key is not None and now_s >= self._aside_ends_s(key, repair.asked_s):
                self._repairs.unanswered(repair)
                if (asked := self._flights.feeds.get(key)) is not None:
                    for run in repair.pieces:
                        self._flights.unask(asked, run)
        hedge = self._hedging.hedge
        if hedge is not None and now_s >= self._aside_ends_s(hedge.key, hedge.asked_s):
            self._end_hedge(hedge.key, list(hedge.pieces), now_s)

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
        self._ask_repairs(now_s, actions)
        for work in works:
            if work.away is not None and not work.wanting:
                self._in_vain(work, now_s)  # the last pieces wait for nobody
        drained = not self._repairs and self._hedging.is_possible
        wanting = [work for work in works if work.wanting > 0]
        sources = [self._source_for(work, now_s) for work in wanting]  # all, as they share windows
        for work, feed in zip(wanting, sources, strict=True):
            if feed is not None:
                self._size_window(work)  # others may have left the source they shared
                self._top_up(feed, work, now_s, actions)
                if work.active is None and (other := self._source_for(work, now_s)) is not None:
                    self._top_up(other, work, now_s, actions)  # the origin's budget is spent
            if work.away is not None and self._returning.is_due(work, now_s):
                self._probe(work, now_s, actions)
            drained = drained and work.wanting == 0
        self._hedging.due_s = None
        if drained:
            self._start_hedge(now_s, actions)
        for feed in list(self._flights.feeds.values()):
            if self._flights.is_idle(feed):
                self._forget(feed, actions)
        self._ask_repairs(now_s, actions)  # some may have been asked of a stream just closed
        self._steady = (
            not self._repairs
            and self._hedging.hedge is None
            and self._hedging.due_s is None
            and all(work.active is not None for work in works if work.wanting)
            and all(work.away is None or work.away.probe is None for work in works)
        )

    def keep_full(self, extent: Extent, now_s: float, actions: list[SessionAction]) -> bool:
        """Do for the lanes of ``extent``, which has just arrived, what ``pump`` would do for all;
        return whether that is certain to be the same.
        """
        if not self._steady:
            return False
        for work, _ in self._flights.works.parts(extent):
            feed = self._flights.feed_of(work)
            if feed is None or not work.wanting:
                return False
            self._top_up(feed, work, now_s, actions)
            if work.active is None:
                return False
            if not work.wanting:
                self._steady = False
        return True

    def _source_for(self, work: Work, now_s: float) -> Feed | None:
        if (feed := self._flights.feed_of(work)) is not None:
            return feed
        work.active = None
        choice, missing = self._choice, next(work.taken.gaps(work.extent))
        able = [each for each in work.candidates if choice.may_ask(each, missing, work, now_s)]
        if not choice.may_afford(work.candidates[0], missing) or (
            not able and not all(choice.may_afford(each, missing) for each in work.candidates)
        ):
            self.stalled = choice.refusal()
        if not able:
            return None
        best = choice.best(able, work)
        work.active, work.progress_s = best.key, now_s
        fresh = work.is_first_choice(best.key) and not choice.was_given_up(best, work)
        hurry = len(able) > 1 and best.kind == "worker" and not fresh
        work.hurry_s = self._patience.hurry_s(work) if hurry else 0.0
        if not work.is_first_choice(best.key):
            self._returning.stands_in(work, now_s)
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
                    self.stalled = self._choice.refusal()
            if extent.size == 0:
                return
            self._request(feed, extent, now_s, actions)

    def _request(
        self,
        feed: Feed,
        extent: Extent,
        now_s: float,
        actions: list[SessionAction],
        *,
        aside: bool = False,
    ) -> None:
        self._flights.ask(feed, extent, now_s, aside=aside)
        if feed.source.kind == "origin":
            self._choice.budget.spent_bytes += self._pieces.bytes_of(extent)
        actions.append(Fetch(feed.source, feed.stream, extent))

    # ── on the side: repairs, a hedge, the way back ──────────────────────────────────────────────

    def _ask_repairs(self, now_s: float, actions: list[SessionAction]) -> None:
        for repair in [*self._repairs] if self._repairs else ():
            if repair.asked is None and now_s >= repair.retry_at_s:
                self._ask_repair(repair, now_s, actions)

    def _ask_repair(self, repair: Repair, now_s: float, actions: list[SessionAction]) -> None:
        work, part = next(self._flights.works.parts(next(iter(repair.pieces))))
        if part.size < repair.pieces.count:
            repair = self._repairs.split(repair, part)  # a run at a time, of one lane
        self._judge(repair, work)
        if self.hopeless is not None:
            return
        choice = self._choice

        def may_ask(source: Source) -> bool:
            return choice.may_ask(source, part, work, now_s)

        source = self._repairs.choose(repair, work.candidates, may_ask, now_s)
        if source is None:
            if not all(choice.may_afford(each, part) for each in work.candidates):
                self.stalled = choice.refusal()
            return
        if source.kind == "origin":
            fits = self._pieces.fitting(part, choice.budget.left_bytes, part.size)
            if fits.size < part.size:
                repair, part = self._repairs.split(repair, fits), fits
        repair.asked, repair.asked_s = source.key, now_s
        self._request(self._flights.open(source, now_s), part, now_s, actions, aside=True)

    def _start_hedge(self, now_s: float, actions: list[SessionAction]) -> None:
        """Ask a spare for the oldest pieces in flight once they are late; who sends first wins.

        Never the origin: a fleet that waits for its slowest link would read the model twice.
        """
        found = self._hedging.oldest(self._flights.feeds.values(), self._flights.works)
        if found is None or now_s < (self._hedging.due_s or 0.0):
            return
        work, run = found
        owing = self._flights.owing(run)
        for source in work.candidates:
            if source.kind == "origin" or source.key in owing:
                continue
            if self._choice.may_ask(source, run, work, now_s):
                extent = self._hedging.start(source.key, run, now_s)
                feed = self._flights.open(source, now_s)
                self._request(feed, extent, now_s, actions, aside=True)
                return

    def _end_hedge(self, key: str, pieces: list[Extent], now_s: float) -> None:
        """Leave a spare that did not help; the first source still owes the pieces."""
        self._hedging.hedge = None
        feed = self._flights.feeds.get(key)
        for run in pieces:
            if feed is not None:
                self._flights.unask(feed, run)
            for work, _ in self._flights.works.parts(run):
                self._choice.fell_behind(key, work, now_s)

    def _probe(self, work: Work, now_s: float, actions: list[SessionAction]) -> None:
        """Ask the source that the plan names for one piece, to see how far it is."""
        planned, gap = work.candidates[0], next(work.taken.gaps(work.extent), None)
        if gap is None or planned.kind == "origin":
            return
        if self._choice.may_ask(planned, gap, work, now_s):
            piece = Extent(gap.first, gap.first + 1)
            self._returning.asked(work, piece, now_s)
            feed = self._flights.open(planned, now_s)
            self._request(feed, piece, now_s, actions, aside=True)

    def _look_at_probes(self, extent: Extent, now_s: float) -> None:
        """Go back to the source that the plan names where its probe has arrived and tells so."""
        for work, part in self._flights.works.parts(extent):
            if work.away is None or (probe := work.away.probe) is None:
                continue
            if part.first <= probe.piece.first < part.stop and self._returning.came(work, now_s):
                # What is in flight from the spare still comes from there.
                work.active, work.progress_s, work.hurry_s = work.candidates[0].key, now_s, 0.0
                self._flights.open(work.candidates[0], now_s)

    def _end_probe(self, work: Work, part: Extent, now_s: float) -> None:
        """Give the probe of ``work`` up where ``part`` is or holds its piece."""
        if work.away is None or (probe := work.away.probe) is None:
            return
        if part.first <= probe.piece.first < part.stop:
            self._in_vain(work, now_s)

    def _end_probes(self, key: str, now_s: float) -> None:
        """Give up the probes at a source that is lost."""
        for work in self._flights.works:
            if work.is_first_choice(key):
                self._in_vain(work, now_s)

    def _in_vain(self, work: Work, now_s: float) -> None:
        if work.away is not None and work.away.probe is not None:
            self._flights.end_probe(work, takes_over=False)
            self._returning.in_vain(work, now_s)
