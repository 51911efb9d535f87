"""Reading pieces from the source, by parallel ranges that begin small and grow.

Every piece is checked against the manifest like a peer's, and may be forwarded, as soon as its last
byte is here, while the rest of its range still arrives. Bytes are counted for the origin budget and
paced by the same link as all incoming bytes. ``sources`` has the kinds of sources; the session
decides which pieces to read.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import PacelineError
from paceline.manifest import Manifest, Piece
from paceline.relay.protocol import (
    Extent,
    PieceRejected,
    PieceVerified,
    SourceAlive,
)
from paceline.relay.sources import RangeReader
from paceline.relay.transport import (
    PullSpec,
    ReadCoalescer,
    ReceiveWindow,
    held_bytes,
)

# Parallel ranges: Amazon recommends one request for each 85 to 90 MB/s wanted of S3 ("Performance
# design patterns for Amazon S3"). Adapting their number to the measured rate was no faster on
# loopback, and where several workers share the origin's link more connections help only one alone.
RANGE_BYTES_S = 85e6
MIN_RANGES = 2  # one sends its request while the other one reads
MAX_RANGES = 16
MIB = 1024 * 1024
FIRST_RANGE = 256 * 1024  # doubles with each range: forwarding starts at once
SHARED_RANGE = 2 * MIB  # below it no range shrinks for an even share: a request costs 3 ms of CPU
MAX_RANGE = 16 * MIB
# All ranges in flight together span this much of the stream. A peer requests a second's worth in
# order: of ranges that span more it would see one, at a fraction of the link.
IN_FLIGHT_S = 0.5
PINNED_AHEAD_FILES = 3  # files whose objects are looked up before a range of them is wanted
MIN_READ_TIMEOUT_S = 4.0  # in the middle of a range; longer where the plan allows a piece more time
PROGRESS_INTERVAL_S = 0.2  # interval of progress events for a range in flight


class OriginStream:
    """Reads the requested pieces with a few threads, verifies, writes and reports them."""

    def __init__(self, pull: PullSpec, reader: RangeReader, expected_bytes_s: float = 0.0) -> None:
        self._pull = pull
        self._reader = reader
        self._staging = staging = pull.staging
        self._receive_window = ReceiveWindow(pull.planned_rate)
        self._queue: deque[Extent] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._most_bytes = range_bytes(staging.manifest)
        self._range_bytes = min(FIRST_RANGE, self._most_bytes)
        self._at_file = -1
        self._busy = _BusyTimer()
        self._ranges = ranges = parallel_ranges(expected_bytes_s, staging.manifest)
        self._in_flight_bytes = int(expected_bytes_s * IN_FLIGHT_S / ranges) or self._most_bytes
        for number in range(self._ranges):
            threading.Thread(target=self._run, name=f"origin-{number}", daemon=True).start()
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

    def _next(self) -> Extent | None:
        """Return the next run of pieces of one file, at most a range long; None when closed."""
        manifest = self._staging.manifest
        with self._ready:
            self._ready.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return None
            first, stop = self._queue.popleft()
            head = manifest.piece_of(first)
            # An even share of what is requested, so that no thread ends alone with a long range.
            share = (stop - first) // self._ranges
            least = min(self._range_bytes, SHARED_RANGE) // manifest.piece_bytes
            take = max(1, min(self._range_bytes // manifest.piece_bytes, max(share, least)))
            most = max(self._in_flight_bytes, FIRST_RANGE)
            self._range_bytes = min(2 * self._range_bytes, most, self._most_bytes)
            end = min(stop, first + take, manifest.file_pieces(head.file_index).stop)
            if end < stop:
                self._queue.appendleft(Extent(end, stop))
            if head.file_index != self._at_file:
                self._at_file = head.file_index
                self._ready.notify_all()
            return Extent(first, end)

    def _run(self) -> None:
        coalescer = ReadCoalescer()
        with self._pull.receiving(lambda: self._closed):
            while (extent := self._next()) is not None:
                self._read(extent, coalescer)
        self.close()

    def _look_ahead(self) -> None:
        """Pin the objects of the files that come next, so that no range waits for that."""
        seen, files = -1, self._staging.manifest.files
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._closed or self._at_file != seen)  # noqa: B023
                if self._closed:
                    return
                seen = self._at_file
            for file in files[seen + 1 : seen + 1 + PINNED_AHEAD_FILES]:
                try:
                    self._reader.pin(file)
                except PacelineError:
                    return  # the thread that reads the file meets the same error, and reports it

    def _read(self, extent: Extent, coalescer: ReadCoalescer) -> None:
        manifest = self._staging.manifest
        pieces = deque(manifest.piece_of(piece) for piece in range(*extent))
        offset, size = pieces[0].file_offset, sum(piece.length for piece in pieces)
        file = manifest.files[pieces[0].file_index]
        self._pull.report(SourceAlive(self._pull.key, self._pull.stream))
        data = memoryview(bytearray(size))
        done, alive_at = 0, time.monotonic()
        used: list[socket.socket] = []  # one an answer

        def on_socket(sock: socket.socket) -> None:
            self._limit(sock)
            used.append(sock)

        with self._busy.reading():
            steps = self._reader.stream(file, offset, data, on_socket)
            for filled in _coalesced_reads(steps, size, coalescer, used):
                self._pull.counters.add(origin=filled - done)
                while done < filled:
                    if self._closed:
                        return
                    step = min(self._pull.pacer.block_bytes, filled - done)
                    self._pull.pacer.take(step)
                    done += step
                while pieces and pieces[0].file_offset + pieces[0].length <= offset + done:
                    piece = pieces.popleft()
                    self._keep(piece, data[piece.file_offset - offset :][: piece.length])
                    alive_at = time.monotonic()
                if time.monotonic() - alive_at >= PROGRESS_INTERVAL_S:
                    alive_at = time.monotonic()
                    self._pull.report(SourceAlive(self._pull.key, self._pull.stream, moving=True))

    def _limit(self, sock: socket.socket) -> None:
        # A keep-alive is a quarter of the time in which the plan expects a piece.
        sock.settimeout(max(MIN_READ_TIMEOUT_S, 4 * self._pull.keepalive_s))
        with self._ready:
            self._receive_window.apply(sock, self._ranges)

    def _keep(self, piece: Piece, view: memoryview) -> None:
        pull, staging = self._pull, self._staging
        extent = Extent(piece.index, piece.index + 1)
        staging.edges.carried(pull.key, pull.worker_id, len(view), self._busy.lap())
        if not staging.manifest.matches(piece, view):
            pull.counters.add(refetched=len(view))
            pull.report(PieceRejected(pull.key, pull.stream, extent))
            return
        if not staging.keep(piece, view):
            pull.counters.add(refetched=len(view))
        pull.report(PieceVerified(pull.key, pull.stream, extent))


class _BusyTimer:
    """Wall-clock time in which at least one thread was reading; parallel reads count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._since = 0.0
        self._spent = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
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


