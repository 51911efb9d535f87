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

SHELF_BYTES = 4 * 1024 * 1024  # four pieces of 1 MiB, or halves of two of 4 MiB; 8 MiB was slower


class Shelf:
    """Blocks to receive into; one that was never used takes no memory. One thread uses it."""

    def __init__(self, pacer: Pacer) -> None:
        self.block_bytes = pacer.block_bytes
        # A paced process waits for its own clock: to it, bytes that are here are not yet.
        together = hashing.LANES > 1 and not pacer.paced
        count = SHELF_BYTES // self.block_bytes if together else 1
        self._free = [memoryview(mmap.mmap(-1, self.block_bytes)) for _ in range(count)]

    @property
    def has_room(self) -> bool:
        """Return whether there is another block."""
        return bool(self._free)

    def room(self, size: int) -> memoryview:
        """Return a place for ``size`` bytes, at most ``block_bytes``; there must be one."""
        return self._free.pop()[:size]

    def take_back(self, blocks: list[memoryview]) -> None:
        """Use these places again."""
        self._free.extend(memoryview(block.obj) for block in blocks)
