"""A job's history across drivers, and the background writer that stores it beside checkpoints.

A restarted driver reads from ``JobHistory`` the failures (an ``auto`` checkpoint interval depends
on their rate), the skipped batches and the attempt number. Allowances (restarts, failures per
host) start anew with each driver, because a user decided to run it again. Writes are best effort,
ordered and bounded, in a thread: a slow store can block for a minute, while the driver must poll
every node within its lease (30 s). Does not depend on ranks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping

from pydantic import Field, ValidationError

from paceline.errors import PacelineError, SourceMissing
from paceline.schemas import Record, TrainJob, canonical_json
from paceline.storage import ObjectStore, join_url

log = logging.getLogger(__name__)

HISTORY_FILE = "history.json"
MAX_HISTORY_BYTES = 4 * 1024 * 1024


class JobHistory(Record):
    """Record of a job's earlier drivers."""

    attempts: int = Field(default=0, ge=0)
    failures: int = Field(default=0, ge=0)  # without requested stops and preemptions
    running_s: float = Field(default=0.0, ge=0)  # running time of the drivers
    hosts: dict[str, int] = {}  # failures by node
    shards: dict[str, int] = {}  # bad shards by digest
    skipped_batches: tuple[int, ...] = ()

    def with_hosts(self, more: Mapping[str, int]) -> dict[str, int]:
        """Return the failures per host, including ``more``."""
        return {
            each: self.hosts.get(each, 0) + more.get(each, 0)
            for each in sorted({*self.hosts, *more})
        }

    def with_shards(self, more: Mapping[str, int]) -> dict[str, int]:
        """Return the count per bad shard, including ``more``; a repeated report does not add up."""
        return {
            each: max(self.shards.get(each, 0), more.get(each, 0))
            for each in sorted({*self.shards, *more})
        }


def read_history(job: TrainJob, store: ObjectStore) -> JobHistory:
    """Return the stored history of ``job``; an empty one where none can be read."""
    url = history_url(job)
    try:
        return JobHistory.model_validate_json(store.get_bytes(url, MAX_HISTORY_BYTES))
    except SourceMissing:
        return JobHistory()
    except (PacelineError, ValidationError) as error:
        log.warning("a job's history cannot be read: counts begin at 0 url=%s why=%s", url, error)
        return JobHistory()


def history_url(job: TrainJob) -> str:
    """Return the URL of the history of ``job``."""
    return join_url(job.checkpoint_url, job.job_id, HISTORY_FILE)


MAX_QUEUED = 4096
CLOSE_S = 5.0


class HistoryWriter:
    """Background writer of one job; a context manager that flushes for ``CLOSE_S`` at its end."""

    def __init__(self, job: TrainJob, store: ObjectStore) -> None:
        self._job = job
        self._store = store
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="notes", daemon=True)

    def __enter__(self) -> HistoryWriter:
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
        """Store the stacks of a hung rank; return the URL prefix of its attempt's stacks."""
        url = join_url(self._job.checkpoint_url, self._job.job_id, "stacks", f"attempt-{attempt}")
        self._put(join_url(url, f"rank-{rank}.txt"), text.encode())
        return url

    def keep_history(self, history: JobHistory) -> None:
        """Store ``history`` for the job's next driver."""
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
