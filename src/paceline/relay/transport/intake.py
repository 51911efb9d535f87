"""What arrives on one stream: bytes → SHA-256 → file, judged a piece at a time.

Only when the digest matches does a piece count as held, and only then can the server side pass it
on (I3). Bytes that are here already may be *kept* and judged together, which is cheaper; who does
that must not wait for anything meanwhile. What happened is reported as events; what to do next is
decided elsewhere, and how the bytes came is the transports' business. One thread takes pieces; any
may ask.
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
from paceline.relay.transport.contract import Pull
from paceline.relay.transport.pacing import Pacer

SILENCE_S = 30.0  # a bound of the byte threads' own; the session notices much earlier


class _Arriving:
    """A piece that arrives or waits for its verdict; ``writing`` guards ``mine``."""

    __slots__ = ("descriptor", "digest", "done", "memory", "mine", "piece", "unhashed", "writing")

    def __init__(self, piece: Piece, descriptor: int) -> None:
        self.piece = piece
        self.descriptor = descriptor
        self.digest = hashing.sha256()
        self.done = 0
        self.unhashed = 0  # blocks of it that are kept
        self.mine = False  # whether it is ours to write
        self.writing = threading.Lock()  # while it is written, and while it changes hands
        self.memory: memoryview | None = None  # of a piece that another stream is writing

    @property
    def wanted(self) -> bool:
        """Return whether its bytes are kept anywhere."""
        return self.mine or self.memory is not None

    def leave(self) -> bool:
        """Leave its claim to another stream; return whether it was ours."""
        with self.writing:
            mine, self.mine = self.mine, False
            return mine

    def matches(self) -> bool:
        """Return whether its bytes are right; nobody is blamed on our own extension's word."""
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


