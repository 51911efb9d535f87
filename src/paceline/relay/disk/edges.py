"""What passed between this node and each of its peers for one model: threads count, beats tell.

Whether a peer is slow or corrupting stands out only beside the rest of the fleet, so nothing is
judged here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from paceline.wire.calls import EdgeTally

MOST = 512  # edges a beat may carry


@dataclass(slots=True)
class _Count:
    bytes: int = 0
    busy_s: float = 0.0
    pieces: int = 0
    corrupt: int = 0


class Edges:
    """Counts by ``(source key, reader)``; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Count] = {}

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
            made = [
                EdgeTally(
                    source=source,
                    reader=reader,
                    bytes=each.bytes,
                    busy_s=each.busy_s,
                    pieces=each.pieces,
                    corrupt=each.corrupt,
                )
                for (source, reader), each in self._counts.items()
            ]
        return tuple(sorted(made, key=lambda edge: -(edge.bytes + edge.pieces))[:MOST])
