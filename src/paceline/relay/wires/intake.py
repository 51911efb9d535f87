"""What arrives on one stream: bytes → SHA-256 → file, judged a piece at a time.

Only when the digest matches does a piece count as held, and only then can the server side pass it
on (I3). What happened is reported as events; what to do next is decided elsewhere, and how the
bytes came is the transports' business. One thread takes pieces; any may ask.
"""

from __future__ import annotations

import hashlib
import threading
import time

from paceline.errors import InvalidFrame, PeerLost
from paceline.manifest import Piece
from paceline.relay.disk.staging import CLAIM_S
from paceline.relay.session.events import PieceRejected, PieceVerified, SourceAlive
from paceline.relay.session.extents import Extent, Extents
from paceline.relay.wires.pull import Pull

SILENCE_S = 30.0  # a bound of the byte threads' own; the session notices much earlier


class Intake:
    """The pieces asked of ``source`` and the one that is arriving."""

    def __init__(self, pull: Pull) -> None:
        self._pull = pull
        self._key, self._staging = pull.key, pull.staging  # the hot ones
        self._lock = threading.Lock()
        self._asked = Extents()
        self._ever = Extents()  # one that was asked for twice may come twice
        self._told_alive_s = 0.0
        self._piece: Piece | None = None
        self._mine = False  # whether the arriving piece is ours to write
        self._writing = threading.Lock()  # while it is written, and while it changes hands
        self._memory: memoryview | None = None  # of a piece that another stream is writing
        self._descriptor = -1
        self._digest = hashlib.sha256()
        self._done = 0

    def ask(self, extent: Extent) -> None:
        """Take note that ``extent`` was asked for."""
        with self._lock:
            self._asked.add(extent)
            self._ever.add(extent)

    @property
    def waiting(self) -> bool:
        """Return whether something that was asked for has not arrived."""
        return bool(self._asked) or self._piece is not None

    def begin(self, index: int, length: int) -> None:
        """Expect the ``length`` bytes of piece ``index``; raises InvalidFrame if nobody asked."""
        manifest = self._staging.manifest
        with self._lock:
            self._asked.remove(Extent(index, index + 1))
            known = index in self._ever
        if not known or index >= manifest.piece_count:
            raise InvalidFrame("a piece nobody asked for", got=index, where=self._key)
        piece = manifest.piece_of(index)
        if length != piece.length:
            raise InvalidFrame("piece of another length", got=length, wanted=piece.length)
        self._memory = None
        try:
            self._mine = self._staging.claim(index, wait_s=0.0)
        except TimeoutError:
            # Hedged: another stream is writing it. Whichever has it whole first wins.
            self._mine, self._memory = False, memoryview(bytearray(length))
        if self._mine:
            self._staging.writers[index] = self._leave
        self._piece, self._done = piece, 0
        self._digest = hashlib.sha256()
        self._descriptor = self._staging.descriptor(piece.file_index)

    def take(self, block: memoryview) -> None:
        """Hash and write the next bytes of the piece; those of a duplicate are dropped."""
        piece = self._piece
        if piece is None or self._done + len(block) > piece.length:
            raise InvalidFrame("bytes beyond a piece", got=len(block), where=self._key)
        if self._mine or self._memory is not None:
            self._digest.update(block)
        if self._memory is not None:
            self._memory[self._done : self._done + len(block)] = block
        elif self._mine:
            with self._writing:
                if self._mine:
                    at = piece.file_offset + self._done
                    self._staging.write(self._descriptor, block, at)
        self._done += len(block)
        self._pull.pacer.take(len(block))
        if self._done < piece.length:
            self.alive(self._pull.keepalive_s, moving=True)

    def end(self) -> bool:
        """Judge the piece and report it; return whether its bytes were right."""
        piece, staging = self._piece, self._staging
        if piece is None or self._done != piece.length:
            raise InvalidFrame("a piece ended early", got=self._done, where=self._key)
        judged = self._mine or self._memory is not None
        matches = not judged or self._digest.hexdigest() == piece.sha256
        if matches and self._memory is not None:
            self._mine = self._write_whole(piece, self._memory)
        with self._writing:
            held = self._mine and matches
            if held:
                staging.writers.pop(piece.index, None)
                staging.hold(piece)
                self._mine = False
        self.drop()
        if not held:
            self._pull.counters.add(refetched=piece.length)
        if judged:
            staging.edges.judged(
                self._key, self._pull.worker_id, matched=int(matches), corrupt=int(not matches)
            )
        extent = Extent(piece.index, piece.index + 1)
        kind = PieceVerified if matches else PieceRejected
        self._pull.report(kind(self._key, self._pull.stream, extent))
        return matches

    def drop(self) -> None:
        """Give up what has arrived of a piece and is not held."""
        piece, self._piece, self._memory = self._piece, None, None
        if piece is None:
            return
        self._pull.counters.add(received=self._done)
        with self._writing:
            if self._mine:
                self._mine = False
                self._staging.writers.pop(piece.index, None)
                self._staging.release(piece.index)

    def _leave(self) -> bool:
        """Leave the arriving piece's claim to another stream; return whether it was ours."""
        with self._writing:
            mine, self._mine = self._mine, False
            return mine

    def _write_whole(self, piece: Piece, data: memoryview) -> bool:
        """Write a piece that is right; return False where it is held by now."""
        staging = self._staging
        end_s = time.monotonic() + CLAIM_S
        while (writer := staging.writers.pop(piece.index, None)) is None or not writer():
            try:
                if not staging.claim(piece.index, wait_s=0.05):
                    return False
                break
            except TimeoutError as error:  # it was claimed, but not yet by a writer we know
                if time.monotonic() > end_s:
                    raise PeerLost(str(error), where=self._key) from error
        try:
            staging.write(self._descriptor, data, piece.file_offset)
        except BaseException:
            staging.release(piece.index)
            raise
        return True

    def alive(self, at_most_every_s: float = 0.0, *, moving: bool = False) -> None:
        """Report a sign of life of the source: that it waits, or that its bytes are ``moving``."""
        now = time.monotonic()
        if now - self._told_alive_s >= at_most_every_s:
            self._told_alive_s = now
            self._pull.report(SourceAlive(self._key, self._pull.stream, moving=moving))
