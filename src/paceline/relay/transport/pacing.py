"""Rate limits: a token bucket per link direction, and receive windows that divide a link.

One bucket for each direction is shared by all connections of an agent. Bytes are counted where they
pass a socket. The burst is small (20 ms or one block), so that a transfer over paced loopback takes
the time that the planner predicts for the link.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

BURST_S = 0.02
MIN_BLOCK = 16 * 1024
BUFFER_S = 0.1  # of the link that a paced socket buffers; 20 ms left a busy machine's link idle
MIN_BUFFER = 128 * 1024
MAX_BUFFER = 64 * 1024 * 1024  # kernels grant no more, and the call accepts at most 2 GiB
MAX_BLOCK = 512 * 1024  # larger sub-blocks between recv, hash and write were no faster


class Pacer:
    """Limits a link to ``link_mbit`` (goodput; None means no limit) and counts its bytes."""

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
    """Bytes per second of a growing count, measured between two calls of ``look``."""

    def __init__(self) -> None:
        self._seen = 0
        self._at = time.monotonic()
        self._rate = 0.0

    def look(self, total: int) -> float:
        """Return the rate since the last sample; samples are at least 50 ms apart."""
        now = time.monotonic()
        if now - self._at >= 0.05:
            self._rate = (total - self._seen) / (now - self._at)
            self._seen, self._at = total, now
        return self._rate


# Receive windows divide a worker's link among several streams.
#
# By itself TCP shares a full link per connection: with two connections to the origin and one to a
# peer, the peer got a third instead of its half, looked like a straggler, and was moved to the
# tail. Receive windows in the proportion of the planned rates share the link in that proportion,
# and queues stay short: 8 hosts at 50 Mbit/s lost 20 to 45 % with stripes before, and 3 to 12 %
# since. A worker with one source does not need this, nor does a lane whose window would be larger
# than the kernel grants, which is every lane on fast links.

HOLD_S = 0.035  # of its planned rate: more than a reader's sleep, less than a switch's queue
LEAST_BYTES = 40_000  # the kernel doubles it, for its own overhead
MOST_BYTES = 200_000  # the most that an unprivileged process may set

PlannedRate = Callable[[], float]  # planned bytes per second of one of several streams; 0: no limit


def no_limit() -> float:
    """Return 0: the stream may use the whole link."""
    return 0.0


class ReceiveWindow:
    """The receive windows of one stream's connections; call ``apply`` before each use of one."""

    def __init__(self, rate: PlannedRate) -> None:
        self._rate = rate
        self._windows: WeakKeyDictionary[socket.socket, int] = WeakKeyDictionary()

    def apply(self, sock: socket.socket, connections: int = 1) -> None:
        """Set the window of ``sock``, one of ``connections`` that carry this stream."""
        planned = self._rate() * HOLD_S / connections
        limited, now = 0 < planned < MOST_BYTES, self._windows.get(sock)
        if not limited and now is None:
            return  # the kernel's automatic sizing is active, and does better
        # Setting a window ends the kernel's automatic sizing for good, so unlimited then means the
        # largest window.
        wanted = max(int(planned), LEAST_BYTES) if limited else MOST_BYTES
        if wanted != now:
            self._windows[sock] = wanted
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted)
