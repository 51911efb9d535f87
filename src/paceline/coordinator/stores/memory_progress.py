"""The progress store in process memory: for one replica, lost when it ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from paceline.schemas.records import WorkerProgress


class MemoryProgress:
    """Implements the Progress contract with two dictionaries and a lock."""

    backend = "memory"
    healthy = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, dict[str, WorkerProgress]] = {}
        self._beats: dict[str, float] = {}

    def begin(self) -> None:
        """Drop what was stored in an earlier term."""
        with self._lock:
            self._parts, self._beats = {}, {}

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        """Store parts and heartbeat times."""
        with self._lock:
            for (deployment_id, worker_id), part in parts.items():
                self._parts.setdefault(deployment_id, {})[worker_id] = part
            self._beats.update(beats)

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        """Return the parts of one deployment."""
        with self._lock:
            return dict(self._parts.get(deployment_id, {}))

    def beats(self) -> dict[str, float]:
        """Return the time of each worker's last heartbeat."""
        with self._lock:
            return dict(self._beats)

    def drop(self, deployment_id: str) -> None:
        """Delete a deployment's parts."""
        with self._lock:
            self._parts.pop(deployment_id, None)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
