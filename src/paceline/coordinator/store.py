"""What survives the coordinator: one SQLite file, one transaction for each handled command.

Every write proves in its own transaction that this process still leads: a newer process raised the
``leader`` row when it opened the file, and the older one gets StaleEpoch from then on. Beats never
come here. Progress is not kept: it returns with the agents' next beats. It knows no decisions.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.coordinator.messages import (
    Answer,
    Effect,
    KeepDeployment,
    KeepKey,
    KeepPlan,
    KeepReceipt,
    KeepWorker,
    Kept,
    KeptDeployment,
    Memo,
    Observed,
)
from paceline.errors import ServiceUnavailable, StaleEpoch
from paceline.manifest import parse_manifest
from paceline.wire.events import Event
from paceline.wire.plan import Plan
from paceline.wire.records import Deployment, Failure, Receipt, StageRecord, Worker

SCHEMA_VERSION = 1
KEPT_PLANS = 3  # of each deployment, the newest
SCHEMA = """
CREATE TABLE leader (id INTEGER PRIMARY KEY CHECK (id = 1), epoch INTEGER NOT NULL);
INSERT INTO leader VALUES (1, 0);
CREATE TABLE deployments (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, deployment_id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL,
  record TEXT NOT NULL, memo TEXT NOT NULL, boot_id TEXT NOT NULL, manifest BLOB NOT NULL);
CREATE TABLE plans (
  deployment_id TEXT NOT NULL, plan_epoch INTEGER NOT NULL, epoch INTEGER NOT NULL,
  plan TEXT NOT NULL, PRIMARY KEY (deployment_id, plan_epoch));
CREATE TABLE receipts (
  deployment_id TEXT NOT NULL, worker_id TEXT NOT NULL, epoch INTEGER NOT NULL,
  receipt TEXT NOT NULL, PRIMARY KEY (deployment_id, worker_id));
