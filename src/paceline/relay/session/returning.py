"""The way back to the source that the plan names, after a spare has stood in for it.

A machine that pauses, or a link that stalls for a while, lives on; but whoever read there reads
from a spare now, whose card feeds two, and while the lanes stay nothing would ever end that. So
after a while one piece is asked of the planned source on the side, from beyond what the spare was
asked for, and then another. When they come, compared with how far the spare has brought us by
then, tells how far behind the planned source is and whether it keeps up. To wait for it then costs
as long as it is behind; to stay costs the fleet a second reader at one card until the end.

Each attempt in vain, and each return that did not last, makes the next one come much later, so that
nobody flaps. It asks nothing itself.
"""

from __future__ import annotations

from paceline.relay.session.extents import Extent
from paceline.relay.session.feeds import Away, Probe, Work
from paceline.relay.session.limits import SessionLimits
from paceline.relay.session.patience import Patience

LATER = 4.0  # each attempt comes so many times later than the one before
FALLING_BACK = 0.5  # of our own pace: a source that falls further behind is slower than the spare
WORTH = 2  # what is missing must be so many times what the planned source is behind


class Returning:
    """Decides when to ask the planned source again, and whether to go back to it."""

    def __init__(self, limits: SessionLimits, patience: Patience) -> None:
        self._limits = limits
        self._patience = patience

    def stands_in(self, work: Work, now_s: float) -> None:
        """Take note that a spare was chosen for ``work``."""
        away = work.away
        if away is None:
            away = work.away = Away()
        if not away.absent:
            away.absent = True
            self._later(away, now_s)

    def is_due(self, work: Work, now_s: float) -> bool:
        """Return whether to ask the planned source for a piece on the side."""
        at_s = self.due_s(work)
        return at_s is not None and now_s >= at_s

    def due_s(self, work: Work) -> float | None:
        """Return when to ask the planned source next; None: it has been asked, or never."""
        away = work.away
        if away is None or not away.absent or away.probe is not None:
            return None
        # At the end nothing is gained, and the last pieces would wait for it.
        return away.next_s if work.wanting >= self._limits.return_pieces else None

    def is_over(self, work: Work, now_s: float) -> bool:
        """Return whether a piece was asked on the side and should have come by now."""
        probe = work.away.probe if work.away is not None else None
        return probe is not None and now_s >= self.ends_s(probe)

    def ends_s(self, probe: Probe) -> float:
        """Return until when to wait for a piece asked on the side."""
        return probe.asked_s + self._patience.standstill_s()

    def asked(self, work: Work, piece: Extent, now_s: float) -> None:
        """Take note that ``piece``, the first that nobody was asked for, is asked on the side."""
        if work.away is None:
            raise AssertionError("no spare stands in")
        # What is taken already, the spare brings before it would have brought this one.
        work.away.probe = Probe(piece, now_s, work.held, work.taken.count)
        work.taken.add(piece)

    def in_vain(self, work: Work, now_s: float) -> None:
        """Take note that the planned source did not deliver."""
        if (away := work.away) is not None:
            away.probe = away.behind = None
            away.times += 1
            self._later(away, now_s)

    def came(self, work: Work, now_s: float) -> bool:
        """Take note that the piece came; return whether to go back now."""
        away = work.away
        if away is None or (probe := away.probe) is None:
            return False
        away.probe = None
        behind = max(0, work.held - 1 - probe.due)
        if away.behind is None:
            away.behind, away.behind_at, away.next_s = behind, probe.due, now_s
            return False
        passed = max(1, probe.due - away.behind_at)
        keeps_up = behind - away.behind <= FALLING_BACK * passed
        pieces_s = (work.held - 1 - probe.held) / max(1e-9, now_s - probe.asked_s)
        soon = behind <= pieces_s * self._patience.standstill_s() / 2
        worth = work.missing >= WORTH * behind + self._limits.return_pieces
        away.behind = None
        away.times += 1
        if keeps_up and soon and worth:
            away.absent = False
            return True
        self._later(away, now_s)
        return False

    def _later(self, away: Away, now_s: float) -> None:
        limits = self._limits
        wait_s = min(limits.return_max_s, limits.return_s * LATER ** min(away.times, 16))
        away.next_s = now_s + wait_s
