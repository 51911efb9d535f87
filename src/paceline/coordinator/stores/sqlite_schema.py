"""The coordinator's SQLite file: its tables, and how a file of an older version gets them.

Version 1 kept the whole history in ``audit``. Since version 2 events wait in ``outbox`` until the
audit store has them; ``audit`` is that store's own table, which may stand in the same file.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from paceline.coordinator.stores.contracts import RECENT_EVENTS
from paceline.errors import ServiceUnavailable

SCHEMA_VERSION = 2

_VERSION_1 = """
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
CREATE TABLE IF NOT EXISTS audit (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
"""

# What was told under version 1 is in ``audit`` already: the newest of it is also kept to follow.
_VERSION_2 = f"""
ALTER TABLE leader ADD COLUMN replica_id TEXT NOT NULL DEFAULT '';
ALTER TABLE leader ADD COLUMN url TEXT NOT NULL DEFAULT '';
CREATE TABLE tokens (
  token_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE outbox (
  seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
INSERT INTO outbox SELECT seq, epoch, name, at, deployment_id, worker_id, data FROM audit
  WHERE seq > (SELECT COALESCE(MAX(seq), 0) FROM audit) - {RECENT_EVENTS};
CREATE TABLE counters (
  id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL,
  last INTEGER NOT NULL, shipped INTEGER NOT NULL);
INSERT INTO counters SELECT 1, 1, COALESCE(MAX(seq), 0), COALESCE(MAX(seq), 0) FROM audit;
CREATE INDEX keys_by_deployment ON idempotency_keys (deployment_id);
"""  # noqa: S608 (a number of our own)

_STEPS = (_VERSION_1, _VERSION_2)


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> None:
    """Give the file behind ``db`` this version's tables; within a transaction of the caller's.

    Raises ServiceUnavailable where a newer Paceline wrote it, and sqlite3.Error.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= version <= SCHEMA_VERSION:
        raise ServiceUnavailable(
            "the coordinator's file is of another version",
            got=version,
            wanted=SCHEMA_VERSION,
            where=path,
            do="Start the Paceline version that wrote it, or move the file away.",
        )
    for step in _STEPS[version:]:
        for statement in step.split(";\n"):
            db.execute(statement)
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
