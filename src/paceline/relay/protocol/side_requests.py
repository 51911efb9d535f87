"""Sends requests outside a pull task's own stream: repairs, hedged requests, failback probes.

Corrupt pieces are fetched again on their own, the last pieces are also requested from a spare when
they are late, and a planned source that a spare replaces is probed with single pieces. The rules
are in ``recovery`` and ``pull_state``; ``pulling`` keeps the tasks' own windows full. No I/O and no
clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.relay.protocol.deadlines import Deadlines
from paceline.relay.protocol.events import SessionAction
from paceline.relay.protocol.extents import Extent
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.protocol.pull_state import PullState
from paceline.relay.protocol.recovery import Failback, Repair
from paceline.relay.protocol.source_selection import PullTask, SourceStream
from paceline.schemas import Source


class SideRequests:
    """All side requests under the current lanes."""

    def __init__(self, limits: SessionLimits, deadlines: Deadlines, state: PullState) -> None:
        self._deadlines = deadlines
        self._state = state
        self._pieces, self._choice = state.pieces, state.choice
        self._repairs, self._hedging = state.repairs, state.hedging
        self.failback = Failback(limits, deadlines)
        self.hopeless: Repair | None = None  # pieces that arrived corrupt from every source

    def begin(self) -> None:
        """Reset for new lanes; repairs in flight on streams that stay open are kept."""
        self._hedging.begin()
        self._repairs.replan(set(self._state.feeds))
        self.hopeless = None

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which a side request becomes due or times out."""
        for repair in self._repairs:
            if repair.asked is None:
                yield repair.retry_at_s
            else:
                yield self._ends_s(repair.asked, repair.asked_s)
        for work in self._state.works:
            if work.away is not None and work.away.probe is not None:
                yield self.failback.ends_s(work.away.probe)
            elif (due_s := self.failback.due_s(work)) is not None:
                yield max(due_s, self._choice.backoff_ends_s(work.candidates[0], work))
        if (hedge := self._hedging.hedge) is not None:
            yield self._ends_s(hedge.key, hedge.asked_s)
        elif self._hedging.due_s is not None:
            yield self._hedging.due_s

    def _ends_s(self, key: str, asked_s: float) -> float:
        return self._deadlines.side_request_ends_s(self._state.feeds.get(key), asked_s)

    def check_deadlines(self, now_s: float) -> None:
        """Abandon side requests that have timed out."""
        for work in self._state.works:
            probe = work.away.probe if work.away is not None else None
            if probe is not None and now_s >= self.failback.ends_s(probe):
                self.end_probe(work, now_s)
        for repair in self._repairs:
            key = repair.asked
            if key is not None and now_s >= self._ends_s(key, repair.asked_s):
                repair.unanswered()
                if (asked := self._state.feeds.get(key)) is not None:
                    self._state.cancel_side_request(asked, repair.piece)
        hedge = self._hedging.hedge
        if hedge is not None and now_s >= self._ends_s(hedge.key, hedge.asked_s):
            self._end_hedge(hedge.key, list(hedge.pieces), now_s)

    # ── repairs ──────────────────────────────────────────────────────────────────────────────────

    def rejected(self, feed: SourceStream, extent: Extent, now_s: float) -> None:
        """Create repairs for the requested pieces of ``extent`` that ``feed`` sent corrupt, as far
        as they are neither verified nor in flight from elsewhere.
        """
        for work, part in self._state.corrupt(feed, extent):
            if _is_probed(work, part):
                self.end_probe(work, now_s)
            for run in self._state.nowhere(part):
                work.taken.add(run)
                for repair in self._repairs.rejected(feed.source.key, run, now_s):
                    self._judge(repair, work)

    def ask_repairs(self, now_s: float, actions: list[SessionAction]) -> None:
        """Request the repairs that are due, adjacent pieces of one source together."""
        asked: tuple[Source, Extent] | None = None
        for repair in self._repairs:
            if repair.asked is not None or now_s < repair.retry_at_s:
                continue
            source = self._choose(repair, now_s)
            if self.hopeless is not None:
                break
            if source is None:
                continue
            repair.asked, repair.asked_s = source.key, now_s
            if source.kind == "origin":  # charged here, since the next choice depends on it
                self._choice.budget.spent_bytes += self._pieces.bytes_of(repair.piece)
            if asked is not None and asked[0] == source and asked[1].stop == repair.piece.first:
                asked = source, Extent(asked[1].first, repair.piece.stop)
                continue
            if asked is not None:
                self._ask_repair(*asked, now_s, actions)
            asked = source, repair.piece
        if asked is not None:
            self._ask_repair(*asked, now_s, actions)

    def _ask_repair(
        self, source: Source, extent: Extent, now_s: float, actions: list[SessionAction]
    ) -> None:
        feed = self._state.open(source, now_s)
        self._state.ask(feed, extent, now_s, actions, is_side_request=True, charge=False)

    def _choose(self, repair: Repair, now_s: float) -> Source | None:
        work, _ = next(self._state.works.parts(repair.piece))
        self._judge(repair, work)
        if self.hopeless is not None:
            return None
        choice = self._choice

        def may_ask(source: Source) -> bool:
            return choice.may_ask(source, repair.piece, work, now_s)

        source = self._repairs.choose(repair, work.candidates, may_ask, now_s)
        if source is None and not all(
            choice.is_within_budget(each, repair.piece) for each in work.candidates
        ):
            choice.refuse()
        return source

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
        found = self._hedging.oldest(self._state.feeds.values(), self._state.works)
        if found is None or now_s < (self._hedging.due_s or 0.0):
            return
        work, run = found
        requested_from = self._state.requested_from(run)
        for source in work.candidates:
            if source.kind == "origin" or source.key in requested_from:
                continue
            if self._choice.may_ask(source, run, work, now_s):
                extent = self._hedging.start(source.key, run, now_s)
                feed = self._state.open(source, now_s)
                self._state.ask(feed, extent, now_s, actions, is_side_request=True)
                return

    def _end_hedge(self, key: str, pieces: list[Extent], now_s: float) -> None:
        """Drop a hedge that did not deliver; the pieces stay in flight from the first source."""
        self._hedging.hedge = None
        feed = self._state.feeds.get(key)
        for run in pieces:
            if feed is not None:
                self._state.cancel_side_request(feed, run)
            for work, _ in self._state.works.parts(run):
                self._choice.task_stalled(key, work, now_s)

    # ── failback ─────────────────────────────────────────────────────────────────────────────────

    def probe(self, work: PullTask, now_s: float, actions: list[SessionAction]) -> None:
        """Send a probe to the planned source of ``work`` if one is due."""
        due_s = self.failback.due_s(work)
        if due_s is None or now_s < due_s:
            return
        planned, gap = work.candidates[0], next(work.taken.gaps(work.extent), None)
        if gap is None or planned.kind == "origin":
            return
        if self._choice.may_ask(planned, gap, work, now_s):
            piece = Extent(gap.first, gap.first + 1)
            self.failback.asked(work, piece, now_s)
            feed = self._state.open(planned, now_s)
            self._state.ask(feed, piece, now_s, actions, is_side_request=True)

    def check_probes(self, extent: Extent, now_s: float) -> None:
        """Go back to a planned source if its probe has arrived in ``extent`` and it keeps up."""
        for work, part in self._state.works.parts(extent):
            if _is_probed(work, part) and self.failback.came(work, now_s):
                # Pieces in flight from the spare still arrive from there.
                planned = work.candidates[0]
                work.active, work.progress_s, work.spare_stall_s = planned.key, now_s, 0.0
                self._state.open(planned, now_s)

    def end_probes(self, key: str, now_s: float) -> None:
        for work in self._state.works:
            if work.is_first_choice(key):
                self.end_probe(work, now_s)

    def end_probe(self, work: PullTask, now_s: float) -> None:
        """Abandon the probe of ``work``, if there is one."""
        if work.away is not None and work.away.probe is not None:
            self._state.end_probe(work, takes_over=False)
            self.failback.probe_failed(work, now_s)


def _is_probed(work: PullTask, part: Extent) -> bool:
    """Return whether ``part`` contains the probed piece of ``work``."""
    if work.away is None or (probe := work.away.probe) is None:
        return False
    return part.first <= probe.piece.first < part.stop
