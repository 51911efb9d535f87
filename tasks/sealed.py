"""Results that a later decision rests on: recorded by the stage that made them, found by digest.

A record lies at ``<bucket>/records/KIND/DIGEST.json`` beside its seal, an HMAC over kind and digest
under a key that follows from the installation's own token. Trust boundary: whoever has
``runtime.json`` or ``secrets.json`` of the installation (mode 0600) can make a record. A token of
any scope, the bucket, the ledger, MLflow, Prefect's parameters and files can not: a record without
the right seal is refused. The key stays the same as long as ``secrets.json`` does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import TypeVar

from pydantic import ValidationError

from paceline.config import Runtime
from paceline.errors import AccessDenied, CorruptData, InvalidInput, NotFound, SourceMissing
from paceline.schemas import SHA256_HEX, Record, canonical_json, digest_of
from paceline.tasks.run import Run

MAX_BYTES = 16 * 1024 * 1024

AGAIN = {
    "training": "Run the same `paceline train` again: a finished job is not trained again, its "
    "result is recorded.",
    "evaluation": "Run `paceline evaluate` again, and use the report_digest that it prints.",
}

Kept = TypeVar("Kept", bound=Record)


def keep(run: Run, record: Record, kind: str) -> str:
    """Record ``record`` and return its digest; the same record twice is one."""
    digest = digest_of(record)
    content = {
        "record": record.model_dump(mode="json"),
        "seal": _seal(run.runtime, kind, digest),
    }
    run.store.put_bytes(_url(run, kind, digest), canonical_json(content))
    return digest


def find(run: Run, digest: str, kind: str, record_type: type[Kept]) -> Kept:
    """Return the record of ``kind`` with ``digest``, its digest and its seal checked.

    Raises InvalidInput for what is no digest, NotFound where none was recorded, CorruptData for one
    that this installation did not make.
    """
    if not re.fullmatch(SHA256_HEX, digest):  # it becomes a path
        raise InvalidInput(
            f"not the digest of a recorded {kind}",
            got=repr(digest[:100]),
            wanted="64 hexadecimal digits",
            do=AGAIN[kind],
        )
    where = _url(run, kind, digest)
    try:
        raw = run.store.get_bytes(where, max_bytes=MAX_BYTES)
    except SourceMissing as error:
        raise NotFound(
            f"no such {kind} was recorded", got=digest, where=where, do=AGAIN[kind]
        ) from error
    try:
        content = json.loads(raw)
        fields, seal = content["record"], str(content["seal"])
        right = hmac.compare_digest(seal.encode(), _seal(run.runtime, kind, digest).encode())
        if digest_of(fields) != digest or not right:
            raise ValueError("another digest or seal than this installation gave it")
        return record_type.model_validate(fields)
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        raise CorruptData(
            f"the record of this {kind} cannot be trusted",
            got=str(error).splitlines()[0][:200],
            wanted=digest,
            where=where,
            do=AGAIN[kind],
        ) from error


def found(run: Run, digest: object, kind: str, record_type: type[Kept]) -> Kept | None:
    """Return the record, or None where there is none that can be trusted."""
    try:
        return find(run, str(digest), kind, record_type)
    except (InvalidInput, NotFound, CorruptData):
        return None


def _seal(runtime: Runtime, kind: str, digest: str) -> str:
    key = runtime.secrets.records_key
    if not key:
        raise AccessDenied(
            "results are recorded and found with the installation's own token",
            got="no coordinator_token",
            where=runtime.state_dir,
            do="Run this flow on the installation, not on a node that joined it.",
        )
    return hmac.new(key.encode(), f"{kind}:{digest}".encode(), hashlib.sha256).hexdigest()


def _url(run: Run, kind: str, digest: str) -> str:
    return f"{run.runtime.records_url}/{kind}/{digest}.json"
