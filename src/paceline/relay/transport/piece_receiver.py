"""Receives the pieces of one stream: writes bytes to the file, hashes them and verifies each piece.

A piece counts as held, and may be forwarded, only when its digest matches (I3). Results are
reported as session events. It does not depend on how the bytes arrive. One thread delivers pieces;
any thread may request. What comes from S3 is verified in ``relay.origin``.
"""

from __future__ import annotations

import threading
import time

from paceline.errors import InvalidFrame, PeerLost
from paceline.manifest import Piece
from paceline.relay.protocol import Extent, Extents, PieceRejected, PieceVerified, SourceAlive
from paceline.relay.transport.contract import PullSpec

SILENCE_S = 30.0  # a last bound for the byte threads; the session notices silence much earlier


class _ArrivingPiece:
    """A piece that is arriving; ``writing`` guards ``claimed``."""

    __slots__ = ("claimed", "descriptor", "extent", "hash", "held", "memory", "piece", "writing")

    def __init__(self, pull: PullSpec, piece: Piece, extent: Extent) -> None:
        self.piece = piece
        self.extent = extent
        self.descriptor = pull.staging.descriptor(piece.file_index)
        self.hash = pull.staging.manifest.new_piece_hash()
        self.held = False  # written and counted from memory
        self.claimed = False  # whether this stream holds the claim to write it
        self.writing = threading.Lock()  # held while it is written, and while the claim moves
        self.memory: memoryview | None = None  # a copy, while another stream writes the piece

    def release_claim(self) -> bool:
        """Give up the claim for another stream; return whether this stream had it."""
        with self.writing:
            claimed, self.claimed = self.claimed, False
            return claimed


