"""The last pieces asked twice: which are late, and how many may be (A10).

At the end of a transfer one slow source would hold everything up. Once nothing is left to ask for,
the oldest pieces in flight are asked of a spare too; who sends first wins, the other copy is
dropped. It asks nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.relay.session.extents import Extent, Extents
from paceline.relay.session.feeds import Feed, Work
from paceline.relay.session.lanes import Works
from paceline.relay.session.limits import PieceMap, SessionLimits
from paceline.relay.session.patience import Patience


@dataclass(slots=True, eq=False)
class Hedge:
    """Pieces that a second source was asked for while the first still owes them."""

    key: str
    pieces: Extents
    asked_s: float


class Hedging:
    """The hedge under way, if any, and what is left of this plan's allowance."""

    def __init__(self, limits: SessionLimits, pieces: PieceMap, patience: Patience) -> None:
        self._limits = limits
        self._pieces = pieces
        self._patience = patience
        self._left = 0  # pieces
        self.hedge: Hedge | None = None
        self.due_s: float | None = None  # when the oldest piece in flight is late, at the end

    def begin(self) -> None:
        """Start a new plan: a small share of all pieces may be asked twice in it."""
        self.hedge = self.due_s = None
        share = int(self._pieces.count * self._limits.hedge_share)
        self._left = max(self._limits.least_hedges, share)

    @property
    def is_possible(self) -> bool:
        """Return whether another hedge may be made now."""
        return self.hedge is None and self._left > 0

    def oldest(self, feeds: Iterable[Feed], works: Works) -> tuple[Work, Extent] | None:
        """Return the pieces in flight from a worker that are late first; sets ``due_s``.

        Not those from the origin: it retries by itself, and nobody else has them.
        """
        due: list[tuple[float, Work, Extent]] = []
        for feed in feeds:
            if feed.source.kind == "worker" and (oldest := feed.oldest()) is not None:
                asked_s, run = oldest
                work, part = next(works.parts(run))
                due.append((self._patience.late_at_s(work, asked_s), work, part))
        if not due:
            return None
        self.due_s, work, part = min(due, key=lambda each: each[0])
        return work, part

    def start(self, key: str, run: Extent, now_s: float) -> Extent:
        """Begin to hedge the first pieces of ``run`` at ``key``; return them."""
        most = min(self._limits.hedge_pieces, self._left)
        fits = self._pieces.fitting(run, self._limits.window_bytes, most)
        extent = Extent(run.first, max(fits.stop, run.first + 1))
        self._left -= extent.size
        self.hedge = Hedge(key, Extents([extent]), now_s)
        return extent

    def arrived(self, extent: Extent) -> None:
        """Take note that pieces are here, or will not come from the hedge."""
        if self.hedge is not None:
            self.hedge.pieces.remove(extent)
            if not self.hedge.pieces:
                self.hedge = None
