"""Group commit: makes verified pieces durable every 64 MiB or second, and at once at the end.

One thread a deployment, so that neither receiving nor planning ever waits for a disk's fsync.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.errors import Cancelled, PacelineError, StorageFailed
from paceline.relay.protocol import LocalFailed, PiecesDurable, SessionEvent
from paceline.relay.store.staging import Staging

log = logging.getLogger(__name__)

GROUP_BYTES = 64 * 1024 * 1024
GROUP_S = 1.0


class Committer:
    """Commits ``staging`` and reports PiecesDurable or LocalFailed."""

    def __init__(self, staging: Staging, report: Callable[[SessionEvent], None]) -> None:
        self._staging = staging
        self._report = report
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Commit at once: a group is full, or no piece is missing any more."""
        self._wake.set()

    def stop(self, *, wait: bool = False) -> None:
        """Stop after the commit in progress, without a last commit.

        ``wait`` is only for a thread that the reports do not wait for.
        """
        self._stopped = True
        self._wake.set()
        if wait:
            self._thread.join(30.0)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(GROUP_S)
            self._wake.clear()
            try:
                for extent in self._staging.commit():
                    self._report(PiecesDurable(extent))
            except Cancelled:
                return
            except PacelineError as error:
                self._report(LocalFailed(error))
                return
            except Exception as error:  # without this thread nothing ever becomes durable
                if not isinstance(error, OSError):
                    log.exception("committing broke")
                self._report(LocalFailed(StorageFailed("the disk failed", got=error)))
                return