class Intake:
    """The pieces asked of ``source`` and those that are arriving."""

    def __init__(self, pull: Pull) -> None:
        self._pull = pull
        self._key, self._staging = pull.key, pull.staging  # the hot ones
        self._lock = threading.Lock()
        self._asked = Extents()
        self._ever = Extents()  # one that was asked for twice may come twice
        self._told_alive_s = 0.0
        self._arriving: _Arriving | None = None
        self._whole: list[_Arriving] = []  # without a verdict
        self._unhashed: deque[tuple[_Arriving, memoryview]] = deque()

    def ask(self, extent: Extent) -> None:
        """Take note that ``extent`` was asked for."""
        with self._lock:
            self._asked.add(extent)
            self._ever.add(extent)

    @property
    def waiting(self) -> bool:
        """Return whether something that was asked for has not arrived."""
        return bool(self._asked) or self._arriving is not None

    @property
    def keeps(self) -> bool:
        """Return whether something waits for ``judge``."""
        return bool(self._unhashed or self._whole)

    def begin(self, index: int, length: int) -> None:
        """Expect the ``length`` bytes of piece ``index``; raises InvalidFrame if nobody asked."""
        manifest = self._staging.manifest
        if self._arriving is not None:  # its claim would never be released
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
        arriving = _Arriving(piece, self._staging.descriptor(piece.file_index))
        try:
            arriving.mine = self._staging.claim(index, wait_s=0.0)
        except TimeoutError:
            # Hedged: another stream is writing it. Whichever has it whole first wins.
            arriving.memory = memoryview(bytearray(length))
        if arriving.mine:
            self._staging.writers[index] = arriving.leave
        self._arriving = arriving

    def take(self, block: memoryview) -> None:
        """Write and hash the next bytes of the piece; those of a duplicate are dropped."""
        if self.keep(block):
            self._hash()

    def keep(self, block: memoryview) -> bool:
        """Do what ``take`` does, but hash them in ``judge``: until then ``block`` may not change,
        and the caller waits for nothing. Return False where there is nothing to hash.
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
        """Judge the piece and report it; return whether its bytes were right."""
        self.end_kept()
        return not self.judge()[0]

    def end_kept(self) -> None:
        """Take note that the piece is whole; its verdict comes with ``judge``."""
        arriving = self._arriving
        if arriving is None or arriving.done != arriving.piece.length:
            got = arriving.done if arriving else 0
            raise InvalidFrame("a piece ended early", got=got, where=self._key)
        self._arriving = None
        self._whole.append(arriving)

    def judge(self) -> tuple[list[int], list[memoryview]]:
        """Hash one block that was kept of each of the oldest pieces, side by side, and judge and
        report what is whole. Return the pieces that are wrong and the blocks that are free again.
        """
        free, wrong = self._hash(), []
        while self._whole and not self._whole[0].unhashed:
            if not self._judge(self._whole[0]):
                wrong.append(self._whole[0].piece.index)
            del self._whole[0]
        return wrong, free

    def _hash(self) -> list[memoryview]:
        now: dict[int, tuple[_Arriving, memoryview]] = {}
        later: deque[tuple[_Arriving, memoryview]] = deque()
        for each in self._unhashed:
            if len(now) < hashing.LANES and now.setdefault(id(each[0]), each) is each:
                continue
            later.append(each)
        self._unhashed = later
        hashing.update_each([(arriving.digest, block) for arriving, block in now.values()])
        for arriving, _ in now.values():
            arriving.unhashed -= 1
        return [block for _, block in now.values()]

    def _judge(self, arriving: _Arriving) -> bool:
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
        """Give up what has arrived and is not held."""
        self._unhashed.clear()
        if self._arriving is not None:
            self._whole.append(self._arriving)
            self._arriving = None
        while self._whole:
            self._drop(self._whole.pop())

    def _drop(self, arriving: _Arriving) -> None:
        arriving.memory = None
        self._pull.counters.add(received=arriving.done)
        with arriving.writing:
            if arriving.mine:
                arriving.mine = False
                self._staging.writers.pop(arriving.piece.index, None)
                self._staging.release(arriving.piece.index)

    def _write_whole(self, arriving: _Arriving, data: memoryview) -> bool:
        """Write a piece that is right; return False where it is held by now."""
        piece, staging = arriving.piece, self._staging
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
            staging.write(arriving.descriptor, data, piece.file_offset)
        except BaseException:
            staging.release(piece.index)
            raise
        return True

    def waits(self) -> None:
        """Report that the source waits too; four times a keep-alive at most, however often it says
        so: one thread takes the reports of all streams.
        """
        self.alive(self._pull.keepalive_s / 4)

    def alive(self, at_most_every_s: float = 0.0, *, moving: bool = False) -> None:
        """Report a sign of life of the source: that it waits, or that its bytes are ``moving``."""
        now = time.monotonic()
        if now - self._told_alive_s >= at_most_every_s:
            self._told_alive_s = now
            self._pull.report(SourceAlive(self._key, self._pull.stream, moving=moving))


# Where blocks of one stream lie until they are hashed: together, where that is cheaper.
#
# SHA-256 of several pieces side by side takes half the time (``hashing``). Blocks are kept for that
# only while more of them are in the kernel already, so nothing ever waits for the network unhashed:
# on a link that is slower than this process every block is hashed before the next is awaited, and a
# long chain of hops is as fast as without this. It knows no sockets and no pieces.

PLACE_BYTES = 1024 * 1024
PLACES = 6  # 4 MiB at once were faster than 2, and 8 no faster


class Shelf:
    """Places to receive into; one that was never used takes no memory. One thread uses it."""

    def __init__(self, pacer: Pacer) -> None:
        # A paced process waits for its own clock: to it, bytes that are here are not yet.
        together = hashing.LANES > 1 and not pacer.paced
        self._small = pacer.block_bytes
        self._large = max(PLACE_BYTES, self._small) if together else self._small
        count = PLACES if together else 1
        memory = mmap.mmap(-1, count * self._large, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Private, for shared pages are a file's. Huge ones were cheaper by no more than the noise.
        room = memoryview(memory)
        self._free = [room[at : at + self._large] for at in range(0, len(room), self._large)]
        self._used: dict[int, tuple[memoryview, memoryview]] = {}  # block and place, by the block

    def block_bytes(self, here: int) -> int:
        """Return how much to receive next where ``here`` bytes have come: small blocks are hashed
        while the next one comes, large ones cost fewer calls.
        """
        return self._large if here >= self._large else self._small

    @property
    def has_room(self) -> bool:
        """Return whether there is another place."""
        return bool(self._free)

    def room(self, size: int) -> memoryview:
        """Return a place for ``size`` bytes, at most ``block_bytes``; there must be one."""
        place = self._free.pop()
        block = place[:size]
        self._used[id(block)] = block, place
        return block

    def take_back(self, blocks: list[memoryview]) -> None:
        """Use the places of these blocks again."""
        self._free.extend(self._used.pop(id(block))[1] for block in blocks)
