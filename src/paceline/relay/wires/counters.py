"""Bytes of one deployment on this node, counted where they pass a socket."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Counters:
    """Counts that several byte threads add to; ``covering`` hears of each new count of what was
    read from the origin, which begins at ``origin_bytes``.
    """

    def __init__(
        self, origin_bytes: int = 0, covering: Callable[[int], None] = lambda _read: None
    ) -> None:
        self._lock = threading.Lock()
        self._covering = covering
        self.received_bytes = self.refetched_bytes = 0
        self.origin_bytes = origin_bytes

    def add(self, *, received: int = 0, origin: int = 0, refetched: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.received_bytes += received
            self.origin_bytes += origin
            self.refetched_bytes += refetched
            if origin:
                self._covering(self.origin_bytes)
