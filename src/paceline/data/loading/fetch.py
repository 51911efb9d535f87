"""Fetch objects from the store in ranges over several connections, with hedged requests.

A range that has not arrived after three times the recent median is requested again on another
connection, and after three times that once more; the first answer is used and the other requests
are cancelled ("hedged requests", Dean and Barroso, The Tail at Scale, 2013). Hedges are at most a
tenth of the requests, so that a store that is slow as a whole does not get twice the load. Retries
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
MOST_TRIES = 3  # of one range, concurrently
HEDGE_SHARE = 10  # one hedge in so many requests
DEADLINE_S = 600.0  # of one range, including hedges


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

        Calls it from this thread only, with at most ``RANGES`` ranges in memory. Raises
        SourceMissing, CorruptData where the object has another size, ServiceUnavailable.
        """
        offsets = deque(range(0, size, RANGE_BYTES))
        running: dict[Future[memoryview], _Range] = {}
        try:
            while offsets or running:
                while offsets and len(running) < RANGES:
                    one = _Range(self, url, offsets[0], min(RANGE_BYTES, size - offsets[0]), size)
                    # wait for the first connection; take more only while some are free
                    if not self._slots.acquire(timeout=0.0 if running else DEADLINE_S):
                        break
                    offsets.popleft()
                    running[one.start()] = one
                if not running:
                    raise ServiceUnavailable("no connection is free for a data shard", where=url)
                due = min(each.hedge_due_s() for each in running.values())
                done, _ = wait(running, timeout=due, return_when=FIRST_COMPLETED)
                for future in done:
                    if (its := running.pop(future, None)) is None:
                        continue  # another request for this range finished at the same moment
                    data = its.finished(future, running)
                    if data is not None:
                        write(its.offset, data)
                for future in [*running]:
                    if (second := running[future].hedge()) is not None:
                        running[second] = running[future]
        except PermanentError as error:
            if type(error) is PermanentError:  # a range beyond the end has no specific error
                got = self._store.head(url).size
                if got != size:
                    raise _other_size(url, got, size) from error
            raise
        finally:
            for one in running.values():
                one.cancel()

    def deadline_s(self) -> float:
        """Return the seconds after which a range is requested a second time."""
        with self._lock:
            if len(self._seen_s) < SEEN_WANTED:
                return HEDGE_START_S
            return max(HEDGE_FLOOR_S, HEDGE_FACTOR * statistics.median(self._seen_s))

    def may_hedge(self) -> bool:
        """Return whether another hedge is within the limit of a tenth, and count it."""
        with self._lock:
            allowed = self.hedges < 2 + self.requests // HEDGE_SHARE
            self.hedges += allowed
            return allowed

    def took(self, seconds: float) -> None:
        """Record the duration of a range."""
        with self._lock:
            self._seen_s.append(seconds)


class _Range:
    """One range, requested up to three times; holds one of the fetcher's slots."""

    def __init__(self, owner: Fetcher, url: str, offset: int, length: int, size: int) -> None:
        self._owner, self._url, self._size = owner, url, size
        self.offset, self._length = offset, length
        self._tries: list[_Try] = []
        self._began_s = 0.0
        self._over = False
        self._due = 0  # number of hedges due so far

    def start(self) -> Future[memoryview]:
        """Send the first request; the caller has acquired the slot."""
        self._began_s = time.monotonic()
        with self._owner._lock:
            self._owner.requests += 1
        return self._ask()

    def hedge_due_s(self) -> float:
        """Return the seconds until this range is due for a hedge or its deadline."""
        return max(0.001, self._began_s + self._limit_s() - time.monotonic())

    def _limit_s(self) -> float:
        if self._due >= MOST_TRIES - 1:
            return DEADLINE_S
        return min(DEADLINE_S, self._owner.deadline_s() * (2.0 ** (self._due + 1) - 1))

    def hedge(self) -> Future[memoryview] | None:
        """Return another request if one is due and allowed, else None."""
        waited_s = time.monotonic() - self._began_s
        if waited_s > DEADLINE_S:
            raise ServiceUnavailable(
                "a range of a data shard does not come",
                got=f"{self._length} bytes not complete after {waited_s:.0f} s",
                where=self._url,
            )
        if self._over or waited_s < self._limit_s():
            return None
        self._due += 1
        return self._ask() if self._owner.may_hedge() else None

    def finished(
        self, future: Future[memoryview], others: dict[Future[memoryview], _Range]
    ) -> memoryview | None:
        """Return the bytes; None if another request of this range has returned them or is still
        running.

        Raises the error of the last request.
        """
        if self._over:
            return None
        try:
            data = future.result()
        except TemporaryError:
            if any(each is self for each in others.values()):
                return None
            self.cancel()
            raise
        except BaseException:
            self.cancel()
            raise
        self._owner.took(time.monotonic() - self._began_s)
        for each in [each for each, one in others.items() if one is self]:
            del others[each]
        self.cancel()
        return data

    def cancel(self) -> None:
        """Cancel the running requests and release the slot."""
        if not self._over:
            self._over = True
            self._owner._slots.release()
        for each in self._tries:
            each.cancel()

    def _ask(self) -> Future[memoryview]:
        one = _Try(self._owner._store, self._url, self.offset, self._length, self._size)
        self._tries.append(one)
        return self._owner._pool.submit(one.run)


class _Try:
    """One request for a range, which another thread can cancel."""

    def __init__(self, store: ObjectStore, url: str, offset: int, length: int, size: int) -> None:
        self._ask = (store, url, offset, length, size)
        self._cancelled = threading.Event()
        self._socket: socket.socket | None = None

    def run(self) -> memoryview:
        store, url, offset, length, size = self._ask
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


def _other_size(url: str, got: int, wanted: int) -> CorruptData:
    return CorruptData(
        "object has another size", got=f"{got} bytes", wanted=f"{wanted} bytes", where=url
    )
