"""Workers whose identity was taken back: they are served no more, whatever their certificate says.

A certificate cannot be called back, and nobody reads revocation lists in the middle of a stream; so
the coordinator names these workers in its answers to beats. It knows no transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.errors import AccessDenied

log = logging.getLogger(__name__)


class Barred:
    """Written by the thread that hears the coordinator, read by each that serves a peer."""

    def __init__(self) -> None:
        self._workers: frozenset[str] = frozenset()

    def replace(self, workers: Iterable[str]) -> None:
        """Bar these workers and nobody else, from now on."""
        found = frozenset(workers)
        if found != self._workers:
            log.warning("served no more: %s", ", ".join(sorted(found)) or "nobody is barred")
            self._workers = found

    def require(self, worker_id: str, admission: str = "") -> None:
        """Raise AccessDenied where ``worker_id`` is barred, or what ``admission`` names.

        A worker that was let in again has another certificate; the one before stays barred.
        """
        if worker_id in self._workers or admission in self._workers:
            raise AccessDenied(
                "this worker's identity was taken back",
                got=worker_id,
                do="Let it join again with a new join token.",
            )
