"""The audit store in SQLite or PostgreSQL: one table of events.

Each exchange with PostgreSQL has a deadline, after which its connection is cut, because a server
may stop answering.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from paceline.coordinator.stores.rows import sanitized
from paceline.coordinator.stores.sqlite import BUSY_S, prepare_file, unusable_file
from paceline.errors import Conflict, InvalidProfile, ServiceUnavailable
from paceline.schemas import Event, EventName

PRUNE_EVENTS = 20_000  # deleted in one transaction
MAX_QUERY_EVENTS = 1_000  # the most events that one query returns
CONNECT_S = 3
EXCHANGE_S = 5.0  # one transaction, before its connection is cut
STATEMENT_MS = 4_000
SCHEMA_VERSION = 1
SCHEMA_LOCK = 0x7061_6365  # one process creates the tables while the others wait

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventQuery:
    """A query of the audit store: events numbered in (after, before), with times in [since, until)
    in Unix time. ``limit`` is capped at MAX_QUERY_EVENTS.
    """

    after: int = 0
    before: int | None = None
    limit: int = MAX_QUERY_EVENTS
    newest_first: bool = False
    deployment_id: str | None = None
    worker_id: str | None = None
    names: Sequence[EventName] = ()
    since: float | None = None
    until: float | None = None


ALL_EVENTS = EventQuery()


def _tables(*more: sa.Column[Any]) -> tuple[sa.MetaData, sa.Table]:
    metadata = sa.MetaData()
    table = sa.Table(
        "audit",
        metadata,
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        *more,
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("deployment_id", sa.Text),
        sa.Column("worker_id", sa.Text),
        # JSON, not JSONB: text is stored exactly, also what JSONB cannot hold.
        sa.Column("data", sa.JSON, nullable=False),
        sa.Index("audit_by_deployment", "deployment_id", "seq"),
        sa.Index("audit_by_worker", "worker_id", "seq"),
        sa.Index("audit_by_name", "name", "seq"),
    )
    return metadata, table


class Audit:
    """The append-only history of events, over an engine.

    Every method may be called from any thread. Raises ServiceUnavailable where the store cannot
    be used.
    """

    backend: str  # with its version, for display

    def __init__(self, engine: sa.Engine, table: sa.Table, insert: Callable[..., Any]) -> None:
        self._engine, self._table, self._insert = engine, table, insert
        self._columns = [table.c[name] for name in Event.model_fields]

    def check(self) -> None:
        """Raise ServiceUnavailable where the store cannot be read."""
        self.last()

    def append(self, events: Sequence[Event]) -> None:
        """Store ``events``, all or none; numbers that are there already are not stored twice.

        Raises Conflict where a number belongs to another event, ServiceUnavailable where the
        outcome is unknown: appending the same events again is safe.
        """
        if not events:
            return
        clean = {event.seq: event for event in map(sanitized, reversed(events))}
        table = self._table
        added = self._insert(table).on_conflict_do_nothing(index_elements=["seq"])
        rows = [{**event.model_dump(), "name": event.name.value} for event in clean.values()]

        def insert(db: sa.Connection) -> None:
            db.execute(added, rows)
            kept = sa.select(*self._columns).where(table.c.seq.between(min(clean), max(clean)))
            there = {row.seq: _event_of(row) for row in db.execute(kept)}
            for event in map(sanitized, events):
                if there[event.seq] != event:
                    raise Conflict(
                        "the audit store has another event under this number",
                        got=f"event {event.seq}: {event.name.value}",
                        wanted=f"{there[event.seq].name.value} at {there[event.seq].at}",
                        where=self._engine.url.render_as_string(),
                        do="Give each installation an audit store of its own, "
                        "or restore both stores alike.",
                    )

        self._do(insert)

    def last(self) -> int:
        """Return the highest stored number, 0 before the first."""
        newest = sa.select(sa.func.coalesce(sa.func.max(self._table.c.seq), 0))
        return int(self._do(lambda db: db.execute(newest).scalar_one()))

    def query(self, asked: EventQuery = ALL_EVENTS) -> list[Event]:
        """Return the matching events; to page, pass the last number as ``after`` (or as ``before``
        where the newest come first).
        """
        column = self._table.c
        found = sa.select(*self._columns).where(column.seq > asked.after)
        if asked.before is not None:
            found = found.where(column.seq < asked.before)
        if asked.since is not None:
            found = found.where(column.at >= asked.since)
        if asked.until is not None:
            found = found.where(column.at < asked.until)
        same = {"deployment_id": asked.deployment_id, "worker_id": asked.worker_id}
        found = found.filter_by(**{name: each for name, each in same.items() if each is not None})
        if asked.names:
            found = found.where(column.name.in_([each.value for each in asked.names]))
        found = found.order_by(column.seq.desc() if asked.newest_first else column.seq)
        found = found.limit(max(0, min(asked.limit, MAX_QUERY_EVENTS)))
        return self._do(lambda db: [_event_of(row) for row in db.execute(found)])

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep`` (at least 1); return how many.

        At most PRUNE_EVENTS per call: call again where it returns that many.
        """
        seq = self._table.c.seq
        oldest = sa.select(seq).order_by(seq.desc()).offset(max(1, keep)).limit(1)
        old = sa.select(seq).where(seq <= oldest.scalar_subquery()).order_by(seq)
        gone = sa.delete(self._table).where(seq.in_(old.limit(PRUNE_EVENTS)))
        return self._do(lambda db: db.execute(gone).rowcount)

    def close(self) -> None:
        self._engine.dispose()

    def _do(self, work: Callable[[sa.Connection], Found]) -> Found:
        """Run ``work`` in a transaction; raises ServiceUnavailable."""
        raise NotImplementedError


