"""The audit history in a SQLite file, which may be the one that coordination uses."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.coordinator.stores.audit_rows import event_of, pruning, require_same, row_of, select
from paceline.coordinator.stores.contracts import EVERYTHING, Question
from paceline.errors import ServiceUnavailable
from paceline.wire.events import Event

BUSY_S = 5.0
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
        self.path = path
        self.backend = f"sqlite {sqlite3.sqlite_version}"
        self._lock = threading.Lock()
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_S
            )
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                with self._transaction():
                    for statement in SCHEMA.split(";\n"):
                        self._db.execute(statement)
            except BaseException:
                self._db.close()
                raise

    def check(self) -> None:
        """Raise ServiceUnavailable where the file cannot be read."""
        self.last()

    def append(self, events: Sequence[Event]) -> None:
        """Keep all of ``events`` in one transaction."""
        with self._lock, self._translated(), self._transaction():
            for event in events:
                seq, *rest = row_of(event)
                added = self._db.execute(
                    "INSERT INTO audit (seq, epoch, name, at, deployment_id, worker_id, data)"
                    " VALUES (?, 0, ?, ?, ?, ?, ?) ON CONFLICT (seq) DO NOTHING",
                    (seq, *rest),
                )
                if added.rowcount == 0:
                    same = select(Question(after=event.seq - 1, limit=1), "?")
                    require_same(event_of(self._db.execute(*same).fetchone()), event, self.path)

    def last(self) -> int:
        """Return the highest number kept."""
        with self._lock, self._translated():
            return int(self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM audit").fetchone()[0])

    def query(self, asked: Question = EVERYTHING) -> list[Event]:
        """Return the events asked for."""
        with self._lock, self._translated():
            return [event_of(row) for row in self._db.execute(*select(asked, "?"))]

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep``."""
        with self._lock, self._translated(), self._transaction():
            return self._db.execute(*pruning("?", keep)).rowcount

    def close(self) -> None:
        """Let the file go."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ServiceUnavailable(
                "the audit file cannot be used",
                got=f"{type(error).__name__}: {error}",
                where=self.path,
                do="Check the disk and its space.",
            ) from error
