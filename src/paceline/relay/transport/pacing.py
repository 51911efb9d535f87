"""A node's NIC as a token bucket: one for each direction, shared by all connections of an agent.

Bytes are counted where they pass a socket. The burst is small (20 ms or one block), so that what a
paced loopback takes is what the planner predicts from the link. It knows no sockets.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

BURST_S = 0.02
MIN_BLOCK = 16 * 1024
BUFFER_S = (
    0.1  # of the link: what a paced socket may hold unseen. 20 ms idled a busy machine's link
)
MIN_BUFFER = 128 * 1024
MAX_BUFFER = 64 * 1024 * 1024  # more no kernel grants, and the call takes no more than 2 GiB
MAX_BLOCK = 512 * 1024  # larger sub-blocks between recv, hash and write were no faster


class Pacer:
    """Lets through ``link_mbit`` (goodput; None means as fast as possible) and counts bytes."""

    def __init__(self, link_mbit: float | None) -> None:
        self._rate = link_mbit * 1e6 / 8 if link_mbit else 0.0
        self.paced = bool(link_mbit)
        self._lock = threading.Lock()
        self._free_at = time.monotonic()
        self.total_bytes = 0
        self.buffer_bytes = min(MAX_BUFFER, max(MIN_BUFFER, int(self._rate * BUFFER_S)))
        by_burst = int(self._rate * BURST_S / 2)
        self.block_bytes = min(MAX_BLOCK, max(MIN_BLOCK, by_burst)) if self._rate else MAX_BLOCK

    def take(self, count: int) -> None:
        """Count ``count`` bytes and wait until the link would have carried them."""
        with self._lock:
            self.total_bytes += count
            if not self._rate:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + count / self._rate
            wait_s = self._free_at - now
        if wait_s > 0.0005:
            time.sleep(wait_s)


class RateMeter:
    """Bytes per second of a growing count, over the time between two looks."""

    def __init__(self) -> None:
        self._seen = 0
        self._at = time.monotonic()
        self._rate = 0.0

    def look(self, total: int) -> float:
        """Return the rate since the last look that was at least 50 ms ago."""
        now = time.monotonic()
        if now - self._at >= 0.05:
            self._rate = (total - self._seen) / (now - self._at)
            self._seen, self._at = total, now
        return self._rate


# A stream's portion of this worker's link, where the plan gives it several streams.
#
# Left alone, TCP shares a full link by chance: with two connections to the origin and one to a
# peer, the peer got a third instead of its half, looked like a straggler, and was moved to the
# tail. Streams with receive windows in the proportion of their planned rates share it in that
# proportion, and queues stay short: 8 hosts at 50 Mbit/s lost 20 to 45 % in stripes before, 3 to 12
# % since. A worker with one source needs none of this; nor does a lane whose window would be larger
# than the kernel grants, which on fast links is every one.

HOLD_S = 0.035  # of its planned rate: more than a reader's rest, less than a switch's queue
LEAST_BYTES = 40_000  # the kernel doubles it, for its own overhead
MOST_BYTES = 200_000  # what an unprivileged process may ask for

Rate = Callable[[], float]  # bytes per second that the plan gives to one of several streams; 0: all


def no_limit() -> float:
    """Return that a stream may take what the link gives."""
    return 0.0


class Portion:
    """The receive windows of one stream's connections; ``apply`` before a use of each of them."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._windows: WeakKeyDictionary[socket.socket, int] = WeakKeyDictionary()

    def apply(self, sock: socket.socket, connections: int = 1) -> None:
        """Give ``sock`` its window, one of ``connections`` that carry this stream."""
        planned = self._rate() * HOLD_S / connections
        limited, now = 0 < planned < MOST_BYTES, self._windows.get(sock)
        if not limited and now is None:
            return  # the kernel's own sizing is at work, and knows better
        # Once limited, the kernel sizes it no more: then the most has to do.
        wanted = max(int(planned), LEAST_BYTES) if limited else MOST_BYTES
        if wanted != now:
            self._windows[sock] = wanted
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted)
