"""The three contracts of what a coordinator keeps, each with two backends.

========== =================================================== ================= =================
contract   what                                                one machine       cluster
========== =================================================== ================= =================
Coordination deployments, plans, workers, receipts, keys,      SQLite            etcd
           tokens, the ledger, the outbox of events, who leads
Progress   how far each worker is, and when it last beat       memory            Redis
Audit      every event, for as long as the operator wants      SQLite            PostgreSQL
========== =================================================== ================= =================

Coordination is the only one that must not lose anything. Each of its writes proves in its own
transaction that the writer still leads (I4). Progress may vanish at any moment. Audit is filled
from Coordination's outbox, so an event is committed together with the change that it tells of.

Every method may be called from any thread, also by several at once, and returns or raises within
the time limits of its backend. What cannot be reached raises ServiceUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.coordinator.ledger import LedgerLine
from paceline.coordinator.state.messages import Effect, Kept, Observed
from paceline.coordinator.state.persisted_state import Memo
from paceline.errors import ServiceUnavailable, StaleEpoch
from paceline.schemas.events import Event, EventName
from paceline.schemas.records import StageRecord, WorkerProgress

OUTBOX_EVENTS = 10_000  # waiting for the audit store; with so many, nothing more is committed
RECENT_EVENTS = 1_000  # shipped already and still kept, for who begins to follow
PRUNE_EVENTS = 20_000  # deleted from the audit store in one go
QUERY_EVENTS = 1_000  # the most that one question to the audit store is answered with


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that would lead."""

    replica_id: str
    url: str  # where clients reach it


@dataclass(frozen=True, slots=True)
class Term:
    """One replica's time as the leader; epochs strictly increase over all terms of a store."""

    epoch: int
    replica_id: str
    url: str


@dataclass(frozen=True, slots=True)
class Outbox:
    """Where the events stand on their way to the audit store, by their numbers."""

    shipped: int  # the newest one that the audit store is known to have
    last: int  # the newest one committed

    @property
    def waiting(self) -> int:
        """Return how many have yet to be shipped."""
        return self.last - self.shipped


@runtime_checkable
class Coordination(Protocol):
    """What must survive, and who may write it."""

    @property
    def backend(self) -> str:
        """Return the backend and its version, such as ``etcd 3.4.23``, for people."""
        ...

    @property
    def standbys(self) -> bool:
        """Return whether several replicas may share this store.

        Where they may not (SQLite), ``campaign`` takes over at once from whoever led.
        """
        ...

    def check(self) -> None:
        """Raise ServiceUnavailable, saying what to do, where the store cannot be used now."""
        ...

    # --- who leads -------------------------------------------------------------------------------

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Block until this replica leads and return its term; None once ``give_up()`` is true.

        ``give_up`` is asked at least five times a second. A store that is away is waited for.
        One campaign at a time in a process.
        """
        ...

    def resign(self, term: Term) -> None:
        """End ``term`` and let the next one lead at once. Never raises: a lease ends by itself."""
        ...

    def is_leading(self, term: Term) -> bool:
        """Return whether ``term`` certainly still leads: local knowledge, without I/O.

        False once the lease may have run out by the local clock, which jumps of the wall's time do
        not touch, or once a write was refused. What was true a moment ago proves nothing about a
        write: only ``commit`` does.
        """
        ...

    def leader(self) -> Term | None:
        """Return who leads, as the store has it now."""
        ...

    # --- state -----------------------------------------------------------------------------------

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        """Keep everything that ``effects`` ask for, or nothing; return the events, numbered.

        ``Answer`` effects are passed over. Raises StaleEpoch where ``term`` no longer leads, and
        ServiceUnavailable where the store is away or too many events wait for the audit store.
        After any error the outcome may be unknown: the caller must ``load`` before it goes on, and
        a commit before that raises ServiceUnavailable. Once ``load`` has returned, an older commit
        that it does not show cannot come to pass any more.
        """
        ...

    def load(self, now_s: float) -> Kept:
        """Return everything; after a reboot the durations of running deployments begin anew.

        ``now_s`` is the caller's monotonic clock. A standby that asks again pays for what changed.
        """
        ...

    def revision(self) -> int:
        """Return a number that grows with each change; ask before ``load``, then ``wait`` on it."""
        ...

    def wait(self, after: int, timeout_s: float) -> int:
        """Block until something changed since revision ``after``, or for ``timeout_s``.

        Returns the newest revision, which is ``after`` where nothing changed. A change of leaders
        is a change.
        """
        ...

    # --- the ledger of stages --------------------------------------------------------------------

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        ...

    def ledger(self) -> Iterable[LedgerLine]:
        """Return a line for each record of the ledger."""
        ...

    def keep_stage(self, term: Term, record: StageRecord, told: Observed) -> list[Event]:
        """Put ``record`` into the ledger, in place of an older one; errors as of ``commit``.

        How large it may be, and the ledger with it, is decided before (``ledger``).
        """
        ...

    # --- the outbox of events --------------------------------------------------------------------

    def outbox(self) -> Outbox:
        """Return which events wait for the audit store."""
        ...

    def events_after(self, seq: int, limit: int) -> list[Event]:
        """Return up to ``limit`` events after number ``seq``, oldest first, that are still kept.

        Kept are those that wait and the newest RECENT_EVENTS of the others.
        """
        ...

    def trim_events(self, term: Term, seq: int) -> None:
        """Note that the audit store has every event up to ``seq``; errors as of ``commit``."""
        ...

    def number_after(self, term: Term, seq: int) -> None:
        """Number further events above ``seq``: the audit store has more than this store knows of.

        Happens where this store was restored from an older backup. Errors as of ``commit``.
        """
        ...

    def close(self) -> None:
        """Let go of files, connections and threads. A term that is held ends with its lease."""
        ...


@runtime_checkable
class Progress(Protocol):
    """What changes with every beat. It may all be gone at any moment; nothing here raises.

    Writing costs the caller no I/O: the newest value of each part is sent in the background and
    dropped where the backend is away, so that what is read lacks it or is a little older.
    """

    @property
    def backend(self) -> str:
        """Return the backend and its version, for people."""
        ...

    @property
    def healthy(self) -> bool:
        """Return whether the last exchange with the backend worked."""
        ...

    def begin(self) -> None:
        """Forget what this process put in an earlier term, so that it does not come again."""
        ...

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        """Note parts by (deployment_id, worker_id), and by worker when it last beat (Unix time)."""
        ...

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        """Return the parts of one deployment that are known, by worker."""
        ...

    def beats(self) -> dict[str, float]:
        """Return when each worker last beat, as far as it is known."""
        ...

    def drop(self, deployment_id: str) -> None:
        """Forget a deployment."""
        ...

    def close(self) -> None:
        """Send what is still to be sent, for a second at most, and let go."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of an audit store: events numbered in (after, before), told in [since, until)
    of Unix time. ``limit`` is brought down to QUERY_EVENTS.
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


