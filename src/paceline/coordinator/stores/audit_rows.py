"""Events as rows, and a question to the audit store as SQL: the same for SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.coordinator.stores.contracts import PRUNE_EVENTS, QUERY_EVENTS, Question
from paceline.coordinator.stores.events import cleaned
from paceline.errors import Conflict
from paceline.wire.events import Event

COLUMNS = "seq, name, at, deployment_id, worker_id, data"
_FIELDS = tuple(COLUMNS.split(", "))


def row_of(event: Event) -> tuple[object, ...]:
    """Return ``event``, cleaned, in the order of COLUMNS, its data as JSON."""
    fit = cleaned(event)
    names = (fit.deployment_id, fit.worker_id)
    return (fit.seq, fit.name.value, fit.at, *names, json.dumps(fit.data))


def event_of(row: Sequence[Any]) -> Event:
    """Return the event in a row of COLUMNS."""
    data = json.loads(row[5]) if isinstance(row[5], str) else row[5]
    return Event.model_validate(dict(zip(_FIELDS, (*row[:5], data), strict=True)))


def require_same(kept: Event, told: Event, where: object) -> None:
    """Raise Conflict where ``kept`` is not the event that came again under its number."""
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


def select(asked: Question, mark: str) -> tuple[str, list[object]]:
    """Return the SELECT of what is asked and its values; ``mark`` stands for one (? or %s)."""
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
    # Text of our own; the caller's values go apart from it.
    return (
        f"SELECT {COLUMNS} FROM audit WHERE {' AND '.join(clauses)}"  # noqa: S608
        f" ORDER BY seq {order} LIMIT {mark}",
        values,
    )
