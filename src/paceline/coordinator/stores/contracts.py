"""The coordinator's three stores, each with two backends, and the values that they exchange.

========== =================================================== ================= =================
contract   content                                             one machine       cluster
========== =================================================== ================= =================
Coordination deployments, plans, workers, receipts, keys,      SQLite            etcd
           tokens, the ledger, the event outbox, the leader
Progress   each worker's progress and last heartbeat           memory            Redis
Audit      every event, for as long as the operator wants      SQLite            PostgreSQL
========== =================================================== ================= =================

Only Coordination must not lose anything. Progress may be lost at any moment. Audit is filled from
Coordination's outbox, so an event is committed together with the change that it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.schemas import EventName

MAX_OUTBOX_EVENTS = 10_000  # unshipped; with so many, every further commit is refused
RECENT_EVENTS = 1_000  # shipped, and still kept for new readers of the event stream
PRUNE_EVENTS = 20_000  # deleted from the audit store in one transaction
MAX_QUERY_EVENTS = 1_000  # the most events that one query of the audit store returns


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that campaigns for leadership."""

    replica_id: str
    url: str  # at which clients reach it


@dataclass(frozen=True, slots=True)
class Term:
    """One replica's term as the leader; epochs strictly increase over all terms of a store."""

    epoch: int
    replica_id: str
    url: str


@dataclass(frozen=True, slots=True)
class Outbox:
    """The event numbers that bound what is still to be shipped to the audit store."""

    shipped: int  # the newest event that the audit store has
    last: int  # the newest committed event

    @property
    def waiting(self) -> int:
        """Return how many events have yet to be shipped."""
        return self.last - self.shipped


@dataclass(frozen=True, kw_only=True, slots=True)
class EventQuery:
    """A query of the audit store: events numbered in (after, before), with times in [since, until)
    in Unix time. ``limit`` is capped at MAX_QUERY_EVENTS.
    """

    after: int = 0
    before: int | None = None
    limit: int = MAX_QUERY_EVENTS
    newest_first: bool = False
    deployment_id: str | None = None
    worker_id: str | None = None
    names: Sequence[EventName] = ()
    since: float | None = None
    until: float | None = None


ALL_EVENTS = EventQuery()
