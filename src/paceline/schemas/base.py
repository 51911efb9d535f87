"""The base of every record on the wire, and the one canonical way to write and digest it."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema

from paceline.text import printable

SHA256_HEX = r"^[0-9a-f]{64}$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

Sha256 = Annotated[str, StringConstraints(pattern=SHA256_HEX)]
Name = Annotated[str, StringConstraints(pattern=NAME)]
COUNT_MAX = 2**63 - 1
# Of bytes, pieces, restarts: what a machine may say. JSON knows larger numbers, and stores, floats
# and monitors do not.
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
# Another process chose it, and logs, tables and pages show it: control characters are escaped.
Text = Annotated[str, AfterValidator(printable)]


def _be_strict(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("int", "float", "bool"):
            schema["strict"] = True
        elif schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True  # 4 MB of wrong items made 6,500,000 errors of 1.5 KB each
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return
    for each in schema:
        _be_strict(each)


class Record(BaseModel):
    """An immutable record: unknown keys are refused, NaN and infinity too, and so is what only
    passes for a number or a truth (``true`` is no count, and neither is ``"1"``). The first wrong
    item of a list is the only one that is reported.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Return the schema with its numbers and truths strict (tuples, enumerations and the like
        still come from JSON's lists and strings), and lists that end at their first bad item."""
        schema = handler(source)
        _be_strict(schema)
        return schema


def parse_json(raw: bytes | str) -> Any:
    """Return the JSON value in ``raw``, which comes from outside.

    Raises ValueError for anything else; nesting too deep, numbers too long and an object with one
    key twice, which two parsers would read differently, are that too.
    """
    try:
        return json.loads(raw, object_pairs_hook=_each_key_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {key[:100]!r}")
    return found


def canonical_json(value: Any) -> bytes:
    """Return the one byte string that stands for ``value``: sorted keys, no spaces, UTF-8."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_of(value: Any) -> str:
    """Return the SHA-256 (hex) of ``value``'s canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


# One id ties a run's Prefect, Dask, MLflow, logs and metrics together.

RUN_ID = r"^run-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}$"
RunId = Annotated[str, StringConstraints(pattern=RUN_ID)]


def new_run_id() -> str:
    """Return a fresh run id that sorts by its UTC start, e.g. ``run-20261120-153600-9f3a1c``."""
    return time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)


# What answers say about who leads: two headers, written by replicas and read by clients.

EPOCH_HEADER = "Paceline-Epoch"  # of the newest leader that the answering replica knows
LEADER_HEADER = "Paceline-Leader"  # its URL; absent where the replica knows none
