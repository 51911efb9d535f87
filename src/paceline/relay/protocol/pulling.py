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
        tasks, state = PullTasks.of(lanes, self._pieces), self.state
        planned = {task.candidates[0].key: task.candidates[0] for task in tasks}
        for key, stream in list(state.open_streams.items()):
            if planned.get(key) != stream.source:
                self._close_stream(stream, actions)
        self._deadlines.is_first_plan = not state.tasks
        self._deadlines.piece_deadline_s = lanes.piece_deadline_s
        self.side_requests.reset()
        state.set_tasks(tasks, now_s)
        for task in tasks:
            self._size_window(task)
        # The budget accounts for the origin bytes reported before the plan was made. Bytes read
        # since then and bytes in flight count as spent.
        counted = lanes.origin_counted_bytes
        unreported = 0 if counted is None else max(0, read - counted)
        spent = state.origin_in_flight_bytes + unreported
        self.choice.reset(OriginBudget(lanes.origin_budget_bytes, spent))
        if self.choice.unconfirmed:
            self.sleep(unconfirmed=True)  # these lanes may have been sent during a suspension
        self.lost.clear()

    def sleep(self, *, unconfirmed: bool) -> None:
        """Record that this process was suspended (True), or that its lanes were confirmed (False).

        In between, nothing is requested from the origin: another worker may be planned to read it
        instead, and the origin budget is one for the fleet (I6). Requests in flight continue.
        """
        self.choice.unconfirmed = unconfirmed
        for task in self.state.tasks if unconfirmed else ():
            stream = self.state.stream_of(task)
            if stream is not None and stream.source.kind == "origin":
                task.active = None

    def is_first_choice(self, key: str) -> bool:
        """Return whether it is the planned source of pieces that are still missing."""
        return any(task.missing and task.is_first_choice(key) for task in self.state.tasks)

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────

    def arrived(self, key: str, stream_id: int, extent: Extent, now_s: float) -> int:
        """Record verified pieces from any stream, open or not; return how many are new."""
        stream = self.state.find_stream(key, stream_id)
        new = self.state.record_verified(extent, now_s, stream)
        self.choice.stalled = None
        if stream is not None:
            stream.last_signal_s = stream.last_bytes_s = now_s
            stream.record_run(extent.size, 0)
            stream.verified_pieces += extent.size
            self.choice.delivered(key, extent.size)
        self.side_requests.check_probes(extent, now_s)
        return new

    def rejected(
        self, key: str, stream_id: int, extent: Extent, now_s: float
    ) -> tuple[SourceStream | None, bool]:
        """Record corrupt pieces; return their stream if it is open, and whether its share of
        corrupt pieces is so high that it should be abandoned.

        Pieces that are neither verified nor in flight from elsewhere become a repair.
        """
        stream = self.state.find_stream(key, stream_id)
        if stream is None:
            return None, False  # its pieces were requested from another source already
        stream.last_signal_s = stream.last_bytes_s = now_s
        self.side_requests.rejected(stream, extent, now_s)
        return stream, stream.is_bad(self._limits)

    # ── leaving sources ──────────────────────────────────────────────────────────────────────────

    def lose(
        self,
        stream: SourceStream,
        error: PacelineError,
        now_s: float,
        actions: list[SessionAction],
        *,
        for_good: bool = False,
    ) -> None:
        """Abandon a stream, back off from its source, and mark its pieces in flight as wanted."""
        key, idle = stream.source.key, not stream.waiting
        self.side_requests.end_probes(key, now_s)
        self._close_stream(stream, actions)
        if idle:
            return  # nothing was requested from it: no loss
        self.choice.failed(key, now_s, for_good=for_good)
        self._report_lost(key, error, actions)

    def stream_ended(
        self, stream: SourceStream, error: PacelineError, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Handle a stream that ended by itself.

        A stream from a worker that has delivered is reopened at once: connections break while both
        ends are alive, and switching to a spare would put a second reader on another worker's link
        for good. A crashed worker refuses within a round trip, and then counts as lost.
        """
        temporary = isinstance(error, TemporaryError) and stream.source.kind == "worker"
        if temporary and stream.verified_pieces > 0:
            self.side_requests.end_probes(stream.source.key, now_s)
            self._close_stream(stream, actions)
            self.choice.broken.add(stream.source.key)
            self.last_error = error
        else:
            self.lose(stream, error, now_s, actions)

    def _report_lost(self, key: str, error: PacelineError, actions: list[SessionAction]) -> None:
        self.last_error = error
        self.lost[key] = None
        actions.append(ReportSourceLost(key, error.one_line()))

    def close_all(self, actions: list[SessionAction]) -> None:
        for stream in list(self.state.open_streams.values()):
            self._close_stream(stream, actions)

    def _close_stream(self, stream: SourceStream, actions: list[SessionAction]) -> None:
        """Close a stream; its pieces in flight are wanted again."""
        self.state.close(stream)
        actions.append(Abandon(stream.source.key, stream.stream_id))

    def _leave(self, task: PullTask, key: str, error: PacelineError, now_s: float) -> bool:
        """Detach ``task`` from a source that is alive but has nothing for it; return whether it is
        the planned source. Other pull tasks may continue to use it.
        """
        self.choice.task_stalled(key, task, now_s)
        self.state.leave_source(task, key)
        self.last_error = error
        return task.is_first_choice(key)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``check_deadlines`` or ``pump`` may have to act."""
        for stream in self.state.open_streams.values():
            if stream.waiting:
                yield self._deadlines.silent_at_s(stream)
        for task in self.state.tasks:
            if task.active is not None:
                if task.requested_pieces:
                    yield self._deadlines.stalls_at_s(task, self.state.stream_of(task))
            elif task.unrequested:
                yield from self.choice.retries(task)
        yield from self.side_requests.deadlines()

    def check_deadlines(self, now_s: float, actions: list[SessionAction]) -> None:
        """Abandon silent sources, stalled pull tasks' sources and unanswered side requests."""
        self.checked_s = now_s
        for stream in list(self.state.open_streams.values()):
            if stream.waiting and now_s >= self._deadlines.silent_at_s(stream):
                silence_s = self._deadlines.silence_s(stream.source)
                error = PeerLost(
                    "source went silent",
                    got=f"{now_s - stream.last_signal_s:.2f} s",
                    wanted=f"a sign of life within {silence_s:.2f} s",
                    where=stream.source.key,
                )
                self.lose(stream, error, now_s, actions)
        for task in self.state.tasks:
            self._check_progress(task, now_s, actions)
        self.side_requests.check_deadlines(now_s)

    def _check_progress(self, task: PullTask, now_s: float, actions: list[SessionAction]) -> None:
        key, stream = task.active, self.state.stream_of(task)
        if key is None or not task.requested_pieces:
            return
        if now_s < self._deadlines.stalls_at_s(task, stream):
            return
        error = PeerLost(
            "source lives but makes no progress",
            got=f"{now_s - task.progress_s:.2f} s",
            wanted="a piece",
            where=key,
        )
        is_alive = (
            stream is not None and stream.last_bytes_s > task.progress_s
        )  # it serves other lanes
        if self._leave(task, key, error, now_s) and not is_alive:
            self._report_lost(key, error, actions)

    def waits_for(self, now_s: float) -> str:
        """Return what the first missing piece waits for, for logs."""
        gap = next(self.state.verified.gaps(Extent(0, self._pieces.count)), None)
        if gap is None:
            return "the disk: every piece has arrived"
        piece = Extent(gap.first, gap.first + 1)
        for stream in self.state.open_streams.values():
            if stream.in_flight.covers(piece) or stream.side_requests.covers(piece):
                return (
                    f"piece {piece.first} from {stream.source.key}, whose last sign of life came "
                    f"{now_s - stream.last_signal_s:.1f} s ago and last bytes "
                    f"{now_s - stream.last_bytes_s:.1f} s ago; "
                    f"{stream.in_flight.count} pieces in flight"
                )
        reason = self.choice.stalled or self.last_error
        why = reason.one_line() if reason is not None else "no reason is known"
        return f"piece {piece.first}, which is requested from no source: {why}"

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def pump(self, now_s: float, actions: list[SessionAction]) -> None:
        """Send every request that is possible now; close streams with nothing left to deliver."""
        tasks = self.state.tasks
        self.side_requests.request_repairs(now_s, actions)
        for task in tasks:
            if task.failback_state is not None and not task.unrequested:
                self.side_requests.end_probe(task, now_s)  # the last pieces do not wait for a probe
        unrequested = [task for task in tasks if task.unrequested > 0]
        sources = [
            self._source_for(task, now_s) for task in unrequested
        ]  # first, for shared windows
        for task, stream in zip(unrequested, sources, strict=True):
            if stream is not None:
                self._size_window(task)  # other tasks may have left the shared source
                self._top_up(stream, task, now_s, actions)
                if task.active is None and (other := self._source_for(task, now_s)) is not None:
                    self._top_up(other, task, now_s, actions)  # the origin's budget is spent
            if task.failback_state is not None:
                self.side_requests.probe(task, now_s, actions)
        self.side_requests.hedge(
            now_s, actions, is_drained=not any(task.unrequested for task in unrequested)
        )
        for stream in list(self.state.open_streams.values()):
            if self.state.is_idle(stream):
                self._close_stream(stream, actions)
        # Some may have been on a stream that just closed.
        self.side_requests.request_repairs(now_s, actions)

    def is_supplied(self, extent: Extent) -> bool:
        """Return whether the tasks of ``extent``, which has just arrived, need no request now:
        more than half of their windows is in flight. Before the next deadline, ``pump`` then has
        nothing to do.
        """
        return all(
            task.active is not None and is_half_full(task)
            for task, _ in self.state.tasks.parts(extent)
        )

    def _source_for(self, task: PullTask, now_s: float) -> SourceStream | None:
        if (stream := self.state.stream_of(task)) is not None:
            return stream
        task.active = None
        choice, missing = self.choice, next(task.claimed.gaps(task.extent))
        available = [
            each for each in task.candidates if choice.may_request(each, missing, task, now_s)
        ]
        if not choice.is_within_budget(task.candidates[0], missing) or (
            not available
            and not all(choice.is_within_budget(each, missing) for each in task.candidates)
        ):
            choice.record_stall()
        if not available:
            return None
        best = choice.best(available, task)
        task.active, task.progress_s = best.key, now_s
        failed = best.key in choice.broken or choice.failures(best, task) > 0
        fresh = task.is_first_choice(best.key) and not failed
        leave_early = len(available) > 1 and best.kind == "worker" and not fresh
        task.spare_stall_s = self._deadlines.spare_stall_s(task) if leave_early else 0.0
        if not task.is_first_choice(best.key):
            self.side_requests.failback.record_spare(task, now_s)
        elif task.failback_state is not None:
            self.state.end_probe(task, takes_over=True)
            task.failback_state.is_on_spare = False
        return self.state.open(best, now_s)

    def _size_window(self, task: PullTask) -> None:
        sharing = self.state.tasks.sharing(task)
        size_window(task, self.state.stream_of(task), sharing, self._limits, self._pieces)

    def _top_up(
        self, stream: SourceStream, task: PullTask, now_s: float, actions: list[SessionAction]
    ) -> None:
        """Request more once half of the window has drained: few requests, never an empty pipe."""
        if is_half_full(task):
            return
        self._size_window(task)
        budget = self.choice.budget
        while (gap := next(task.claimed.gaps(task.extent), None)) is not None:
            room_bytes = task.window_bytes - task.requested_bytes
            room_pieces = task.window_pieces - task.requested_pieces
            extent = self._pieces.fitting(gap, room_bytes, room_pieces)
            if stream.source.kind == "origin":
                extent = self._pieces.fitting(extent, budget.left_bytes, extent.size)
                if extent.size == 0 and not task.requested_pieces:
                    task.active = None  # the origin budget is spent; other sources may still serve
                    self.choice.record_stall()
            if extent.size == 0:
                return
            self.state.request(stream, extent, now_s, actions)
