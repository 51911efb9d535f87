"""Reports, trainings and scores that the gate reads later: stored with a seal, found by digest.

A record lies at ``<bucket>/records/KIND/DIGEST.json`` (a score: under the digest of what it follows
from, which is in it) beside its seal, an HMAC over kind and the record's digest under a key that
follows from the installation's own token. Trust boundary: a process that has ``runtime.json`` or
``secrets.json`` of the installation (mode 0600) can make a record. A token of any scope, the
bucket, the ledger, MLflow, Prefect's parameters and files can not: a record without the right seal
is refused. The key stays the same as long as ``secrets.json`` does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.config import Runtime
from paceline.errors import AccessDenied, CorruptData, InvalidInput, NotFound, SourceMissing
from paceline.manifest import Manifest
from paceline.schemas import (
    JOB_ID,
    RUN_ID,
    SHA256_HEX,
    Record,
    RecordedScore,
    TrainingData,
    canonical_json,
    digest_of,
)
from paceline.tasks._support.run import Run

MAX_BYTES = 16 * 1024 * 1024

HOW_TO_RECORD = {
    "training": "Run the same training again: a finished job is not trained again, its "
    "result is recorded.",
    "evaluation": "Run `paceline evaluate` again, and use the report_digest that it prints.",
    "score": "It is computed again.",
    "reference": "Name its digest instead.",
    "descent": "Run the same training again: its result is recorded anew.",
}

Loaded = TypeVar("Loaded", bound=Record)


class Reference(Record):
    """The digest that belongs to a name: of the newest record of ``kind`` of a run or a job, or
    what ``add_reference`` recorded."""

    kind: str
    name: str  # run-…, job-…, or a digest
    digest: str

    @property
    def key(self) -> str:
        """Return what it is found by."""
        return digest_of([self.kind, self.name])


def add_references(run: Run, kind: str, digest: str, *names: str) -> None:
    """Have ``resolve`` find the record with ``digest`` by this run's id and by ``names``."""
    for name in (run.run_id, *names):
        reference = Reference(kind=kind, name=name, digest=digest)
        _write(run, reference, "reference", reference.key, digest_of(reference))


def add_reference(run: Run, kind: str, name: str, digest: str, *, replaces: bool = False) -> None:
    """Have ``find_reference`` find ``digest`` by ``name``; unless it ``replaces`` that, what it
    finds already stays."""
    if replaces or find_reference(run, kind, name) is None:
        reference = Reference(kind=kind, name=name, digest=digest)
        _write(run, reference, "reference", reference.key, digest_of(reference))


def find_reference(run: Run, kind: str, name: str) -> str | None:
    """Return the digest that was recorded for ``name``, None where there is none; raises
    CorruptData as ``load``."""
    key = digest_of([kind, name])
    try:
        return _load_verified(
            run, key, "reference", Reference, lambda each: Reference.model_validate(each).key
        ).digest
    except NotFound:
        return None


class Descent(Record):
    """What made weights: the data that they learned from, and the base that they began as."""

    weights_digest: str
    data: TrainingData
    base_model_id: str = ""  # "": nothing
    base_manifest_digest: str = ""
    base_weights_digest: str = ""

    @property
    def key(self) -> str:
        """Return what it is found by."""
        return digest_of(["descent", self.weights_digest])


def weights_of(manifest: Manifest) -> str:
    """Return the weights digest of what ``manifest`` lists, "" where that has no safetensors."""
    held = {each.path: each.sha256 for each in manifest.files if each.path.endswith(".safetensors")}
    return digest_of(held) if held else ""


def save_descent(run: Run, descent: Descent) -> None:
    """Record ``descent``; the first one of its weights stays."""
    if load_descent(run, descent.weights_digest) is None:
        _write(run, descent, "descent", descent.key, digest_of(descent))


def load_descent(run: Run, weights_digest: str) -> Descent | None:
    """Return what made these weights, None where no training here did; raises CorruptData as
    ``load``."""
    key = digest_of(["descent", weights_digest])
    try:
        return _load_verified(
            run, key, "descent", Descent, lambda each: Descent.model_validate(each).key
        )
    except NotFound:
        return None