class PieceReceiver:
    """The requested pieces of one pull stream, and the one that is arriving."""

    def __init__(self, pull: PullSpec) -> None:
        self._pull = pull
        self._key, self._staging = pull.key, pull.staging  # used in the hot loop
        self._lock = threading.Lock()
        self._requested = Extents()
        self._ever_requested = Extents()  # a piece requested twice may arrive twice
        self._reported_alive_s = 0.0
        self._arriving: _ArrivingPiece | None = None
        self.missing_bytes = 0  # bytes of the arriving piece that are missing
        self._received = 0  # bytes since the last ``flush``
        self._verified: list[_ArrivingPiece] = []  # verified since the last ``flush``

    def add_request(self, extent: Extent) -> None:
        """Record that ``extent`` is requested."""
        with self._lock:
            self._requested.add(extent)
            self._ever_requested.add(extent)

    @property
    def waiting(self) -> bool:
        """Return whether any requested piece has not arrived."""
        return self._requested.count > 0 or self._arriving is not None

    @property
    def requested_bytes(self) -> int:
        """Return about how many bytes have yet to arrive."""
        return self.missing_bytes + self._requested.count * self._staging.manifest.piece_bytes

    def begin_piece(self, index: int, length: int) -> None:
        """Start piece ``index`` of ``length`` bytes; raises InvalidFrame if it is unrequested."""
        manifest = self._staging.manifest
        if self._arriving is not None:  # else its claim would never be released
            got, where = self._arriving.piece.index, self._key
            raise InvalidFrame("a piece ended early", got=got, wanted="all of it", where=where)
        extent = Extent(index, index + 1)
        with self._lock:
            known = self._requested.remove(extent) or index in self._ever_requested
        if not known:
            raise InvalidFrame("a piece that was not requested", got=index, where=self._key)
        piece = manifest.piece_of(index)
        if length != piece.length:
            raise InvalidFrame("piece of another length", got=length, wanted=piece.length)
        arriving = _ArrivingPiece(self._pull, piece, extent)
        try:
            arriving.claimed = self._staging.claim(index, wait_s=0.0)
        except TimeoutError:
            # Hedged: another stream is writing it. The first complete copy wins.
            arriving.memory = memoryview(bytearray(length))
        if arriving.claimed:
            self._staging.writers[index] = arriving.release_claim
        self._arriving, self.missing_bytes = arriving, length

    def write_block(self, block: memoryview) -> None:
        """Write and hash the next bytes of the piece; the bytes of a duplicate are dropped."""
        arriving, size = self._arriving, len(block)
        if arriving is None or size > self.missing_bytes:
            raise InvalidFrame("bytes beyond a piece", got=size, where=self._key)
        done = arriving.piece.length - self.missing_bytes
        if arriving.memory is not None:
            arriving.hash.update(block)
            arriving.memory[done : done + size] = block
        elif arriving.claimed:
            arriving.hash.update(block)
            with arriving.writing:
                if arriving.claimed:
                    at = arriving.piece.file_offset + done
                    self._staging.write(arriving.descriptor, block, at)
        self.missing_bytes -= size
        self._received += size
        if self._pull.pacer.paced:
            self._pull.pacer.take(size)
        if self.missing_bytes:
            self.report_alive(self._pull.keepalive_s, moving=True)

    def end_piece(self) -> int | None:
        """Verify the piece that has arrived; return its number if it is corrupt."""
        arriving = self._arriving
        if arriving is None or self.missing_bytes:
            got = self.missing_bytes if arriving else None
            raise InvalidFrame("a piece ended early", got=f"{got} bytes left", where=self._key)
        is_hashed = arriving.claimed or arriving.memory is not None
        if not is_hashed or arriving.hash.hexdigest() == arriving.piece.digest:
            if arriving.memory is not None:
                self._keep(arriving, arriving.memory)
            self._verified.append(arriving)
            self._arriving = None
            return None
        self.drop_piece(refetched=arriving.piece.length)
        self._pull.report(PieceRejected(self._key, self._pull.stream, arriving.extent))
        return arriving.piece.index

    def _keep(self, arriving: _ArrivingPiece, data: memoryview) -> None:
        try:
            arriving.held = self._staging.keep(arriving.piece, data)
        except TimeoutError as error:
            raise PeerLost(str(error), where=self._key) from error
        arriving.memory = None

    def flush(self) -> None:
        """Count the verified pieces as held and report them: readers wake once for all of them."""
        if not self._verified:
            return
        verified, self._verified = self._verified, []
        claimed, refetched = [], 0
        runs: list[Extent] = []
        for arriving in verified:
            run = arriving.extent
            if runs and runs[-1].stop == run.first:
                run = Extent(runs.pop().first, run.stop)
            runs.append(run)
            with arriving.writing:
                if arriving.claimed:
                    arriving.claimed = False
                    self._staging.writers.pop(arriving.piece.index, None)
                    claimed.append(arriving.piece)
                elif not arriving.held:
                    refetched += arriving.piece.length
        try:
            self._staging.hold(*claimed)
        except BaseException:
            for piece in claimed:  # another stream may bring them
                self._staging.release(piece.index)
            raise
        self._pull.counters.add(received=self._received, refetched=refetched)
        self._received = 0
        for run in runs:
            self._pull.report(PieceVerified(self._key, self._pull.stream, run))

    def drop_piece(self, refetched: int = 0) -> None:
        """Discard the piece that is arriving, whose ``refetched`` bytes are read again."""
        self.flush()
        self._pull.counters.add(received=self._received, refetched=refetched)
        self._received = 0
        arriving, self._arriving, self.missing_bytes = self._arriving, None, 0
        if arriving is None:
            return
        arriving.memory = None
        with arriving.writing:
            if arriving.claimed:
                arriving.claimed = False
                self._staging.writers.pop(arriving.piece.index, None)
                self._staging.release(arriving.piece.index)

    def report_waiting(self) -> None:
        """Report that the source waits, at most four times per keep-alive interval: one thread
        handles the reports of all streams.
        """
        self.report_alive(self._pull.keepalive_s / 4)

    def report_alive(self, at_most_every_s: float = 0.0, *, moving: bool = False) -> None:
        """Report that the source is alive: it waits, or its bytes are ``moving``."""
        now = time.monotonic()
        if now - self._reported_alive_s >= at_most_every_s:
            self._reported_alive_s = now
            self._pull.report(SourceAlive(self._key, self._pull.stream, moving=moving))
