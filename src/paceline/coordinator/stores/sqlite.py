"""The coordination store in one SQLite file, for one machine; one transaction per handled event.

The newest campaign wins: it raises the epoch in the file, and the older leader's next write detects
that in its own transaction. One connection, one lock; no call waits longer than the file's busy
timeout. The audit store's table may be in the same file.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.coordinator.stores.coordination import Candidate, Coordination, Term
from paceline.coordinator.stores.rows import Change, KeyLayout, Put, Row, Tip
from paceline.errors import PacelineError, ServiceUnavailable
from paceline.system import PRIVATE_DIRECTORY, ensure_private, make_directories

BUSY_S = 5.0  # longest wait for another process's transaction
SCAN_ROWS = 500


class SqliteCoordination(Coordination):
    """The coordination store in one file.

    The constructor and every method raise ServiceUnavailable where the file cannot be used.
    """

    standbys = False
    backend = f"sqlite {sqlite3.sqlite_version}"

    def __init__(self, path: Path) -> None:
        super().__init__(KeyLayout(""), str(path))
        self._path, self._closed = path, False
        self._leader_row = b""  # as this process's newest term wrote it
        with self._translated():
            prepare_file(path)
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_S
            )
        try:
            with self._translated():
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
            with self._transaction():
                self._migrate()
        except BaseException:
            self._db.close()
            raise

    def check(self) -> None:
        self.leader()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    # --- leadership ------------------------------------------------------------------------------

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Take over at once; raises ServiceUnavailable where the file cannot be written."""
        if give_up():
            return None
        with self._transaction():
            term = Term(1 + self._newest_epoch(), **asdict(candidate))
            self._put(self._layout.epoch, str(term.epoch).encode())
            self._leader_row = json.dumps(asdict(term)).encode()
            self._put(self._layout.leader, self._leader_row)
        self._begin(term)
        return term

    def resign(self, term: Term) -> None:
        """Clear the leader in the file, if ``term`` still leads."""
        with self._lock, contextlib.suppress(PacelineError):
            self._lost = self._lost or self._term == term
            with self._transaction():
                if self.leader() == term:
                    self._db.execute("DELETE FROM rows WHERE key = ?", (self._layout.leader,))

    def is_leading(self, term: Term) -> bool:
        """Return whether no write of ``term`` was refused so far; there is no lease here."""
        return self._term == term and not self._lost and not self._closed

    # --- rows ------------------------------------------------------------------------------------

    def revision(self) -> int:
        """Return SQLite's counter of other connections' transactions."""
        return int(self._select("PRAGMA data_version")[0][0])

    def _read(self, *keys: bytes) -> list[Row | None]:
        with self._lock:
            found = [self._select("SELECT key, value FROM rows WHERE key = ?", key) for key in keys]
        return [Row(rows[0][1]) if rows else None for rows in found]

    def _scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, Row]]:
        query = "SELECT key, value FROM rows WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
        while page := self._select(query, start, end, SCAN_ROWS):
            yield from ((key, Row(value)) for key, value in page)
            start = page[-1][0] + b"\0"

    def _snapshot(self) -> dict[bytes, Row]:
        query = "SELECT key, value FROM rows WHERE key >= ? AND key < ?"
        rows = self._select(query, *self._layout.below("state"))
        return {key: Row(value) for key, value in rows}

    def _settle(self) -> None:
        self._tip, self._shipped = self._read_tip()

    def _write(self, changes: list[Change], tip: Tip | None) -> None:
        assert self._term is not None
        with self._transaction():
            (leader,) = self._read(self._layout.leader)
            if leader is None or leader.value != self._leader_row:
                self._lost = True
                raise self._stale(self._term, self._newest_epoch())
            for each in changes:
                if isinstance(each, Put):
                    self._put(each.key, each.value)
                else:
                    self._db.execute(
                        "DELETE FROM rows WHERE key >= ? AND key < ?", (each.start, each.end)
                    )
            if tip is not None:
                self._put(self._layout.tip, tip.value())
        self._tip = tip or self._tip

    def _newest_epoch(self) -> int:
        (newest,) = self._read(self._layout.epoch)
        return int(newest.value) if newest else 0

    def _put(self, key: bytes, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (key, value))

    def _select(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, self._translated():
            return self._db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a failed COMMIT may have ended it
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate SQLite's and the file system's errors to ServiceUnavailable."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # Full, locked or missing: nothing was acknowledged, and the same call may work later.
            raise unusable_file("coordinator's file", self._path, error) from error

    def _migrate(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, 2, SCHEMA_VERSION):
            raise ServiceUnavailable(
                "the coordinator's file is of another version",
                got=version,
                wanted=SCHEMA_VERSION,
                where=self._path,
                do="Start the Paceline version that wrote it, or move the file away.",
            )
        if version == SCHEMA_VERSION:
            return
        self._db.create_function("row_key", -1, self._layout.key)
        drops = [f"DROP TABLE {table}" for table in _TABLES_2.split()]
        older = [*_FROM_VERSION_2.split(";\n"), *drops] if version else []
        for statement in (_ROWS, *older):
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def prepare_file(path: Path) -> None:
    """Create the file and its directory, for this user alone; raises OSError."""
    make_directories(path.parent, PRIVATE_DIRECTORY)
    ensure_private(path)  # SQLite gives its -wal and -shm files the same mode
    for beside in (Path(f"{path}-wal"), Path(f"{path}-shm")):
        if beside.exists():
            ensure_private(beside)


def unusable_file(what: str, path: Path, error: Exception) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the {what} cannot be used",
        got=f"{type(error).__name__}: {error}",
        where=path,
        do="Check the disk and its space.",
    )


