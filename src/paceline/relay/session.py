"""One worker's share of one deployment, as pure protocol logic.

Events and a time go in, actions come out: which pieces to ask of which source, when a source is
lost and who replaces it, what to do with corrupt pieces, when the model is complete. No clock,
sockets, files or threads, and no idea of topologies: it executes lanes. The socket driver, the
in-memory network of the tests and any simulator run this same object.

Promises: held pieces are never asked for again; a piece is in flight from one source at a time; the
origin is asked for at most ``origin_budget_bytes`` an epoch; every wait ends (I12).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from paceline.errors import (
    CorruptData,
    InvalidPlan,
    OriginBudgetExceeded,
    PacelineError,
    PeerLost,
    PermanentError,
)
from paceline.manifest import Manifest
from paceline.relay.events import (
    Abandon,
    Cancelled,
    Complete,
    Fail,
    Fetch,
    LanesAssigned,
    LocalFailed,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    ReportCorrupt,
    ReportSourceLost,
    SessionAction,
    SessionEvent,
    SessionProgress,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.relay.extents import Extent, Extents
from paceline.relay.feeds import Feed, Health, Repair, Work, backoff_s
from paceline.relay.limits import PieceMap, SessionLimits
from paceline.wire.plan import Source, WorkerLanes
from paceline.wire.records import Failure, WorkerStatus


class RelaySession:
    """Executes one worker's lanes; see the module's docstring.

    ``held`` are the pieces already durable on this worker's disk.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        manifest: Manifest,
        held: Iterable[int] = (),
        limits: SessionLimits | None = None,
        seed: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self._digest = manifest.digest
        self._pieces = PieceMap(manifest)
        self._limits = limits or SessionLimits()
        self._random = Random(f"{seed}/{worker_id}")
        self._durable = Extents.of(held)
        self._verified = self._durable.copy()
        self._taken = self._durable.copy()  # verified, in flight, or under repair
        self._status = WorkerStatus.IDLE
        self._lanes: WorkerLanes | None = None
        self._work: list[Work] = []
        self._feeds: dict[str, Feed] = {}
        self._health: dict[str, Health] = {}
        self._repairs: dict[int, Repair] = {}
        self._streams = 0
        self._origin_spent = 0
        self._piece_deadline_s = 1.0  # until the first lanes
        self._failure: PacelineError | None = None
        self._last_error: PacelineError | None = None
        self._progress_s = self._alive_s = 0.0
        self._lost: dict[str, None] = {}  # ordered sets, for reports
        self._corrupt: dict[str, None] = {}
        self._refetched = self._rejected = 0
        self._over = False  # cancelled: no lanes revive it
        self._now_s = 0.0

    # ── what drivers call ────────────────────────────────────────────────────────────────────────

    def handle(self, event: SessionEvent, now_s: float) -> list[SessionAction]:
        """Take one event at time ``now_s`` (any monotonic clock) and return what to do."""
        actions: list[SessionAction] = []
        self._now_s = now_s
        match event:
            case LanesAssigned(lanes):
                self._assign(lanes, now_s, actions)
            case PieceVerified(key, _, extent):
                self._arrived(key, extent, now_s)
            case PieceRejected(key, stream, piece):
                self._reject(key, stream, piece, now_s, actions)
            case SourceAlive(key, stream):
                if feed := self._feed(key, stream):
                    feed.heard_s = self._alive_s = now_s
            case SourceFailed(key, stream, error):
                if feed := self._feed(key, stream):
                    self._lose(feed, error, now_s, actions)
            case PiecesDurable(extent):
                self._verified.add(extent)
                self._taken.add(extent)
                self._durable.add(extent)
            case LocalFailed(error):
                self._fail(error, actions)
            case Cancelled():
                self._over = True
                self._status = WorkerStatus.IDLE
                self._close_all(actions)
            case Tick():
                pass
        if self._status is WorkerStatus.RECEIVING:
            self._check_deadlines(now_s, actions)
            self._pump(now_s, actions)
            self._check_complete(actions)
        return actions

    def deadline_s(self) -> float | None:
        """Return when the session wants its next Tick, or None when it waits for nothing."""
        if self._status is not WorkerStatus.RECEIVING or self._lanes is None:
            return None
        feeds = self._feeds.values()
        lost_at = (feed.deadline_s(*self._patience(feed.source)) for feed in feeds)
        times = [self._give_up_s(), *(each for each in lost_at if each is not None)]
        times += [
            each.retry_at_s if each.asked is None else each.asked_s + self._repair_s()
            for each in self._repairs.values()
        ]
        for work in self._unfinished():
            if work.active is None:
                rests = (self._health.get(each.key) for each in work.candidates)
                times += [rest.retry_at_s for rest in rests if rest is not None]
        # What lies in the past was looked at in the last ``handle`` and waits for something else.
        return min((each for each in times if each > self._now_s), default=self._give_up_s())

    def progress(self) -> SessionProgress:
        """Return where this worker stands; what is reported as held is durable (I2)."""
        failure = self._failure
        return SessionProgress(
            deployment_id=self._lanes.deployment_id if self._lanes else "",
            epoch=self.epoch,
            status=self._status,
            pieces_held=self._durable.count,
            bytes_held=sum(self._pieces.bytes_of(run) for run in self._durable),
            pieces_verified=self._verified.count,
            chunks_received=tuple(
                number
                for number, extent in enumerate(self._pieces.chunks)
                if self._durable.covers(extent)
            ),
            refetched_pieces=self._refetched,
            corrupt_pieces=self._rejected,
            origin_spent_bytes=self._origin_spent,
            lost_sources=tuple(self._lost),
            corrupt_sources=tuple(self._corrupt),
            failure=None if failure is None else as_failure(failure),
        )

    @property
    def epoch(self) -> int:
        """Return the epoch of the lanes in use, 0 before the first."""
        return self._lanes.epoch if self._lanes else 0

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def _assign(self, lanes: WorkerLanes, now_s: float, actions: list[SessionAction]) -> None:
        if lanes.epoch <= self.epoch or self._over:
            return
        if lanes.manifest_digest != self._digest or lanes.worker_id != self.worker_id:
            wanted = f"{self._digest[:12]}… for {self.worker_id}"
            got = f"{lanes.manifest_digest[:12]}… for {lanes.worker_id}"
            self._fail(
                InvalidPlan("lanes are not for this session", got=got, wanted=wanted), actions
            )
            return
        self._lanes = lanes
        self._piece_deadline_s = lanes.piece_deadline_s
        if self._status is WorkerStatus.COMPLETE:
            return  # the new epoch is acknowledged; there is nothing left to pull
        self._work = [
            Work(
                self._pieces.chunk_range(lane.first_chunk, lane.last_chunk),
                _others((lane.source, *lane.spares), self.worker_id),
            )
            for lane in lanes.lanes
        ]
        self._cover_the_rest()
        for health in self._health.values():
            health.retry_at_s = 0.0  # the coordinator knows more than our last failures
        for key, feed in list(self._feeds.items()):
            using = [w for w in self._work if w.candidates and w.candidates[0] == feed.source]
            for work in using:
                work.active = key
            if not using:
                self._close(feed, actions)
        self._origin_spent = 0
        self._lost.clear()
        self._corrupt.clear()
        self._repairs = {p: r for p, r in self._repairs.items() if r.asked in self._feeds} | {
            p: Repair(avoid=r.avoid) for p, r in self._repairs.items() if r.asked not in self._feeds
        }
        self._failure = None
        self._status = WorkerStatus.RECEIVING
        self._progress_s = self._alive_s = now_s

    def _cover_the_rest(self) -> None:
        """Add work for missing pieces that no lane names: marks may be fewer than the plan knew."""
        covered = self._durable.copy()
        sources: dict[str, Source] = {}
        for work in self._work:
            covered.add(work.extent)
            sources |= {each.key: each for each in work.candidates if each.kind == "worker"}
        for work in self._work:
            sources |= {each.key: each for each in work.candidates}
        if sources:
            rest = list(covered.gaps(Extent(0, self._pieces.count)))
            self._work += [Work(extent, tuple(sources.values())) for extent in rest]

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, key: str, extent: Extent, now_s: float) -> None:
        new = self._verified.add(extent)
        self._taken.add(extent)
        self._refetched += extent.size - new
        for feed in self._feeds.values():
            for run in list(feed.in_flight.common(extent)):
                feed.in_flight.remove(run)
                feed.in_flight_bytes -= self._pieces.bytes_of(run)
        if self._repairs:
            for piece in range(extent.first, extent.stop):
                self._repairs.pop(piece, None)
        if sender := self._feeds.get(key):
            sender.heard_s = sender.progress_s = now_s
            self._health.pop(key, None)
        if new:
            self._progress_s = self._alive_s = now_s
            if self._status is WorkerStatus.RECEIVING:
                self._failure = None

    def _reject(
        self, key: str, stream: int, piece: int, now_s: float, actions: list[SessionAction]
    ) -> None:
        self._rejected += 1
        self._corrupt[key] = None
        actions.append(ReportCorrupt(key, piece))
        feed = self._feed(key, stream)
        if feed is not None:
            feed.heard_s = self._alive_s = now_s
            self._drop_in_flight(feed, piece)
            feed.corrupt += 1
        if piece in self._verified:
            return
        repair = self._repairs.setdefault(piece, Repair())
        self._taken.add(Extent(piece, piece + 1))
        repair.attempts += 1
        repair.senders.append(key)
        repair.asked = None
        repair.retry_at_s = now_s + backoff_s(repair.attempts, self._limits, self._random)
        if not key.startswith("origin:"):  # what the origin sends, peers can only have from there
            repair.avoid.add(key)
        if repair.attempts >= self._limits.piece_attempts:
            error = CorruptData(
                f"a piece arrived corrupt {repair.attempts} times",
                got=f"piece {piece} from {', '.join(dict.fromkeys(repair.senders))}",
                wanted="bytes that match the manifest",
                do="Check the source object and the named workers' disks; publish again if needed.",
            )
            self._fail(error, actions)
        elif feed is not None and feed.corrupt >= self._limits.corrupt_before_lost:
            lost = PeerLost("source sends corrupt pieces", got=feed.corrupt, where=key)
            self._lose(feed, lost, now_s, actions)

    # ── sources ──────────────────────────────────────────────────────────────────────────────────

    def _feed(self, key: str, stream: int) -> Feed | None:
        feed = self._feeds.get(key)
        return feed if feed is not None and feed.stream == stream else None

    def _lose(
        self, feed: Feed, error: PacelineError, now_s: float, actions: list[SessionAction]
    ) -> None:
        key, idle = feed.source.key, not feed.in_flight
        self._close(feed, actions)
        if idle:
            return  # a stream closed while nothing was asked of it is no loss
        health = self._health.setdefault(key, Health())
        health.failures += 1
        health.error = self._last_error = error
        health.retry_at_s = now_s + backoff_s(health.failures, self._limits, self._random)
        self._lost[key] = None
        actions.append(ReportSourceLost(key, error.one_line()))
        if feed.source.kind == "origin" and isinstance(error, PermanentError):
            health.retry_at_s = float("inf")  # a missing or replaced source does not heal
            if any(
                key == next((c.key for c in work.candidates), "") for work in self._unfinished()
            ):
                self._fail(error, actions)

    def _unfinished(self) -> Iterator[Work]:
        return (work for work in self._work if not self._verified.covers(work.extent))

    def _close(self, feed: Feed, actions: list[SessionAction]) -> None:
        """End a stream; what was in flight is wanted again."""
        key = feed.source.key
        del self._feeds[key]
        for run in feed.in_flight:
            self._taken.remove(run)
        for piece, repair in self._repairs.items():
            if repair.asked == key:
                repair.asked = None
                self._taken.add(Extent(piece, piece + 1))
        for work in self._work:
            if work.active == key:
                work.active = None
        actions.append(Abandon(key, feed.stream))

    def _close_all(self, actions: list[SessionAction]) -> None:
        for feed in list(self._feeds.values()):
            self._close(feed, actions)

    def _patience(self, source: Source) -> tuple[float, float]:
        """Return after which silence, and after which standstill, ``source`` counts as lost."""
        limits, deadline_s = self._limits, self._piece_deadline_s
        if source.kind == "origin":
            silence_s = max(limits.origin_deadline_s, deadline_s)
            return silence_s, silence_s + limits.standstill_factor * deadline_s
        return deadline_s, max(limits.standstill_min_s, limits.standstill_factor * deadline_s)

    def _repair_s(self) -> float:
        """Return how long to wait for one repaired piece before asking somebody else."""
        return 4 * self._piece_deadline_s

    def _give_up_s(self) -> float:
        return min(self._alive_s + self._limits.give_up_s, self._progress_s + self._limits.stall_s)

    def _check_deadlines(self, now_s: float, actions: list[SessionAction]) -> None:
        for feed in list(self._feeds.values()):
            silence_s, standstill_s = self._patience(feed.source)
            lost_at = feed.deadline_s(silence_s, standstill_s)
            if lost_at is None or now_s < lost_at:
                continue
            silent = now_s - feed.heard_s >= silence_s
            what = "source went silent" if silent else "source lives but makes no progress"
            waited = f"{now_s - (feed.heard_s if silent else feed.progress_s):.2f} s"
            limit = f"a piece within {silence_s if silent else standstill_s:.2f} s"
            error = PeerLost(what, got=waited, wanted=limit, where=feed.source.key)
            self._lose(feed, error, now_s, actions)
        for piece, repair in self._repairs.items():
            if repair.asked and now_s >= repair.asked_s + self._repair_s():
                if (asked := self._feeds.get(repair.asked)) is not None:
                    self._drop_in_flight(asked, piece)
                repair.avoid.add(repair.asked)
                repair.asked = None
        if now_s >= self._give_up_s():
            self._fail(self._failure or self._last_error or self._nobody(), actions)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def _pump(self, now_s: float, actions: list[SessionAction]) -> None:
        if self._status is not WorkerStatus.RECEIVING:
            return
        for piece, repair in self._repairs.items():
            if repair.asked is None and now_s >= repair.retry_at_s:
                self._ask_repair(piece, repair, now_s, actions)
        for work in self._unfinished():
            feed = self._source_for(work, now_s)
            if feed is not None:
                self._top_up(feed, work, now_s, actions)
        used = {work.active for work in self._work} | {r.asked for r in self._repairs.values()}
        for key, feed in list(self._feeds.items()):
            if not feed.in_flight and key not in used:
                self._close(feed, actions)

    def _source_for(self, work: Work, now_s: float) -> Feed | None:
        if work.active is not None and (feed := self._feeds.get(work.active)):
            return feed
        work.active = None
        missing = next(self._taken.gaps(work.extent), None)
        if missing is None:
            return None  # all of it is on its way from somewhere
        for source in work.candidates:
            if self._may_ask(source, missing, now_s):
                work.active = source.key
                return self._open(source, now_s)
        if any(
            each.kind == "origin" and not self._may_afford(each, missing)
            for each in work.candidates
        ):
            self._failure = self._over_budget()
        return None

    def _ask_repair(
        self, piece: int, repair: Repair, now_s: float, actions: list[SessionAction]
    ) -> None:
        extent = Extent(piece, piece + 1)
        works = [work for work in self._work if work.extent.first <= piece < work.extent.stop]
        candidates = list({each.key: each for work in works for each in work.candidates}.values())
        fresh = [each for each in candidates if each.key not in repair.avoid]
        for source in (*fresh, *(each for each in candidates if each.key in repair.avoid)):
            if self._may_ask(source, extent, now_s):
                repair.asked, repair.asked_s = source.key, now_s
                self._request(self._open(source, now_s), extent, now_s, actions)
                return
        repair.retry_at_s = now_s + self._limits.backoff_s  # all of them rest; look again soon

    def _open(self, source: Source, now_s: float) -> Feed:
        feed = self._feeds.get(source.key)
        if feed is None:
            self._streams += 1
            feed = Feed(source, self._streams, now_s, now_s)
            self._feeds[source.key] = feed
        return feed

    def _top_up(self, feed: Feed, work: Work, now_s: float, actions: list[SessionAction]) -> None:
        """Ask for more once half of the window has drained: few requests, never an empty pipe."""
        limits = self._limits
        if feed.in_flight and (
            feed.in_flight_bytes > limits.window_bytes // 2
            or feed.in_flight.count > limits.window_pieces // 2
        ):
            return
        for gap in list(self._taken.gaps(work.extent)):
            room_bytes = limits.window_bytes - feed.in_flight_bytes
            room_pieces = limits.window_pieces - feed.in_flight.count
            extent = self._pieces.fitting(gap, room_bytes, room_pieces)
            if extent.size == 0 and not feed.in_flight:
                extent = Extent(gap.first, gap.first + 1)  # a piece larger than the window
            if feed.source.kind == "origin":
                extent = self._pieces.fitting(extent, self._origin_left(), extent.size)
                if extent.size == 0 and not feed.in_flight:
                    work.active = None  # the fuse: others may still be asked
                    self._failure = self._over_budget()
            if extent.size == 0:
                return
            self._request(feed, extent, now_s, actions)

    def _request(
        self, feed: Feed, extent: Extent, now_s: float, actions: list[SessionAction]
    ) -> None:
        if not feed.in_flight:
            feed.heard_s = feed.progress_s = now_s
        self._taken.add(extent)
        feed.in_flight.add(extent)
        asked_bytes = self._pieces.bytes_of(extent)
        feed.in_flight_bytes += asked_bytes
        if feed.source.kind == "origin":
            self._origin_spent += asked_bytes
        actions.append(Fetch(feed.source, feed.stream, extent))

    def _drop_in_flight(self, feed: Feed, piece: int) -> None:
        if feed.in_flight.remove(Extent(piece, piece + 1)):
            feed.in_flight_bytes -= self._pieces.bytes_of(Extent(piece, piece + 1))

    def _may_ask(self, source: Source, extent: Extent, now_s: float) -> bool:
        health = self._health.get(source.key)
        return (health is None or now_s >= health.retry_at_s) and self._may_afford(source, extent)

    def _may_afford(self, source: Source, extent: Extent) -> bool:
        if source.kind != "origin" or extent.size == 0:
            return True
        return self._pieces.bytes_of(Extent(extent.first, extent.first + 1)) <= self._origin_left()

    def _origin_left(self) -> int:
        return (self._lanes.origin_budget_bytes if self._lanes else 0) - self._origin_spent

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _check_complete(self, actions: list[SessionAction]) -> None:
        if self._status is WorkerStatus.RECEIVING and self._durable.count == self._pieces.count:
            self._status = WorkerStatus.COMPLETE
            self._failure = None
            self._close_all(actions)
            actions.append(Complete())

    def _fail(self, error: PacelineError, actions: list[SessionAction]) -> None:
        if self._status in (WorkerStatus.FAILED, WorkerStatus.COMPLETE):
            return
        self._status = WorkerStatus.FAILED
        self._failure = error
        self._close_all(actions)
        actions.append(Fail(error))

    def _over_budget(self) -> PacelineError:
        return OriginBudgetExceeded(
            "no living peer has the missing pieces and the origin's budget is spent",
            got=f"{self._origin_spent} bytes read from the origin",
            wanted=f"at most {self._lanes.origin_budget_bytes if self._lanes else 0}",
            where=self.worker_id,
            do="Bring a holder back, or raise the budget with a new plan.",
        )

    def _nobody(self) -> PacelineError:
        return PeerLost(
            "no source is left to pull from",
            where=self.worker_id,
            do="Check the other workers and the source; a new plan revives this worker.",
        )


def as_failure(error: PacelineError) -> Failure:
    """Return ``error`` as reports carry it."""
    return Failure(code=error.code, message=error.one_line()[:2000])


def _others(candidates: tuple[Source, ...], worker_id: str) -> tuple[Source, ...]:
    """Return the candidates without duplicates and without the worker itself, origins last."""
    unique = {each.key: each for each in reversed(candidates) if each.worker_id != worker_id}
    ordered = list(reversed(unique.values()))
    head, tail = ordered[:1], ordered[1:]
    return (*head, *sorted(tail, key=lambda each: each.kind == "origin"))
