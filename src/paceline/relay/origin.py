"""Reading pieces from the source, by parallel ranges that begin small and grow.

Every piece is checked against the manifest like a peer's, and may be forwarded, as soon as its last
byte is here, while the rest of its range still arrives. Bytes are counted for the origin budget and
paced by the same link as all incoming bytes. ``sources`` has the kinds of sources; the session
decides which pieces to read.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError, SourceMissing, StorageFailed, StorageFull
from paceline.manifest import Manifest, Piece
from paceline.relay.protocol.events import (
    LocalFailed,
    PieceRejected,
    PieceVerified,
    SessionEvent,
    SourceAlive,
    SourceFailed,
)
from paceline.relay.protocol.extents import Extent
from paceline.relay.sources import RangeReader
from paceline.relay.store.staging import Staging
from paceline.relay.transport.contract import TransferCounters
from paceline.relay.transport.pacing import Pacer, PlannedRate, ReceiveWindow, no_limit
from paceline.relay.transport.sockets import ReadCoalescer
from paceline.schemas.plan import Source

# The number of parallel ranges, adapted to the measured rate.
#
# One connection of an object store carries a fraction of a fast link; on a slow link several only
# compete. Pure arithmetic over bytes and times that the caller passes.

FEWEST = 2  # one sends its request while the other one reads
MOST = 16
LOOK_S = 0.5
WORTH_IT = 1.25  # the gain required of twice as many ranges
ENOUGH = 0.9  # of the planned rate: more would take from other readers' share
HOLD_S = 10.0  # until the next trial after one that failed, then twice that, …


class RangeConcurrency:
    """Doubles the number of ranges for as long as that raises the rate by a quarter.

    And only below the rate that the plan expects: where several workers share the origin's link,
    more connections help each one alone, and all of them together not at all.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, min(MOST, most))
        self.now = min(FEWEST, self._most)
        self.rate = 0.0  # bytes per second over the last interval; 0: not measured yet
        self._trial: tuple[int, float] | None = None  # ranges and rate before it
        self._hold_s = HOLD_S
        self._try_at_s = float("-inf")
        self._looks_from_s: float | None = None
        self._bytes = 0

    def arrived(self, count: int, now_s: float, expected_rate: float = 0.0) -> bool:
        """Count bytes; return whether ``now`` has changed.

        ``expected_rate`` is the plan's, in bytes per second; 0: unknown.
        """
        if self._looks_from_s is None:
            self._looks_from_s = now_s + LOOK_S  # skip the ramp-up of new connections
        if now_s < self._looks_from_s:
            return False
        self._bytes += count
        took_s = now_s - self._looks_from_s
        if took_s < LOOK_S:
            return False
        self.rate = self._bytes / took_s
        self._bytes, self._looks_from_s = 0, now_s
        was = self.now
        if self._trial is not None:
            fewer, rate = self._trial
            self._trial = None
            if self.rate < WORTH_IT * rate:
                self.now, self._try_at_s = fewer, now_s + self._hold_s
                self._hold_s *= 2
                return True
            self._hold_s = HOLD_S
        enough = 0 < ENOUGH * expected_rate <= self.rate
        if self.now < self._most and now_s >= self._try_at_s and not enough:
            self._trial = self.now, self.rate
            self.now = min(2 * self.now, self._most)
        return self.now != was


MIB = 1024 * 1024
FIRST_RANGE = 256 * 1024  # doubles with each range: forwarding starts at once
MAX_RANGE = 16 * MIB
# All ranges in flight together span this much of the stream. A peer requests a second's worth in
# order: of ranges that span more it would see one, at a fraction of the link.
SPREAD_S = 0.5
AHEAD = 3  # files whose objects are looked up before a range of them is wanted
LEAST_SILENCE_S = 4.0  # in the middle of a range; longer where the plan allows a piece more time
ALIVE_S = 0.2  # interval of progress events for a range in flight


