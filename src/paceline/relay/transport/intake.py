"""Receives the pieces of one stream: writes bytes to the file, hashes them and verifies each piece.

A piece counts as held, and may be forwarded, only when its SHA-256 matches (I3). Blocks that have
arrived may be kept and hashed together, which is cheaper; the caller must not block while it keeps
any. Results are reported as session events. It does not depend on how the bytes arrive. One thread
delivers pieces; any thread may request.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator

from paceline import hashing
from paceline.errors import InvalidFrame, PeerLost
from paceline.manifest import Piece
from paceline.relay.protocol.events import PieceRejected, PieceVerified, SourceAlive
from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.store.staging import CLAIM_S
from paceline.relay.transport.contract import PullSpec
from paceline.relay.transport.pacing import Pacer

SILENCE_S = 30.0  # a last bound for the byte threads; the session notices silence much earlier


class _ArrivingPiece:
    """A piece that is arriving or waits for verification; ``writing`` guards ``mine``."""

    __slots__ = ("descriptor", "digest", "done", "memory", "mine", "piece", "unhashed", "writing")

    def __init__(self, piece: Piece, descriptor: int) -> None:
        self.piece = piece
        self.descriptor = descriptor
        self.digest = hashing.sha256()
        self.done = 0
        self.unhashed = 0  # kept blocks of it
        self.mine = False  # whether this stream holds the claim to write it
        self.writing = threading.Lock()  # held while it is written, and while the claim moves
        self.memory: memoryview | None = None  # a copy, while another stream writes the piece

    @property
    def wanted(self) -> bool:
        """Return whether its bytes are stored, in the file or in memory."""
        return self.mine or self.memory is not None

    def leave(self) -> bool:
        """Give up the claim for another stream; return whether this stream had it."""
        with self.writing:
            mine, self.mine = self.mine, False
            return mine

    def matches(self) -> bool:
        """Return whether the digest matches; hashlib confirms a mismatch (``hashing.proven``)."""
        piece, digest = self.piece, self.digest.hexdigest()
        if digest == piece.sha256:
            return True
        with self.writing:
            if self.memory is None and not self.mine:
                return False  # another stream writes there now
            return hashing.proven(digest, piece.sha256, self._bytes)

    def _bytes(self) -> Iterator[bytes | memoryview]:
        if self.memory is not None:
            yield self.memory
        else:
            yield os.pread(self.descriptor, self.piece.length, self.piece.file_offset)


class PieceReceiver:
    """The requested and the arriving pieces of one pull stream."""

    def __init__(self, pull: PullSpec) -> None:
        self._pull = pull
        self._key, self._staging = pull.key, pull.staging  # used in the hot loop
        self._lock = threading.Lock()
        self._asked = Extents()
        self._ever = Extents()  # a piece requested twice may arrive twice
        self._told_alive_s = 0.0
        self._arriving: _ArrivingPiece | None = None
        self._whole: list[_ArrivingPiece] = []  # complete, not verified
        self._unhashed: deque[tuple[_ArrivingPiece, memoryview]] = deque()

    def ask(self, extent: Extent) -> None:
        """Record that ``extent`` is requested."""
        with self._lock:
            self._asked.add(extent)
            self._ever.add(extent)

    @property
    def waiting(self) -> bool:
        """Return whether any requested piece has not arrived."""
        return bool(self._asked) or self._arriving is not None

    @property
    def keeps(self) -> bool:
        """Return whether kept blocks or complete pieces wait for ``judge``."""
        return bool(self._unhashed or self._whole)

    def begin(self, index: int, length: int) -> None:
        """Start piece ``index`` of ``length`` bytes; raises InvalidFrame if it is unrequested."""
        manifest = self._staging.manifest
        if self._arriving is not None:  # else its claim would never be released
            got, where = self._arriving.piece.index, self._key
            raise InvalidFrame("a piece ended early", got=got, wanted="all of it", where=where)
        with self._lock:
            self._asked.remove(Extent(index, index + 1))
            known = index in self._ever
        if not known or index >= manifest.piece_count:
            raise InvalidFrame("a piece nobody asked for", got=index, where=self._key)
        piece = manifest.piece_of(index)
        if length != piece.length:
            raise InvalidFrame("piece of another length", got=length, wanted=piece.length)
        arriving = _ArrivingPiece(piece, self._staging.descriptor(piece.file_index))
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
        if self.keep(block):
            self._hash()

    def keep(self, block: memoryview) -> bool:
        """Write the next bytes like ``take`` but hash them in ``judge``; return False if there is
        nothing to hash. Until then ``block`` must not change and the caller must not block.
        """
        arriving = self._arriving
        if arriving is None or arriving.done + len(block) > arriving.piece.length:
            raise InvalidFrame("bytes beyond a piece", got=len(block), where=self._key)
        wanted = arriving.wanted
        if wanted:
            arriving.unhashed += 1
            self._unhashed.append((arriving, block))
        if arriving.memory is not None:
            arriving.memory[arriving.done : arriving.done + len(block)] = block
        elif arriving.mine:
            with arriving.writing:
                if arriving.mine:
                    at = arriving.piece.file_offset + arriving.done
                    self._staging.write(arriving.descriptor, block, at)
        arriving.done += len(block)
        self._pull.pacer.take(len(block))
        if arriving.done < arriving.piece.length:
            self.alive(self._pull.keepalive_s, moving=True)
        return wanted

    def end(self) -> bool:
        """Verify the piece and report it; return whether its digest matches."""
        self.end_kept()
        return not self.judge()[0]

    def end_kept(self) -> None:
        """Mark the piece as complete; ``judge`` verifies it."""
        arriving = self._arriving
        if arriving is None or arriving.done != arriving.piece.length:
            got = arriving.done if arriving else 0
            raise InvalidFrame("a piece ended early", got=got, where=self._key)
        self._arriving = None
        self._whole.append(arriving)

    def judge(self) -> tuple[list[int], list[memoryview]]:
        """Hash one kept block of each of the oldest pieces, side by side; verify and report the
        complete pieces. Return the numbers of the corrupt pieces and the blocks that are free.
        """
        free, wrong = self._hash(), []
        while self._whole and not self._whole[0].unhashed:
            if not self._judge(self._whole[0]):
                wrong.append(self._whole[0].piece.index)
            del self._whole[0]
        return wrong, free

    def _hash(self) -> list[memoryview]:
        now: dict[int, tuple[_ArrivingPiece, memoryview]] = {}
        later: deque[tuple[_ArrivingPiece, memoryview]] = deque()
        for each in self._unhashed:
            if len(now) < hashing.LANES and now.setdefault(id(each[0]), each) is each:
                continue
            later.append(each)
        self._unhashed = later
        hashing.update_each([(arriving.digest, block) for arriving, block in now.values()])
        for arriving, _ in now.values():
            arriving.unhashed -= 1
        return [block for _, block in now.values()]

    def _judge(self, arriving: _ArrivingPiece) -> bool:
        piece, staging = arriving.piece, self._staging
        judged = arriving.wanted
        matches = not judged or arriving.matches()
        if matches and arriving.memory is not None:
            arriving.mine = self._write_whole(arriving, arriving.memory)
        with arriving.writing:
            held = arriving.mine and matches
            if held:
                staging.writers.pop(piece.index, None)
                staging.hold(piece)
                arriving.mine = False
        self._drop(arriving)
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
        """Discard everything that has arrived and is not held."""
        self._unhashed.clear()
        if self._arriving is not None:
            self._whole.append(self._arriving)
            self._arriving = None
        while self._whole:
            self._drop(self._whole.pop())

    def _drop(self, arriving: _ArrivingPiece) -> None:
        arriving.memory = None
        self._pull.counters.add(received=arriving.done)
        with arriving.writing:
            if arriving.mine:
                arriving.mine = False
                self._staging.writers.pop(arriving.piece.index, None)
                self._staging.release(arriving.piece.index)

    def _write_whole(self, arriving: _ArrivingPiece, data: memoryview) -> bool:
        """Write a verified piece from memory; return False if it is held by now."""
        piece, staging = arriving.piece, self._staging
        end_s = time.monotonic() + CLAIM_S
        while (writer := staging.writers.pop(piece.index, None)) is None or not writer():
            try:
                if not staging.claim(piece.index, wait_s=0.05):
                    return False
                break
            except TimeoutError as error:  # claimed by a writer that has not registered yet
                if time.monotonic() > end_s:
                    raise PeerLost(str(error), where=self._key) from error
        try:
            staging.write(arriving.descriptor, data, piece.file_offset)
        except BaseException:
            staging.release(piece.index)
            raise
        return True

    def waits(self) -> None:
        """Report that the source waits, at most four times per keep-alive interval: one thread
        handles the reports of all streams.
        """
        self.alive(self._pull.keepalive_s / 4)

    def alive(self, at_most_every_s: float = 0.0, *, moving: bool = False) -> None:
        """Report that the source is alive: it waits, or its bytes are ``moving``."""
        now = time.monotonic()
        if now - self._told_alive_s >= at_most_every_s:
            self._told_alive_s = now
            self._pull.report(SourceAlive(self._key, self._pull.stream, moving=moving))


# A pool of receive buffers, so that blocks of several pieces can be hashed together: SHA-256 of
# several pieces side by side takes half the time (``hashing``). Blocks are kept for that only while
# the kernel already holds more bytes, so no block waits unhashed for the network: on a link slower
# than this process every block is hashed before the next one is awaited, and a long chain of hops
# is as fast as without the pool.

PLACE_BYTES = 1024 * 1024
PLACES = 6  # 4 MiB at once were faster than 2 MiB, and 8 MiB no faster


class BufferPool:
    """Buffers to receive into; unused ones take no memory. For one thread."""

    def __init__(self, pacer: Pacer) -> None:
        # A paced process delays bytes that have arrived, so it never hashes blocks together.
        together = hashing.LANES > 1 and not pacer.paced
        self._small = pacer.block_bytes
        self._large = max(PLACE_BYTES, self._small) if together else self._small
        count = PLACES if together else 1
        memory = mmap.mmap(-1, count * self._large, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Private: shared pages belong to a file. Huge pages were no faster beyond the noise.
        room = memoryview(memory)
        self._free = [room[at : at + self._large] for at in range(0, len(room), self._large)]
        self._used: dict[int, tuple[memoryview, memoryview]] = {}  # block and buffer by id(block)

    def block_bytes(self, here: int) -> int:
        """Return how much to receive next when ``here`` bytes have arrived: small blocks are hashed
        while the next one arrives, large ones cost fewer calls.
        """
        return self._large if here >= self._large else self._small

    @property
    def has_room(self) -> bool:
        """Return whether a buffer is free."""
        return bool(self._free)

    def room(self, size: int) -> memoryview:
        """Return a buffer of ``size`` bytes, at most ``block_bytes``; requires ``has_room``."""
        place = self._free.pop()
        block = place[:size]
        self._used[id(block)] = block, place
        return block

    def take_back(self, blocks: list[memoryview]) -> None:
        """Free the buffers of these blocks."""
        self._free.extend(self._used.pop(id(block))[1] for block in blocks)
