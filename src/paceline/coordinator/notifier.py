"""Wakes coroutines of any event loop from any thread; holds the newest events for long polls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from paceline.schemas import Event, EventList, EventName


class Notifier:
    """Wakes every coroutine that is waiting when ``notify`` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        # One call per loop: with 10,000 heartbeats held, one call each would block the caller.
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for each in waiting:
            loops.setdefault(each.get_loop(), []).append(each)
        for loop, futures in loops.items():
            with suppress(RuntimeError):  # the loop is closed: it has no waiters left
                loop.call_soon_threadsafe(_wake, futures)

    def listen(self) -> asyncio.Future[None]:
        """Return a future that the next ``notify`` completes; create it before reading the state,
        so that no change is missed in between.
        """
        changed = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.add(changed)
        return changed

    def leave(self, changed: asyncio.Future[None]) -> None:
        with self._lock:
            self._waiting.discard(changed)
        changed.cancel()


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for each in waiting:
        if not each.done():
            each.set_result(None)


# The newest events, bounded and in memory; the audit store has the full history.

RING_EVENTS = 10_000
MAX_PAGE = 1_000
# Callers' names and addresses are for the audit history, not for every reader of events.
PRIVATE = frozenset({EventName.CHANGE_ACCEPTED, EventName.CHANGE_REFUSED})


class EventRing:
    """One thread appends, many read; appending to a deque is atomic."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=RING_EVENTS)
        self.last = 0  # number of the newest event

    def extend(self, events: Iterable[Event]) -> None:
        for event in events:
            self._events.append(event)
            self.last = event.seq

    def after(self, seq: int) -> EventList:
        """Return the events after number ``seq`` that are still held."""
        last = self.last
        if seq >= last:
            return EventList(events=(), last=last, first=self._first())
        # Sequence numbers have no gaps, so the index is computed, not searched.
        held = list(self._events)
        start = max(0, len(held) - (held[-1].seq - seq)) if held else 0
        public = (e for e in islice(held, start, None) if e.seq > seq and e.name not in PRIVATE)
        newer = tuple(islice(public, MAX_PAGE))
        return EventList(
            events=newer, last=newer[-1].seq if newer else last, first=held[0].seq if held else 0
        )

    def _first(self) -> int:
        try:
            return self._events[0].seq
        except IndexError:
            return 0
