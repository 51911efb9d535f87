"""Counts what passed between this node and each of its peers for one model.

Threads count, heartbeats report. Whether a peer is slow or corrupt shows only in comparison with
the rest of the fleet, so nothing is judged here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from paceline.schemas import EdgeTally

MAX_EDGES = 512  # edges in a heartbeat at most


@dataclass(slots=True)
class _Count:
    bytes: int = 0
    busy_s: float = 0.0
    pieces: int = 0
    corrupt: int = 0


class EdgeCounters:
    """Counts by ``(source key, reader)``; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Count] = {}
        self._under_way: dict[object, tuple[tuple[str, str], float]] = {}

    def sends(self, sender: object, source: str, reader: str) -> None:
        """Record that from now on ``sender`` has something to send to ``reader``.

        That time is in the tallies at once: when it was counted only after a piece had left, every
        second check of a far too slow edge found it idle, and detected it a second later.
        """
        with self._lock:
            self._under_way[sender] = (source, reader), time.monotonic()

    def sent(self, sender: object, count: int, *, goes_on: bool) -> None:
        """Count ``count`` bytes sent since ``sender`` began or its last call."""
        with self._lock:
            now_s = time.monotonic()
            key, since_s = self._under_way.pop(sender)
            edge = self._counts.setdefault(key, _Count())
            edge.bytes += count
            edge.busy_s += now_s - since_s
            if goes_on:
                self._under_way[sender] = key, now_s

    def rests(self, sender: object) -> None:
        """Record that ``sender`` has stopped, whatever was in flight."""
        with self._lock:
            self._under_way.pop(sender, None)

    def carried(self, source: str, reader: str, count: int, busy_s: float) -> None:
        """Count ``count`` bytes that took ``busy_s`` seconds with something to send."""
        with self._lock:
            edge = self._counts.setdefault((source, reader), _Count())
            edge.bytes += count
            edge.busy_s += busy_s

    def judged(self, source: str, reader: str, *, matched: int = 0, corrupt: int = 0) -> None:
        """Count pieces that matched their digests, and pieces that did not."""
        with self._lock:
            edge = self._counts.setdefault((source, reader), _Count())
            edge.pieces += matched
            edge.corrupt += corrupt

    def tallies(self) -> tuple[EdgeTally, ...]:
        """Return the counts so far, busiest first."""
        with self._lock:
            now_s, waiting = time.monotonic(), dict.fromkeys(self._counts, 0.0)
            for key, since_s in self._under_way.values():
                if key in waiting:  # of an edge that has carried nothing yet there is no count
                    waiting[key] += max(0.0, now_s - since_s)
            made = [
                EdgeTally(
                    source=source,
                    reader=reader,
                    bytes=each.bytes,
                    busy_s=each.busy_s + waiting[source, reader],
                    pieces=each.pieces,
                    corrupt=each.corrupt,
                )
                for (source, reader), each in self._counts.items()
            ]
        return tuple(sorted(made, key=lambda edge: -(edge.bytes + edge.pieces))[:MAX_EDGES])
