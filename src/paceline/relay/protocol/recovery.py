"""Recovery of corrupt pieces, and failback to the planned source after a spare replaced it.

A corrupt piece is requested again at once from its sender the first time: the sender has checked
its copy by then (this worker reports the corruption), and if the wire was at fault the correct
bytes are one transfer away. In a saturated line a spare would have to take that transfer from its
own reader: two links would lose time instead of one, and such losses add up along the line. The
second time it is requested from another source.

It opens no streams and sends no requests; ``side_requests`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from paceline.relay.protocol.deadlines import Deadlines
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.protocol.source_selection import FailbackState, Probe, PullTask, backoff_s
from paceline.schemas.plan import Source


@dataclass(slots=True, eq=False)
class Repair:
    """Corrupt pieces with the same history.

    A run is one entry while it is sent and verified together, so that a thousand corrupt pieces of
    one sender cost one entry.
    """

    pieces: Extents
    corrupt: dict[str, int] = field(default_factory=dict)  # corrupt arrivals from each source
    vain: set[str] = field(default_factory=set)  # sources that did not deliver since
    attempts: int = 0  # corrupt arrivals in all
    retry_at_s: float = 0.0
    asked: str | None = None  # key of the source that they are requested from
    asked_s: float = 0.0

    def part(self, extent: Extent) -> Repair | None:
        """Remove the pieces of ``extent`` and return them as a repair with the same history, or
        None if there are none.
        """
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
    """All repairs of one session."""

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
        """Record pieces that source ``key`` sent corrupt; return their repairs, one per history.

        They are due at once the first time, and after a back-off from then on.
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
        """Remove pieces that are verified, from whichever source."""
        if self.pieces.remove(extent):
            for each in self._all:
                each.pieces.remove(extent)
            self._all = [each for each in self._all if each.pieces]

    def split(self, repair: Repair, extent: Extent) -> Repair:
        """Split the pieces of ``extent`` off ``repair`` and return them as a repair of its own."""
        part = repair.part(extent)
        if part is None:
            raise AssertionError(f"{extent} is not in this repair")
        self._all.append(part)
        if not repair.pieces:
            self._all.remove(repair)
        return part

    def unanswered(self, repair: Repair) -> None:
        """Record that the source of the current request did not deliver."""
        if repair.asked is not None:
            repair.vain.add(repair.asked)
            repair.asked = None

    def later(self, repair: Repair, now_s: float) -> None:
        """Postpone ``repair`` by a back-off: no source is available now."""
        repair.retry_at_s = now_s + backoff_s(max(1, repair.attempts), self._limits, self._random)

    def replan(self, open_feeds: dict[str, object] | set[str]) -> None:
        """Reset for other candidates; requests on streams that stay open are kept."""
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
        """Return the source to request from, or None for a later retry: the sender once more, then
        another holder, the origin last.

        If the origin is the planned source it ranks first: peers get these pieces only from here.
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
        # Every source failed to deliver or is in back-off: start another round. A source in
        # back-off may be dead; waiting for it would exclude others that hold the pieces by now.
        repair.vain.clear()
        self.later(repair, now_s)
        return None

    def is_hopeless(
        self, repair: Repair, candidates: Sequence[Source], is_gone: Callable[[Source], bool]
    ) -> bool:
        """Return whether every candidate has sent these pieces corrupt as often as is allowed, is
        gone, or did not deliver. Peers get them from the origin in the end: while the origin has
        attempts left, the repair is not hopeless.
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


# Failback to the planned source, after a spare replaced it.
#
# A machine may pause, or a link stall, and recover; but its reader now reads from a spare, whose
# link feeds two, and nothing else ends that while the lanes stay. So after a while one piece beyond
# the spare's window is requested from the planned source as a probe, and then another. Their
# arrival times, compared with the spare's progress, give the lag of the planned source and whether
# it keeps up. Going back costs a wait of that lag; staying costs the fleet a second reader on one
# link until the end.
#
# Each failed probe, and each failback that did not last, delays the next attempt by a factor, so
# that a worker does not flap.

LATER = 4.0  # factor between the delays of successive attempts
FALLING_BACK = 0.5  # of this worker's pace: a source whose lag grows faster is slower than a spare
WORTH = 2  # the missing pieces must be this many times the planned source's lag


class Failback:
    """Decides when to probe the planned source, and whether to go back to it."""

    def __init__(self, limits: SessionLimits, patience: Deadlines) -> None:
        self._limits = limits
        self._patience = patience

    def stands_in(self, work: PullTask, now_s: float) -> None:
        """Record that a spare was chosen for ``work``."""
        away = work.away
        if away is None:
            away = work.away = FailbackState()
        if not away.absent:
            away.absent = True
            self._later(away, now_s)

    def is_due(self, work: PullTask, now_s: float) -> bool:
        """Return whether to send a probe to the planned source now."""
        at_s = self.due_s(work)
        return at_s is not None and now_s >= at_s

    def due_s(self, work: PullTask) -> float | None:
        """Return when to send the next probe; None if one is in flight or none is needed."""
        away = work.away
        if away is None or not away.absent or away.probe is not None:
            return None
        # Near the end a failback gains nothing, and the last pieces would wait for the probe.
        return away.next_s if work.wanting >= self._limits.return_pieces else None

    def is_over(self, work: PullTask, now_s: float) -> bool:
        """Return whether the probe of ``work`` has timed out."""
        probe = work.away.probe if work.away is not None else None
        return probe is not None and now_s >= self.ends_s(probe)

    def ends_s(self, probe: Probe) -> float:
        """Return when ``probe`` times out."""
        return probe.asked_s + self._patience.standstill_s()

    def asked(self, work: PullTask, piece: Extent, now_s: float) -> None:
        """Record that ``piece``, the first unrequested one, is requested as a probe."""
        if work.away is None:
            raise AssertionError("no spare stands in")
        # The spare would deliver everything taken so far before this piece.
        work.away.probe = Probe(piece, now_s, work.held, work.taken.count)
        work.taken.add(piece)

    def in_vain(self, work: PullTask, now_s: float) -> None:
        """Record that the probe failed."""
        if (away := work.away) is not None:
            away.probe = away.behind = None
            away.times += 1
            self._later(away, now_s)

    def came(self, work: PullTask, now_s: float) -> bool:
        """Record that the probed piece arrived; return whether to go back now."""
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

    def _later(self, away: FailbackState, now_s: float) -> None:
        limits = self._limits
        wait_s = min(limits.return_max_s, limits.return_s * LATER ** min(away.times, 16))
        away.next_s = now_s + wait_s
