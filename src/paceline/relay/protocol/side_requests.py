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
        self.hopeless_repair: Repair | None = None  # pieces that arrived corrupt from every source

    def reset(self) -> None:
        """Reset for new lanes; repairs in flight on streams that stay open are kept."""
        self._hedging.reset()
        self._repairs.replan(set(self._state.open_streams))
        self.hopeless_repair = None

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which a side request becomes due or times out."""
        for repair in self._repairs:
            if repair.requested_from is None:
                yield repair.retry_at_s
            else:
                yield self._ends_s(repair.requested_from, repair.requested_s)
        for task in self._state.tasks:
            if task.failback_state is not None and task.failback_state.probe is not None:
                yield self.failback.ends_s(task.failback_state.probe)
            elif (due_s := self.failback.due_s(task)) is not None:
                yield max(due_s, self._choice.backoff_ends_s(task.candidates[0], task))
        if (hedge := self._hedging.hedge) is not None:
            yield self._ends_s(hedge.key, hedge.requested_s)
        elif self._hedging.due_s is not None:
            yield self._hedging.due_s

    def _ends_s(self, key: str, requested_s: float) -> float:
        return self._deadlines.side_request_ends_s(self._state.open_streams.get(key), requested_s)

    def check_deadlines(self, now_s: float) -> None:
        """Abandon side requests that have timed out."""
        for task in self._state.tasks:
            probe = task.failback_state.probe if task.failback_state is not None else None
            if probe is not None and now_s >= self.failback.ends_s(probe):
                self.end_probe(task, now_s)
        for repair in self._repairs:
            key = repair.requested_from
            if key is not None and now_s >= self._ends_s(key, repair.requested_s):
                repair.unanswered()
                if (stream := self._state.open_streams.get(key)) is not None:
                    self._state.cancel_side_request(stream, repair.piece)
        hedge = self._hedging.hedge
        if hedge is not None and now_s >= self._ends_s(hedge.key, hedge.requested_s):
            self._end_hedge(hedge.key, list(hedge.pieces), now_s)

    # ── repairs ──────────────────────────────────────────────────────────────────────────────────

    def rejected(self, stream: SourceStream, extent: Extent, now_s: float) -> None:
        """Create repairs for the requested pieces of ``extent`` that ``stream`` sent
        corrupt, as far as they are neither verified nor in flight from elsewhere.
        """
        for task, part in self._state.corrupt(stream, extent):
            if _is_probed(task, part):
                self.end_probe(task, now_s)
            for run in self._state.unassigned(part):
                task.claimed.add(run)
                for repair in self._repairs.rejected(stream.source.key, run, now_s):
                    self._check_hopeless(repair, task)

    def request_repairs(self, now_s: float, actions: list[SessionAction]) -> None:
        """Request the repairs that are due, adjacent pieces of one source together."""
        batch: tuple[Source, Extent] | None = None
        for repair in self._repairs:
            if repair.requested_from is not None or now_s < repair.retry_at_s:
                continue
            source = self._choose(repair, now_s)
            if self.hopeless_repair is not None:
                break
            if source is None:
                continue
            repair.requested_from, repair.requested_s = source.key, now_s
            if source.kind == "origin":  # charged here, since the next choice depends on it
                self._choice.budget.spent_bytes += self._pieces.bytes_of(repair.piece)
            if batch is not None and batch[0] == source and batch[1].stop == repair.piece.first:
                batch = source, Extent(batch[1].first, repair.piece.stop)
                continue
            if batch is not None:
                self._request_repair(*batch, now_s, actions)
            batch = source, repair.piece
        if batch is not None:
            self._request_repair(*batch, now_s, actions)

    def _request_repair(
        self, source: Source, extent: Extent, now_s: float, actions: list[SessionAction]
    ) -> None:
        stream = self._state.open(source, now_s)
        self._state.request(stream, extent, now_s, actions, is_side_request=True, charge=False)

    def _choose(self, repair: Repair, now_s: float) -> Source | None:
        task, _ = next(self._state.tasks.parts(repair.piece))
        self._check_hopeless(repair, task)
        if self.hopeless_repair is not None:
            return None
        choice = self._choice

        def may_request(source: Source) -> bool:
            return choice.may_request(source, repair.piece, task, now_s)

        source = self._repairs.choose(repair, task.candidates, may_request, now_s)
        if source is None and not all(
            choice.is_within_budget(each, repair.piece) for each in task.candidates
        ):
            choice.record_stall()
        return source

    def _check_hopeless(self, repair: Repair, task: PullTask) -> None:
        if self._repairs.is_hopeless(repair, task.candidates, self._choice.is_gone):
            self.hopeless_repair = repair

    # ── hedged requests ──────────────────────────────────────────────────────────────────────────

    def hedge(self, now_s: float, actions: list[SessionAction], *, is_drained: bool) -> None:
        """Once no task has anything left to request, request the oldest pieces in flight from a
        spare too when they are late; the first copy wins.

        Never from the origin: a fleet that waits for its slowest link would read the model twice.
        """
        self._hedging.due_s = None
        if not is_drained or self._repairs or not self._hedging.is_possible:
            return
        found = self._hedging.oldest(self._state.open_streams.values(), self._state.tasks)
        if found is None or now_s < (self._hedging.due_s or 0.0):
            return
        task, run = found
        requested_from = self._state.requested_from(run)
        for source in task.candidates:
            if source.kind == "origin" or source.key in requested_from:
                continue
            if self._choice.may_request(source, run, task, now_s):
                extent = self._hedging.start(source.key, run, now_s)
                stream = self._state.open(source, now_s)
                self._state.request(stream, extent, now_s, actions, is_side_request=True)
                return

    def _end_hedge(self, key: str, pieces: list[Extent], now_s: float) -> None:
        """Drop a hedge that did not deliver; the pieces stay in flight from the first source."""
        self._hedging.hedge = None
        stream = self._state.open_streams.get(key)
        for run in pieces:
            if stream is not None:
                self._state.cancel_side_request(stream, run)
            for task, _ in self._state.tasks.parts(run):
                self._choice.task_stalled(key, task, now_s)

    # ── failback ─────────────────────────────────────────────────────────────────────────────────

    def probe(self, task: PullTask, now_s: float, actions: list[SessionAction]) -> None:
        """Send a probe to the planned source of ``task`` if one is due."""
        due_s = self.failback.due_s(task)
        if due_s is None or now_s < due_s:
            return
        planned, gap = task.candidates[0], next(task.claimed.gaps(task.extent), None)
        if gap is None or planned.kind == "origin":
            return
        if self._choice.may_request(planned, gap, task, now_s):
            piece = Extent(gap.first, gap.first + 1)
            self.failback.record_probe(task, piece, now_s)
            stream = self._state.open(planned, now_s)
            self._state.request(stream, piece, now_s, actions, is_side_request=True)

    def check_probes(self, extent: Extent, now_s: float) -> None:
        """Go back to a planned source if its probe has arrived in ``extent`` and it keeps up."""
        for task, part in self._state.tasks.parts(extent):
            if _is_probed(task, part) and self.failback.probe_arrived(task, now_s):
                # Pieces in flight from the spare still arrive from there.
                planned = task.candidates[0]
                task.active, task.progress_s, task.spare_stall_s = planned.key, now_s, 0.0
                self._state.open(planned, now_s)

    def end_probes(self, key: str, now_s: float) -> None:
        for task in self._state.tasks:
            if task.is_first_choice(key):
                self.end_probe(task, now_s)

    def end_probe(self, task: PullTask, now_s: float) -> None:
        """Abandon the probe of ``task``, if there is one."""
        if task.failback_state is not None and task.failback_state.probe is not None:
            self._state.end_probe(task, takes_over=False)
            self.failback.probe_failed(task, now_s)


def _is_probed(task: PullTask, part: Extent) -> bool:
    """Return whether ``part`` contains the probed piece of ``task``."""
    if task.failback_state is None or (probe := task.failback_state.probe) is None:
        return False
    return part.first <= probe.piece.first < part.stop
