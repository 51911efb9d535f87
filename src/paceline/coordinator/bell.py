"""Wakes coroutines of any event loop from any thread: how a held answer hears of a new plan."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Bell:
    """Rung by whoever decided something; heard by whoever waits at that moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake everybody who waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        # One call a loop: with 10,000 beats held, as many calls would hold up whoever rings.
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for each in waiting:
            loops.setdefault(each.get_loop(), []).append(each)
        for loop, futures in loops.items():
            with suppress(RuntimeError):  # it has closed: nobody waits there any more
                loop.call_soon_threadsafe(_wake, futures)

    def listen(self) -> asyncio.Future[None]:
        """Return what is done once the bell rings; begin to listen before asking for news, so that
        none is missed between.
        """
        heard = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.add(heard)
        return heard

    def leave(self, heard: asyncio.Future[None]) -> None:
        """Listen no longer."""
        with self._lock:
            self._waiting.discard(heard)
        heard.cancel()


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for each in waiting:
        if not each.done():
            each.set_result(None)
