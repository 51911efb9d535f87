"""What a driver writes beside a job's checkpoints, stacks and history, by a thread of its own.

A store that is slow keeps a caller for a minute, and whoever drives a gang must ask every node for
news within its lease (30 s). Best effort, in order, bounded: the restart matters more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from paceline.errors import PacelineError
from paceline.objects import ObjectStore, join_url
from paceline.training.history import History, history_url
from paceline.wire.base import canonical_json
from paceline.wire.training import TrainJob

log = logging.getLogger(__name__)

MOST_WAITING = 4096
CLOSE_S = 5.0


class Notes:
    """Writes of one job; use it in a ``with``, whose end waits a moment for what is left."""

    def __init__(self, job: TrainJob, store: ObjectStore) -> None:
        self._job = job
        self._store = store
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="notes", daemon=True)

    def __enter__(self) -> Notes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + CLOSE_S
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning("notes of a job could not all be kept job=%s", self._job.job_id)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def keep_stack(self, attempt: int, rank: int, text: str) -> str:
        """Keep where a rank hung; return the directory of its attempt's stacks."""
        url = self.stacks_of(attempt)
        self._put(join_url(url, f"rank-{rank}.txt"), text.encode())
        return url

    def stacks_of(self, attempt: int) -> str:
        """Return the directory of an attempt's stacks."""
        return join_url(self._job.checkpoint_url, self._job.job_id, "stacks", f"attempt-{attempt}")

    def keep_history(self, history: History) -> None:
        """Keep ``history`` for the job's next driver."""
        self._put(history_url(self._job), canonical_json(history))

    def _put(self, url: str, data: bytes) -> None:
        try:
            self._waiting.put_nowait((url, data))
        except queue.Full:
            log.warning("a note could not be kept, the store is too slow url=%s", url)

    def _run(self) -> None:
        while (note := self._waiting.get()) is not None:
            url, data = note
            try:
                self._store.put_bytes(url, data)
            except PacelineError as error:
                log.warning("a note could not be kept url=%s why=%s", url, error.one_line())
