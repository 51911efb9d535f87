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

    def silent_at_s(self, feed: SourceStream) -> float:
        """Return when this stream counts as lost without a further sign of life."""
        return max(feed.heard_s + self.silence_s(feed.source), feed.alive_until_s)

    def spare_stall_s(self, work: PullTask) -> float:
        """Return how long a spare may make no progress for ``work`` while others are left to try.

        Jittered: if two workers without a parent wait for each other, one leaves first and
        continues elsewhere, and the other then has a source.
        """
        least_s = max(self._limits.spare_standstill_s, SPARE_SHARE * self.piece_deadline_s)
        if work.expected_bytes_s > 0:
            least_s = max(least_s, SPARE_TIMES * self._piece_bytes / work.expected_bytes_s)
        return least_s * (1 + self._random.random())

    def stall_timeout_s(self) -> float:
        """Return how long the planned source may be alive without progress."""
        limits = self._limits
        return max(limits.standstill_min_s, limits.standstill_factor * self.piece_deadline_s)

    def stalls_at_s(self, work: PullTask, feed: SourceStream | None) -> float:
        """Return when the source of ``work`` counts as stalled.

        Late for the planned source: while a plan starts, the whole line waits for its head. Early
        for a spare (or a planned source that was abandoned before) while others are left to try:
        a spare that holds the pieces sends at once, and one that lags behind this worker would
        delay it by its lag.
        """
        wait_s = self.stall_timeout_s()
        if self.is_first_plan and not work.held:
            wait_s = max(wait_s, self._limits.start_s)
        if feed is None:
            return work.progress_s + wait_s
        if feed.source.kind == "origin":
            wait_s += self.silence_s(feed.source)
        at_s = work.progress_s + wait_s
        if work.spare_stall_s > 0:
            at_s = min(at_s, max(work.progress_s, feed.moved_s) + work.spare_stall_s)
        return max(at_s, feed.alive_until_s)

    def side_request_ends_s(self, feed: SourceStream | None, asked_s: float) -> float:
        """Return when a side request times out; its pieces may be queued behind others."""
        if feed is None:
            return asked_s + self.piece_deadline_s
        silence_s = self.silence_s(feed.source)
        moved_s = min(feed.moved_s, asked_s + 3 * silence_s)
        alive_until_s = min(feed.alive_until_s, asked_s + 4 * silence_s)
        return max(asked_s + silence_s, moved_s + silence_s, alive_until_s)

    def late_at_s(self, work: PullTask, asked_s: float) -> float:
        """Return when pieces that were requested at ``asked_s`` are late.

        At the planned rate: after twice the time of a whole window. Without a planned rate: when
        the task has had no progress for one piece deadline.
        """
        if work.expected_bytes_s > 0:
            drains_s = work.window_bytes / work.expected_bytes_s
            return asked_s + max(self.piece_deadline_s, 2 * drains_s)
        return max(asked_s, work.progress_s) + self.piece_deadline_s


def size_window(
    work: PullTask, feed: SourceStream | None, sharing: int, limits: SessionLimits, pieces: PieceMap
) -> None:
    """Set how much of ``work`` may be in flight from ``feed``: ``window_s`` at the planned rate,
    within the source's window, which ``sharing`` pull tasks share. A larger window keeps the pipe
    no fuller, and is requested again when the source dies or turns out to be slow.
    """
    most, rate = limits.window_bytes, work.expected_bytes_s
    if rate > 0:
        at_origin = feed is not None and feed.source.kind == "origin"
        window_s = limits.origin_window_s if at_origin else limits.window_s
        most = min(most, int(rate * window_s))
    several = max(1, limits.least_window_pieces // sharing) * pieces.piece_bytes
    work.window_bytes = max(several, most // sharing)
    away = work.away is not None and work.away.absent
    most_pieces = min(limits.window_pieces, limits.away_pieces) if away else limits.window_pieces
    work.window_pieces = max(1, most_pieces // sharing)


def is_half_full(work: PullTask) -> bool:
    """Return whether more than half of the window is in flight: no further request is due."""
    return work.asked_pieces > 0 and (
        work.asked_bytes > work.window_bytes // 2 or work.asked_pieces > work.window_pieces // 2
    )
