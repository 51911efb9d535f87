"""Expectations of one's own on a snapshot's samples, read from YAML and checked before any sample.

The file maps a kind of snapshot (``all``, ``text``, ``conversations``, ``pairs``) to a list; each
entry is one of Great Expectations' names with its arguments::

    text:
      - expect_column_values_to_be_between: {column: n_tokens, min_value: 16, mostly: 0.99}

Conditions on rows are refused: pandas evaluates them as code, and the file may lie in a bucket.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from paceline.data.snapshot import Snapshot
from paceline.errors import InvalidInput
from paceline.storage import ObjectStore

KINDS = ("all", "text", "conversations", "pairs")
COLUMN_ARGUMENTS = ("column", "column_A", "column_B", "column_list", "column_set")
CODE = ("row_condition", "condition_parser")
MAX_BYTES = 64 * 1024


def expectations_text(named: str, store: ObjectStore) -> str:
    """Return the YAML that ``named`` (``data.expectations``) is or names; "" where there is none.

    Raises InvalidInput for a file that this machine does not have.
    """
    if named.startswith("s3://"):
        return store.get_bytes(named, MAX_BYTES).decode(errors="replace")
    if not named or ":" in named:
        return named
    try:
        return Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "the file of expectations cannot be read",
            got=f"{named}: {error}"[:300],
            wanted="a YAML file on the flow's machine, s3://…, or the YAML itself",
            where="data.expectations",
        ) from error


def kind_of(snapshot: Snapshot) -> str:
    """Return the kind of snapshot whose expectations apply, besides those of all."""
    return "pairs" if snapshot.is_paired else "conversations" if snapshot.is_masked else "text"


def own_expectations(text: str, snapshot: Snapshot, columns: Collection[str]) -> dict[str, Any]:
    """Return the expectations in ``text`` for ``snapshot``, by the names of their checks.

    Raises InvalidInput for what is no YAML, an unknown kind or expectation, or a column that is not
    among ``columns``.
    """
    found: dict[str, Any] = {}
    known = _parsed(text)
    for kind in known:  # of every kind, so that a mistake shows with any snapshot
        for number, entry in enumerate(known[kind] or [], start=1):
            where = f"data.expectations, {kind} {number}"
            if not (isinstance(entry, dict) and len(entry) == 1):
                raise _refused("an expectation has one name", entry, "expect_…: {…}", where)
            ((name, given),) = entry.items()
            made = _made(str(name), given, where)
            if kind in ("all", kind_of(snapshot)):
                _require_columns(given or {}, columns, where)
                found[f"{kind} {number}: {name} {(given or {}).get('column', '')}".strip()] = made
    return found


def _parsed(text: str) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        got = " ".join(str(error).split())[:200]
        raise InvalidInput(
            "not YAML", got=got, wanted="a list a kind", where="data.expectations"
        ) from error
    wrong = not isinstance(raw, dict) or [
        str(kind)
        for kind, entries in raw.items()
        if kind not in KINDS or not isinstance(entries, list | None)
    ]
    if wrong:
        got = type(raw).__name__ if wrong is True else ", ".join(wrong)
        raise _refused("not a list a kind", got, ", ".join(KINDS), "data.expectations")
    return dict(raw)


def _made(name: str, given: Any, where: str) -> Any:
    from great_expectations.exceptions import GreatExpectationsError
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    if not isinstance(given, dict | None) or set(given or {}) & set(CODE):
        raise _refused("arguments are names and values, no conditions", given, "column: …", where)
    try:
        return ExpectationConfiguration(type=name, kwargs=given or {}).to_domain_obj()
    except (GreatExpectationsError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())[:200]
        raise _refused("not an expectation", f"{name}: {said}", "its arguments", where) from error


def _require_columns(given: dict[str, Any], columns: Collection[str], where: str) -> None:
    for argument in COLUMN_ARGUMENTS:
        named = given.get(argument, [])
        for column in [named] if isinstance(named, str) else named:
            if column not in columns:
                raise _refused("no such column", column, ", ".join(sorted(columns)), where)


def _refused(what: str, got: Any, wanted: str, where: str) -> InvalidInput:
    return InvalidInput(what, got=str(got)[:300], wanted=wanted, where=where)
