"""The audit store in PostgreSQL: one table, migrated on the first connection.

Two connections, one for appends and one for queries, each used by one thread at a time. Each
exchange has a deadline, after which its connection is cut, because a server may stop answering.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psycopg

from paceline.coordinator.stores.audit import (
    COLUMNS,
    event_of,
    pruning,
    require_same,
    row_of,
    select,
)
from paceline.coordinator.stores.contracts import EVERYTHING, EventQuery
from paceline.errors import InvalidProfile, ServiceUnavailable
from paceline.schemas.events import Event

log = logging.getLogger(__name__)

CONNECT_S = 3
EXCHANGE_S = 5.0  # one transaction, before its connection is cut
STATEMENT_MS = 4_000
# Migrations from version N to N + 1; never change a released one.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # JSON, not JSONB: text is stored exactly, also what JSONB cannot hold.
        """CREATE TABLE audit (
             seq BIGINT PRIMARY KEY, name TEXT NOT NULL, at DOUBLE PRECISION NOT NULL,
             deployment_id TEXT, worker_id TEXT, data JSON NOT NULL)""",
        "CREATE INDEX audit_by_deployment ON audit (deployment_id, seq)",
        "CREATE INDEX audit_by_worker ON audit (worker_id, seq)",
        "CREATE INDEX audit_by_name ON audit (name, seq)",
        "CREATE INDEX audit_by_time ON audit (at)",
    ),
)
MIGRATION_LOCK = 0x7061_6365  # one process migrates while the others wait
_INSERT = f"""
INSERT INTO audit ({COLUMNS})
SELECT * FROM unnest(%s::bigint[], %s::text[], %s::float8[], %s::text[], %s::text[], %s::json[])
ON CONFLICT (seq) DO NOTHING RETURNING seq
"""  # noqa: S608 (a list of our own)

Found = TypeVar("Found")


class PostgresAudit:
    """Implements the Audit contract with one database."""

    def __init__(self, url: str, *, password: str = "") -> None:
        """Nothing is connected yet; raises InvalidProfile for a URL that libpq cannot read."""
        try:
            fields = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise InvalidProfile(
                "no URL of a PostgreSQL database", got=error, where="control.postgres_url"
            ) from error
        settings = f"-c statement_timeout={STATEMENT_MS} -c synchronous_commit=on"
        self._conninfo = psycopg.conninfo.make_conninfo(
            "",
            **{
                "connect_timeout": CONNECT_S,
                "application_name": "paceline",
                **fields,
                "options": f"{fields.get('options') or ''} {settings}".strip(),
                **({"password": password} if password else {}),
            },
        )
        self._where = url
        self._version = ""
        self._migrating = threading.Lock()
        self._migrated = False
        self._appending, self._asking = _Connection(self._connect), _Connection(self._connect)

    @property
    def backend(self) -> str:
        """Return ``postgresql`` and its version, once it answered."""
        return f"postgresql {self._version}".strip()

    def check(self) -> None:
        """Raise ServiceUnavailable where the database does not answer."""
        self._do(self._asking, lambda db: db.execute("SELECT 1").fetchone())

    def append(self, events: Sequence[Event]) -> None:
        """Store all of ``events`` in one transaction."""
        if not events:
            return
        rows = [row_of(each) for each in events]

        def insert(db: psycopg.Connection[Any]) -> None:
            columns = [list(column) for column in zip(*rows, strict=True)]
            added = {seq for (seq,) in db.execute(_INSERT, columns)}
            # An event repeated within this call, or stored before, must be the same.
            told = {event.seq: event for event in events}
            there = [each.seq for each in events if each.seq not in added or told[each.seq] != each]
            query = f"SELECT {COLUMNS} FROM audit WHERE seq = ANY(%s)"  # noqa: S608
            kept = {row[0]: event_of(row) for row in db.execute(query, (there,))}
            for event in events:
                if event.seq in kept:
                    require_same(kept[event.seq], event, self._where)

        self._do(self._appending, insert)

    def last(self) -> int:
        """Return the highest stored number."""
        query = "SELECT COALESCE(MAX(seq), 0) FROM audit"
        found = self._do(self._asking, lambda db: db.execute(query).fetchone())
        assert found is not None
        return int(found[0])

    def query(self, asked: EventQuery = EVERYTHING) -> list[Event]:
        """Return the matching events."""
        query, values = select(asked, "%s")
        rows = self._do(self._asking, lambda db: db.execute(query.encode(), values).fetchall())
        return [event_of(row) for row in rows]

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep``."""
        query, values = pruning("%s", keep)
        return self._do(self._appending, lambda db: db.execute(query.encode(), values).rowcount)

    def close(self) -> None:
        """Close both connections."""
        self._appending.close()
        self._asking.close()

    # --- inside ----------------------------------------------------------------------------------

    def _do(self, line: _Connection, work: Callable[[psycopg.Connection[Any]], Found]) -> Found:
        try:
            return line.do(work)
        except (psycopg.Error, OSError) as error:
            raise ServiceUnavailable(
                "the audit database cannot be used",
                got=f"{type(error).__name__}: {error}".strip(),
                where=self._where,
                do="Bring PostgreSQL back, or look at what it says; events wait meanwhile.",
            ) from error

    def _connect(self) -> psycopg.Connection[Any]:
        db = psycopg.connect(self._conninfo)
        try:
            with self._migrating:
                if not self._migrated:
                    with _cut_after(db, EXCHANGE_S), db.transaction():
                        self._migrate(db)
                    self._migrated = True
        except BaseException:
            db.close()
            raise
        number = db.info.server_version
        self._version = f"{number // 10_000}.{number % 10_000}"
        return db

    def _migrate(self, db: psycopg.Connection[Any]) -> None:
        db.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
        db.execute("CREATE TABLE IF NOT EXISTS audit_schema (version INTEGER NOT NULL)")
        row = db.execute("SELECT MAX(version) FROM audit_schema").fetchone()
        version = (row and row[0]) or 0
        if version > len(MIGRATIONS):
            raise ServiceUnavailable(
                "the audit tables are of a newer Paceline",
                got=version,
                wanted=len(MIGRATIONS),
                where=self._where,
                do="Start the Paceline version that made them.",
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                db.execute(statement.encode())
        if version < len(MIGRATIONS):
            db.execute("INSERT INTO audit_schema VALUES (%s)", (len(MIGRATIONS),))
            log.info("audit tables: version %d to %d", version, len(MIGRATIONS))


class _Connection:
    """One connection, opened on demand and again after an error."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._db: psycopg.Connection[Any] | None = None

    def do(self, work: Callable[[psycopg.Connection[Any]], Found]) -> Found:
        """Run ``work`` in a transaction; once more where the existing connection was dead."""
        with self._lock:
            if self._db is not None:
                try:
                    return self._in_transaction(self._db, work)
                except psycopg.OperationalError as error:
                    log.info("connected anew to the audit database: %s", error)
            self._db = self._connect()
            return self._in_transaction(self._db, work)

    def _in_transaction(
        self, db: psycopg.Connection[Any], work: Callable[[psycopg.Connection[Any]], Found]
    ) -> Found:
        try:
            with _cut_after(db, EXCHANGE_S), db.transaction():
                return work(db)
        except psycopg.Error:
            self._db = None
            db.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None


@contextlib.contextmanager
def _cut_after(db: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Cut the connection if the block takes longer, because a frozen server never answers."""

    def cut() -> None:
        with (
            contextlib.suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(db.fileno())) as line,
        ):
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
