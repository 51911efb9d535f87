"""Wakes coroutines of any event loop from any thread: how a held answer hears of a new plan."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from paceline.schemas.calls import EventList
from paceline.schemas.events import Event, EventName


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


# The newest events, for whoever watches: bounded, numbered, in memory.
#
# The audit history in the store has them all; here is only what a long poll can still catch up
# with.

RING_EVENTS = 10_000
MOST_AT_ONCE = 1_000
# Who asked for what from which address is for the audit history, not for every watcher.
PRIVATE = frozenset({EventName.CHANGE_ACCEPTED, EventName.CHANGE_REFUSED})


class EventRing:
    """Appended by one thread, read by many; appending to a deque is atomic."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: deque[Event] = deque(events, maxlen=RING_EVENTS)
        self._last = self._events[-1].seq if self._events else 0

    @property
    def last(self) -> int:
        """Return the number of the newest event, 0 before the first."""
        return self._last

    def extend(self, events: Iterable[Event]) -> None:
        """Add events, oldest first."""
        for event in events:
            self._events.append(event)
            self._last = event.seq

    def after(self, seq: int) -> EventList:
        """Return what came after number ``seq`` and is still held."""
        last = self._last
        if seq >= last:
            return EventList(events=(), last=last, first=self._first())
        # Numbers have no gaps, so the place can be computed and need not be sought.
        held = list(self._events)
        start = max(0, len(held) - (held[-1].seq - seq)) if held else 0
        told = (e for e in islice(held, start, None) if e.seq > seq and e.name not in PRIVATE)
        newer = tuple(islice(told, MOST_AT_ONCE))
        return EventList(
            events=newer, last=newer[-1].seq if newer else last, first=held[0].seq if held else 0
        )

    def _first(self) -> int:
        try:
            return self._events[0].seq
        except IndexError:
            return 0
