"""Chooses the source of a pull task: which sources are available now, and which of them is best.

It records the failures and back-off of each source and the origin budget, and holds the state of
one pull task (``PullTask``) and of one open stream (``SourceStream``). What to request is decided
in ``pulling``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from paceline.errors import OriginBudgetExceeded, PacelineError, ServiceUnavailable
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.schemas import Source

SAMPLE_RUNS = 16  # a stream's corrupt share is taken over about this many of its last runs
FORGIVEN_PIECES = 16  # verified in a row, after which a source's failures are forgotten


@dataclass(slots=True, eq=False)
class SourceStream:
    """One open stream from a source. A piece is ``in_flight`` from at most one stream;
    ``side_requests`` are the pieces of repairs, hedges and failback probes.
    """

    source: Source
    stream_id: int
    last_signal_s: float  # last sign of life, or when waiting began
    last_bytes_s: float  # last bytes, or when the stream was opened
    alive_until_s: float = 0.0  # until when the driver guarantees that bytes move
    verified_pieces: int = 0  # that it delivered
    in_flight: Extents = field(default_factory=Extents)
    side_requests: Extents = field(default_factory=Extents)
    requests: deque[tuple[float, Extent]] = field(default_factory=deque)  # oldest first
    # Over the last runs, each weighing less than the one after it:
    sampled: float = 0.0  # pieces,
    corrupt: float = 0.0  # corrupt pieces,
    corrupt_runs: float = 0.0  # and runs of corrupt pieces

    @property
    def waiting(self) -> bool:
        """Return whether any requested piece has not arrived."""
        return self.in_flight.count > 0 or self.side_requests.count > 0

    def record_run(self, pieces: int, corrupt: int) -> None:
        """Record a run that arrived, either all verified or all corrupt."""
        kept = 1 - 1 / SAMPLE_RUNS
        self.sampled = kept * self.sampled + pieces
        self.corrupt = kept * self.corrupt + corrupt
        self.corrupt_runs = kept * self.corrupt_runs + (corrupt > 0)

    def is_bad(self, limits: SessionLimits) -> bool:
        """Return whether this stream's share of corrupt pieces is too high to continue: a source
        whose data is all corrupt reaches it with its fourth run, one that was good with its eighth.
        """
        return (
            self.corrupt_runs >= limits.corrupt_before_lost - 0.5
            and self.corrupt >= limits.corrupt_share * self.sampled
        )

    def oldest(self) -> tuple[float, Extent] | None:
        """Return when the oldest incomplete request was sent, and its first missing run."""
        while self.requests:
            at_s, extent = self.requests[0]
            run = next(self.in_flight.common(extent), None)
            if run is not None:
                return at_s, run
            self.requests.popleft()
        return None


@dataclass(slots=True)
class SourceHealth:
    """The failures and back-off of a source that was abandoned."""

    failures: int = 0
    verified_pieces: int = 0  # since the last failure
    retry_at_s: float = 0.0

    def failed(self, now_s: float, limits: SessionLimits, random: Random) -> None:
        """Record a failure and back off, longer each time."""
        self.failures += 1
        self.verified_pieces = 0
        self.retry_at_s = now_s + backoff_s(self.failures, limits, random)


@dataclass(slots=True, eq=False)
class Probe:
    """A piece requested from the planned source to test it; see ``recovery``."""

    piece: Extent
    requested_s: float
    held: int  # pieces of the task that were verified when the probe was sent
    due: int  # verified pieces at which the spare would have delivered the probed piece


@dataclass(slots=True, eq=False)
class FailbackState:
    """Failback state of a planned source that a spare replaces, or replaced before."""

    is_on_spare: bool = False  # a spare replaces the planned source now
    next_s: float = 0.0  # when the next probe may be sent to the planned source
    attempts: int = 0  # failed probes and failbacks so far
    probe: Probe | None = None
    lag_pieces: int | None = None  # pieces that it lags by, measured with the first of two probes
    first_probe_due: int = 0  # ``due`` of that first probe


@dataclass(slots=True, eq=False)
class PullTask:
    """One pull task: a run of pieces and its candidate sources, best first."""

    extent: Extent
    candidates: tuple[Source, ...]
    expected_bytes_s: float = 0.0
    missing: int = 0  # pieces that are not verified
    claimed: Extents = field(default_factory=Extents)  # verified, in flight, or in a side request
    requested_pieces: int = 0  # in flight
    requested_bytes: int = 0
    window_bytes: int = 0
    window_pieces: int = 0
    progress_s: float = 0.0  # last verified piece, or when waiting began
    active: str | None = None  # key of the source in use
    spare_stall_s: float = 0.0  # short stall limit of a spare while others are left; 0: none
    # Sources that had nothing for the task.
    stalled_sources: dict[str, SourceHealth] = field(default_factory=dict)
    failback_state: FailbackState | None = None  # set once a spare has replaced the planned source

    @property
    def held(self) -> int:
        """Return how many pieces are verified."""
        return self.extent.size - self.missing

    @property
    def unrequested(self) -> int:
        """Return how many missing pieces are not requested yet."""
        return self.extent.size - self.claimed.count

    def is_first_choice(self, key: str) -> bool:
        """Return whether ``key`` is the planned source."""
        return bool(self.candidates) and self.candidates[0].key == key


def backoff_s(failures: int, limits: SessionLimits, random: Random) -> float:
    """Return the back-off after a source's n-th failure: exponential, jittered."""
    full = min(limits.backoff_max_s, limits.backoff_s * 2.0 ** min(failures - 1, 16))
    return full * (0.5 + random.random())


