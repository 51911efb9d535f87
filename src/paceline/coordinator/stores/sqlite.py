"""The coordination store in one SQLite file, for one machine; one transaction per handled event.

The newest campaign wins: it raises the epoch in the file, and the older leader's next write detects
that in its own transaction. One connection, one lock; no call waits longer than the file's busy
timeout. Progress is not stored, and no decision is made.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.coordinator.ledger import LedgerEntry
from paceline.coordinator.state.messages import (
    Answer,
    DropDeployment,
    DropStage,
    DropToken,
    DropWorker,
    Effect,
    EmitEvent,
    LoadedDeployment,
    LoadedState,
    SaveDeployment,
    SaveIdempotencyKey,
    SavePlan,
    SaveReceipt,
    SaveToken,
    SaveWorker,
)
from paceline.coordinator.stores.audit import numbered
from paceline.coordinator.stores.contracts import (
    OUTBOX_EVENTS,
    RECENT_EVENTS,
    Candidate,
    Outbox,
    Term,
    boot_id,
    load_first,
    outbox_is_full,
    read_memo,
    stale,
    write_memo,
)
from paceline.coordinator.stores.sqlite_file import SqliteFile, bring_up_to_date
from paceline.errors import PacelineError
from paceline.manifest import parse_manifest
from paceline.schemas.access import TokenRecord
from paceline.schemas.events import Event
from paceline.schemas.plan import Plan
from paceline.schemas.records import Deployment, Receipt, StageRecord, Worker

KEPT_PLANS = 3  # of each deployment, the newest
LOOK_S = 0.1  # between two checks whether the file changed
_EVENT = "seq, name, at, deployment_id, worker_id, data"


class SqliteCoordination:
    """Implements the Coordination contract with one file."""

    standbys = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = f"sqlite {sqlite3.sqlite_version}"
        self._boot_id = boot_id()
        self._unsure = False  # a write failed, and nothing was loaded since
        self._lost: set[int] = set()  # own epochs that were refused
        self._closed = False
        self._file = SqliteFile(path, "coordinator's file", lambda db: bring_up_to_date(db, path))
        self._db = self._file.db

    def check(self) -> None:
        """Raise ServiceUnavailable where the file cannot be read."""
        self.leader()

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        self._file.close()

    # --- leadership ------------------------------------------------------------------------------

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Take over at once; raises ServiceUnavailable where the file cannot be written."""
        if give_up():
            return None
        with self._writing():
            self._db.execute(
                "UPDATE leader SET epoch = epoch + 1, replica_id = ?, url = ?",
                (candidate.replica_id, candidate.url),
            )
            epoch = int(self._db.execute("SELECT epoch FROM leader").fetchone()[0])
        return Term(epoch, candidate.replica_id, candidate.url)

    def resign(self, term: Term) -> None:
        """Clear the leader in the file, if ``term`` still leads."""
        self._lost.add(term.epoch)
        with contextlib.suppress(PacelineError), self._writing():
            self._db.execute(
                "UPDATE leader SET replica_id = '', url = '' WHERE epoch = ?", (term.epoch,)
            )

    def is_leading(self, term: Term) -> bool:
        """Return whether no write of ``term`` was refused so far; there is no lease here."""
        return not self._closed and term.epoch not in self._lost

    def leader(self) -> Term | None:
        """Return the newest campaign's term, unless it resigned."""
        row = self._file.one("SELECT epoch, replica_id, url FROM leader")
        return Term(*row) if row[1] else None

    # --- state -----------------------------------------------------------------------------------

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        """Commit all of ``effects`` in one transaction, or none."""
        kept = [each for each in effects if not isinstance(each, Answer)]
        if not kept:
            return []
        with self._fenced(term):
            if any(isinstance(each, EmitEvent) for each in kept):
                self._require_room()
            return [e for effect in kept if (e := self._keep(effect, term.epoch)) is not None]

    def load(self, now_s: float) -> LoadedState:
        """Return everything, from one transaction."""
        rows = self._file.rows
        with self._file.reading():
            plans: dict[str, str] = dict(
                rows("SELECT deployment_id, plan FROM plans ORDER BY plan_epoch")
            )
            receipts: dict[str, list[Receipt]] = {}
            for deployment_id, raw in rows(
                "SELECT deployment_id, receipt FROM receipts ORDER BY worker_id"
            ):
                receipts.setdefault(deployment_id, []).append(Receipt.model_validate_json(raw))
            deployments = []
            query = "SELECT deployment_id, record, memo, boot_id, manifest FROM deployments"
            for deployment_id, record, memo, boot, manifest in rows(f"{query} ORDER BY seq"):
                plan = plans.get(deployment_id)
                deployments.append(
                    LoadedDeployment(
                        deployment=Deployment.model_validate_json(record),
                        memo=read_memo(memo, now_s, same_boot=boot == self._boot_id),
                        manifest=parse_manifest(manifest),
                        plan=Plan.model_validate_json(plan) if plan else None,
                        receipts=tuple(receipts.get(deployment_id, ())),
                    )
                )
            workers = rows("SELECT record FROM workers ORDER BY worker_id")
            keys = rows("SELECT key, body_digest, deployment_id FROM idempotency_keys ORDER BY key")
            tokens = rows("SELECT record FROM tokens ORDER BY token_id")
            loaded = LoadedState(
                deployments=tuple(deployments),
                workers=tuple(Worker.model_validate_json(raw) for (raw,) in workers),
                keys=tuple(SaveIdempotencyKey(*row) for row in keys),
                tokens=tuple(TokenRecord.model_validate_json(raw) for (raw,) in tokens),
            )
            self._unsure = False
        return loaded

    def revision(self) -> int:
        """Return how many transactions changed the file."""
        return int(self._file.one("SELECT revision FROM counters")[0])

    def wait(self, after: int, timeout_s: float) -> int:
        """Check ten times a second whether the file changed."""
        until_s = time.monotonic() + timeout_s
        while (now := self.revision()) <= after and (left := until_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))
        return now

    # --- the ledger of stages --------------------------------------------------------------------

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        row = self._file.one(
            "SELECT record FROM ledger WHERE stage = ? AND input_digest = ?", (stage, input_digest)
        )
        return None if row is None else StageRecord.model_validate_json(row[0])

    def ledger(self) -> list[LedgerEntry]:
        """Return the size and age of each ledger record."""
        rows = self._file.rows(
            "SELECT stage, input_digest, json_extract(record, '$.run_id'),"
            " json_extract(record, '$.finished_at'), LENGTH(CAST(record AS BLOB)) FROM ledger"
        )
        return [LedgerEntry(*row) for row in rows]

    def keep_stage(self, term: Term, record: StageRecord, told: EmitEvent) -> list[Event]:
        """Put ``record`` into the ledger and return the numbered event."""
        raw = record.model_dump_json()
        with self._fenced(term):
            self._require_room()
            self._db.execute(
                "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?)",
                (record.stage, record.input_digest, term.epoch, raw),
            )
            return [self._tell(told, term.epoch)]

    # --- the outbox of events --------------------------------------------------------------------

    def outbox(self) -> Outbox:
        """Return the range of event numbers that wait for the audit store."""
        return Outbox(*self._file.one("SELECT shipped, last FROM counters"))

    def events_after(self, seq: int, limit: int) -> list[Event]:
        """Return up to ``limit`` kept events after ``seq``."""
        query = f"SELECT {_EVENT} FROM outbox WHERE seq > ? ORDER BY seq LIMIT ?"  # noqa: S608
        return [read_event(row) for row in self._file.rows(query, (seq, limit))]

    def trim_events(self, term: Term, seq: int) -> None:
        """Record what was shipped, and delete events that are shipped and not recent."""
        with self._fenced(term, decides=False):
            self._db.execute(
                "UPDATE counters SET shipped = MAX(shipped, MIN(last, ?)) WHERE id = 1", (seq,)
            )
            self._db.execute(
                "DELETE FROM outbox WHERE seq <= (SELECT shipped FROM counters) AND seq <="
                " (SELECT last FROM counters) - ?",
                (RECENT_EVENTS,),
            )

    def number_after(self, term: Term, seq: int) -> None:
        """Continue the numbering above ``seq``; ``shipped`` moves too where all are shipped."""
        with self._fenced(term):
            self._db.execute(
                "UPDATE counters SET shipped = CASE WHEN shipped = last THEN ?1 ELSE shipped END,"
                " last = ?1 WHERE last < ?1",
                (seq,),
            )

    # --- inside ----------------------------------------------------------------------------------

    def _keep(self, effect: Effect, epoch: int) -> Event | None:
        execute = self._db.execute
        match effect:
            case SaveDeployment(deployment, memo, manifest):
                values = (epoch, deployment.model_dump_json(), write_memo(memo), self._boot_id)
                identity = deployment.deployment_id
                execute(
                    "UPDATE deployments SET epoch = ?, record = ?, memo = ?, boot_id = ?"
                    " WHERE deployment_id = ?",
                    (*values, identity),
                )
                if manifest is not None:
                    execute(
                        "INSERT INTO deployments (deployment_id, epoch, record, memo, boot_id,"
                        " manifest) VALUES (?, ?, ?, ?, ?, ?)"
                        " ON CONFLICT (deployment_id) DO UPDATE SET manifest = excluded.manifest",
                        (identity, *values, manifest.to_bytes()),
                    )
            case SavePlan(plan):
                execute(
                    "INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?)",
                    (plan.deployment_id, plan.epoch, epoch, plan.model_dump_json()),
                )
                execute(
                    "DELETE FROM plans WHERE deployment_id = ? AND plan_epoch <= ?",
                    (plan.deployment_id, plan.epoch - KEPT_PLANS),
                )
            case SaveReceipt(receipt):
                execute(
                    "INSERT OR REPLACE INTO receipts VALUES (?, ?, ?, ?)",
                    (receipt.deployment_id, receipt.worker_id, epoch, receipt.model_dump_json()),
                )
            case SaveWorker(worker):
                execute(
                    "INSERT OR REPLACE INTO workers VALUES (?, ?, ?)",
                    (worker.worker_id, epoch, worker.model_dump_json()),
                )
            case DropWorker(worker_id):
                execute("DELETE FROM workers WHERE worker_id = ?", (worker_id,))
            case SaveIdempotencyKey(key, body_digest, deployment_id):
                execute(
                    "INSERT OR REPLACE INTO idempotency_keys VALUES (?, ?, ?, ?)",
                    (key, body_digest, deployment_id, epoch),
                )
            case SaveToken(token):
                execute(
                    "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)",
                    (token.token_id, epoch, token.model_dump_json()),
                )
            case DropStage(stage, input_digest):
                execute(
                    "DELETE FROM ledger WHERE stage = ? AND input_digest = ?", (stage, input_digest)
                )
            case DropToken(token_id):
                execute("DELETE FROM tokens WHERE token_id = ?", (token_id,))
            case DropDeployment(deployment_id):
                for table in ("deployments", "plans", "receipts", "idempotency_keys"):
                    execute(f"DELETE FROM {table} WHERE deployment_id = ?", (deployment_id,))  # noqa: S608
            case EmitEvent():
                return self._tell(effect, epoch)
            case _:
                raise AssertionError(f"nothing to keep in {effect}")
        return None

    def _tell(self, told: EmitEvent, epoch: int) -> Event:
        self._db.execute("UPDATE counters SET last = last + 1")
        seq = int(self._db.execute("SELECT last FROM counters").fetchone()[0])
        event = numbered(told, seq)
        self._db.execute("INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?, ?)", event_row(event, epoch))
        return event

    def _require_room(self) -> None:
        shipped, last = self._db.execute("SELECT shipped, last FROM counters").fetchone()
        if last - shipped >= OUTBOX_EVENTS:
            raise outbox_is_full(last - shipped)

    @contextlib.contextmanager
    def _fenced(self, term: Term, *, decides: bool = True) -> Iterator[None]:
        """Run a transaction that proves that ``term`` leads; refused after a failed decision."""
        with self._file.held():
            if term.epoch in self._lost:
                newest = int(self._file.one("SELECT epoch FROM leader")[0])
                raise stale(term, newest, self.path)
            if self._unsure and decides:
                raise load_first(self.path)
            try:
                with self._writing():
                    newest, replica_id = self._db.execute(
                        "SELECT epoch, replica_id FROM leader"
                    ).fetchone()
                    if newest != term.epoch or not replica_id:
                        self._lost.add(term.epoch)
                        raise stale(term, newest, self.path)
                    yield
            except BaseException:
                self._unsure = self._unsure or decides
                raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._file.writing() as db:
            yield
            db.execute("UPDATE counters SET revision = revision + 1")


def event_row(event: Event, epoch: int) -> tuple[object, ...]:
    """Return ``event`` as a row of ``outbox`` and of ``audit``."""
    names = (event.deployment_id, event.worker_id)
    return (event.seq, epoch, event.name.value, event.at, *names, json.dumps(event.data))


def read_event(row: tuple[Any, ...]) -> Event:
    """Return the event in a row of (seq, name, at, deployment_id, worker_id, data)."""
    fields = ("seq", "name", "at", "deployment_id", "worker_id", "data")
    return Event.model_validate(dict(zip(fields, (*row[:5], json.loads(row[5])), strict=True)))
