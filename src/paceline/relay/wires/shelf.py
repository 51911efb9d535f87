"""Where blocks of one stream lie until they are hashed: together, where that is cheaper.

SHA-256 of several pieces side by side takes half the time (``hashing``). Blocks are kept for that
only while more of them are in the kernel already, so nothing ever waits for the network unhashed:
on a link that is slower than this process every block is hashed before the next is awaited, and a
long chain of hops is as fast as without this. It knows no sockets and no pieces.
"""

from __future__ import annotations

import mmap

from paceline import hashing
from paceline.relay.wires.pacing import Pacer

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
