"""Receives the pieces of one stream: writes bytes to the file, hashes them and verifies each piece.

A piece counts as held, and may be forwarded, only when its digest matches (I3). Results are
reported as session events. It does not depend on how the bytes arrive. One thread delivers pieces;
any thread may request.
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

    __slots__ = ("descriptor", "done", "extent", "hash", "memory", "mine", "piece", "writing")

    def __init__(self, pull: PullSpec, piece: Piece, extent: Extent) -> None:
        self.piece = piece
        self.extent = extent
        self.descriptor = pull.staging.descriptor(piece.file_index)
        self.hash = pull.staging.manifest.new_piece_hash()
        self.done = 0
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

    def ask(self, extent: Extent) -> None:
        """Record that ``extent`` is requested."""
        with self._lock:
            self._asked.add(extent)
            self._ever.add(extent)

    @property
    def waiting(self) -> bool:
        """Return whether any requested piece has not arrived."""
        return self._asked.count > 0 or self._arriving is not None

    def begin(self, index: int, length: int) -> None:
        """Start piece ``index`` of ``length`` bytes; raises InvalidFrame if it is unrequested."""
        manifest = self._staging.manifest
        if self._arriving is not None:  # else its claim would never be released
            got, where = self._arriving.piece.index, self._key
            raise InvalidFrame("a piece ended early", got=got, wanted="all of it", where=where)
        extent = Extent(index, index + 1)
        with self._lock:
            self._asked.remove(extent)
            known = index in self._ever
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
        self._arriving = arriving

    def take(self, block: memoryview) -> None:
        """Write and hash the next bytes of the piece; the bytes of a duplicate are dropped."""
        arriving = self._arriving
        if arriving is None or arriving.done + len(block) > arriving.piece.length:
            raise InvalidFrame("bytes beyond a piece", got=len(block), where=self._key)
        if arriving.memory is not None:
            arriving.hash.update(block)
            arriving.memory[arriving.done : arriving.done + len(block)] = block
        elif arriving.mine:
            arriving.hash.update(block)
            with arriving.writing:
                if arriving.mine:
                    at = arriving.piece.file_offset + arriving.done
                    self._staging.write(arriving.descriptor, block, at)
        arriving.done += len(block)
        if self._pull.pacer.paced:
            self._pull.pacer.take(len(block))
        if arriving.done < arriving.piece.length:
            self.alive(self._pull.keepalive_s, moving=True)

    def end(self) -> bool:
        """Verify the piece and report it; return whether its digest matches."""
        arriving, staging = self._arriving, self._staging
        if arriving is None or arriving.done != arriving.piece.length:
            got = arriving.done if arriving else 0
            raise InvalidFrame("a piece ended early", got=got, where=self._key)
        piece = arriving.piece
        judged = arriving.mine or arriving.memory is not None
        matches = not judged or arriving.hash.hexdigest() == piece.digest
        held = False
        if matches and arriving.memory is not None:
            try:
                held = staging.keep(piece, arriving.memory)
            except TimeoutError as error:
                raise PeerLost(str(error), where=self._key) from error
        with arriving.writing:
            if arriving.mine and matches:
                staging.writers.pop(piece.index, None)
                staging.hold(piece)
                held, arriving.mine = True, False
        self.drop()
        if not held:
            self._pull.counters.add(refetched=piece.length)
        kind = PieceVerified if matches else PieceRejected
        self._pull.report(kind(self._key, self._pull.stream, arriving.extent))
        return matches

    def drop(self) -> None:
        """Discard the piece that is arriving, unless it is held."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        arriving.memory = None
        self._pull.counters.add(received=arriving.done)
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
