"""Timeouts and window sizes of a session, from the expected time of a piece; no wait is endless
(I12). Pure arithmetic: the callers keep the times.
"""

from __future__ import annotations

from random import Random

from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.source_selection import PullTask, SourceStream
from paceline.schemas import Source

# A spare that holds the pieces, and serves others too, sends within two piece times, which are this
# share of the piece deadline.
SPARE_TIMES, SPARE_SHARE = 2, 0.1


class Deadlines:
    """Computes deadlines from ``piece_deadline_s``, which comes with each plan."""

    def __init__(self, limits: SessionLimits, piece_bytes: int, random: Random) -> None:
        self._limits = limits
        self._piece_bytes = piece_bytes
        self._random = random
        self.piece_deadline_s = 1.0
        self.is_first_plan = True

    def silence_s(self, source: Source) -> float:
        """Return how long a source with requests in flight may be silent."""
        if source.kind == "origin":
            return max(self._limits.origin_deadline_s, self.piece_deadline_s)
        return self.piece_deadline_s

    def silent_at_s(self, stream: SourceStream) -> float:
        """Return when this stream counts as lost without a further sign of life."""
        return max(stream.last_signal_s + self.silence_s(stream.source), stream.alive_until_s)

    def spare_stall_s(self, task: PullTask) -> float:
        """Return how long a spare may make no progress for ``task`` while others are left to try.

        Jittered: if two workers without a parent wait for each other, one leaves first and
        continues elsewhere, and the other then has a source.
        """
        least_s = max(self._limits.spare_standstill_s, SPARE_SHARE * self.piece_deadline_s)
        if task.expected_bytes_s > 0:
            least_s = max(least_s, SPARE_TIMES * self._piece_bytes / task.expected_bytes_s)
        return least_s * (1 + self._random.random())

    def stall_timeout_s(self) -> float:
        """Return how long the planned source may be alive without progress."""
        limits = self._limits
        return max(limits.standstill_min_s, limits.standstill_factor * self.piece_deadline_s)

    def stalls_at_s(self, task: PullTask, stream: SourceStream | None) -> float:
        """Return when the source of ``task`` counts as stalled.

        Late for the planned source: while a plan starts, the whole line waits for its head. Early
        for a spare (or a planned source that was abandoned before) while others are left to try:
        a spare that holds the pieces sends at once, and one that lags behind this worker would
        delay it by its lag.
        """
        wait_s = self.stall_timeout_s()
        if self.is_first_plan and not task.held:
            wait_s = max(wait_s, self._limits.start_s)
        if stream is None:
            return task.progress_s + wait_s
        if stream.source.kind == "origin":
            wait_s += self.silence_s(stream.source)
        at_s = task.progress_s + wait_s
        if task.spare_stall_s > 0:
            at_s = min(at_s, max(task.progress_s, stream.last_bytes_s) + task.spare_stall_s)
        return max(at_s, stream.alive_until_s)

    def side_request_ends_s(self, stream: SourceStream | None, requested_s: float) -> float:
        """Return when a side request times out; its pieces may be queued behind others."""
        if stream is None:
            return requested_s + self.piece_deadline_s
        silence_s = self.silence_s(stream.source)
        last_bytes_s = min(stream.last_bytes_s, requested_s + 3 * silence_s)
        alive_until_s = min(stream.alive_until_s, requested_s + 4 * silence_s)
        return max(requested_s + silence_s, last_bytes_s + silence_s, alive_until_s)

    def late_at_s(self, task: PullTask, requested_s: float) -> float:
        """Return when pieces that were requested at ``requested_s`` are late.

        At the planned rate: after twice the time of a whole window. Without a planned rate: when
        the task has had no progress for one piece deadline.
        """
        if task.expected_bytes_s > 0:
            drains_s = task.window_bytes / task.expected_bytes_s
            return requested_s + max(self.piece_deadline_s, 2 * drains_s)
        return max(requested_s, task.progress_s) + self.piece_deadline_s


def size_window(
    task: PullTask,
    stream: SourceStream | None,
    sharing: int,
    limits: SessionLimits,
    pieces: PieceMap,
) -> None:
    """Set how much of ``task`` may be in flight from ``stream``: ``window_s`` at the planned
    rate, within the source's window, which ``sharing`` pull tasks share. A larger window keeps the
    pipe no fuller, and is requested again when the source dies or turns out to be slow.
    """
    most, rate = limits.window_bytes, task.expected_bytes_s
    if rate > 0:
        at_origin = stream is not None and stream.source.kind == "origin"
        window_s = limits.origin_window_s if at_origin else limits.window_s
        most = min(most, int(rate * window_s))
    several = max(1, limits.least_window_pieces // sharing) * pieces.piece_bytes
    task.window_bytes = max(several, most // sharing)
    on_spare = task.failback_state is not None and task.failback_state.is_on_spare
    most_pieces = (
        min(limits.window_pieces, limits.on_spare_pieces) if on_spare else limits.window_pieces
    )
    task.window_pieces = max(1, most_pieces // sharing)


def is_half_full(task: PullTask) -> bool:
    """Return whether more than half of the window is in flight: no further request is due."""
    return task.requested_pieces > 0 and (
        task.requested_bytes > task.window_bytes // 2
        or task.requested_pieces > task.window_pieces // 2
    )