def _event_of(row: Any) -> Event:
    return Event.model_validate(row._asdict())


class SqliteAudit(Audit):
    """The audit store in one SQLite file, which may be the coordinator's."""

    def __init__(self, path: Path) -> None:
        """Create the table; raises ServiceUnavailable where the file cannot be used."""
        # ``epoch`` is of the table's first version, and no longer used.
        _, table = _tables(sa.Column("epoch", sa.Integer, nullable=False, default=0))
        engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_S})
        super().__init__(engine, table, sqlite.insert)
        self.backend, self._path = f"sqlite {sqlite3.sqlite_version}", path

        @sa.event.listens_for(engine, "connect")
        def durable(db: sqlite3.Connection, _: object) -> None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")

        try:
            prepare_file(path)
        except OSError as error:
            raise unusable_file("audit file", path, error) from error
        self._do(lambda db: _create_missing(db, table))

    def _do(self, work: Callable[[sa.Connection], Found]) -> Found:
        try:
            with self._engine.begin() as db:
                return work(db)
        except sa.exc.DBAPIError as error:
            raise unusable_file("audit file", self._path, error.orig or error) from error  # type: ignore[arg-type]


def _create_missing(db: sa.Connection, table: sa.Table) -> None:
    # Not create_all, which looks first: replicas that start together would race.
    db.execute(sa.schema.CreateTable(table, if_not_exists=True))
    for index in table.indexes:
        db.execute(sa.schema.CreateIndex(index, if_not_exists=True))


class PostgresAudit(Audit):
    """The audit store in a PostgreSQL database; its table is created on the first exchange."""

    def __init__(self, url: str, *, password: str = "") -> None:
        """Nothing is connected yet; raises InvalidProfile for a URL that libpq cannot read."""
        import psycopg

        try:
            fields = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise InvalidProfile(
                "no URL of a PostgreSQL database", got=error, where="control.postgres_url"
            ) from error
        settings = f"-c statement_timeout={STATEMENT_MS} -c synchronous_commit=on"
        conninfo = psycopg.conninfo.make_conninfo(
            "",
            **{
                "connect_timeout": CONNECT_S,
                "application_name": "paceline",
                **fields,
                "options": f"{fields.get('options') or ''} {settings}".strip(),
                **({"password": password} if password else {}),
            },
        )
        metadata, table = _tables()
        sa.Index("audit_by_time", table.c.at)
        versions = sa.Table(
            "audit_schema", metadata, sa.Column("version", sa.Integer, nullable=False)
        )
        engine = sa.create_engine(
            "postgresql+psycopg://", creator=lambda: psycopg.connect(conninfo), pool_size=2
        )
        super().__init__(engine, table, postgresql.insert)
        self._metadata, self._versions, self._where = metadata, versions, url
        self._is_created = False

    @property
    def backend(self) -> str:  # type: ignore[override]
        """Return ``postgresql`` and its version, once it answered."""
        version = getattr(self._engine.dialect, "server_version_info", None)
        return "postgresql" + (f" {version[0]}.{version[-1]}" if version else "")

    def _do(self, work: Callable[[sa.Connection], Found]) -> Found:
        for attempt in (1, 2):
            try:
                with self._engine.connect() as db, _cut_after(db, EXCHANGE_S), db.begin():
                    if not self._is_created:
                        self._create(db)
                    found = work(db)
            except (sa.exc.DBAPIError, OSError) as error:
                # A connection that the server closed meanwhile is opened again, once.
                if attempt == 1 and getattr(error, "connection_invalidated", False):
                    continue
                cause = getattr(error, "orig", None) or error
                raise ServiceUnavailable(
                    "the audit database cannot be used",
                    got=f"{type(cause).__name__}: {cause}".strip(),
                    where=self._where,
                    do="Bring PostgreSQL back, or read its log; events wait meanwhile.",
                ) from error
            else:
                self._is_created = True
                return found
        raise AssertionError

    def _create(self, db: sa.Connection) -> None:
        db.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEMA_LOCK)))
        self._metadata.create_all(db)
        version = db.execute(sa.select(sa.func.max(self._versions.c.version))).scalar()
        if version is None:
            db.execute(sa.insert(self._versions).values(version=SCHEMA_VERSION))
        elif version != SCHEMA_VERSION:
            raise ServiceUnavailable(
                "the audit tables are of another version of Paceline",
                got=version,
                wanted=SCHEMA_VERSION,
                where=self._where,
                do="Start the Paceline version that made them.",
            )


@contextlib.contextmanager
def _cut_after(db: sa.Connection, seconds: float) -> Iterator[None]:
    """Cut the connection if the block takes longer, because a frozen server never answers."""
    number = os.dup(db.connection.dbapi_connection.fileno())  # type: ignore[union-attr]
    with socket.socket(fileno=number) as line:

        def cut() -> None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
