"""Bytes of one deployment on this node, counted where they pass a socket."""

from __future__ import annotations

import threading


class Counters:
    """Counts that several byte threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.received_bytes = self.origin_bytes = self.refetched_bytes = 0

    def add(self, *, received: int = 0, origin: int = 0, refetched: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.received_bytes += received
            self.origin_bytes += origin
            self.refetched_bytes += refetched
