"""The coordination store: commits, events, the ledger and loading, over rows of keys and values.

A backend (SQLite, etcd) reads rows, writes changes that take effect together if its term still
leads, and elects leaders; see the methods at the end.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from paceline.coordinator.ledger import LedgerEntry
from paceline.coordinator.state import Answer, Drop, Effect, EmitEvent, LoadedState, Save
from paceline.coordinator.stores.rows import (
    Change,
    Delete,
    KeyLayout,
    Put,
    Row,
    Tip,
    boot_id,
    to_event,
    unpack,
)
from paceline.errors import ServiceUnavailable, StaleEpoch
from paceline.schemas import TRAINING_JOBS, Event, PurposeRule, StageRecord, TrainingJob

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=BaseModel)

MAX_OUTBOX_EVENTS = 10_000  # unshipped; with so many, every further commit is refused
MOVED_AT_ONCE = 100  # changes of one commit
RECENT_EVENTS = 1_000  # shipped, and still kept for new readers of the event stream


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
        return self.last - self.shipped


class Coordination:
    """The durable store of the state, with leader election and fenced writes.

    Each write proves in its own transaction that the writer still leads (I4). Every method may be
    called from any thread, also concurrently, and returns or raises within the time limits of its
    backend. An unreachable store raises ServiceUnavailable.
    """

    backend: str  # with its version, such as ``etcd 3.4.23``, for display
    standbys: bool  # several replicas may share the store; else ``campaign`` takes over at once

    def __init__(self, layout: KeyLayout, where: str) -> None:
        self._layout, self._where = layout, where
        self._boot = boot_id()
        self._lock = threading.RLock()  # one commit at a time; never held by a campaign
        self._term: Term | None = None  # the newest that this process won
        self._lost = False  # it was resigned, or a write of it was refused
        self._unsure = False  # a commit failed, and nothing was loaded since
        self._tip = Tip()
        self._shipped = 0

    # --- state -----------------------------------------------------------------------------------

    def leader(self) -> Term | None:
        """Return the current leader's term from the store, or None."""
        (row,) = self._read(self._layout.leader)
        return None if row is None else Term(**json.loads(row.value))

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        """Commit all of ``effects`` atomically, or none; return the events with their numbers.

        ``Answer`` effects are ignored. Raises StaleEpoch where ``term`` no longer leads, and
        ServiceUnavailable where the store is unavailable or the outbox is full. After any error
        the outcome may be unknown: the caller must ``load`` before it continues, and a commit
        before that raises ServiceUnavailable. Once ``load`` has returned, an older commit that it
        does not show can no longer take effect.
        """
        kept = [each for each in effects if not isinstance(each, Answer)]
        if not kept:
            return []
        emitted = [each for each in kept if isinstance(each, EmitEvent)]
        rest = [each for each in kept if not isinstance(each, EmitEvent)]
        with self._lock:
            self._require_leading(term)
            changes = list(self._layout.changes(rest, self._boot, self._tip.made + 1))
            waiting = self._tip.last - self._shipped
            if emitted and waiting >= MAX_OUTBOX_EVENTS:
                raise ServiceUnavailable(
                    "too many events wait for the audit store",
                    got=f"{waiting} events",
                    wanted=f"fewer than {MAX_OUTBOX_EVENTS}",
                    do="Bring the audit store back; the events are then shipped and writes go on.",
                )
            events = [to_event(each, self._tip.last + n) for n, each in enumerate(emitted, 1)]
            changes += self._layout.event_rows(events)
            made = sum(getattr(each, "manifest", None) is not None for each in rest)
            tip = self._tip.next(last=self._tip.last + len(events), made=self._tip.made + made)
            self._decide(changes, tip)
        return events

    def load(self, now_s: float) -> LoadedState:
        """Return everything, as of one revision; after a reboot the durations of running
        deployments are rebased. ``now_s`` is the caller's monotonic clock.
        """
        with self._lock:
            self._settle()
            rows = self._snapshot()
            loaded = self._layout.read_state(rows, self._parsed, self._boot, now_s)
            self._unsure = False
        return loaded

    # --- the ledger of stages, training jobs, purposes of data ------------------------------------

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        (row,) = self._read(self._layout.key("ledger", stage, input_digest))
        return None if row is None else self._parsed(row, StageRecord.model_validate_json)

    def stages(self, stage: str) -> Iterator[StageRecord]:
        return self._records(StageRecord, "ledger", stage)

    def ledger(self) -> Iterator[LedgerEntry]:
        """Yield the size and age of each ledger record."""
        return map(LedgerEntry.of, self._records(StageRecord, "ledger"))

    def jobs(self) -> Iterator[TrainingJob]:
        return self._records(TrainingJob, "jobs")

    def move_jobs(self, term: Term) -> None:
        """Give each job that the release before kept in the ledger a row of its own.

        One that this release does not read stays there, and is logged. Errors as of ``commit``.
        """
        moved: list[Effect] = []
        for record in self.stages(TRAINING_JOBS):
            try:
                job = TrainingJob.model_validate_json(json.dumps(record.output))
            except ValidationError as error:
                why = _first_fault(error)
                log.warning("job of the release before left out: %s %s", record.input_digest, why)
                continue
            if self._read(self._layout.key("jobs", job.job_id)) == [None]:
                moved.append(Save(job))
            moved.append(Drop(StageRecord, (record.stage, record.input_digest)))
        for first in range(0, len(moved), MOVED_AT_ONCE):
            self.commit(term, moved[first : first + MOVED_AT_ONCE])

    def purposes(self) -> Iterator[PurposeRule]:
        return self._records(PurposeRule, "purposes")

    def _records(self, kind: type[Kind], *above: str) -> Iterator[Kind]:
        for _, row in self._scan(*self._layout.below(*above)):
            yield self._parsed(row, kind.model_validate_json)

    # --- the outbox of events --------------------------------------------------------------------

    def outbox(self) -> Outbox:
        """Return the range of event numbers that wait for the audit store."""
        tip, shipped = self._read_tip()
        return Outbox(shipped, tip.last)

    def events_after(self, seq: int, limit: int) -> list[Event]:
        """Return up to ``limit`` kept events after number ``seq``, oldest first.

        Kept are the unshipped events and the newest RECENT_EVENTS of the others.
        """
        found: list[Event] = []
        for _, row in self._scan(self._layout.events(seq + 1), self._layout.below("events")[1]):
            events = map(Event.model_validate, json.loads(unpack(row.value)))
            found += [event for event in events if event.seq > seq]
            if len(found) >= limit:
                break
        return found[:limit]

    def trim_events(self, term: Term, seq: int) -> None:
        """Record that the audit store has every event up to ``seq``, and delete events that are
        shipped and not recent; errors as of ``commit``.
        """
        with self._lock:
            self._require_leading(term, sure=False)
            last = self._tip.last
            shipped = max(self._shipped, min(seq, last))
            oldest = max(0, min(shipped, last - RECENT_EVENTS))
            old = Delete(self._layout.events(0), self._layout.events(oldest + 1))
            # Nothing depends on the outcome, so it does not change the tip.
            self._write([Put(self._layout.shipped, str(shipped).encode()), old], None)
            self._shipped = shipped

    def continue_numbering(self, term: Term, seq: int) -> None:
        """Number further events above ``seq``, because the audit store has newer events.

        This happens where this store was restored from an older backup. Errors as of ``commit``.
        """
        with self._lock:
            self._require_leading(term)
            if seq <= self._tip.last:
                return
            nothing_waits = self._shipped == self._tip.last
            shipped = [Put(self._layout.shipped, str(seq).encode())] if nothing_waits else []
            self._decide(shipped, self._tip.next(last=seq))
            if nothing_waits:
                self._shipped = seq

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self, term: Term) -> None:
        with self._lock:
            self._tip, self._shipped = self._read_tip()
            self._term, self._lost, self._unsure = term, False, False

    def _decide(self, changes: Iterable[Change], tip: Tip) -> None:
        try:
            self._write(list(changes), tip)
        except BaseException:
            self._unsure = True
            raise

    def _require_leading(self, term: Term, *, sure: bool = True) -> None:
        if self._term != term or self._lost:
            newest = self.leader() or term
            raise self._stale(term, max(newest.epoch, term.epoch))
        if sure and self._unsure:
            raise ServiceUnavailable(
                "an earlier write failed, and its outcome is unknown",
                wanted="load() before the next write",
                where=self._where,
                do="Ask again.",
            )

    def _stale(self, term: Term, newest: int) -> StaleEpoch:
        ended = newest == term.epoch
        return StaleEpoch(
            "this term has ended" if ended else "a newer coordinator leads",
            got=f"epoch {term.epoch}",
            wanted="a new campaign" if ended else f"epoch {newest}",
            where=self._where,
            do="Stop deciding; campaign again or stop this process.",
        )

    def _read_tip(self) -> tuple[Tip, int]:
        tip, shipped = self._read(self._layout.tip, self._layout.shipped)
        return Tip.read(tip), int(shipped.value) if shipped else 0

    def _parsed(self, row: Row, parse: Callable[[bytes], Any]) -> Any:
        if row.parsed is None:
            try:
                row.parsed = parse(unpack(self._whole(row.value)))
            except ValidationError as error:
                raise ServiceUnavailable(
                    "a stored record is of another version of Paceline",
                    got=f"{error.title}: {_first_fault(error)}",
                    where=self._where,
                    do="Upgrade this replica to the version of the others.",
                ) from error
        return row.parsed

    # --- the backend -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ServiceUnavailable, with what to do, where the store cannot be used now."""
        raise NotImplementedError

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Block until this replica leads and return its term; None once ``give_up()`` is true.

        etcd: an unavailable cluster is tried again. One campaign at a time in a process.
        """
        raise NotImplementedError

    def resign(self, term: Term) -> None:
        """End ``term`` so that another replica can lead at once. Never raises."""
        raise NotImplementedError

    def is_leading(self, term: Term) -> bool:
        """Return whether ``term`` certainly still leads: a local check without I/O.

        False once the lease may have expired by the local clock, which wall-time jumps do not
        affect, or once a write was refused. True proves nothing about a later write: only
        ``commit`` does.
        """
        raise NotImplementedError

    def revision(self) -> int:
        """Return a number that changes with each write of another process; read it before
        ``load``. A new leader counts as a change.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release files, connections and threads. A held term ends when its lease expires."""
        raise NotImplementedError

    def _read(self, *keys: bytes) -> list[Row | None]:
        """Return the rows of ``keys``, as of one moment."""
        raise NotImplementedError

    def _scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, Row]]:
        """Yield the rows in [start, end) in order."""
        raise NotImplementedError

    def _snapshot(self) -> Mapping[bytes, Row]:
        """Return all rows below ``state``, as of one moment."""
        raise NotImplementedError

    def _whole(self, value: bytes) -> bytes:
        """Return the value, where it is stored elsewhere."""
        return value

    def _settle(self) -> None:
        """Make sure that an earlier write has taken effect or never will; update the tip."""
        raise NotImplementedError

    def _write(self, changes: list[Change], tip: Tip | None) -> None:
        """Write all changes, and ``tip``, if this process's term still leads, and keep ``tip``.

        Raises StaleEpoch where it does not lead. ServiceUnavailable: the outcome may be unknown.
        """
        raise NotImplementedError


def _first_fault(error: ValidationError) -> str:
    """Return the first field that is wrong, and why; its value may be the record's own secret."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
