"""Who is asked for which pieces, and when somebody else is: the session's view of its sources.

``RelaySession`` decides what an event means; this half keeps streams full, notices silence and
standstill, leaves lost sources alone for a while, repairs single pieces elsewhere, and watches the
origin's budget. No I/O and no clock, like the session itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from paceline.errors import OriginBudgetExceeded, PacelineError, PeerLost
from paceline.relay.events import Abandon, Fetch, ReportSourceLost, SessionAction
from paceline.relay.extents import Extent, Extents
from paceline.relay.feeds import Feed, Health, Repair, Work, backoff_s
from paceline.relay.limits import PieceMap, SessionLimits
from paceline.wire.plan import Source, WorkerLanes


class Puller:
    """Pulls what ``verified`` lacks from the sources of the lanes it was given last."""

    def __init__(
        self, pieces: PieceMap, verified: Extents, limits: SessionLimits, random: Random
    ) -> None:
        self._pieces = pieces
        self._verified = verified  # the session's own set; only read here
        self._taken = verified.copy()  # verified, in flight, or under repair
        self._limits = limits
        self._random = random
        self._work: list[Work] = []
        self._feeds: dict[str, Feed] = {}
        self._health: dict[str, Health] = {}
        self._repairs: dict[int, Repair] = {}
        self._streams = 0
        self._budget_bytes = 0
        self._piece_deadline_s = 1.0
        self.origin_spent = 0
        self.lost: dict[str, None] = {}  # an ordered set of source keys, for reports
        self.last_error: PacelineError | None = None
        self.stalled: PacelineError | None = None  # why nothing can be asked just now

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def assign(self, lanes: WorkerLanes, durable: Extents, actions: list[SessionAction]) -> None:
        """Go over to ``lanes``; streams whose source stays are kept with what is in flight."""
        self._work = [
            Work(
                self._pieces.chunk_range(lane.first_chunk, lane.last_chunk),
                _others((lane.source, *lane.spares), lanes.worker_id),
            )
            for lane in lanes.lanes
        ]
        self._cover_the_rest(durable)
        for health in self._health.values():
            health.retry_at_s = 0.0  # the coordinator knows more than our last failures
        for key, feed in list(self._feeds.items()):
            using = [w for w in self._work if w.candidates and w.candidates[0] == feed.source]
            for work in using:
                work.active = key
            if not using:
                self.close(feed, actions)
        self._repairs = {
            piece: repair if repair.asked in self._feeds else Repair(avoid=repair.avoid)
            for piece, repair in self._repairs.items()
        }
        self._budget_bytes, self.origin_spent = lanes.origin_budget_bytes, 0
        self._piece_deadline_s = lanes.piece_deadline_s
        self.lost.clear()
        self.stalled = None

    def _cover_the_rest(self, durable: Extents) -> None:
        """Add work for missing pieces that no lane names: marks may be fewer than the plan knew."""
        covered = durable.copy()
        sources: dict[str, Source] = {}
        for work in self._work:
            covered.add(work.extent)
            sources |= {each.key: each for each in work.candidates}
        if sources:
            last_origin = sorted(sources.values(), key=lambda each: each.kind == "origin")
            rest = list(covered.gaps(Extent(0, self._pieces.count)))
            self._work += [Work(extent, tuple(last_origin)) for extent in rest]

    def is_first_choice(self, key: str) -> bool:
        """Return whether the lanes name this source first for pieces that are still missing."""
        return any(key == work.candidates[0].key for work in self._unfinished() if work.candidates)

    # ── streams ──────────────────────────────────────────────────────────────────────────────────

    def feed(self, key: str, stream: int) -> Feed | None:
        """Return the stream, or None where it was given up already."""
        feed = self._feeds.get(key)
        return feed if feed is not None and feed.stream == stream else None

    def arrived(self, key: str, extent: Extent, now_s: float) -> None:
        """Take note that verified pieces came from ``key`` (and need not come from elsewhere)."""
        self._taken.add(extent)
        for feed in self._feeds.values():
            self._drop_in_flight(feed, extent)
        if self._repairs:
            for piece in range(extent.first, extent.stop):
                self._repairs.pop(piece, None)
        self.stalled = None
        if sender := self._feeds.get(key):
            sender.heard_s = sender.progress_s = now_s
            self._health.pop(key, None)

    def missing_again(self, extent: Extent) -> None:
        """Ask anew for pieces that were here and are not any more."""
        self._taken.remove(extent)

    def rejected(self, key: str, piece: int, now_s: float) -> Repair:
        """Set a piece aside that ``key`` sent corrupt, to be fetched on its own after a while."""
        self._taken.add(Extent(piece, piece + 1))
        repair = self._repairs.setdefault(piece, Repair())
        repair.attempts += 1
        repair.senders.append(key)
        repair.asked = None
        repair.retry_at_s = now_s + backoff_s(repair.attempts, self._limits, self._random)
        if not key.startswith("origin:"):  # what the origin sends, peers can only have from there
            repair.avoid.add(key)
        return repair

    def corrupted(self, feed: Feed, piece: int) -> bool:
        """Count a corrupt piece against a stream; return whether it is not worth reading on."""
        self._drop_in_flight(feed, Extent(piece, piece + 1))
        feed.corrupt += 1
        return feed.corrupt >= self._limits.corrupt_before_lost

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
        key, idle = feed.source.key, not feed.in_flight
        self.close(feed, actions)
        if idle:
            return  # a stream closed while nothing was asked of it is no loss
        health = self._health.setdefault(key, Health())
        health.failures += 1
        health.retry_at_s = now_s + backoff_s(health.failures, self._limits, self._random)
        if for_good:
            health.retry_at_s = float("inf")
        self.last_error = error
        self.lost[key] = None
        actions.append(ReportSourceLost(key, error.one_line()))

    def close(self, feed: Feed, actions: list[SessionAction]) -> None:
        """End a stream; what was in flight is wanted again."""
        key = feed.source.key
        del self._feeds[key]
        for run in feed.in_flight:
            self._taken.remove(run)
        for piece, repair in self._repairs.items():
            if repair.asked == key:
                repair.asked = None
                self._taken.add(Extent(piece, piece + 1))
        for work in self._work:
            if work.active == key:
                work.active = None
        actions.append(Abandon(key, feed.stream))

    def close_all(self, actions: list[SessionAction]) -> None:
        """End every stream."""
        for feed in list(self._feeds.values()):
            self.close(feed, actions)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which something here may have to change."""
        for feed in self._feeds.values():
            if (at := feed.deadline_s(*self._patience(feed.source))) is not None:
                yield at
        for repair in self._repairs.values():
            yield repair.retry_at_s if repair.asked is None else repair.asked_s + self._repair_s()
        for work in self._unfinished():
            if work.active is None:
                rests = (self._health.get(each.key) for each in work.candidates)
                yield from (rest.retry_at_s for rest in rests if rest is not None)

    def check_deadlines(self, now_s: float, actions: list[SessionAction]) -> None:
        """Give up sources that are silent or stand still, and repairs that take too long."""
        for feed in list(self._feeds.values()):
            silence_s, standstill_s = self._patience(feed.source)
            lost_at = feed.deadline_s(silence_s, standstill_s)
            if lost_at is None or now_s < lost_at:
                continue
            silent = now_s - feed.heard_s >= silence_s
            what = "source went silent" if silent else "source lives but makes no progress"
            waited = f"{now_s - (feed.heard_s if silent else feed.progress_s):.2f} s"
            limit = f"a piece within {silence_s if silent else standstill_s:.2f} s"
            error = PeerLost(what, got=waited, wanted=limit, where=feed.source.key)
            self.lose(feed, error, now_s, actions)
        for piece, repair in self._repairs.items():
            if repair.asked and now_s >= repair.asked_s + self._repair_s():
                if (asked := self._feeds.get(repair.asked)) is not None:
                    self._drop_in_flight(asked, Extent(piece, piece + 1))
                repair.avoid.add(repair.asked)
                repair.asked = None

    def _patience(self, source: Source) -> tuple[float, float]:
        """Return after which silence, and after which standstill, ``source`` counts as lost."""
        limits, deadline_s = self._limits, self._piece_deadline_s
        if source.kind == "origin":
            silence_s = max(limits.origin_deadline_s, deadline_s)
            return silence_s, silence_s + limits.standstill_factor * deadline_s
        return deadline_s, max(limits.standstill_min_s, limits.standstill_factor * deadline_s)

    def _repair_s(self) -> float:
        """Return how long to wait for one repaired piece before asking somebody else."""
        return 4 * self._piece_deadline_s

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def pump(self, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for whatever can be asked for now; close streams that nothing is left for."""
        for piece, repair in self._repairs.items():
            if repair.asked is None and now_s >= repair.retry_at_s:
                self._ask_repair(piece, repair, now_s, actions)
        for work in self._unfinished():
            feed = self._source_for(work, now_s)
            if feed is not None:
                self._top_up(feed, work, now_s, actions)
        used = {work.active for work in self._work} | {r.asked for r in self._repairs.values()}
        for key, feed in list(self._feeds.items()):
            if not feed.in_flight and key not in used:
                self.close(feed, actions)

    def _unfinished(self) -> Iterator[Work]:
        return (work for work in self._work if not self._verified.covers(work.extent))

    def _source_for(self, work: Work, now_s: float) -> Feed | None:
        if work.active is not None and (feed := self._feeds.get(work.active)):
            return feed
        work.active = None
        missing = next(self._taken.gaps(work.extent), None)
        if missing is None:
            return None  # all of it is on its way from somewhere
        for source in work.candidates:
            if self._may_ask(source, missing, now_s):
                work.active = source.key
                return self._open(source, now_s)
        if not all(self._may_afford(each, missing) for each in work.candidates):
            self.stalled = self._over_budget()
        return None

    def _ask_repair(
        self, piece: int, repair: Repair, now_s: float, actions: list[SessionAction]
    ) -> None:
        extent = Extent(piece, piece + 1)
        works = [work for work in self._work if work.extent.first <= piece < work.extent.stop]
        candidates = list({each.key: each for work in works for each in work.candidates}.values())
        fresh = [each for each in candidates if each.key not in repair.avoid]
        for source in (*fresh, *(each for each in candidates if each.key in repair.avoid)):
            if self._may_ask(source, extent, now_s):
                repair.asked, repair.asked_s = source.key, now_s
                self._request(self._open(source, now_s), extent, now_s, actions)
                return
        repair.retry_at_s = now_s + self._limits.backoff_s  # all of them rest; look again soon

    def _open(self, source: Source, now_s: float) -> Feed:
        feed = self._feeds.get(source.key)
        if feed is None:
            self._streams += 1
            feed = Feed(source, self._streams, now_s, now_s)
            self._feeds[source.key] = feed
        return feed

    def _top_up(self, feed: Feed, work: Work, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for more once half of the window has drained: few requests, never an empty pipe."""
        limits = self._limits
        if feed.in_flight and (
            feed.in_flight_bytes > limits.window_bytes // 2
            or feed.in_flight.count > limits.window_pieces // 2
        ):
            return
        for gap in list(self._taken.gaps(work.extent)):
            room_bytes = limits.window_bytes - feed.in_flight_bytes
            room_pieces = limits.window_pieces - feed.in_flight.count
            extent = self._pieces.fitting(gap, room_bytes, room_pieces)
            if extent.size == 0 and not feed.in_flight:
                extent = Extent(gap.first, gap.first + 1)  # a piece larger than the window
            if feed.source.kind == "origin":
                extent = self._pieces.fitting(extent, self._origin_left(), extent.size)
                if extent.size == 0 and not feed.in_flight:
                    work.active = None  # the fuse: others may still be asked
                    self.stalled = self._over_budget()
            if extent.size == 0:
                return
            self._request(feed, extent, now_s, actions)

    def _request(
        self, feed: Feed, extent: Extent, now_s: float, actions: list[SessionAction]
    ) -> None:
        if not feed.in_flight:
            feed.heard_s = feed.progress_s = now_s
        self._taken.add(extent)
        feed.in_flight.add(extent)
        asked_bytes = self._pieces.bytes_of(extent)
        feed.in_flight_bytes += asked_bytes
        if feed.source.kind == "origin":
            self.origin_spent += asked_bytes
        actions.append(Fetch(feed.source, feed.stream, extent))

    def _drop_in_flight(self, feed: Feed, extent: Extent) -> None:
        for run in list(feed.in_flight.common(extent)):
            feed.in_flight.remove(run)
            feed.in_flight_bytes -= self._pieces.bytes_of(run)

    def _may_ask(self, source: Source, extent: Extent, now_s: float) -> bool:
        health = self._health.get(source.key)
        return (health is None or now_s >= health.retry_at_s) and self._may_afford(source, extent)

    def _may_afford(self, source: Source, extent: Extent) -> bool:
        if source.kind != "origin":
            return True
        return self._pieces.bytes_of(Extent(extent.first, extent.first + 1)) <= self._origin_left()

    def _origin_left(self) -> int:
        return self._budget_bytes - self.origin_spent

    def _over_budget(self) -> PacelineError:
        return OriginBudgetExceeded(
            "no living peer has the missing pieces and the origin's budget is spent",
            got=f"{self.origin_spent} bytes asked of the origin",
            wanted=f"at most {self._budget_bytes}",
            do="Bring a holder back, or raise the budget with a new plan.",
        )


def _others(candidates: tuple[Source, ...], worker_id: str) -> tuple[Source, ...]:
    """Return the candidates without duplicates and without the worker itself; origins come last
    among the spares.
    """
    unique = {each.key: each for each in reversed(candidates) if each.worker_id != worker_id}
    ordered = list(reversed(unique.values()))
    return (*ordered[:1], *sorted(ordered[1:], key=lambda each: each.kind == "origin"))
