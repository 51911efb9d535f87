"""Sends requests outside a pull task's own stream: repairs, hedged requests, failback probes.

Corrupt pieces are fetched again on their own, the last pieces are also requested from a spare when
they are late, and a planned source that a spare replaces is probed with single pieces. The rules
are in ``recovery`` and ``pull_state``; ``pulling`` keeps the tasks' own windows full. No I/O and no
clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.relay.protocol.deadlines import Deadlines
from paceline.relay.protocol.events import Fetch, SessionAction
from paceline.relay.protocol.extents import Extent
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.pull_state import Hedging, PullState
from paceline.relay.protocol.recovery import Failback, Repair, Repairs
from paceline.relay.protocol.source_selection import PullTask, SourceSelector, SourceStream
from paceline.schemas.plan import Source


class RequestSender:
    """Sends requests: records them, charges the origin budget, returns ``Fetch`` actions.

    The callers (``pulling`` and ``Aside``) choose the source and the pieces.
    """

    def __init__(self, pieces: PieceMap, flights: PullState, choice: SourceSelector) -> None:
        self._pieces = pieces
        self._flights = flights
        self._choice = choice

    def ask(
        self,
        feed: SourceStream,
        extent: Extent,
        now_s: float,
        actions: list[SessionAction],
        *,
        aside: bool = False,
    ) -> None:
        """Request ``extent`` from ``feed``; ``aside`` for a repair, a hedge or a probe."""
        self._flights.ask(feed, extent, now_s, aside=aside)
        if feed.source.kind == "origin":
            self._choice.budget.spent_bytes += self._pieces.bytes_of(extent)
        actions.append(Fetch(feed.source, feed.stream, extent))


class SideRequests:
    """All side requests under the current lanes."""

    def __init__(
        self,
        pieces: PieceMap,
        limits: SessionLimits,
        patience: Deadlines,
        choice: SourceSelector,
        flights: PullState,
        asking: RequestSender,
        repairs: Repairs,
        hedging: Hedging,
    ) -> None:
        self._pieces = pieces
        self._patience = patience
        self._choice = choice
        self._flights = flights
        self._asking = asking
        self._repairs = repairs
        self._hedging = hedging
        self._returning = Failback(limits, patience)
        self.hopeless: Repair | None = None  # pieces that arrived corrupt from every source

    def begin(self) -> None:
        """Reset for new lanes; repairs in flight on streams that stay open are kept."""
        self._hedging.begin()
        self._repairs.replan(set(self._flights.feeds))
        self.hopeless = None

    @property
    def is_repairing(self) -> bool:
        """Return whether any repair is pending."""
        return bool(self._repairs)

    @property
    def is_quiet(self) -> bool:
        """Return whether no side request can become due before a deadline, and the only ones in
        flight are repairs from sources that pull tasks use.
        """
        reading = [work.active for work in self._flights.works] if self._repairs else []
        return (
            all(each.asked is not None and each.asked in reading for each in self._repairs)
            and self._hedging.hedge is None
            and all(work.away is None or work.away.probe is None for work in self._flights.works)
        )

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which a side request becomes due or times out."""
        for repair in self._repairs:
            if repair.asked is None:
                yield repair.retry_at_s
            else:
                yield self._ends_s(repair.asked, repair.asked_s)
        for work in self._flights.works:
            if work.away is not None:
                yield from self._return_deadlines(work)
        if (hedge := self._hedging.hedge) is not None:
            yield self._ends_s(hedge.key, hedge.asked_s)
        elif self._hedging.due_s is not None:
            yield self._hedging.due_s

    def _return_deadlines(self, work: PullTask) -> Iterator[float]:
        if work.away is not None and work.away.probe is not None:
            yield self._returning.ends_s(work.away.probe)
        elif (due_s := self._returning.due_s(work)) is not None:
            yield max(due_s, self._choice.rested_s(work.candidates[0], work))

    def _ends_s(self, key: str, asked_s: float) -> float:
        return self._patience.aside_ends_s(self._flights.feeds.get(key), asked_s)

    def check_deadlines(self, now_s: float) -> None:
        """Abandon side requests that have timed out."""
        for work in self._flights.works:
            if self._returning.is_over(work, now_s):
                self.end_probe(work, now_s)
        for repair in self._repairs:
            key = repair.asked
            if key is not None and now_s >= self._ends_s(key, repair.asked_s):
                self._repairs.unanswered(repair)
                if (asked := self._flights.feeds.get(key)) is not None:
                    for run in repair.pieces:
                        self._flights.unask(asked, run)
        hedge = self._hedging.hedge
        if hedge is not None and now_s >= self._ends_s(hedge.key, hedge.asked_s):
            self._end_hedge(hedge.key, list(hedge.pieces), now_s)

    # ── repairs ──────────────────────────────────────────────────────────────────────────────────

    def rejected(self, feed: SourceStream, extent: Extent, now_s: float) -> None:
        """Create repairs for the requested pieces of ``extent`` that ``feed`` sent corrupt, as far
        as they are neither verified nor in flight from elsewhere.
        """
        for work, part in self._flights.corrupt(feed, extent):
            if _is_probed(work, part):
                self.end_probe(work, now_s)
            for run in self._flights.nowhere(part):
                work.taken.add(run)
                for repair in self._repairs.rejected(feed.source.key, run, now_s):
                    self._judge(repair, work)

    def ask_repairs(self, now_s: float, actions: list[SessionAction]) -> None:
        """Request the repairs that are due."""
        for repair in [*self._repairs] if self._repairs else ():
            if repair.asked is None and now_s >= repair.retry_at_s:
                self._ask_repair(repair, now_s, actions)

    def _ask_repair(self, repair: Repair, now_s: float, actions: list[SessionAction]) -> None:
        work, part = next(self._flights.works.parts(next(iter(repair.pieces))))
        if part.size < repair.pieces.count:
            repair = self._repairs.split(repair, part)  # one run of one pull task at a time
        self._judge(repair, work)
        if self.hopeless is not None:
            return
        choice = self._choice

        def may_ask(source: Source) -> bool:
            return choice.may_ask(source, part, work, now_s)

        source = self._repairs.choose(repair, work.candidates, may_ask, now_s)
        if source is None:
            if not all(choice.may_afford(each, part) for each in work.candidates):
                choice.refuse()
            return
        if source.kind == "origin":
            fits = self._pieces.fitting(part, choice.budget.left_bytes, part.size)
            if fits.size < part.size:
                repair, part = self._repairs.split(repair, fits), fits
        repair.asked, repair.asked_s = source.key, now_s
        self._asking.ask(self._flights.open(source, now_s), part, now_s, actions, aside=True)

    def _judge(self, repair: Repair, work: PullTask) -> None:
        if self._repairs.is_hopeless(repair, work.candidates, self._choice.is_gone):
            self.hopeless = repair

    # ── hedged requests ──────────────────────────────────────────────────────────────────────────

    def hedge(self, now_s: float, actions: list[SessionAction], *, is_drained: bool) -> None:
        """Once no task has anything left to request, request the oldest pieces in flight from a
        spare too when they are late; the first copy wins.

        Never from the origin: a fleet that waits for its slowest link would read the model twice.
        """
        self._hedging.due_s = None
        if not is_drained or self._repairs or not self._hedging.is_possible:
            return
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
                self._asking.ask(feed, extent, now_s, actions, aside=True)
                return

    def _end_hedge(self, key: str, pieces: list[Extent], now_s: float) -> None:
        """Drop a hedge that did not deliver; the pieces stay in flight from the first source."""
        self._hedging.hedge = None
        feed = self._flights.feeds.get(key)
        for run in pieces:
            if feed is not None:
                self._flights.unask(feed, run)
            for work, _ in self._flights.works.parts(run):
                self._choice.fell_behind(key, work, now_s)

    # ── failback ─────────────────────────────────────────────────────────────────────────────────

    def stands_in(self, work: PullTask, now_s: float) -> None:
        """Record that a spare was chosen for ``work``."""
        self._returning.stands_in(work, now_s)

    def probe(self, work: PullTask, now_s: float, actions: list[SessionAction]) -> None:
        """Send a probe to the planned source of ``work`` if one is due."""
        if not self._returning.is_due(work, now_s):
            return
        planned, gap = work.candidates[0], next(work.taken.gaps(work.extent), None)
        if gap is None or planned.kind == "origin":
            return
        if self._choice.may_ask(planned, gap, work, now_s):
            piece = Extent(gap.first, gap.first + 1)
            self._returning.asked(work, piece, now_s)
            feed = self._flights.open(planned, now_s)
            self._asking.ask(feed, piece, now_s, actions, aside=True)

    def look_at_probes(self, extent: Extent, now_s: float) -> None:
        """Go back to a planned source if its probe has arrived in ``extent`` and it keeps up."""
        for work, part in self._flights.works.parts(extent):
            if _is_probed(work, part) and self._returning.came(work, now_s):
                # Pieces in flight from the spare still arrive from there.
                work.active, work.progress_s, work.hurry_s = work.candidates[0].key, now_s, 0.0
                self._flights.open(work.candidates[0], now_s)

    def end_probes(self, key: str, now_s: float) -> None:
        """Abandon the probes of a lost source."""
        for work in self._flights.works:
            if work.is_first_choice(key):
                self.end_probe(work, now_s)

    def end_probe(self, work: PullTask, now_s: float) -> None:
        """Abandon the probe of ``work``, if there is one."""
        if work.away is not None and work.away.probe is not None:
            self._flights.end_probe(work, takes_over=False)
            self._returning.in_vain(work, now_s)


def _is_probed(work: PullTask, part: Extent) -> bool:
    """Return whether ``part`` contains the probed piece of ``work``."""
    if work.away is None or (probe := work.away.probe) is None:
        return False
    return part.first <= probe.piece.first < part.stop