def resolve(run: Run, named: str, kind: str) -> str:
    """Return the digest of the record of ``kind`` that ``named`` is: its digest, run-… or job-….

    Raises InvalidInput, NotFound for a run or a job without one, CorruptData as ``load``.
    """
    if re.fullmatch(SHA256_HEX, named):
        return named
    if not re.fullmatch(f"{RUN_ID}|{JOB_ID}", named):
        raise InvalidInput(
            f"not the digest of a recorded {kind}, and no id of a run or a job",
            got=repr(named[:100]),
            wanted="the id of a run or a job, or 64 hexadecimal digits",
            do=HOW_TO_RECORD[kind],
        )
    if (digest := find_reference(run, kind, named)) is None:
        raise NotFound(f"no {kind} of it was recorded", got=named, do=HOW_TO_RECORD[kind])
    return digest


def save(run: Run, record: Record, kind: str) -> str:
    """Record ``record`` and return its digest; the same record twice is one."""
    digest = digest_of(record)
    _write(run, record, kind, digest, digest)
    return digest


def save_score(run: Run, score: RecordedScore) -> None:
    """Record ``score`` under what it follows from."""
    _write(run, score, "score", score.key, digest_of(score))


def _write(run: Run, record: Record, kind: str, name: str, digest: str) -> None:
    content = {
        "record": record.model_dump(mode="json"),
        "seal": _seal(run.runtime, kind, digest),
    }
    run.store.put_bytes(_url(run, kind, name), canonical_json(content))


def load(run: Run, digest: str, kind: str, record_type: type[Loaded]) -> Loaded:
    """Return the record of ``kind`` with ``digest``, its digest and its seal checked.

    Raises InvalidInput for what is no digest, NotFound where none was recorded, CorruptData for one
    that this installation did not make.
    """
    return _load_verified(run, digest, kind, record_type, digest_of)


def load_score(run: Run, key: str) -> RecordedScore | None:
    """Return the score recorded under ``key``, or None where there is none.

    Raises CorruptData for one that this installation did not make, or made under another key.
    """
    try:
        return _load_verified(
            run, key, "score", RecordedScore, lambda each: RecordedScore.model_validate(each).key
        )
    except NotFound:
        return None


def _load_verified(
    run: Run, digest: str, kind: str, record_type: type[Loaded], name_of: Callable[[Any], str]
) -> Loaded:
    """Return the record that lies under ``digest``: its seal is right, and ``name_of`` its fields
    gives that name."""
    if not re.fullmatch(SHA256_HEX, digest):  # it becomes a path
        raise InvalidInput(
            f"not the digest of a recorded {kind}",
            got=repr(digest[:100]),
            wanted="64 hexadecimal digits",
            do=HOW_TO_RECORD[kind],
        )
    where = _url(run, kind, digest)
    try:
        raw = run.store.get_bytes(where, max_bytes=MAX_BYTES)
    except SourceMissing as error:
        raise NotFound(
            f"no such {kind} was recorded", got=digest, where=where, do=HOW_TO_RECORD[kind]
        ) from error
    try:
        content = json.loads(raw)
        fields, seal = content["record"], str(content["seal"])
        wanted = _seal(run.runtime, kind, digest_of(fields))
        is_valid = hmac.compare_digest(seal.encode(), wanted.encode())
        if name_of(fields) != digest or not is_valid:
            raise ValueError("another digest or seal than this installation gave it")
        return record_type.model_validate(fields)
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        raise CorruptData(
            f"the record of this {kind} cannot be trusted",
            got=str(error).splitlines()[0][:200],
            wanted=digest,
            where=where,
            do=HOW_TO_RECORD[kind],
        ) from error


def load_or_none(run: Run, digest: object, kind: str, record_type: type[Loaded]) -> Loaded | None:
    """Return the record, or None where there is none that can be trusted."""
    try:
        return load(run, str(digest), kind, record_type)
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