class OriginStream:
    """Reads the requested pieces with a few threads; every piece is verified, written and
    reported.
    """

    def __init__(
        self,
        *,
        source: Source,
        stream: int,
        worker_id: str,
        reader: RangeReader,
        staging: Staging,
        pacer: Pacer,
        counters: TransferCounters,
        report: Callable[[SessionEvent], None],
        expected_rate: PlannedRate = no_limit,
        portion: PlannedRate = no_limit,
        deadline: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._source = source
        self._stream = stream
        self._worker_id = worker_id
        self._reader = reader
        self._staging = staging
        self._pacer = pacer
        self._counters = counters
        self._report = report
        self._expected_rate = expected_rate  # bytes per second that the plan expects; 0: unknown
        self._portion = ReceiveWindow(portion)
        self._deadline = deadline  # the time in which the plan expects a piece
        self._queue: deque[Extent] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._most_bytes = range_bytes(staging.manifest)
        self._range_bytes = min(FIRST_RANGE, self._most_bytes)
        self._at_file = -1
        self._busy = _Busy()
        self._width = RangeConcurrency(staging.manifest.piece_count)
        self._threads = 0
        self._start_threads()
        threading.Thread(target=self._look_ahead, name="origin-ahead", daemon=True).start()

    def request(self, extent: Extent) -> None:
        """Queue pieces; returns at once."""
        with self._ready:
            if self._queue and self._queue[-1].stop == extent.first:  # one range, not two
                extent = Extent(self._queue.pop().first, extent.stop)
            self._queue.append(extent)
            self._ready.notify_all()

    def close(self) -> None:
        """Stop reading; a range in flight is dropped at its next step."""
        with self._ready:
            self._closed = True
            self._queue.clear()
            self._ready.notify_all()

    def _start_threads(self) -> None:
        while self._threads < self._width.now:
            name, self._threads = f"origin-{self._threads}", self._threads + 1
            threading.Thread(
                target=self._run, args=(self._threads,), name=name, daemon=True
            ).start()

    def _next(self, number: int) -> Extent | None:
        """Return the next run of pieces of one file, at most a range long, for thread ``number``
        (from 1), which waits while fewer threads suffice; None when closed.
        """
        manifest = self._staging.manifest
        with self._ready:
            self._ready.wait_for(
                lambda: self._closed or (self._queue and number <= self._width.now)
            )
            if self._closed:
                return None
            first, stop = self._queue.popleft()
            head = manifest.piece_of(first)
            # An even share of what is requested, so that no thread ends alone with a long range.
            share = (stop - first) // self._width.now
            least = FIRST_RANGE // manifest.piece_bytes
            take = max(1, min(self._range_bytes // manifest.piece_bytes, max(share, least)))
            most = int(self._width.rate * SPREAD_S / self._width.now) or self._most_bytes
            self._range_bytes = min(2 * self._range_bytes, max(most, FIRST_RANGE), self._most_bytes)
            end = min(stop, first + take, manifest.file_pieces(head.file_index).stop)
            if end < stop:
                self._queue.appendleft(Extent(end, stop))
            if head.file_index != self._at_file:
                self._at_file = head.file_index
                self._ready.notify_all()
            return Extent(first, end)

    def _run(self, number: int) -> None:
        lull = ReadCoalescer()
        try:
            with self._staging.using():
                while (extent := self._next(number)) is not None:
                    self._read(extent, lull)
        except (StorageFull, StorageFailed) as error:
            self._report(LocalFailed(error))
        except PacelineError as error:
            if not self._closed:
                self._report(SourceFailed(self._source.key, self._stream, error))
            self.close()
        except Exception as error:
            lost = SourceMissing("reading the source failed", got=error, where=self._source.key)
            self._report(SourceFailed(self._source.key, self._stream, lost))
            self.close()
            raise

    def _look_ahead(self) -> None:
        """Pin the objects of the files that come next, so that no range waits for that."""
        seen = -1
        files = self._staging.manifest.files
        while (at := self._next_file(seen)) is not None:
            seen = at
            for file in files[seen + 1 : seen + 1 + AHEAD]:
                try:
                    self._reader.pin(file)
                except PacelineError:
                    return  # the thread that reads the file meets the same error, and reports it

    def _next_file(self, seen: int) -> int | None:
        """Wait until another file than ``seen`` is read and return its index; None when closed."""
        with self._ready:
            self._ready.wait_for(lambda: self._closed or self._at_file != seen)
            return None if self._closed else self._at_file

    def _read(self, extent: Extent, lull: ReadCoalescer) -> None:
        manifest = self._staging.manifest
        pieces = deque(manifest.piece_of(piece) for piece in range(*extent))
        offset, size = pieces[0].file_offset, sum(piece.length for piece in pieces)
        file = manifest.files[pieces[0].file_index]
        self._report(SourceAlive(self._source.key, self._stream))
        data = memoryview(bytearray(size))
        done, alive_at = 0, time.monotonic()
        with self._busy.reading():
            steps = self._reader.stream(file, offset, data, self._limit)
            for filled in _unhurried(steps, lull):
                self._counters.add(origin=filled - done)
                self._arrived(filled - done)
                while done < filled:
                    if self._closed:
                        return
                    step = min(self._pacer.block_bytes, filled - done)
                    self._pacer.take(step)
                    done += step
                while pieces and pieces[0].file_offset + pieces[0].length <= offset + done:
                    piece = pieces.popleft()
                    self._keep(piece, data[piece.file_offset - offset :][: piece.length])
                    alive_at = time.monotonic()
                if time.monotonic() - alive_at >= ALIVE_S:
                    alive_at = time.monotonic()
                    self._report(SourceAlive(self._source.key, self._stream, moving=True))

    def _limit(self, sock: socket.socket) -> None:
        sock.settimeout(max(LEAST_SILENCE_S, self._deadline()))
        with self._ready:
            self._portion.apply(sock, self._width.now)

    def _arrived(self, count: int) -> None:
        with self._ready:
            if self._width.arrived(count, time.monotonic(), self._expected_rate()):
                self._start_threads()
                self._ready.notify_all()

    def _keep(self, piece: Piece, view: memoryview) -> None:
        key, staging = self._source.key, self._staging
        staging.edges.carried(key, self._worker_id, len(view), self._busy.lap())
        if hashlib.sha256(view).hexdigest() != piece.sha256:
            self._counters.add(refetched=len(view))
            staging.edges.judged(key, self._worker_id, corrupt=1)
            self._report(PieceRejected(key, self._stream, Extent(piece.index, piece.index + 1)))
            return
        staging.edges.judged(key, self._worker_id, matched=1)
        if staging.claim_whole(piece.index):
            try:
                staging.write(staging.descriptor(piece.file_index), view, piece.file_offset)
            except BaseException:
                staging.release(piece.index)
                raise
            staging.hold(piece)
        else:
            self._counters.add(refetched=len(view))
        self._report(PieceVerified(key, self._stream, Extent(piece.index, piece.index + 1)))


class _Busy:
    """Wall-clock time in which at least one thread was reading; parallel reads count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._since = 0.0
        self._spent = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time inside."""
        with self._lock:
            if self._readers == 0:
                self._since = time.monotonic()
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._readers == 0:
                    self._spent += time.monotonic() - self._since

    def lap(self) -> float:
        """Return the time counted since the last lap; each second is returned once."""
        with self._lock:
            now = time.monotonic()
            lap = self._spent + (now - self._since if self._readers else 0.0)
            self._spent, self._since = 0.0, now
            return lap


def _unhurried(steps: Iterator[int], lull: ReadCoalescer) -> Iterator[int]:
    """Yield what ``steps`` yields, with a pause before each in which its bytes may gather."""
    done = step = 0
    while True:
        began_s = time.monotonic()
        lull.sleep(step)
        read_s = time.monotonic()
        filled = next(steps, None)
        if filled is None:
            return
        step, done = filled - done, filled
        lull.read(step, began_s, time.monotonic() - read_s)
        yield filled


def range_bytes(manifest: Manifest) -> int:
    """Return the largest size of a GET: up to 16 MiB, at least a piece, never beyond a chunk."""
    return max(manifest.piece_bytes, min(MAX_RANGE, manifest.chunk_bytes))
