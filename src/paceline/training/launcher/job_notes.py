"""What a driver writes beside a job's checkpoints, stacks and history, by a thread of its own.

A store that is slow keeps a caller for a minute, and whoever drives a gang must ask every node for
news within its lease (30 s). Best effort, in order, bounded: the restart matters more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping

from pydantic import Field, ValidationError

from paceline.errors import PacelineError, SourceMissing
from paceline.schemas.base import Record, canonical_json
from paceline.schemas.training import TrainJob
from paceline.storage import ObjectStore, join_url

# What became of a job over all its drivers, kept beside its checkpoints.
#
# A driver that is killed, and run again, knows what failed before: how often (an ``auto`` interval
# between checkpoints depends on it), which batches are passed over (each is listed in the result),
# and how many attempts there were. Allowances (restarts, failures of a host) begin anew with each
# driver: running it again is somebody's decision. Best effort: a store that is away costs the
# memory, not the job. Knows no ranks.

log = logging.getLogger(__name__)

HISTORY_FILE = "history.json"
MOST_BYTES = 4 * 1024 * 1024


class History(Record):
    """All that earlier drivers of one job left."""

    attempts: int = Field(default=0, ge=0)
    failures: int = Field(default=0, ge=0)  # of machines: what was asked for does not count
    running_s: float = Field(default=0.0, ge=0)  # of drivers, up to their last failure or end
    hosts: dict[str, int] = {}
    shards: dict[str, int] = {}  # by digest
    skipped_batches: tuple[int, ...] = ()

    def with_hosts(self, more: Mapping[str, int]) -> dict[str, int]:
        """Return how often each host failed, ``more`` included."""
        return _sums(self.hosts, more)

    def with_shards(self, more: Mapping[str, int]) -> dict[str, int]:
        """Return how often each shard was bad, ``more`` included: once is once, whoever saw it."""
        return {
            each: max(self.shards.get(each, 0), more.get(each, 0)) for each in _keys(self, more)
        }


def read_history(job: TrainJob, store: ObjectStore) -> History:
    """Return what earlier drivers of ``job`` left; an empty one where there is none to be read."""
    url = history_url(job)
    try:
        return History.model_validate_json(store.get_bytes(url, MOST_BYTES))
    except SourceMissing:
        return History()
    except (PacelineError, ValidationError) as error:
        log.warning("a job's history cannot be read: counts begin at 0 url=%s why=%s", url, error)
        return History()


def history_url(job: TrainJob) -> str:
    """Return where the history of ``job`` is kept."""
    return join_url(job.checkpoint_url, job.job_id, HISTORY_FILE)


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {each: one.get(each, 0) + other.get(each, 0) for each in sorted({*one, *other})}


def _keys(history: History, more: Mapping[str, int]) -> list[str]:
    return sorted({*history.shards, *more})


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
