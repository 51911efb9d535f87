"""The audit history in a SQLite file, which may be the one that coordination uses."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from paceline.coordinator.stores.audit_rows import event_of, pruning, require_same, row_of, select
from paceline.coordinator.stores.contracts import EVERYTHING, Question
from paceline.coordinator.stores.sqlite_file import SqliteFile
from paceline.wire.events import Event

# The table is the one that version 1 of the coordinator's file had; ``epoch`` is no longer told.
SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS audit_by_deployment ON audit (deployment_id, seq);
CREATE INDEX IF NOT EXISTS audit_by_worker ON audit (worker_id, seq);
CREATE INDEX IF NOT EXISTS audit_by_name ON audit (name, seq);
"""


class SqliteAudit:
    """One table, as the Audit contract wants it."""

    def __init__(self, path: Path) -> None:
        self.backend = f"sqlite {sqlite3.sqlite_version}"
        self._file = SqliteFile(path, "audit file", _make_tables)

    def check(self) -> None:
        """Raise ServiceUnavailable where the file cannot be read."""
        self.last()

    def append(self, events: Sequence[Event]) -> None:
        """Keep all of ``events`` in one transaction."""
        with self._file.writing() as db:
            for event in events:
                seq, *rest = row_of(event)
                added = db.execute(
                    "INSERT INTO audit (seq, epoch, name, at, deployment_id, worker_id, data)"
                    " VALUES (?, 0, ?, ?, ?, ?, ?) ON CONFLICT (seq) DO NOTHING",
                    (seq, *rest),
                )
                if added.rowcount == 0:
                    same = select(Question(after=event.seq - 1, limit=1), "?")
                    require_same(event_of(db.execute(*same).fetchone()), event, self._file.path)

    def last(self) -> int:
        """Return the highest number kept."""
        return int(self._file.one("SELECT COALESCE(MAX(seq), 0) FROM audit")[0])

    def query(self, asked: Question = EVERYTHING) -> list[Event]:
        """Return the events asked for."""
        return [event_of(row) for row in self._file.rows(*select(asked, "?"))]

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep``."""
        with self._file.writing() as db:
            return db.execute(*pruning("?", keep)).rowcount

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def _make_tables(db: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";\n"):
        db.execute(statement)
