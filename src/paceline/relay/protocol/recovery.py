"""Recovery of corrupt pieces, and failback to the planned source after a spare replaced it.

A corrupt piece is requested again at once from its sender the first time: the sender has checked
its copy by then (this worker reports the corruption), and if the wire was at fault the correct
bytes are one transfer away. In a saturated line a spare would have to take that transfer from its
own reader: two links would lose time instead of one, and such losses add up along the line. The
second time it is requested from another source.

It opens no streams and sends no requests; ``side_requests`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from paceline.relay.protocol.deadlines import Deadlines
from paceline.relay.protocol.extents import Extent
from paceline.relay.protocol.limits import SessionLimits
from paceline.relay.protocol.source_selection import FailbackState, Probe, PullTask, backoff_s
from paceline.schemas import Source


@dataclass(slots=True, eq=False)
class Repair:
    """A piece that arrived corrupt."""

    piece: Extent
    corrupt: Counter[str] = field(default_factory=Counter)  # corrupt arrivals from each source
    failed_sources: set[str] = field(default_factory=set)  # sources that did not deliver since
    retry_at_s: float = 0.0
    requested_from: str | None = None  # key of the source that it is requested from
    requested_s: float = 0.0

    @property
    def attempts(self) -> int:
        """Return how often it arrived corrupt."""
        return self.corrupt.total()

    def unanswered(self) -> None:
        """Record that the source of the current request did not deliver."""
        if self.requested_from is not None:
            self.failed_sources.add(self.requested_from)
            self.requested_from = None


class Repairs:
    """All repairs of one session, in the order of pieces."""

    def __init__(self, limits: SessionLimits, random: Random) -> None:
        self._limits = limits
        self._random = random
        self._all: dict[int, Repair] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Repair]:
        return iter(list(self._all.values()))

    def requested_at(self, key: str) -> list[Repair]:
        """Return the repairs that are requested from source ``key``."""
        return [each for each in self._all.values() if each.requested_from == key]

    def rejected(self, key: str, extent: Extent, now_s: float) -> list[Repair]:
        """Record pieces that source ``key`` sent corrupt; return their repairs.

        They are due at once the first time, and after a back-off from then on.
        """
        found = []
        waits: dict[int, float] = {1: 0.0}  # by attempts: what fails together is retried together
        for piece in range(*extent):
            repair = self._all.setdefault(piece, Repair(Extent(piece, piece + 1)))
            repair.corrupt[key] += 1
            repair.requested_from = None
            repair.retry_at_s = now_s + waits.setdefault(
                repair.attempts, backoff_s(repair.attempts - 1, self._limits, self._random)
            )
            found.append(repair)
        self._all = dict(sorted(self._all.items()))
        return found

    def arrived(self, extent: Extent) -> None:
        """Remove pieces that are verified, from whichever source."""
        for piece in [each for each in self._all if extent.first <= each < extent.stop]:
            del self._all[piece]

    def replan(self, open_keys: Container[str]) -> None:
        """Reset for other candidates; requests on streams that stay open are kept."""
        for each in self._all.values():
            each.failed_sources.clear()
            if each.requested_from not in open_keys:
                each.requested_from = None

    def choose(
        self,
        repair: Repair,
        candidates: Sequence[Source],
        may_request: Callable[[Source], bool],
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
            return (origin_first, repair.corrupt[source.key])

        available = [each for each in candidates if not self._spent(repair, each)]
        fresh = sorted(
            (each for each in available if each.key not in repair.failed_sources), key=rank
        )
        for source in fresh:
            if may_request(source):
                return source
        # Every source failed to deliver or is in back-off: start another round. A source in
        # back-off may be dead; waiting for it would exclude others that hold the pieces by now.
        repair.failed_sources.clear()
        repair.retry_at_s = now_s + backoff_s(repair.attempts, self._limits, self._random)
        return None

    def is_hopeless(
        self, repair: Repair, candidates: Sequence[Source], is_gone: Callable[[Source], bool]
    ) -> bool:
        """Return whether every candidate has sent this piece corrupt as often as is allowed, is
        gone, or did not deliver. Peers get it from the origin in the end: while the origin has
        attempts left, the repair is not hopeless.
        """
        return bool(candidates) and all(
            self._spent(repair, each)
            or is_gone(each)
            or (each.kind == "worker" and each.key in repair.failed_sources)
            for each in candidates
        )

    def _spent(self, repair: Repair, source: Source) -> bool:
        limits = self._limits
        most = limits.origin_attempts if source.kind == "origin" else limits.piece_attempts
        return repair.corrupt[source.key] >= most


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

FAILBACK_DELAY_FACTOR = 4.0  # factor between the delays of successive attempts
MAX_LAG_GROWTH = 0.5  # of this worker's pace: if it grows faster, the source is slower than a spare
MIN_MISSING_PER_LAG = 2  # the missing pieces must be this many times the planned source's lag


class Failback:
    """Decides when to probe the planned source, and whether to go back to it."""

    def __init__(self, limits: SessionLimits, deadlines: Deadlines) -> None:
        self._limits = limits
        self._deadlines = deadlines

    def record_spare(self, task: PullTask, now_s: float) -> None:
        """Record that a spare was chosen for ``task``."""
        failback = task.failback_state
        if failback is None:
            failback = task.failback_state = FailbackState()
        if not failback.is_on_spare:
            failback.is_on_spare = True
            self._later(failback, now_s)

    def due_s(self, task: PullTask) -> float | None:
        """Return when to send the next probe; None if one is in flight or none is needed."""
        failback = task.failback_state
        if failback is None or not failback.is_on_spare or failback.probe is not None:
            return None
        # Near the end a failback gains nothing, and the last pieces would wait for the probe.
        return failback.next_s if task.unrequested >= self._limits.return_pieces else None

    def ends_s(self, probe: Probe) -> float:
        """Return when ``probe`` times out."""
        return probe.requested_s + self._deadlines.stall_timeout_s()

    def record_probe(self, task: PullTask, piece: Extent, now_s: float) -> None:
        """Record that ``piece``, the first unrequested one, is requested as a probe."""
        if task.failback_state is None:
            raise AssertionError("no spare stands in")
        # The spare would deliver everything taken so far before this piece.
        task.failback_state.probe = Probe(piece, now_s, task.held, task.claimed.count)
        task.claimed.add(piece)

    def probe_failed(self, task: PullTask, now_s: float) -> None:
        if (failback := task.failback_state) is not None:
            failback.probe = failback.lag_pieces = None
            failback.attempts += 1
            self._later(failback, now_s)

    def probe_arrived(self, task: PullTask, now_s: float) -> bool:
        """Record that the probed piece arrived; return whether to go back now."""
        failback = task.failback_state
        if failback is None or (probe := failback.probe) is None:
            return False
        failback.probe = None
        lag_pieces = max(0, task.held - 1 - probe.due)
        if failback.lag_pieces is None:
            failback.lag_pieces, failback.first_probe_due, failback.next_s = (
                lag_pieces,
                probe.due,
                now_s,
            )
            return False
        passed = max(1, probe.due - failback.first_probe_due)
        keeps_up = lag_pieces - failback.lag_pieces <= MAX_LAG_GROWTH * passed
        pieces_s = (task.held - 1 - probe.held) / max(1e-9, now_s - probe.requested_s)
        soon = lag_pieces <= pieces_s * self._deadlines.stall_timeout_s() / 2
        worth = task.missing >= MIN_MISSING_PER_LAG * lag_pieces + self._limits.return_pieces
        failback.lag_pieces = None
        failback.attempts += 1
        if keeps_up and soon and worth:
            failback.is_on_spare = False
            return True
        self._later(failback, now_s)
        return False

    def _later(self, failback: FailbackState, now_s: float) -> None:
        limits = self._limits
        wait_s = min(
            limits.return_max_s,
            limits.return_s * FAILBACK_DELAY_FACTOR ** min(failback.attempts, 16),
        )
        failback.next_s = now_s + wait_s
