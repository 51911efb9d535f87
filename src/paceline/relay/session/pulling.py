"""Who is asked for which pieces, and when somebody else is: the session's view of its sources.

``RelaySession`` decides what an event means; this half keeps streams full, notices silence and
standstill, leaves lost sources alone for a while, repairs corrupt runs elsewhere, hedges the last
pieces, and watches the origin's budget. No I/O and no clock, like the session itself.

Lanes become *works*: disjoint runs that tile the model, each with its own candidates. A work pulls
from one source at a time; several works may share a source, its stream and its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from paceline.errors import PacelineError, PeerLost, TemporaryError
from paceline.relay.session.budget import OriginBudget
from paceline.relay.session.events import Abandon, Fetch, ReportSourceLost, SessionAction
from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.feeds import FORGIVEN_PIECES, Feed, Health, Work
from paceline.relay.session.hedging import Hedging
from paceline.relay.session.lanes import Works
from paceline.relay.session.limits import PieceMap, SessionLimits
from paceline.relay.session.patience import Patience
from paceline.relay.session.repairs import Repair, Repairs
from paceline.wire.plan import Source, WorkerLanes


class Puller:
    """Pulls what ``verified`` lacks from the sources of the lanes it was given last."""

    def __init__(
        self, pieces: PieceMap, verified: Extents, limits: SessionLimits, random: Random
    ) -> None:
        self._pieces = pieces
        self._verified = verified  # the session's own set; kept here once there are lanes
        self._limits = limits
        self._random = random
        self._works = Works([])
        self._feeds: dict[str, Feed] = {}
        self._health: dict[str, Health] = {}
        self._repairs = Repairs(limits, random)
        self._patience = Patience(limits, pieces.piece_bytes, random)
        self._hedging = Hedging(limits, pieces, self._patience)
        self._budget = OriginBudget()
        self._steady = False  # nothing but the lanes' own windows needs looking at
        self._broken: set[str] = set()  # sources whose streams broke under the present lanes
        self._streams = 0
        self.checked_s = float("-inf")  # when deadlines were last looked at
        self.lost: dict[str, None] = {}  # an ordered set of source keys, for reports
        self.last_error: PacelineError | None = None
        self.stalled: PacelineError | None = None  # why nothing can be asked just now
        self.hopeless: Repair | None = None  # arrived corrupt from everybody

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def assign(self, lanes: WorkerLanes, now_s: float, actions: list[SessionAction]) -> None:
        """Go over to ``lanes``; streams whose source stays are kept with what is in flight."""
        works = Works.of(lanes, self._pieces)
        planned = {work.candidates[0].key: work.candidates[0] for work in works}
        for key, feed in list(self._feeds.items()):
            if planned.get(key) != feed.source:
                self._forget(feed, actions)
        self._works = works
        self._patience.piece_deadline_s = lanes.piece_deadline_s
        self._broken.clear()
        self._health.clear()  # the coordinator knows more than our last failures
        self._hedging.begin()
        self._repairs.replan(set(self._feeds))
        for work in self._works:
            self._settle(work, now_s)
        for feed in self._feeds.values():
            feed.aside = Extents()
            for repair in self._repairs:
                if repair.asked == feed.source.key:
                    for run in repair.pieces:
                        feed.aside.add(run)
        # The plan knows what arrived from the origin; what is on its way is spent of its budget.
        origins = [feed for feed in self._feeds.values() if feed.source.kind == "origin"]
        flying = (run for feed in origins for runs in (feed.in_flight, feed.aside) for run in runs)
        spent_bytes = sum(map(self._pieces.bytes_of, flying))
        self._budget = OriginBudget(lanes.origin_budget_bytes, spent_bytes)
        self.lost.clear()
        self.stalled = self.hopeless = None

    def _settle(self, work: Work, now_s: float) -> None:
        """Count what of ``work`` is here, on its way, or under repair."""
        held = list(self._verified.common(work.extent))
        work.missing = work.extent.size - sum(run.size for run in held)
        for run in (*held, *self._repairs.pieces.common(work.extent)):
            work.taken.add(run)
        for key, feed in self._feeds.items():
            for run in list(feed.in_flight.common(work.extent)):
                if work.is_first_choice(key):
                    work.taken.add(run)
                    work.asked_pieces += run.size
                    work.asked_bytes += self._pieces.bytes_of(run)
                else:
                    feed.in_flight.remove(run)  # it goes on with other lanes, no more with this
        if work.candidates[0].key in self._feeds:
            work.active = work.candidates[0].key
        work.progress_s = now_s
        self._size_window(work)

    def is_first_choice(self, key: str) -> bool:
        """Return whether the lanes name this source first for pieces that are still missing."""
        return any(work.missing and work.is_first_choice(key) for work in self._works)

    @property
    def origin_spent(self) -> int:
        """Return how many bytes were asked of the origin under the present lanes."""
        return self._budget.spent_bytes

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def feed(self, key: str, stream: int) -> Feed | None:
        """Return the stream, or None where it was given up already."""
        feed = self._feeds.get(key)
        return feed if feed is not None and feed.stream == stream else None

    def arrived(self, key: str, stream: int, extent: Extent, now_s: float) -> int:
        """Count verified pieces, whoever they came from; return how many are new."""
        feed = self.feed(key, stream)
        new = self.hold(extent, now_s, feed)
        self.stalled = None
        if feed is not None:
            feed.heard_s = feed.moved_s = now_s
            feed.judged.append((extent.size, 0))
            feed.good += extent.size
            if key in self._health:
                health = self._health[key]
                health.good += extent.size
                if health.good >= FORGIVEN_PIECES:
                    del self._health[key]
        return new

    def hold(self, extent: Extent, now_s: float, sender: Feed | None = None) -> int:
        """Count pieces as verified: nobody needs to send them any more; return how many are new."""
        if not self._works:
            return self._verified.add(extent)
        new = 0
        for work, part in self._works.parts(extent):
            fresh = self._verified.add(part)
            if fresh:
                new += fresh
                work.missing -= fresh
                work.progress_s = now_s
                if work.behind and sender is not None:
                    work.behind.pop(sender.source.key, None)
            if not self._drop(work, part, sender):
                work.taken.add(part)
        if self._repairs:
            self._repairs.arrived(extent)
        return new

    def missing_again(self, extent: Extent) -> None:
        """Ask anew for pieces that were here and are not any more."""
        for work, part in self._works.parts(extent):
            for run in list(self._verified.common(part)):
                work.missing += self._verified.remove(run)
                work.taken.remove(run)
        self._verified.remove(extent)

    def rejected(
        self, key: str, stream: int, extent: Extent, now_s: float
    ) -> tuple[Feed | None, bool]:
        """Take note of corrupt pieces; return their stream if it is open, and whether its share of
        them is so bad that it should be left.

        What is neither here nor on its way from elsewhere is set aside, to be fetched on its own.
        """
        feed = self.feed(key, stream)
        if feed is None:
            return None, False  # what it owed was asked of somebody else already
        feed.heard_s = feed.moved_s = now_s
        # Only what it owes: the same news twice is one corrupt arrival.
        owed = Extents([*feed.in_flight.common(extent), *feed.aside.common(extent)])
        for run in owed:
            feed.judged.append((run.size, run.size))
            for work, part in self._works.parts(run):
                self._drop_from(feed, work, part)
                if self._hedging.hedge is not None and self._hedging.hedge.key == key:
                    self._hedging.arrived(part)
                self._set_aside(key, work, part, now_s)
        return feed, feed.is_bad(self._limits)

    def _set_aside(self, key: str, work: Work, part: Extent, now_s: float) -> None:
        """Put pieces that ``key`` sent corrupt under repair, but those that are here or on their
        way from elsewhere.
        """
        elsewhere = Extents(run for each in self._feeds.values() for run in each.in_flight)
        for missing in list(self._verified.gaps(part)):
            for run in list(elsewhere.gaps(missing)):
                work.taken.add(run)
                for repair in self._repairs.rejected(key, run, now_s):
                    self._judge(repair, work)

    def _judge(self, repair: Repair, work: Work) -> None:
        if self._repairs.is_hopeless(repair, work.candidates, self._is_gone):
            self.hopeless = repair

    def _is_gone(self, source: Source) -> bool:
        health = self._health.get(source.key)
        return health is not None and health.retry_at_s == float("inf")

    def _drop(self, work: Work, part: Extent, sender: Feed | None) -> bool:
        """Take ``part`` of ``work`` out of every stream's flight; return whether all of it was in
        flight from ``sender`` (the usual case), and so nowhere else.
        """
        here = sender is not None and self._drop_from(sender, work, part)
        if here and self._hedging.hedge is None:
            return True
        for feed in self._feeds.values():
            if feed is not sender:
                self._drop_from(feed, work, part)
        self._hedging.arrived(part)
        return False

    def _drop_from(self, feed: Feed, work: Work, part: Extent) -> bool:
        """Take ``part`` out of one stream's flight; return whether all of it was there."""
        if feed.aside:
            feed.aside.remove(part)
        if feed.in_flight.covers(part):
            feed.in_flight.remove(part)
            work.asked_pieces -= part.size
            work.asked_bytes -= self._pieces.bytes_of(part)
            return True
        for run in list(feed.in_flight.common(part)):
            feed.in_flight.remove(run)
            work.asked_pieces -= run.size
            work.asked_bytes -= self._pieces.bytes_of(run)
        return False

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
        self._forget(feed, actions)
        if idle:
            return  # a stream closed while nothing was asked of it is no loss
        health = self._health.setdefault(key, Health())
        health.failed(now_s, self._limits, self._random)
        if for_good:
            health.retry_at_s = float("inf")
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
            self._forget(feed, actions)
            self._broken.add(feed.source.key)
            self.last_error = error
        else:
            self.lose(feed, error, now_s, actions)

    def _report_lost(self, key: str, error: PacelineError, actions: list[SessionAction]) -> None:
        self.last_error = error
        self.lost[key] = None
        actions.append(ReportSourceLost(key, error.one_line()))

    def close_all(self, actions: list[SessionAction]) -> None:
        """End every stream."""
        for feed in list(self._feeds.values()):
            self._forget(feed, actions)

    def _forget(self, feed: Feed, actions: list[SessionAction]) -> None:
        """End a stream; what was in flight is wanted again."""
        key = feed.source.key
        del self._feeds[key]
        for run in list(feed.in_flight):
            self._want_again(feed, run)
        for repair in self._repairs:
            if repair.asked == key:
                self._repairs.unanswered(repair)
        if self._hedging.hedge is not None and self._hedging.hedge.key == key:
            self._hedging.hedge = None
        for work in self._works:
            if work.active == key:
                work.active = None
        actions.append(Abandon(key, feed.stream))

    def _want_again(self, feed: Feed, extent: Extent) -> None:
        """Take ``extent`` out of flight; what a hedge has asked elsewhere is in flight there."""
        hedge = self._hedging.hedge
        other = self._feeds.get(hedge.key) if hedge is not None else None
        for work, part in self._works.parts(extent):
            self._drop_from(feed, work, part)
            work.taken.remove(part)
            if hedge is None or other is None or other is feed:
                continue
            for run in list(hedge.pieces.common(part)):
                self._hedging.arrived(run)
                other.aside.remove(run)
                self._fly(other, work, run, hedge.asked_s)
                work.active, work.progress_s = hedge.key, hedge.asked_s

    def _leave(self, work: Work, error: PacelineError, now_s: float) -> bool:
        """Take ``work`` away from a source that lives but has nothing for it; return whether the
        plan meant it to have. Others may go on reading there.
        """
        key = work.active or ""
        work.behind.setdefault(key, Health()).failed(now_s, self._limits, self._random)
        if (feed := self._feeds.get(key)) is not None:
            for run in list(feed.in_flight.common(work.extent)):
                self._want_again(feed, run)
        work.active = None if work.active == key else work.active
        self.last_error = error
        return work.is_first_choice(key)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which something here may have to change."""
        for feed in self._feeds.values():
            if feed.waiting:
                yield self._patience.silent_at_s(feed)
        for repair in self._repairs:
            if repair.asked is None:
                yield repair.retry_at_s
            else:
                yield self._aside_ends_s(repair.asked, repair.asked_s)
        for work in self._works:
            if work.active is not None:
                if work.asked_pieces:
                    yield self._patience.standstill_at_s(work, self._feeds.get(work.active))
            elif work.wanting:
                for rests in (self._health, work.behind):
                    for source in work.candidates:
                        if (rest := rests.get(source.key)) is not None:
                            yield rest.retry_at_s
        if (hedge := self._hedging.hedge) is not None:
            yield self._aside_ends_s(hedge.key, hedge.asked_s)
        elif self._hedging.due_s is not None:
            yield self._hedging.due_s

    def _aside_ends_s(self, key: str, asked_s: float) -> float:
        return self._patience.aside_ends_s(self._feeds.get(key), asked_s)

    def check_deadlines(self, now_s: float, actions: list[SessionAction]) -> None:
        """Give up sources that are silent or stand still, and repairs that take too long."""
        self.checked_s = now_s
        for feed in list(self._feeds.values()):
            if feed.waiting and now_s >= self._patience.silent_at_s(feed):
                silence_s = self._patience.silence_s(feed.source)
                error = PeerLost(
                    "source went silent",
                    got=f"{now_s - feed.heard_s:.2f} s",
                    wanted=f"a sign of life within {silence_s:.2f} s",
                    where=feed.source.key,
                )
                self.lose(feed, error, now_s, actions)
        for work in self._works:
            key = work.active
            if key is None or not work.asked_pieces:
                continue
            if now_s < self._patience.standstill_at_s(work, self._feeds.get(key)):
                continue
            error = PeerLost(
                "source lives but makes no progress",
                got=f"{now_s - work.progress_s:.2f} s",
                wanted="a piece",
                where=key,
            )
            left = self._feeds.get(key)
            lives = left is not None and left.moved_s > work.progress_s  # for other lanes
            if self._leave(work, error, now_s) and not lives:
                self._report_lost(key, error, actions)
        for repair in self._repairs:
            key = repair.asked
            if key is not None and now_s >= self._aside_ends_s(key, repair.asked_s):
                if (asked := self._feeds.get(key)) is not None:
                    for run in repair.pieces:
                        asked.aside.remove(run)
                self._repairs.unanswered(repair)
        hedge = self._hedging.hedge
        if hedge is not None and now_s >= self._aside_ends_s(hedge.key, hedge.asked_s):
            self._end_hedge(hedge.key, list(hedge.pieces), now_s)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def pump(self, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for whatever can be asked for now; close streams that nothing is left for."""
        for repair in [*self._repairs] if self._repairs else ():
            if repair.asked is None and now_s >= repair.retry_at_s:
                self._ask_repair(repair, now_s, actions)
        drained = not self._repairs and self._hedging.is_possible
        wanting = [work for work in self._works if work.wanting > 0]
        sources = [self._source_for(work, now_s) for work in wanting]  # all, as they share windows
        for work, feed in zip(wanting, sources, strict=True):
            if feed is not None:
                self._size_window(work)  # others may have left the source they shared
                self._top_up(feed, work, now_s, actions)
                if work.active is None and (other := self._source_for(work, now_s)) is not None:
                    self._top_up(other, work, now_s, actions)  # the origin's budget is spent
            drained = drained and work.wanting == 0
        self._hedging.due_s = None
        if drained:
            self._start_hedge(now_s, actions)
        for key, feed in list(self._feeds.items()):
            if not feed.waiting and not any(
                work.active == key and work.wanting for work in self._works
            ):
                self._forget(feed, actions)
        self._steady = (
            not self._repairs
            and self._hedging.hedge is None
            and self._hedging.due_s is None
            and all(work.active is not None for work in self._works if work.wanting)
        )

    def keep_full(self, extent: Extent, now_s: float, actions: list[SessionAction]) -> bool:
        """Do for the lanes of ``extent``, which has just arrived, what ``pump`` would do for all;
        return whether that is certain to be the same.
        """
        if not self._steady:
            return False
        for work, _ in self._works.parts(extent):
            feed = self._feeds.get(work.active or "")
            if feed is None or not work.wanting:
                return False
            self._top_up(feed, work, now_s, actions)
            if work.active is None:
                return False
            if not work.wanting:
                self._steady = False
        return True

    def _source_for(self, work: Work, now_s: float) -> Feed | None:
        if work.active is not None and (feed := self._feeds.get(work.active)):
            return feed
        work.active = None
        missing = next(work.taken.gaps(work.extent))
        able = [each for each in work.candidates if self._may_ask(each, missing, work, now_s)]
        if not self._may_afford(work.candidates[0], missing) or (
            not able and not all(self._may_afford(each, missing) for each in work.candidates)
        ):
            self.stalled = self._budget.exceeded()
        if able:
            best = min(able, key=lambda each: self._failures(each, work))
            work.active, work.progress_s = best.key, now_s
            given_up = best.key in self._broken or self._failures(best, work) > 0
            fresh = work.is_first_choice(best.key) and not given_up
            hurry = len(able) > 1 and best.kind == "worker" and not fresh
            work.hurry_s = self._patience.hurry_s(work) if hurry else 0.0
            return self._open(best, now_s)
        return None

    def _failures(self, source: Source, work: Work) -> int:
        """Return how often a source was given up of late: the untried come first.

        The origin that a lane names is asked before its spares all the same: they get the pieces
        from us. As a spare it is asked when a few others had nothing: then we are ahead of them.
        """
        if source.kind != "origin":
            rests = (self._health.get(source.key), work.behind.get(source.key))
            return sum(rest.failures for rest in rests if rest is not None)
        vain = sum(self._failures(each, work) > 0 for each in work.candidates if each != source)
        return -1 if work.is_first_choice(source.key) or vain >= self._limits.spares_first else 0

    def _ask_repair(self, repair: Repair, now_s: float, actions: list[SessionAction]) -> None:
        work, part = next(self._works.parts(next(iter(repair.pieces))))
        if part.size < repair.pieces.count:
            repair = self._repairs.split(repair, part)  # a run at a time, of one lane
        self._judge(repair, work)
        if self.hopeless is not None:
            return

        def may_ask(source: Source) -> bool:
            return self._may_ask(source, part, work, now_s)

        source = self._repairs.choose(repair, work.candidates, may_ask, now_s)
        if source is None:
            if not all(self._may_afford(each, part) for each in work.candidates):
                self.stalled = self._budget.exceeded()
            return
        if source.kind == "origin":
            fits = self._pieces.fitting(part, self._budget.left_bytes, part.size)
            if fits.size < part.size:
                repair, part = self._repairs.split(repair, fits), fits
        repair.asked, repair.asked_s = source.key, now_s
        self._request(self._open(source, now_s), part, now_s, actions, aside=True)

    def _open(self, source: Source, now_s: float) -> Feed:
        feed = self._feeds.get(source.key)
        if feed is None:
            self._streams += 1
            feed = Feed(source, self._streams, now_s, now_s)
            self._feeds[source.key] = feed
        return feed

    def _size_window(self, work: Work) -> None:
        """Decide how much of ``work`` may be in flight: what a second brings at the planned rate,
        within the source's window, which lanes of one source share. A larger one keeps no pipe
        fuller, and is asked again when the source dies or turns out to be slow.
        """
        limits, rate = self._limits, work.expected_bytes_s
        sharing = self._works.sharing(work)
        most = limits.window_bytes
        if rate > 0:
            feed = self._feeds.get(work.active or "")
            at_origin = feed is not None and feed.source.kind == "origin"
            window_s = limits.origin_window_s if at_origin else limits.window_s
            most = min(most, int(rate * window_s))
        several = max(1, limits.least_window_pieces // sharing) * self._pieces.piece_bytes
        work.window_bytes = max(several, most // sharing)
        work.window_pieces = max(1, limits.window_pieces // sharing)

    def _top_up(self, feed: Feed, work: Work, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for more once half of the window has drained: few requests, never an empty pipe."""
        if work.asked_pieces and (
            work.asked_bytes > work.window_bytes // 2 or work.asked_pieces > work.window_pieces // 2
        ):
            return
        self._size_window(work)
        while (gap := next(work.taken.gaps(work.extent), None)) is not None:
            room_bytes = work.window_bytes - work.asked_bytes
            room_pieces = work.window_pieces - work.asked_pieces
            extent = self._pieces.fitting(gap, room_bytes, room_pieces)
            if feed.source.kind == "origin":
                extent = self._pieces.fitting(extent, self._budget.left_bytes, extent.size)
                if extent.size == 0 and not work.asked_pieces:
                    work.active = None  # the fuse: others may still be asked
                    self.stalled = self._budget.exceeded()
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
        if not feed.waiting:
            feed.heard_s = now_s
        if aside:
            feed.aside.add(extent)
        else:
            for work, part in self._works.parts(extent):
                if not work.asked_pieces:
                    work.progress_s = now_s
                self._fly(feed, work, part, now_s)
        if feed.source.kind == "origin":
            self._budget.spent_bytes += self._pieces.bytes_of(extent)
        actions.append(Fetch(feed.source, feed.stream, extent))

    def _fly(self, feed: Feed, work: Work, part: Extent, asked_s: float) -> None:
        """Count ``part`` of ``work`` as in flight in ``feed``."""
        work.taken.add(part)
        work.asked_pieces += feed.in_flight.add(part)
        work.asked_bytes += self._pieces.bytes_of(part)
        feed.asked.append((asked_s, part))

    def _may_ask(self, source: Source, extent: Extent, work: Work, now_s: float) -> bool:
        for rests in (self._health, work.behind):
            rest = rests.get(source.key)
            if rest is not None and now_s < rest.retry_at_s:
                return False
        return self._may_afford(source, extent)

    def _may_afford(self, source: Source, extent: Extent) -> bool:
        return self._budget.may_afford(source, extent, self._pieces)

    # ── hedging ──────────────────────────────────────────────────────────────────────────────────

    def _start_hedge(self, now_s: float, actions: list[SessionAction]) -> None:
        """Ask a spare for the oldest pieces in flight once they are late; who sends first wins.

        Never the origin: a fleet that waits for its slowest link would read the model twice.
        """
        found = self._hedging.oldest(self._feeds.values(), self._works)
        if found is None or now_s < (self._hedging.due_s or 0.0):
            return
        work, run = found
        owing = {key for key, feed in self._feeds.items() if next(feed.in_flight.common(run), None)}
        for source in work.candidates:
            if source.kind == "origin" or source.key in owing:
                continue
            if self._may_ask(source, run, work, now_s):
                extent = self._hedging.start(source.key, run, now_s)
                self._request(self._open(source, now_s), extent, now_s, actions, aside=True)
                return

    def _end_hedge(self, key: str, pieces: list[Extent], now_s: float) -> None:
        """Leave a spare that did not help; the first source still owes the pieces."""
        self._hedging.hedge = None
        feed = self._feeds.get(key)
        for run in pieces:
            if feed is not None:
                feed.aside.remove(run)
            for work, _ in self._works.parts(run):
                rest = work.behind.setdefault(key, Health())
                rest.failed(now_s, self._limits, self._random)
