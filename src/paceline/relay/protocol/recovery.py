"""Runs of pieces that arrived corrupt: whom to ask for them again, and when to give them up.

The first time it is the sender, at once, beside what it is sending: it has looked at its copy by
then (a reader complains), and where the wire was at fault the right bytes are a transfer away. In a
saturated line a spare would have to take that transfer from its own reader: two links lose time
then instead of one, and such losses add up along the line. The second time it is somebody else.

A run stays together for as long as it is sent and judged together, so that a thousand corrupt
pieces of one sender cost one entry. It opens no streams and asks nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from paceline.relay.protocol.deadlines import Patience
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.protocol.source_selection import Away, Probe, Work, backoff_s
from paceline.schemas.plan import Source


@dataclass(slots=True, eq=False)
class Repair:
    """Pieces with one history."""

    pieces: Extents
    corrupt: dict[str, int] = field(default_factory=dict)  # how often each source sent them so
    vain: set[str] = field(default_factory=set)  # asked since, and did not deliver
    attempts: int = 0  # corrupt arrivals
    retry_at_s: float = 0.0
    asked: str | None = None  # key of the source they are in flight from
    asked_s: float = 0.0

    def part(self, extent: Extent) -> Repair | None:
        """Take the pieces of ``extent`` out and return them, with their history; None for none."""
        runs = list(self.pieces.common(extent))
        if not runs:
            return None
        for run in runs:
            self.pieces.remove(run)
        return Repair(
            Extents(runs),
            dict(self.corrupt),
            set(self.vain),
            self.attempts,
            self.retry_at_s,
            self.asked,
            self.asked_s,
        )


class Repairs:
    """Every run under repair in one session."""

    def __init__(self, limits: SessionLimits, random: Random) -> None:
        self._limits = limits
        self._random = random
        self._all: list[Repair] = []
        self.pieces = Extents()  # of all of them

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Repair]:
        return iter(self._all)

    def rejected(self, key: str, extent: Extent, now_s: float) -> list[Repair]:
        """Set pieces aside that ``key`` sent corrupt; return them, to be asked for: at once the
        first time, and after a while from then on.

        Pieces of different histories come as several repairs.
        """
        parts = [part for each in self._all if (part := each.part(extent)) is not None]
        fresh = Extents(self.pieces.gaps(extent))
        if fresh:
            parts.append(Repair(fresh))
        self.pieces.add(extent)
        self._all = [each for each in self._all if each.pieces] + parts
        for part in parts:
            part.corrupt[key] = part.corrupt.get(key, 0) + 1
            part.attempts += 1
            part.asked = None
            part.retry_at_s = now_s
            if part.attempts > 1:
                part.retry_at_s += backoff_s(part.attempts - 1, self._limits, self._random)
        return parts

    def arrived(self, extent: Extent) -> None:
        """Take note that pieces are verified, wherever they came from."""
        if self.pieces.remove(extent):
            for each in self._all:
                each.pieces.remove(extent)
            self._all = [each for each in self._all if each.pieces]

    def split(self, repair: Repair, extent: Extent) -> Repair:
        """Let the pieces of ``extent`` go their own way."""
        part = repair.part(extent)
        if part is None:
            raise AssertionError(f"{extent} is not in this repair")
        self._all.append(part)
        if not repair.pieces:
            self._all.remove(repair)
        return part

    def unanswered(self, repair: Repair) -> None:
        """Take note that who was asked did not deliver."""
        if repair.asked is not None:
            repair.vain.add(repair.asked)
            repair.asked = None

    def later(self, repair: Repair, now_s: float) -> None:
        """Look at ``repair`` again after a while: nobody can be asked now."""
        repair.retry_at_s = now_s + backoff_s(max(1, repair.attempts), self._limits, self._random)

    def replan(self, open_feeds: dict[str, object] | set[str]) -> None:
        """Begin anew with other candidates; what is in flight from kept streams stays so."""
        for each in self._all:
            each.vain.clear()
            if each.asked not in open_feeds:
                each.asked = None

    def choose(
        self,
        repair: Repair,
        candidates: Sequence[Source],
        may_ask: Callable[[Source], bool],
        now_s: float,
    ) -> Source | None:
        """Return whom to ask: the sender once more, then another holder, the origin last; None: not
        now.

        What a lane reads from the origin, peers can have from us alone: it is asked again first.
        """
        origin_first = bool(candidates) and candidates[0].kind == "origin"
        once = repair.attempts == 1

        def rank(source: Source) -> tuple[bool, int]:
            if once and source.key in repair.corrupt:
                return (False, -1)
            if source.kind == "origin":
                return (not origin_first, 0)
            return (origin_first, repair.corrupt.get(source.key, 0))

        able = [each for each in candidates if not self._spent(repair, each)]
        fresh = sorted((each for each in able if each.key not in repair.vain), key=rank)
        for source in fresh:
            if may_ask(source):
                return source
        # Every worker was asked, or rests: another round. Who rests may be dead, and for as long as
        # it is waited for, others that have got the pieces since would not be asked.
        repair.vain.clear()
        self.later(repair, now_s)
        return None

    def is_hopeless(
        self, repair: Repair, candidates: Sequence[Source], is_gone: Callable[[Source], bool]
    ) -> bool:
        """Return whether everybody sent these pieces corrupt as often as is allowed, or has not
        got them. Peers get them from the origin in the end: while it is not spent there is hope.
        """
        return bool(candidates) and all(
            self._spent(repair, each)
            or is_gone(each)
            or (each.kind == "worker" and each.key in repair.vain)
            for each in candidates
        )

    def _spent(self, repair: Repair, source: Source) -> bool:
        limits = self._limits
        most = limits.origin_attempts if source.kind == "origin" else limits.piece_attempts
        return repair.corrupt.get(source.key, 0) >= most


# The way back to the source that the plan names, after a spare has stood in for it.
#
# A machine that pauses, or a link that stalls for a while, lives on; but whoever read there reads
# from a spare now, whose card feeds two, and while the lanes stay nothing would ever end that. So
# after a while one piece is asked of the planned source on the side, from beyond what the spare was
# asked for, and then another. When they come, compared with how far the spare has brought us by
# then, tells how far behind the planned source is and whether it keeps up. To wait for it then
# costs as long as it is behind; to stay costs the fleet a second reader at one card until the end.
#
# Each attempt in vain, and each return that did not last, makes the next one come much later, so
# that nobody flaps. It asks nothing itself.

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
