"""One SQLite file with one connection: atomic transactions and translated errors.

Its owners (``sqlite``, ``audit``) define what is stored. The schema and migrations of the
coordinator's file are below.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.coordinator.stores.contracts import RECENT_EVENTS
from paceline.errors import ServiceUnavailable
from paceline.system.files import PRIVATE_DIRECTORY, ensure_private, make_directories

BUSY_S = 5.0  # longest wait for another process's transaction


class SqliteFile:
    """An open file; threads use it one at a time.

    ``what`` names it in errors; ``prepare`` creates its tables. The constructor and every method
    raise ServiceUnavailable where the file cannot be used.
    """

    def __init__(
        self, path: Path, what: str, prepare: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path, self._what = path, what
        self._lock = threading.RLock()
        with self.translated():
            make_directories(path.parent, PRIVATE_DIRECTORY)
            ensure_private(path)  # SQLite gives its -wal and -shm files the same mode
            for beside in (f"{path}-wal", f"{path}-shm"):
                if Path(beside).exists():
                    ensure_private(Path(beside))
            self.db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_S
            )
            try:
                self.db.execute("PRAGMA journal_mode=WAL")
                self.db.execute("PRAGMA synchronous=FULL")
                with transaction(self.db):
                    prepare(self.db)
            except BaseException:
                self.db.close()
                raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Commit all writes of the block, or none."""
        with self.held(), self.translated(), transaction(self.db):
            yield self.db

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the block a consistent snapshot of the file."""
        with self.held(), self.translated():
            self.db.execute("BEGIN")
            try:
                yield self.db
            finally:
                _roll_back(self.db)

    def one(self, query: str, values: Sequence[object] = ()) -> Any:
        """Return the first row, or None."""
        with self.held(), self.translated():
            return self.db.execute(query, values).fetchone()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Return every row."""
        with self.held(), self.translated():
            return self.db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Exclude other threads; reentrant."""
        with self._lock:
            yield

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translate SQLite's and the file system's errors to ServiceUnavailable."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # Full, locked or missing: nothing was acknowledged, and the same call may work later.
            raise ServiceUnavailable(
                f"the {self._what} cannot be used",
                got=f"{type(error).__name__}: {error}",
                where=self.path,
                do="Check the disk and its space.",
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self.held():
            self.db.close()


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all writes of the block, or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        _roll_back(db)
        raise


def _roll_back(db: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # a failed COMMIT may have ended it already
        if db.in_transaction:
            db.execute("ROLLBACK")


# The schema of the coordinator's SQLite file, and its migrations. Version 1 kept all events in
# ``audit``. Since version 2 they wait in ``outbox`` until the audit store has them; ``audit`` is
# that store's own table, which may be in the same file.

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

# The events of version 1 are in ``audit`` already; the newest are also copied to ``outbox``.
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
    """Migrate the file behind ``db`` to this version's tables, in the caller's transaction.

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