@dataclass(slots=True)
class OriginBudget:
    """This worker's share of the origin budget (I6): bytes granted by the plan, bytes requested."""

    granted_bytes: int = 0
    spent_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Return how many bytes may still be requested."""
        return self.granted_bytes - self.spent_bytes


class SourceSelector:
    """The availability of each source under the current lanes, and the choice among them."""

    def __init__(self, pieces: PieceMap, limits: SessionLimits, random: Random) -> None:
        self._pieces = pieces
        self._limits = limits
        self._random = random
        self._health: dict[str, SourceHealth] = {}
        self.broken: set[str] = set()  # sources that delivered before their streams broke
        # This process was suspended or cut off, and its lanes have not been confirmed since.
        self.unconfirmed = False
        self.budget = OriginBudget()
        self.stalled: PacelineError | None = None  # why nothing can be requested now

    def reset(self, budget: OriginBudget) -> None:
        """Reset for new lanes: the coordinator's view is more recent than the last failures.

        A suspension stays recorded: the coordinator may not have noticed it yet.
        """
        self.broken.clear()
        self._health.clear()
        self.budget = budget
        self.stalled = None

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────

    def delivered(self, key: str, pieces: int) -> None:
        """Record verified pieces: after enough in a row, a source's failures are forgotten."""
        if key in self._health:
            health = self._health[key]
            health.verified_pieces += pieces
            if health.verified_pieces >= FORGIVEN_PIECES:
                del self._health[key]

    def failed(self, key: str, now_s: float, *, for_good: bool = False) -> None:
        """Back off from a source, longer each time, or ``for_good``."""
        health = self._health.setdefault(key, SourceHealth())
        health.failed(now_s, self._limits, self._random)
        if for_good:
            health.retry_at_s = float("inf")

    def task_stalled(self, key: str, task: PullTask, now_s: float) -> None:
        """Back off from a source for ``task`` only: it has nothing for it."""
        task.stalled_sources.setdefault(key, SourceHealth()).failed(
            now_s, self._limits, self._random
        )

    # ── availability and choice ──────────────────────────────────────────────────────────────────

    def may_request(self, source: Source, extent: Extent, task: PullTask, now_s: float) -> bool:
        """Return whether the first piece of ``extent`` may be requested from ``source`` now."""
        return now_s >= self.backoff_ends_s(source, task) and self.is_within_budget(source, extent)

    def is_within_budget(self, source: Source, extent: Extent) -> bool:
        """Return whether the budget allows the first piece of ``extent`` from ``source`` now."""
        if source.kind != "origin":
            return True
        needed = self._pieces.bytes_of(Extent(extent.first, extent.first + 1))
        return not self.unconfirmed and needed <= self.budget.left_bytes

    def record_stall(self) -> None:
        """Record in ``stalled`` why nothing is requested from the origin."""
        if self.unconfirmed:
            self.stalled = ServiceUnavailable(
                "this node was suspended or cut off, so it may not read the source now",
                wanted="an answer to a heartbeat after that",
                do="Wait: the coordinator's next answer confirms or replaces this node's lanes.",
            )
        else:
            self.stalled = OriginBudgetExceeded(
                "no living peer has the missing pieces and the origin's budget is spent",
                got=f"{self.budget.spent_bytes} bytes requested from the origin",
                wanted=f"at most {self.budget.granted_bytes}",
                do="Bring a holder back, or raise the budget with a new plan.",
            )

    def backoff_ends_s(self, source: Source, task: PullTask) -> float:
        """Return when the back-off of ``source`` ends."""
        records = (self._health.get(source.key), task.stalled_sources.get(source.key))
        return max((rest.retry_at_s for rest in records if rest is not None), default=0.0)

    def retries(self, task: PullTask) -> Iterator[float]:
        """Yield the times at which the back-off of a candidate ends."""
        for records in (self._health, task.stalled_sources):
            for source in task.candidates:
                if (rest := records.get(source.key)) is not None:
                    yield rest.retry_at_s

    def is_gone(self, source: Source) -> bool:
        """Return whether ``source`` was abandoned for good."""
        health = self._health.get(source.key)
        return health is not None and health.retry_at_s == float("inf")

    def failures(self, source: Source, task: PullTask) -> int:
        """Return the recent failures of a source, its rank in ``best``: untried sources come first.

        If the plan names the origin as the source, it is tried before any spare, because the spares
        receive these pieces from this worker. If it is only a spare, it is tried first once
        ``spares_first`` other candidates have failed: then this worker is probably ahead of them.
        """
        if source.kind != "origin":
            records = (self._health.get(source.key), task.stalled_sources.get(source.key))
            return sum(rest.failures for rest in records if rest is not None)
        failed = sum(self.failures(each, task) > 0 for each in task.candidates if each != source)
        first = task.is_first_choice(source.key) or failed >= self._limits.spares_first
        return -1 if first else 0

    def best(self, available: list[Source], task: PullTask) -> Source:
        """Return the source of ``available`` with the fewest failures; of equals the first
        planned."""
        return min(available, key=lambda each: self.failures(each, task))
