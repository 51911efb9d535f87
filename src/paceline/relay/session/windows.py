"""How much of a work may be in flight at once: few requests, never an empty pipe."""

from __future__ import annotations

from paceline.relay.session.feeds import Feed, Work
from paceline.relay.session.limits import PieceMap, SessionLimits


def size_window(
    work: Work, feed: Feed | None, sharing: int, limits: SessionLimits, pieces: PieceMap
) -> None:
    """Decide how much of ``work`` may be in flight in ``feed``: what a second brings at the planned
    rate, within the source's window, which ``sharing`` works share. A larger one keeps no pipe
    fuller, and is asked again when the source dies or turns out to be slow.
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


def is_half_full(work: Work) -> bool:
    """Return whether more than half of the window is in flight: then nothing more is asked yet."""
    return work.asked_pieces > 0 and (
        work.asked_bytes > work.window_bytes // 2 or work.asked_pieces > work.window_pieces // 2
    )