# Version 2 had a table for each kind of record. Version 3 holds the rows that etcd holds too.

SCHEMA_VERSION = 3
_ROWS = "CREATE TABLE rows (key BLOB PRIMARY KEY, value BLOB NOT NULL)"
_FROM_VERSION_2 = """
INSERT INTO rows SELECT row_key('meta', 'epoch'), CAST(epoch AS TEXT) FROM leader;
INSERT INTO rows SELECT row_key('meta', 'shipped'), CAST(shipped AS TEXT) FROM counters;
INSERT INTO rows SELECT row_key('meta', 'tip'), json_object('commit', '', 'last', last,
  'made', (SELECT COALESCE(MAX(seq), 0) FROM deployments), 'pending', NULL) FROM counters;
INSERT INTO rows SELECT row_key('state', 'deployments', deployment_id, 'record'),
  json_object('record', json(record), 'boot_id', boot_id, 'memo', memo) FROM deployments;
INSERT INTO rows SELECT row_key('state', 'deployments', deployment_id, 'made'),
  json_object('number', seq) FROM deployments;
INSERT INTO rows SELECT row_key('state', 'deployments', deployment_id, 'manifest'), manifest
  FROM deployments;
INSERT INTO rows SELECT row_key('state', 'plans', deployment_id, printf('%010d', plan_epoch)), plan
  FROM plans;
INSERT INTO rows SELECT row_key('state', 'receipts', deployment_id, worker_id), receipt
  FROM receipts;
INSERT INTO rows SELECT row_key('state', 'workers', worker_id), record FROM workers;
INSERT INTO rows SELECT row_key('state', 'tokens', token_id), record FROM tokens;
INSERT INTO rows SELECT row_key('state', 'keys', deployment_id, key),
  json_object('body_digest', body_digest) FROM idempotency_keys;
INSERT INTO rows SELECT row_key('ledger', stage, input_digest), record FROM ledger;
INSERT INTO rows SELECT row_key('events', printf('%016d', seq)), json_array(json_object('seq', seq,
  'name', name, 'at', at, 'deployment_id', deployment_id, 'worker_id', worker_id,
  'data', json(data))) FROM outbox;
UPDATE rows SET value = CAST(value AS BLOB)"""
_TABLES_2 = (
    "leader counters deployments plans receipts workers tokens idempotency_keys ledger outbox"
)
