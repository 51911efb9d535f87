"""This worker's share of the origin fuse: what it may still ask of the source (I6)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import OriginBudgetExceeded, PacelineError
from paceline.relay.session.extents import Extent
from paceline.relay.session.limits import PieceMap
from paceline.wire.plan import Source


@dataclass(slots=True)
class OriginBudget:
    """Bytes granted by the plan, and bytes asked for since."""

    granted_bytes: int = 0
    spent_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Return what may still be asked for."""
        return self.granted_bytes - self.spent_bytes

    def may_afford(self, source: Source, extent: Extent, pieces: PieceMap) -> bool:
        """Return whether the first piece of ``extent`` may be asked of ``source``."""
        if source.kind != "origin":
            return True
        return pieces.bytes_of(Extent(extent.first, extent.first + 1)) <= self.left_bytes

    def exceeded(self) -> PacelineError:
        """Return why a worker whose budget is spent waits."""
        return OriginBudgetExceeded(
            "no living peer has the missing pieces and the origin's budget is spent",
            got=f"{self.spent_bytes} bytes asked of the origin",
            wanted=f"at most {self.granted_bytes}",
            do="Bring a holder back, or raise the budget with a new plan.",
        )
