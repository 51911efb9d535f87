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
    """A piece that is arriving; ``writing`` guards ``mine``."""

    __slots__ = ("descriptor", "extent", "hash", "held", "memory", "mine", "piece", "writing")

    def __init__(self, pull: PullSpec, piece: Piece, extent: Extent) -> None:
        self.piece = piece
        self.extent = extent
        self.descriptor = pull.staging.descriptor(piece.file_index)
        self.hash = pull.staging.manifest.new_piece_hash()
        self.held = False  # written and counted from memory
        self.mine = False  # whether this stream holds the claim to write it
        self.writing = threading.Lock()  # held while it is written, and while the claim moves
        self.memory: memoryview | None = None  # a copy, while another stream writes the piece

    def leave(self) -> bool:
        """Give up the claim for another stream; return whether this stream had it."""
        with self.writing:
            mine, self.mine = self.mine, False
            return mine


class PieceReceiver:
    """The requested pieces of one pull stream, and the one that is arriving."""

    def __init__(self, pull: PullSpec) -> None:
        self._pull = pull
        self._key, self._staging = pull.key, pull.staging  # used in the hot loop
        self._lock = threading.Lock()
        self._asked = Extents()
        self._ever = Extents()  # a piece requested twice may arrive twice
        self._reported_alive_s = 0.0
        self._arriving: _ArrivingPiece | None = None
        self.left = 0  # bytes of the arriving piece that are missing
        self._received = 0  # bytes since the last ``flush``
        self._whole: list[_ArrivingPiece] = []  # verified since the last ``flush``

    def ask(self, extent: Extent) -> None:
        """Record that ``extent`` is requested."""
        with self._lock:
            self._asked.add(extent)
            self._ever.add(extent)

    @property
    def waiting(self) -> bool:
        """Return whether any requested piece has not arrived."""
        return self._asked.count > 0 or self._arriving is not None

    @property
    def due_bytes(self) -> int:
        """Return about how many bytes have yet to arrive."""
        return self.left + self._asked.count * self._staging.manifest.piece_bytes

    def begin(self, index: int, length: int) -> None:
        """Start piece ``index`` of ``length`` bytes; raises InvalidFrame if it is unrequested."""
        manifest = self._staging.manifest
        if self._arriving is not None:  # else its claim would never be released
            got, where = self._arriving.piece.index, self._key
            raise InvalidFrame("a piece ended early", got=got, wanted="all of it", where=where)
        extent = Extent(index, index + 1)
        with self._lock:
            known = self._asked.remove(extent) or index in self._ever
        if not known:
            raise InvalidFrame("a piece that was not requested", got=index, where=self._key)
        piece = manifest.piece_of(index)
        if length != piece.length:
            raise InvalidFrame("piece of another length", got=length, wanted=piece.length)
        arriving = _ArrivingPiece(self._pull, piece, extent)
        try:
            arriving.mine = self._staging.claim(index, wait_s=0.0)
        except TimeoutError:
            # Hedged: another stream is writing it. The first complete copy wins.
            arriving.memory = memoryview(bytearray(length))
        if arriving.mine:
            self._staging.writers[index] = arriving.leave
        self._arriving, self.left = arriving, length

    def take(self, block: memoryview) -> None:
        """Write and hash the next bytes of the piece; the bytes of a duplicate are dropped."""
        arriving, size = self._arriving, len(block)
        if arriving is None or size > self.left:
            raise InvalidFrame("bytes beyond a piece", got=size, where=self._key)
        done = arriving.piece.length - self.left
        if arriving.memory is not None:
            arriving.hash.update(block)
            arriving.memory[done : done + size] = block
        elif arriving.mine:
            arriving.hash.update(block)
            with arriving.writing:
                if arriving.mine:
                    at = arriving.piece.file_offset + done
                    self._staging.write(arriving.descriptor, block, at)
        self.left -= size
        self._received += size
        if self._pull.pacer.paced:
            self._pull.pacer.take(size)
        if self.left:
            self.alive(self._pull.keepalive_s, moving=True)

    def end(self) -> int | None:
        """Verify the piece that has arrived; return its number if it is corrupt."""
        arriving = self._arriving
        if arriving is None or self.left:
            got = self.left if arriving else None
            raise InvalidFrame("a piece ended early", got=f"{got} bytes left", where=self._key)
        judged = arriving.mine or arriving.memory is not None
        if not judged or arriving.hash.hexdigest() == arriving.piece.digest:
            if arriving.memory is not None:
                self._keep(arriving, arriving.memory)
            self._whole.append(arriving)
            self._arriving = None
            return None
        self.drop(refetched=arriving.piece.length)
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
        if not self._whole:
            return
        whole, self._whole = self._whole, []
        mine, refetched = [], 0
        runs: list[Extent] = []
        for arriving in whole:
            run = arriving.extent
            if runs and runs[-1].stop == run.first:
                run = Extent(runs.pop().first, run.stop)
            runs.append(run)
            with arriving.writing:
                if arriving.mine:
                    arriving.mine = False
                    self._staging.writers.pop(arriving.piece.index, None)
                    mine.append(arriving.piece)
                elif not arriving.held:
                    refetched += arriving.piece.length
        try:
            self._staging.hold(*mine)
        except BaseException:
            for piece in mine:  # another stream may bring them
                self._staging.release(piece.index)
            raise
        self._pull.counters.add(received=self._received, refetched=refetched)
        self._received = 0
        for run in runs:
            self._pull.report(PieceVerified(self._key, self._pull.stream, run))

    def drop(self, refetched: int = 0) -> None:
        """Discard the piece that is arriving, whose ``refetched`` bytes are read again."""
        self.flush()
        self._pull.counters.add(received=self._received, refetched=refetched)
        self._received = 0
        arriving, self._arriving, self.left = self._arriving, None, 0
        if arriving is None:
            return
        arriving.memory = None
        with arriving.writing:
            if arriving.mine:
                arriving.mine = False
                self._staging.writers.pop(arriving.piece.index, None)
                self._staging.release(arriving.piece.index)

    def waits(self) -> None:
        """Report that the source waits, at most four times per keep-alive interval: one thread
        handles the reports of all streams.
        """
        self.alive(self._pull.keepalive_s / 4)

    def alive(self, at_most_every_s: float = 0.0, *, moving: bool = False) -> None:
        """Report that the source is alive: it waits, or its bytes are ``moving``."""
        now = time.monotonic()
        if now - self._reported_alive_s >= at_most_every_s:
            self._reported_alive_s = now
            self._pull.report(SourceAlive(self._key, self._pull.stream, moving=moving))
