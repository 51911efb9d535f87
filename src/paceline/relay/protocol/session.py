"""The relay session: one worker's transfer in one deployment, as protocol logic without I/O.

Events and a time go in, actions come out: which pieces to request from which source, when a source
is lost and which one replaces it, how corrupt pieces are recovered, when the model is complete. No
clock, sockets, files or threads; it executes lanes and does not depend on topologies. The socket
driver and the simulator run this same object.

Guarantees: held pieces are never requested again; a piece is in flight from one source at a time
(the last ones from two, where the first is late); at most ``origin_budget_bytes`` are requested
from the origin per epoch; every wait ends (I12).
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from paceline.errors import CorruptData, InvalidPlan, PacelineError, PeerLost, PermanentError
from paceline.manifest import Manifest
from paceline.relay.protocol.events import (
    Cancelled,
    Complete,
    Fail,
    HeldPiecesCorrupt,
    LanesAssigned,
    LanesConfirmed,
    LocalFailed,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    ReportCorrupt,
    Resumed,
    SessionAction,
    SessionEvent,
    SessionProgress,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap, SessionLimits
from paceline.relay.protocol.pulling import Puller
from paceline.relay.protocol.recovery import Repair
from paceline.schemas import Failure, WorkerLanes, WorkerStatus


class RelaySession:
    """Executes one worker's lanes; see the module's docstring.

    ``held`` are the pieces already durable on this worker's disk. ``pieces`` is the manifest's
    ``PieceMap`` if the caller has one; it is read-only and may be shared.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        manifest: Manifest,
        held: Iterable[int] | Extents = (),
        limits: SessionLimits | None = None,
        seed: int = 0,
        pieces: PieceMap | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._manifest = manifest
        self._digest = manifest.digest
        self._limits = limits or SessionLimits()
        self.pieces = pieces or PieceMap(manifest)
        self._durable = held.copy() if isinstance(held, Extents) else Extents.of(held)
        self.verified = self._durable.copy()  # the pieces that may be forwarded; read-only
        self._bytes_held = sum(self.pieces.bytes_of(run) for run in self._durable)
        self._chunks = {
            number for number, run in enumerate(self.pieces.chunks) if self._durable.covers(run)
        }
        self._chunks_received: tuple[int, ...] | None = None  # sorted; computed on demand
        self._pull = Puller(self.pieces, self.verified, self._limits, Random(f"{seed}/{worker_id}"))
        self._status = WorkerStatus.IDLE
        self._is_cancelled = False  # cancelled: new lanes do not restart it
        self._lanes: WorkerLanes | None = None
        self._error: PacelineError | None = None
        self._progress_s = self._alive_s = 0.0
        self._due_s = float("-inf")  # nothing is due before this; see ``handle``
        # The session's clock excludes the time that the process was suspended, so that no source
        # counts as silent for it. Events from before a suspension may be handled after it.
        self._slept_s, self._woke_s = 0.0, float("-inf")
        self._corrupt: dict[str, None] = {}  # an ordered set of sources that sent corrupt pieces
        self._rejected = 0  # pieces

    # ── the drivers' interface ───────────────────────────────────────────────────────────────────

    def handle(self, event: SessionEvent, now_s: float) -> list[SessionAction]:
        """Handle one event at time ``now_s`` (any monotonic clock) and return the actions.

        Most events are verified pieces of a healthy stream before any deadline, whose window is
        more than half full: they need nothing else.
        """
        actions: list[SessionAction] = []
        now_s = max(now_s - self._slept_s, self._woke_s)
        early = now_s < self._due_s
        match event:
            case PieceVerified(key, stream_id, extent):
                if self._pull.arrived(key, stream_id, extent, now_s):
                    self._progress_s = self._alive_s = now_s
                if early and self._pull.is_supplied(extent):
                    return actions
            case PiecesDurable(extent):
                known = self._became_durable(extent, now_s)
                if early and known and self._durable.count < self.pieces.count:
                    return actions
            case SourceAlive():
                self._alive(event, now_s)
                if now_s < self._due_s:
                    return actions  # deadlines only moved later: nothing else can have changed
            case PieceRejected(key, stream_id, extent):
                self._reject(key, stream_id, extent, now_s, actions)
            case SourceFailed(key, stream_id, error):
                self._source_failed(key, stream_id, error, now_s, actions)
            case LanesAssigned(lanes, read):
                self._assign(lanes, read, now_s, actions)
            case HeldPiecesCorrupt(extent):
                self._withdraw_corrupt(extent, now_s)
            case LocalFailed(error):
                self._fail(error, actions)
            case Cancelled():
                self._is_cancelled = True
                self._status = WorkerStatus.IDLE
                self._pull.close_all(actions)
            case Resumed(slept_s, replaced):
                self._slept_s += slept_s
                now_s = self._woke_s = max(now_s - slept_s, self._woke_s)
                if replaced:
                    self._pull.sleep(unconfirmed=True)
            case LanesConfirmed():
                self._pull.sleep(unconfirmed=False)
            case Tick():
                pass
        self._due_s = float("-inf")
        if self._status is WorkerStatus.RECEIVING:
            self._advance(now_s, actions)
        return actions

    def deadline_s(self) -> float | None:
        """Return when the session needs its next Tick, or None when it waits for nothing.

        It may be earlier than the true deadline, never later: progress only moves deadlines later,
        and does not recompute all of them.
        """
        if self._status is not WorkerStatus.RECEIVING:
            return None
        if self._due_s > float("-inf"):
            return self._due_s + self._slept_s
        give_up_s = self._give_up_s()
        # The last ``handle`` processed deadlines in the past; those now wait for another event.
        seen_s = self._pull.checked_s
        later = (at for at in self._pull.deadlines() if seen_s < at < give_up_s)
        self._due_s = min(later, default=give_up_s)
        return self._due_s + self._slept_s

    def progress(self) -> SessionProgress:
        """Return this worker's progress; pieces reported as held are durable (I2)."""
        stalled = self._pull.choice.stalled if self._status is WorkerStatus.RECEIVING else None
        failure = self._error or stalled
        if self._chunks_received is None:
            self._chunks_received = tuple(sorted(self._chunks))
        return SessionProgress(
            deployment_id=self._lanes.deployment_id if self._lanes else "",
            epoch=self.epoch,
            status=self._status,
            pieces_held=self._durable.count,
            bytes_held=self._bytes_held,
            pieces_verified=self.verified.count,
            chunks_received=self._chunks_received,
            corrupt_pieces=self._rejected,
            lost_sources=tuple(self._pull.lost),
            corrupt_sources=tuple(self._corrupt),
            failure=None if failure is None else as_failure(failure),
        )

    def waits_for(self, now_s: float) -> str:
        """Return what the first missing piece waits for, for logs."""
        return self._pull.waits_for(now_s - self._slept_s)

    @property
    def epoch(self) -> int:
        """Return the epoch of the lanes in use, 0 before the first."""
        return self._lanes.epoch if self._lanes else 0

    # ── event handlers ───────────────────────────────────────────────────────────────────────────

    def _assign(
        self, lanes: WorkerLanes, read: int, now_s: float, actions: list[SessionAction]
    ) -> None:
        if lanes.epoch <= self.epoch or self._is_cancelled:
            return
        if lanes.manifest_digest != self._digest or lanes.worker_id != self.worker_id:
            wanted = f"{self._digest[:12]}… for {self.worker_id}"
            got = f"{lanes.manifest_digest[:12]}… for {lanes.worker_id}"
            error = InvalidPlan("lanes are not for this session", got=got, wanted=wanted)
            self._fail(error, actions)
            return
        self._lanes = lanes
        if self._status is WorkerStatus.COMPLETE:
            return  # the new epoch is acknowledged; nothing is left to pull
        self._pull.assign(lanes, read, now_s, actions)
        self._corrupt.clear()
        self._error = None
        self._status = WorkerStatus.RECEIVING
        self._progress_s = self._alive_s = now_s

    def _alive(self, event: SourceAlive, now_s: float) -> None:
        stream = self._pull.state.find_stream(event.source_key, event.stream)
        if stream is None:
            return
        stream.last_signal_s = self._alive_s = now_s
        until_s = event.until_s - self._slept_s
        if event.moving or until_s > now_s:
            stream.last_bytes_s = now_s
        if until_s < stream.alive_until_s:
            self._due_s = float("-inf")  # the driver's guarantee became shorter
        stream.alive_until_s = until_s

    def _became_durable(self, extent: Extent, now_s: float) -> bool:
        """Record durable pieces; return whether all were verified before, as expected."""
        known = self.verified.covers(extent)
        if not known:
            self._pull.state.record_verified(extent, now_s)
        fresh = list(self._durable.gaps(extent))
        for run in fresh:
            self._durable.add(run)
            self._bytes_held += self.pieces.bytes_of(run)
            for number in self.pieces.chunks_of(run):
                if self._durable.covers(self.pieces.chunks[number]):
                    self._chunks.add(number)
                    self._chunks_received = None
        return known

    def _reject(
        self, key: str, stream_id: int, extent: Extent, now_s: float, actions: list[SessionAction]
    ) -> None:
        self._rejected += extent.size
        self._corrupt[key] = None
        actions.append(ReportCorrupt(key, extent.first, extent.size))
        stream, leave = self._pull.rejected(key, stream_id, extent, now_s)
        if stream is not None:
            self._alive_s = now_s
            if leave:
                got = f"{stream.corrupt:.0f} of the last {stream.sampled:.0f}"
                lost = PeerLost("source sends corrupt pieces", got=got, where=key)
                self._pull.lose(stream, lost, now_s, actions)

    def _corrupt_everywhere(self, repair: Repair) -> PacelineError:
        piece = repair.piece.first
        return CorruptData(
            f"a piece arrived corrupt {repair.attempts} times",
            got=f"piece {piece} from {', '.join(repair.corrupt)}",
            wanted="bytes that match the manifest",
            where=self._manifest.files[self._manifest.piece_of(piece).file_index].path,
            do="Check the source object and the named workers' disks; publish again if needed.",
        )

    def _source_failed(
        self,
        key: str,
        stream_id: int,
        error: PacelineError,
        now_s: float,
        actions: list[SessionAction],
    ) -> None:
        stream = self._pull.state.find_stream(key, stream_id)
        if stream is None:
            return
        # A missing, refused or replaced origin does not recover, and other workers wait for the
        # one that reads it.
        for_good = stream.source.kind == "origin" and isinstance(error, PermanentError)
        if for_good:
            self._pull.lose(stream, error, now_s, actions, for_good=True)
        else:
            self._pull.stream_ended(stream, error, now_s, actions)
        if for_good and self._pull.is_first_choice(key):
            self._fail(error, actions)

    def _withdraw_corrupt(self, extent: Extent, now_s: float) -> None:
        if self._status is WorkerStatus.COMPLETE:  # unpublished; drivers withdraw published models
            self._status = WorkerStatus.RECEIVING
            self._progress_s = self._alive_s = now_s
        self._bytes_held -= sum(map(self.pieces.bytes_of, self._durable.common(extent)))
        self._durable.remove(extent)
        self._chunks.difference_update(self.pieces.chunks_of(extent))
        self._chunks_received = None
        self._pull.state.mark_missing(extent)

    # ── progress, completion and failure ─────────────────────────────────────────────────────────

    def _advance(self, now_s: float, actions: list[SessionAction]) -> None:
        self._pull.check_deadlines(now_s, actions)
        if now_s >= self._give_up_s():
            error = self._pull.choice.stalled or self._pull.last_error
            do = "Check the other workers and the source; with a new plan this worker goes on."
            no_source = PeerLost("no source is left to pull from", where=self.worker_id, do=do)
            self._fail(error or no_source, actions)
        elif self._durable.count == self.pieces.count:
            self._status = WorkerStatus.COMPLETE
            self._pull.close_all(actions)
            actions.append(Complete())
        else:
            self._pull.pump(now_s, actions)
        if (repair := self._pull.side_requests.hopeless_repair) is not None:
            self._fail(self._corrupt_everywhere(repair), actions)

    def _give_up_s(self) -> float:
        return min(self._alive_s + self._limits.give_up_s, self._progress_s + self._limits.stall_s)

    def _fail(self, error: PacelineError, actions: list[SessionAction]) -> None:
        if self._status in (WorkerStatus.FAILED, WorkerStatus.COMPLETE):
            return
        self._status = WorkerStatus.FAILED
        self._error = error
        self._pull.close_all(actions)
        actions.append(Fail(error))


def as_failure(error: PacelineError) -> Failure:
    """Return ``error`` as a ``Failure`` record for reports."""
    return Failure(code=error.code, message=error.one_line()[:2000])
