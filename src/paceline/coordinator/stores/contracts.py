"""The contracts of the coordinator's three stores, each with two backends.

========== =================================================== ================= =================
contract   content                                             one machine       cluster
========== =================================================== ================= =================
Coordination deployments, plans, workers, receipts, keys,      SQLite            etcd
           tokens, the ledger, the event outbox, the leader
Progress   each worker's progress and last heartbeat           memory            Redis
Audit      every event, for as long as the operator wants      SQLite            PostgreSQL
========== =================================================== ================= =================

Only Coordination must not lose anything. Each of its writes proves in its own transaction that the
writer still leads (I4). Progress may be lost at any moment. Audit is filled from Coordination's
outbox, so an event is committed together with the change that it describes.

Every method may be called from any thread, also concurrently, and returns or raises within the
time limits of its backend. An unreachable store raises ServiceUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.coordinator.ledger import LedgerEntry
from paceline.coordinator.state.messages import Effect, EmitEvent, LoadedState
from paceline.coordinator.state.persisted_state import PersistedState
from paceline.errors import ServiceUnavailable, StaleEpoch
from paceline.schemas.events import Event, EventName
from paceline.schemas.records import StageRecord, WorkerProgress

OUTBOX_EVENTS = 10_000  # unshipped; with so many, every further commit is refused
RECENT_EVENTS = 1_000  # shipped, and still kept for new readers of the event stream
PRUNE_EVENTS = 20_000  # deleted from the audit store in one transaction
QUERY_EVENTS = 1_000  # the most events that one query of the audit store returns


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


@runtime_checkable
class Coordination(Protocol):
    """The durable store of the state, with leader election and fenced writes."""

    @property
    def backend(self) -> str:
        """Return the backend and its version, such as ``etcd 3.4.23``, for display."""
        ...

    @property
    def standbys(self) -> bool:
        """Return whether several replicas may share this store.

        Where they may not (SQLite), ``campaign`` takes over from the previous leader at once.
        """
        ...

    def check(self) -> None:
        """Raise ServiceUnavailable, with what to do, where the store cannot be used now."""
        ...

    # --- leadership ------------------------------------------------------------------------------

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Block until this replica leads and return its term; None once ``give_up()`` is true.

        ``give_up`` is called at least five times a second. An unavailable store is retried. One
        campaign at a time in a process.
        """
        ...

    def resign(self, term: Term) -> None:
        """End ``term`` so that another replica can lead at once. Never raises."""
        ...

    def is_leading(self, term: Term) -> bool:
        """Return whether ``term`` certainly still leads: a local check without I/O.

        False once the lease may have expired by the local clock, which wall-time jumps do not
        affect, or once a write was refused. True proves nothing about a later write: only
        ``commit`` does.
        """
        ...

    def leader(self) -> Term | None:
        """Return the current leader's term from the store, or None."""
        ...

    # --- state -----------------------------------------------------------------------------------

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        """Commit everything in ``effects`` atomically; return the events with their numbers.

        ``Answer`` effects are ignored. Raises StaleEpoch where ``term`` no longer leads, and
        ServiceUnavailable where the store is unavailable or the outbox is full. After any error
        the outcome may be unknown: the caller must ``load`` before it continues, and a commit
        before that raises ServiceUnavailable. Once ``load`` has returned, an older commit that it
        does not show can no longer take effect.
        """
        ...

    def load(self, now_s: float) -> LoadedState:
        """Return everything; after a reboot the durations of running deployments are rebased.

        ``now_s`` is the caller's monotonic clock. Where the backend caches (etcd), a repeated call
        reads only what changed.
        """
        ...

    def revision(self) -> int:
        """Return a number that grows with each change; read it before ``load``, then ``wait``."""
        ...

    def wait(self, after: int, timeout_s: float) -> int:
        """Block until something changed since revision ``after``, or for ``timeout_s``.

        Returns the newest revision, which is ``after`` where nothing changed. A change of leaders
        counts as a change.
        """
        ...

    # --- the ledger of stages --------------------------------------------------------------------

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        ...

    def ledger(self) -> Iterable[LedgerEntry]:
        """Return the size and age of each ledger record."""
        ...

    def keep_stage(self, term: Term, record: StageRecord, told: EmitEvent) -> list[Event]:
        """Put ``record`` into the ledger, replacing an older one; errors as of ``commit``.

        The caller checks the size limits before (``ledger``).
        """
        ...

    # --- the outbox of events --------------------------------------------------------------------

    def outbox(self) -> Outbox:
        """Return the range of event numbers that wait for the audit store."""
        ...

    def events_after(self, seq: int, limit: int) -> list[Event]:
        """Return up to ``limit`` kept events after number ``seq``, oldest first.

        Kept are the unshipped events and the newest RECENT_EVENTS of the others.
        """
        ...

    def trim_events(self, term: Term, seq: int) -> None:
        """Record that the audit store has every event up to ``seq``; errors as of ``commit``."""
        ...

    def number_after(self, term: Term, seq: int) -> None:
        """Number further events above ``seq``, because the audit store has newer events.

        This happens where this store was restored from an older backup. Errors as of ``commit``.
        """
        ...

    def close(self) -> None:
        """Release files, connections and threads. A held term ends when its lease expires."""
        ...


