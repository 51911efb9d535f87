"""The audit store in SQLite, and what both audit backends share: cleaning, rows, queries."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.coordinator.state.messages import EmitEvent
from paceline.coordinator.stores.contracts import EVERYTHING, PRUNE_EVENTS, QUERY_EVENTS, EventQuery
from paceline.coordinator.stores.sqlite_file import SqliteFile
from paceline.errors import Conflict
from paceline.schemas.events import Event

# Events are cleaned before they are stored: one event that JSON, UTF-8 or a database refuses would
# block all later ones.

LONGEST = 16_384  # characters of one text: 10,000 events may wait, and a million are kept


def numbered(told: EmitEvent, seq: int) -> Event:
    """Return ``told`` as an event with this number, cleaned."""
    data = fit(told.data)
    assert isinstance(data, dict)
    return Event(
        seq=seq,
        name=told.name,
        at=told.at,
        deployment_id=_name(told.deployment_id),
        worker_id=_name(told.worker_id),
        data=data,
    )


def cleaned(event: Event) -> Event:
    """Return ``event`` with the cleaning that ``numbered`` applies."""
    changed = {
        "deployment_id": _name(event.deployment_id),
        "worker_id": _name(event.worker_id),
        "data": fit(event.data),
    }
    return event.model_copy(update=changed)


def fit(value: object) -> object:
    """Return ``value`` as valid JSON data: no NaN, no lone surrogates, other types as text."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case str():
            return _text(value)
        case dict():
            return {_text(str(key)): fit(each) for key, each in value.items()}
        case list() | tuple():
            return [fit(each) for each in value]
        case _:
            return _text(str(value))


def _text(text: str) -> str:
    text = text if len(text) <= LONGEST else text[:LONGEST] + "…"
    return text.encode("utf-8", "replace").decode()


def _name(name: str | None) -> str | None:
    return None if name is None else _text(name).replace("\0", "\ufffd")


# Events as rows, and queries as SQL, for both SQLite and PostgreSQL.

COLUMNS = "seq, name, at, deployment_id, worker_id, data"
_FIELDS = tuple(COLUMNS.split(", "))


def row_of(event: Event) -> tuple[object, ...]:
    """Return ``event``, cleaned, in the order of COLUMNS, with its data as JSON."""
    fit = cleaned(event)
    names = (fit.deployment_id, fit.worker_id)
    return (fit.seq, fit.name.value, fit.at, *names, json.dumps(fit.data))


def event_of(row: Sequence[Any]) -> Event:
    """Return the event in a row of COLUMNS."""
    data = json.loads(row[5]) if isinstance(row[5], str) else row[5]
    return Event.model_validate(dict(zip(_FIELDS, (*row[:5], data), strict=True)))


def require_same(kept: Event, told: Event, where: object) -> None:
    """Raise Conflict where ``kept`` is not the event that was sent again under its number."""
    if kept != cleaned(told):
        raise Conflict(
            "the audit store has another event under this number",
            got=f"event {told.seq}: {told.name.value}",
            wanted=f"{kept.name.value}, told at {kept.at}",
            where=where,
            do="Give each installation an audit store of its own, or restore both stores alike.",
        )


def pruning(mark: str, keep: int) -> tuple[str, list[object]]:
    """Return the DELETE of the oldest events beyond ``keep``, and its values."""
    query = (
        "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE seq <="  # noqa: S608
        f" (SELECT seq FROM audit ORDER BY seq DESC LIMIT 1 OFFSET {mark})"
        f" ORDER BY seq LIMIT {mark})"
    )
    return query, [max(1, keep), PRUNE_EVENTS]


def select(asked: EventQuery, mark: str) -> tuple[str, list[object]]:
    """Return the SELECT for ``asked`` and its values; ``mark`` is the placeholder (? or %s)."""
    conditions: list[tuple[str, object]] = [("seq > ", asked.after)]
    for text, value in (
        ("seq < ", asked.before),
        ("deployment_id = ", asked.deployment_id),
        ("worker_id = ", asked.worker_id),
        ("at >= ", asked.since),
        ("at < ", asked.until),
    ):
        if value is not None:
            conditions.append((text, value))
    clauses = [text + mark for text, _ in conditions]
    values = [value for _, value in conditions]
    if asked.names:
        clauses.append(f"name IN ({', '.join([mark] * len(asked.names))})")
        values += [each.value for each in asked.names]
    values.append(max(0, min(asked.limit, QUERY_EVENTS)))
    order = "DESC" if asked.newest_first else "ASC"
    # Constant text only; the caller's values are bound as parameters.
    return (
        f"SELECT {COLUMNS} FROM audit WHERE {' AND '.join(clauses)}"  # noqa: S608
        f" ORDER BY seq {order} LIMIT {mark}",
        values,
    )


# The table of version 1 of the coordinator's file; ``epoch`` is no longer used.
SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, name TEXT NOT NULL,
  at REAL NOT NULL, deployment_id TEXT, worker_id TEXT, data TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS audit_by_deployment ON audit (deployment_id, seq);
CREATE INDEX IF NOT EXISTS audit_by_worker ON audit (worker_id, seq);
CREATE INDEX IF NOT EXISTS audit_by_name ON audit (name, seq);
"""


class SqliteAudit:
    """Implements the Audit contract with one table, which may be in coordination's file."""

    def __init__(self, path: Path) -> None:
        self.backend = f"sqlite {sqlite3.sqlite_version}"
        self._file = SqliteFile(path, "audit file", _make_tables)

    def check(self) -> None:
        """Raise ServiceUnavailable where the file cannot be read."""
        self.last()

    def append(self, events: Sequence[Event]) -> None:
        """Store all of ``events`` in one transaction."""
        with self._file.writing() as db:
            for event in events:
                seq, *rest = row_of(event)
                added = db.execute(
                    "INSERT INTO audit (seq, epoch, name, at, deployment_id, worker_id, data)"
                    " VALUES (?, 0, ?, ?, ?, ?, ?) ON CONFLICT (seq) DO NOTHING",
                    (seq, *rest),
                )
                if added.rowcount == 0:
                    same = select(EventQuery(after=event.seq - 1, limit=1), "?")
                    require_same(event_of(db.execute(*same).fetchone()), event, self._file.path)

    def last(self) -> int:
        """Return the highest stored number."""
        return int(self._file.one("SELECT COALESCE(MAX(seq), 0) FROM audit")[0])

    def query(self, asked: EventQuery = EVERYTHING) -> list[Event]:
        """Return the matching events."""
        return [event_of(row) for row in self._file.rows(*select(asked, "?"))]

    def prune(self, keep: int) -> int:
        """Delete the oldest events beyond the newest ``keep``."""
        with self._file.writing() as db:
            return db.execute(*pruning("?", keep)).rowcount

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _make_tables(db: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";\n"):
        db.execute(statement)