def _coalesced_reads(
    steps: Iterator[int], size: int, coalescer: ReadCoalescer, used: Sequence[socket.socket]
) -> Iterator[int]:
    """Yield what ``steps`` yields until there are ``size`` bytes, with a pause before each in which
    its bytes may gather: in the last socket that was ``used``.
    """
    done = step = 0
    while True:
        began_s = time.monotonic()
        held = held_bytes(used[-1]) if used else 0
        if done < size and (wait_s := coalescer.wait_s(step, held)):
            coalescer.sleep(wait_s)
        read_s = time.monotonic()
        filled = next(steps, None)
        if filled is None:
            return
        step, done = filled - done, filled
        coalescer.read(step, began_s, time.monotonic() - read_s, held)
        yield filled


def parallel_ranges(expected_bytes_s: float, manifest: Manifest) -> int:
    """Return how many ranges to read at once for a rate (0: unknown); fewer of a small model, for
    which most connections would cost more than they bring.
    """
    wanted = max(MIN_RANGES, int(-(-expected_bytes_s // RANGE_BYTES_S)))
    most = max(MIN_RANGES, manifest.total_size // (2 * MAX_RANGE))
    return min(wanted, most, MAX_RANGES, manifest.piece_count)


def range_bytes(manifest: Manifest) -> int:
    """Return the largest size of a GET: up to 16 MiB, at least a piece, never beyond a chunk."""
    return max(manifest.piece_bytes, min(MAX_RANGE, manifest.chunk_bytes))