@runtime_checkable
class Progress(Protocol):
    """Values that change with every heartbeat. They may be lost at any moment; nothing raises.

    Writing costs the caller no I/O: the newest value of each part is sent in the background and
    dropped where the backend is unavailable, so reads may be incomplete or slightly old.
    """

    @property
    def backend(self) -> str:
        """Return the backend and its version, for display."""
        ...

    @property
    def healthy(self) -> bool:
        """Return whether the last exchange with the backend succeeded."""
        ...

    def begin(self) -> None:
        """Drop what this process stored in an earlier term, so that it is not sent again."""
        ...

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        """Store parts by (deployment_id, worker_id), and heartbeat times by worker (Unix time)."""
        ...

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        """Return the stored parts of one deployment, by worker."""
        ...

    def beats(self) -> dict[str, float]:
        """Return the time of each worker's last heartbeat, where it is stored."""
        ...

    def drop(self, deployment_id: str) -> None:
        """Delete a deployment's parts."""
        ...

    def close(self) -> None:
        """Send pending values, for a second at most, and release connections."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EventQuery:
    """A query of the audit store: events numbered in (after, before), with times in [since, until)
    in Unix time. ``limit`` is capped at QUERY_EVENTS.
    """

    after: int = 0
    before: int | None = None
    limit: int = QUERY_EVENTS
    newest_first: bool = False
    deployment_id: str | None = None
    worker_id: str | None = None
    names: Sequence[EventName] = ()
    since: float | None = None
    until: float | None = None


EVERYTHING = EventQuery()


@runtime_checkable
class Audit(Protocol):
    """The append-only history of events."""

    @property
    def backend(self) -> str:
        """Return the backend and its version, for display."""
        ...

    def check(self) -> None:
        """Raise ServiceUnavailable, with what to do, where the store cannot be used now."""
        ...

    def append(self, events: Sequence[Event]) -> None:
        """Store ``events``, all or none; numbers that are there already are not stored twice.

        Raises Conflict where a number belongs to another event, ServiceUnavailable where the
        outcome is unknown: appending the same events again is safe.
        """
        ...

    def last(self) -> int:
        """Return the highest stored number, 0 before the first."""
        ...

    def query(self, asked: EventQuery = EVERYTHING) -> list[Event]:
        """Return the matching events; to page, pass the last number as ``after`` (or as ``before``
        where the newest come first).
        """
        ...

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep`` (at least 1); return how many.

        At most PRUNE_EVENTS per call: call again where it returns that many.
        """
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


# A deployment's memo as text; its monotonic times are invalid after a reboot and are rebased.


def write_memo(memo: PersistedState) -> str:
    """Return ``memo`` as JSON."""
    return memo.to_json()


def read_memo(text: str, now_s: float, *, same_boot: bool) -> PersistedState:
    """Return the memo in ``text``.

    Where another boot or machine wrote it, its durations continue from their stored values.
    """
    memo = PersistedState.from_json(text)
    # Linux's monotonic clock is shared by all processes, and restarts with each boot.
    return memo if same_boot else memo.rebased(now_s)


def boot_id() -> str:
    """Return an identifier of this machine's current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown boot"


# Errors that every coordination backend raises, with the same text.


def stale(term: Term, newest: int, where: object) -> StaleEpoch:
    """Return the error for a write by a term that has ended."""
    ended = newest == term.epoch
    return StaleEpoch(
        "this term has ended" if ended else "a newer coordinator leads",
        got=f"epoch {term.epoch}",
        wanted="a new campaign" if ended else f"epoch {newest}",
        where=where,
        do="Stop deciding; campaign again or stop this process.",
    )


def load_first(where: object) -> ServiceUnavailable:
    """Return the error for a write after one whose outcome is unknown."""
    return ServiceUnavailable(
        "an earlier write failed, and nobody knows whether it was kept",
        wanted="load() before the next write",
        where=where,
        do="Ask again.",
    )


def outbox_is_full(waiting: int) -> ServiceUnavailable:
    """Return the error for a write with events while the outbox is full."""
    return ServiceUnavailable(
        "too many events wait for the audit store",
        got=f"{waiting} events",
        wanted=f"fewer than {OUTBOX_EVENTS}",
        do="Bring the audit store back; the events are then shipped and writes go on.",
    )