CREATE TABLE workers (
  worker_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE idempotency_keys (
  key TEXT PRIMARY KEY, body_digest TEXT NOT NULL, deployment_id TEXT NOT NULL,
  epoch INTEGER NOT NULL);
CREATE TABLE ledger (
  stage TEXT NOT NULL, input_digest TEXT NOT NULL, epoch INTEGER NOT NULL, record TEXT NOT NULL,
  PRIMARY KEY (stage, input_digest));
CREATE TABLE audit (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
"""


class CoordinatorStore:
    """The file; used by one thread at a time, which its owner sees to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._boot_id = _boot_id()
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=5.0
            )
            try:
                self.leader_epoch = self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> int:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise ServiceUnavailable(
                "the coordinator's file is of another version",
                got=version,
                wanted=SCHEMA_VERSION,
                where=self.path,
                do="Start the Paceline version that wrote it, or move the file away.",
            )
        self._db.execute("BEGIN IMMEDIATE")
        if version == 0:
            for statement in SCHEMA.split(";\n"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        self._db.execute("UPDATE leader SET epoch = epoch + 1")
        epoch = int(self._db.execute("SELECT epoch FROM leader").fetchone()[0])
        self._db.execute("COMMIT")
        return epoch

    def close(self) -> None:
        """Let the file go."""
        self._db.close()

    def commit(self, effects: Iterable[Effect]) -> list[Event]:
        """Keep everything that ``effects`` ask for, or nothing; return the events with numbers.

        Raises StaleEpoch where a newer coordinator leads, ServiceUnavailable where the file fails.
        """
        kept = [each for each in effects if not isinstance(each, Answer)]
        if not kept:
            return []
        with self._transaction():
            return [event for effect in kept if (event := self._keep(effect)) is not None]

    def load(self, now_s: float) -> Kept:
        """Return everything; after a reboot the durations of running deployments begin anew."""
        with self._translated():
            plans: dict[str, str] = dict(
                self._rows("SELECT deployment_id, plan FROM plans ORDER BY plan_epoch")
            )
            receipts: dict[str, list[Receipt]] = {}
            for deployment_id, raw in self._rows("SELECT deployment_id, receipt FROM receipts"):
                receipts.setdefault(deployment_id, []).append(Receipt.model_validate_json(raw))
            deployments = []
            query = "SELECT deployment_id, record, memo, boot_id, manifest FROM deployments"
            for deployment_id, record, memo, boot_id, manifest in self._rows(
                f"{query} ORDER BY seq"
            ):
                plan = plans.get(deployment_id)
                deployments.append(
                    KeptDeployment(
                        deployment=Deployment.model_validate_json(record),
                        memo=_read_memo(memo, now_s, same_boot=boot_id == self._boot_id),
                        manifest=parse_manifest(manifest),
                        plan=Plan.model_validate_json(plan) if plan else None,
                        receipts=tuple(receipts.get(deployment_id, ())),
                    )
                )
            workers = [
                Worker.model_validate_json(raw)
                for (raw,) in self._rows("SELECT record FROM workers")
            ]
            keys = self._rows("SELECT key, body_digest, deployment_id FROM idempotency_keys")
            return Kept(
                deployments=tuple(deployments),
                workers=tuple(workers),
                keys=tuple(KeepKey(*row) for row in keys),
            )

    def recent_events(self, count: int) -> list[Event]:
        """Return the newest events, oldest first."""
        query = (
            "SELECT seq, name, at, deployment_id, worker_id, data FROM audit"
            " ORDER BY seq DESC LIMIT ?"
        )
        with self._translated():
            rows = self._db.execute(query, (count,)).fetchall()
        fields = ("seq", "name", "at", "deployment_id", "worker_id", "data")
        return [
            Event.model_validate(dict(zip(fields, (*row[:5], json.loads(row[5])), strict=True)))
            for row in reversed(rows)
        ]

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        query = "SELECT record FROM ledger WHERE stage = ? AND input_digest = ?"
        with self._translated():
            row = self._db.execute(query, (stage, input_digest)).fetchone()
        return None if row is None else StageRecord.model_validate_json(row[0])

    def keep_stage(self, record: StageRecord, told: Observed) -> list[Event]:
        """Put ``record`` into the ledger, in place of an older one, and return what to tell."""
        raw = record.model_dump_json()
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?)",
                (record.stage, record.input_digest, self.leader_epoch, raw),
            )
            event = self._keep(told)
        return [] if event is None else [event]

    def _keep(self, effect: Effect) -> Event | None:
        epoch = self.leader_epoch
        match effect:
            case KeepDeployment(deployment, memo, manifest):
                values = (epoch, deployment.model_dump_json(), _write_memo(memo), self._boot_id)
                identity = deployment.deployment_id
                if manifest is not None:
                    self._db.execute(
                        "INSERT INTO deployments (deployment_id, epoch, record, memo, boot_id,"
                        " manifest) VALUES (?, ?, ?, ?, ?, ?)",
                        (identity, *values, manifest.to_bytes()),
                    )
                else:
                    self._db.execute(
                        "UPDATE deployments SET epoch = ?, record = ?, memo = ?, boot_id = ?"
                        " WHERE deployment_id = ?",
                        (*values, identity),
                    )
            case KeepPlan(plan):
                self._db.execute(
                    "INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?)",
                    (plan.deployment_id, plan.epoch, epoch, plan.model_dump_json()),
                )
                self._db.execute(
                    "DELETE FROM plans WHERE deployment_id = ? AND plan_epoch <= ?",
                    (plan.deployment_id, plan.epoch - KEPT_PLANS),
                )
            case KeepReceipt(receipt):
                self._db.execute(
                    "INSERT OR REPLACE INTO receipts VALUES (?, ?, ?, ?)",
                    (receipt.deployment_id, receipt.worker_id, epoch, receipt.model_dump_json()),
                )
            case KeepWorker(worker):
                self._db.execute(
                    "INSERT OR REPLACE INTO workers VALUES (?, ?, ?)",
                    (worker.worker_id, epoch, worker.model_dump_json()),
                )
            case KeepKey(key, body_digest, deployment_id):
                self._db.execute(
                    "INSERT INTO idempotency_keys VALUES (?, ?, ?, ?)",
                    (key, body_digest, deployment_id, epoch),
                )
            case Observed(name, at, deployment_id, worker_id, data):
                cursor = self._db.execute(
                    "INSERT INTO audit (epoch, name, at, deployment_id, worker_id, data)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (epoch, name.value, at, deployment_id, worker_id, json.dumps(data)),
                )
                return Event(
                    seq=cursor.lastrowid or 1,
                    name=name,
                    at=at,
                    deployment_id=deployment_id,
                    worker_id=worker_id,
                    data=data,
                )
            case _:
                raise AssertionError(f"nothing to keep in {effect}")
        return None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._prove_leading()
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _prove_leading(self) -> None:
        newest = self._db.execute("SELECT epoch FROM leader").fetchone()[0]
        if newest != self.leader_epoch:
            raise StaleEpoch(
                "a newer coordinator leads",
                got=f"epoch {self.leader_epoch}",
                wanted=f"epoch {newest}",
                where=self.path,
                do="Stop this process.",
            )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # Full, locked or gone: nothing was acknowledged, and the same call may work later.
            raise ServiceUnavailable(
                "the coordinator's file cannot be used",
                got=f"{type(error).__name__}: {error}",
                where=self.path,
                do="Check the disk and its space.",
            ) from error

    def _rows(self, query: str) -> list[Any]:
        return self._db.execute(query).fetchall()


def _write_memo(memo: Memo) -> str:
    raw = asdict(memo)
    raw["failures"] = {name: failure.model_dump() for name, failure in memo.failures.items()}
    return json.dumps(raw)


def _read_memo(text: str, now_s: float, *, same_boot: bool) -> Memo:
    raw = json.loads(text)
    failures = {name: Failure.model_validate(each) for name, each in raw.pop("failures").items()}
    raw["order"] = tuple(raw.get("order", ()))
    memo = Memo(**raw, failures=failures)
    if same_boot:
        return memo  # Linux's monotonic clock goes on across processes
    planned_s = None if memo.planned_s is None else now_s
    return Memo(
        **(raw | {"created_s": now_s, "planned_s": planned_s, "done_s": None}), failures=failures
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown boot"
