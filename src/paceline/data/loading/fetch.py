"""Fetch objects from the store in ranges over several connections, with hedged requests.

A range that has not arrived after three times the recent median is requested a second time on
another connection; the first answer is used and the other request is cancelled ("hedged requests",
Dean and Barroso, The Tail at Scale, 2013). Hedges are at most a tenth of the requests, so that a
store that is slow as a whole does not get twice the load. Retries
and their budget belong to the store (``paceline.storage``). Does not check digests: the caller
does.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from paceline.errors import CorruptData, PermanentError, ServiceUnavailable, TemporaryError
from paceline.storage import ObjectStore

RANGE_BYTES = 8 * 1024 * 1024
RANGES = 4  # of one object, concurrently
HEDGE_FACTOR = 3.0  # times the median
HEDGE_FLOOR_S = 0.1
HEDGE_START_S = 2.0  # until there are SEEN_WANTED measurements
SEEN_WANTED = 8
HEDGE_SHARE = 10  # one hedge in so many requests
DEADLINE_S = 600.0  # of one range, with its hedge


class Fetcher:
    """Owns the threads of the connections; thread-safe; close it."""

    def __init__(self, store: ObjectStore, connections: int) -> None:
        self._store = store
        self._slots = threading.BoundedSemaphore(connections)
        # twice the connections: hedges run beside stuck requests
        self._pool = ThreadPoolExecutor(2 * connections, thread_name_prefix="shard-range")
        self._lock = threading.Lock()
        self._seen_s: deque[float] = deque(maxlen=64)
        self.requests = 0
        self.hedges = 0

    def close(self) -> None:
        """Cancel queued requests; does not wait for those in flight."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fetch(self, url: str, size: int, write: Callable[[int, memoryview], None]) -> None:
        """Call ``write(offset, data)`` with all ``size`` bytes of the object, in any order.

        Calls it from several threads, with at most ``RANGES`` ranges in memory. Raises
        SourceMissing, CorruptData where the object has another size, ServiceUnavailable.
        """

        def one(offset: int) -> None:
            write(offset, self._range(url, offset, min(RANGE_BYTES, size - offset), size))

        try:
            if size <= RANGE_BYTES:
                return one(0)
            with ThreadPoolExecutor(RANGES, thread_name_prefix="shard-fetch") as ranges:
                running = [ranges.submit(one, each) for each in range(0, size, RANGE_BYTES)]
                try:
                    for future in running:
                        future.result()
                finally:
                    ranges.shutdown(wait=True, cancel_futures=True)
        except PermanentError as error:
            if type(error) is PermanentError:  # a range beyond the end has no specific error
                got = self._store.head(url).size
                if got != size:
                    raise CorruptData(
                        "object has another size",
                        got=f"{got} bytes",
                        wanted=f"{size} bytes",
                        where=url,
                    ) from error
            raise

    def deadline_s(self) -> float:
        """Return the seconds after which a range is requested a second time."""
        with self._lock:
            if len(self._seen_s) < SEEN_WANTED:
                return HEDGE_START_S
            return max(HEDGE_FLOOR_S, HEDGE_FACTOR * statistics.median(self._seen_s))

    def _range(self, url: str, offset: int, length: int, size: int) -> memoryview:
        """Return one range's bytes, requested a second time if they are late."""
        if not self._slots.acquire(timeout=DEADLINE_S):
            raise ServiceUnavailable("no connection is free for a data shard", where=url)
        with self._lock:
            self.requests += 1
        began_s = time.monotonic()
        tries: list[_Try] = []

        def request() -> Future[memoryview]:
            tries.append(_Try())
            return self._pool.submit(tries[-1].run, self._store, url, offset, length, size)

        try:
            running = {request()}
            done, running = wait(running, self.deadline_s(), FIRST_COMPLETED)
            if not done and self._may_hedge():
                running.add(request())
            while True:
                if not done:
                    left_s = began_s + DEADLINE_S - time.monotonic()
                    done, running = wait(running, max(0.0, left_s), FIRST_COMPLETED)
                if not done:
                    raise ServiceUnavailable(
                        "a range of a data shard does not come",
                        got=f"{length} bytes not complete after {DEADLINE_S:.0f} s",
                        where=url,
                    )
                try:
                    data = done.pop().result()
                except TemporaryError:
                    if not done and not running:
                        raise
                else:
                    with self._lock:
                        self._seen_s.append(time.monotonic() - began_s)
                    return data
        finally:
            self._slots.release()
            for each in tries:
                each.cancel()

    def _may_hedge(self) -> bool:
        """Return whether another hedge is within the limit of a tenth, and count it."""
        with self._lock:
            allowed = self.hedges < 2 + self.requests // HEDGE_SHARE
            self.hedges += allowed
            return allowed


class _Try:
    """One request for a range, which another thread can cancel."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._socket: socket.socket | None = None

    def run(self, store: ObjectStore, url: str, offset: int, length: int, size: int) -> memoryview:
        view = memoryview(bytearray(length))
        try:
            # No ETag: the bytes are checked against a digest, and that saves a HEAD request.
            for _ in store.stream_range(
                url, offset, view, etag=None, size=size, on_socket=self._connected
            ):
                if self._cancelled.is_set():
                    raise ServiceUnavailable("the other request was faster", where=url)
        finally:
            self._socket = None
        return view

    def cancel(self) -> None:
        self._cancelled.set()
        if (held := self._socket) is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def _connected(self, found: socket.socket) -> None:
        self._socket = found
        if self._cancelled.is_set():
            self.cancel()