EVERYTHING = Question()


@runtime_checkable
class Audit(Protocol):
    """The append-only history of events."""

    @property
    def backend(self) -> str:
        """Return the backend and its version, for people."""
        ...

    def check(self) -> None:
        """Raise ServiceUnavailable, saying what to do, where the store cannot be used now."""
        ...

    def append(self, events: Sequence[Event]) -> None:
        """Keep ``events``, all or none; those whose number is there already are there once.

        Raises Conflict where a number belongs to another event, ServiceUnavailable where the
        outcome is unknown: appending the same again is right.
        """
        ...

    def last(self) -> int:
        """Return the highest number kept, 0 before the first."""
        ...

    def query(self, asked: Question = EVERYTHING) -> list[Event]:
        """Return the events asked for; page on with the last number as ``after`` (or as ``before``
        where the newest come first).
        """
        ...

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep`` (at least 1); return how many.

        At most PRUNE_EVENTS at once: call again where it returns so many.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


# A deployment's memo as text, with the one thing in it that a reboot spoils: monotonic times.


def write_memo(memo: Memo) -> str:
    """Return ``memo`` as JSON."""
    return memo.to_json()


def read_memo(text: str, now_s: float, *, same_boot: bool) -> Memo:
    """Return the memo in ``text``; where another boot (or machine) wrote it, its durations go on
    from where they were."""
    memo = Memo.from_json(text)
    # Linux's monotonic clock goes on across processes, and begins anew with a boot.
    return memo if same_boot else memo.rebased(now_s)


def boot_id() -> str:
    """Return what names this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown boot"


# What every coordination backend refuses with, said the same way.


def stale(term: Term, newest: int, where: object) -> StaleEpoch:
    """Return the refusal of a write by a term that has ended."""
    ended = newest == term.epoch
    return StaleEpoch(
        "this term has ended" if ended else "a newer coordinator leads",
        got=f"epoch {term.epoch}",
        wanted="a new campaign" if ended else f"epoch {newest}",
        where=where,
        do="Stop deciding; campaign again or stop this process.",
    )


def load_first(where: object) -> ServiceUnavailable:
    """Return the refusal of a write that follows one whose outcome is unknown."""
    return ServiceUnavailable(
        "an earlier write failed, and nobody knows whether it was kept",
        wanted="load() before the next write",
        where=where,
        do="Ask again.",
    )


def outbox_is_full(waiting: int) -> ServiceUnavailable:
    """Return the refusal of a write whose events would have nowhere to go."""
    return ServiceUnavailable(
        "too many events wait for the audit store",
        got=f"{waiting} events",
        wanted=f"fewer than {OUTBOX_EVENTS}",
        do="Bring the audit store back; the events are then shipped and writes go on.",
    )
