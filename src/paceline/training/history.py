"""What became of a job over all its drivers, kept beside its checkpoints.

A driver that is killed, and run again, knows what failed before: how often (an ``auto`` interval
between checkpoints depends on it), which batches are passed over (each is listed in the result),
and how many attempts there were. Allowances (restarts, failures of a host) begin anew with each
driver: running it again is somebody's decision. Best effort: a store that is away costs the memory,
not the job. Knows no ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pydantic import Field, ValidationError

from paceline.errors import PacelineError, SourceMissing
from paceline.objects import ObjectStore, join_url
from paceline.wire.base import Record
from paceline.wire.training import TrainJob

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
