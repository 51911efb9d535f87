"""A stream's portion of this worker's link, where the plan gives it several streams.

Left alone, TCP shares a full link by chance: with two connections to the origin and one to a peer,
the peer got a third instead of its half, looked like a straggler, and was moved to the tail.
Streams with receive windows in the proportion of their planned rates share it in that proportion,
and queues stay short: 8 hosts at 50 Mbit/s lost 20 to 45 % in stripes before, 3 to 12 % since. A
worker with one source needs none of this; nor does a lane whose window would be larger than the
kernel grants, which on fast links is every one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from weakref import WeakKeyDictionary

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
