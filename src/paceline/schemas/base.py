"""Record, the base of every message, with canonical JSON, digests and shared field types.

Also new run ids and the two REST headers about the leader.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema

from paceline import config
from paceline.errors import InvalidInput, NotFound
from paceline.text import has_password, has_token, printable, shortened, without_passwords

SHA256_HEX = r"^[0-9a-f]{64}$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
MODEL_ID = config.MODEL_ID  # as NAME, and parts joined by "/"

Sha256 = Annotated[str, StringConstraints(pattern=SHA256_HEX)]
Name = Annotated[str, StringConstraints(pattern=NAME)]
ModelId = Annotated[str, StringConstraints(pattern=MODEL_ID, max_length=128)]
PieceHash = Literal["blake3", "sha256"]  # of a manifest's pieces
COUNT_MAX = 2**63 - 1
# Bytes, pieces, restarts. JSON allows larger numbers; stores, floats and monitors do not.
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
# Text from another process that logs, tables and pages show: control characters are escaped.
Text = Annotated[str, AfterValidator(printable)]


def is_none(value: object) -> bool:
    """Return whether to leave a field out: older versions do not take it, and digests cover it."""
    return value is None


def is_empty(value: object) -> bool:
    """As ``is_none``, of a field that may be empty."""
    return not value


def require_no_password(text: str) -> str:
    """Return ``text``; raises ValueError where it is a URL with a password."""
    if has_password(text):  # it would be kept, and shown
        raise ValueError(
            "a URL with a password or token is refused: credentials are the installation's"
        )
    return text


def require_no_secrets(record: BaseModel) -> None:
    """Raise InvalidInput where a text of ``record``, at any depth, is a URL with a credential, or
    has an access token or a private key."""
    left: list[tuple[str, Any]] = [("", record.model_dump(mode="json"))]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{where}.{key}"[:200], each) for key, each in value.items()]
            left += [(where, key) for key in value]
        elif isinstance(value, list):
            left += [(where, each) for each in value]
        elif isinstance(value, str) and (has_password(value) or has_token(value)):
            url = "a URL with a password or token"
            raise InvalidInput(
                f"{url if has_password(value) else 'an access token or private key'} is refused",
                wanted="texts without credentials: they are kept, and shown",
                where=without_passwords(where.lstrip(".")) or "the call",
                do="Credentials are the installation's: the environment, or files.",
            )


Url = Annotated[Text, AfterValidator(require_no_password)]


def _be_strict(schema: Any, of: type[BaseModel]) -> None:
    if isinstance(schema, dict):
        its: Any = schema.get("cls") if schema.get("type") == "model" else of
        if its is not of and issubclass(its, Record):
            return  # its own hook has done it: together that would be quadratic
        if schema.get("type") in ("int", "float", "bool"):
            schema["strict"] = True
        elif schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True  # 4 MB of wrong items made 6,500,000 errors of 1.5 KB each
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return
    for each in schema:
        _be_strict(each, of)


class Record(BaseModel):
    """An immutable record that refuses unknown keys, NaN and infinity.

    Numbers and booleans are strict (``true`` and ``"1"`` are no counts). Of a list's wrong items
    only the first is reported.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Return the schema with strict numbers and booleans, and lists that fail at once.

        Tuples, enumerations and the like still accept JSON's lists and strings.
        """
        schema = handler(source)
        _be_strict(schema, cls)
        return schema


def parse_json(raw: bytes | str) -> Any:
    """Return the JSON value in ``raw``, which is untrusted.

    Raises ValueError for invalid JSON, nesting too deep, numbers too long, and duplicate keys in an
    object, which parsers read differently.
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
    """Return the canonical JSON of ``value``: sorted keys, no spaces, UTF-8."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_of(value: Any) -> str:
    """Return the SHA-256 (hex) of ``value``'s canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


JOB_ID = r"^job-[A-Za-z0-9._-]{1,120}$"  # of a training job
TRAINING_ID = r"^job-[0-9a-f]{12}(-shuffled)?$"  # the same, whole, as its configuration gives it
RUN_ID = r"^run-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}$"


def new_deployment_id(at: float) -> str:
    """Return a deployment's id: a UUID of version 7 (RFC 9562); they sort by creation time."""
    bits = (int(at * 1000) & 2**48 - 1) << 80 | int(secrets.token_hex(10), 16)
    bits = bits & ~(0xF << 76) | 7 << 76
    return str(uuid.UUID(int=bits & ~(3 << 62) | 2 << 62))


def new_run_id() -> str:
    """Return a new run id that sorts by UTC start time, e.g. ``run-20261120-153600-9f3a1c``.

    It is the same in Prefect, Dask, MLflow, logs and metrics.
    """
    return time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)


# Response headers about the leader, written by replicas and read by clients.

EPOCH_HEADER = "Paceline-Epoch"  # of the newest leader seen by the responding replica
LEADER_HEADER = "Paceline-Leader"  # the leader's URL; absent while there is none


def is_run_id(given: str) -> bool:
    return re.fullmatch(RUN_ID, given) is not None


def one_of(what: str, given: str, known: Collection[str]) -> str:
    """Return the id of ``known`` that begins with ``given``.

    Raises NotFound where there is none, and InvalidInput, with the candidates, where several do.
    """
    found = sorted(each for each in known if each.startswith(given))
    if given in found or len(found) == 1:
        return given if given in found else found[0]
    if not found:
        raise NotFound(f"no such {what}", got=given, wanted="an id, or the beginning of one")
    raise InvalidInput(
        f"several {what}s begin so", got=f"{given}: {shortened(found)}", wanted="more characters"
    )


def require_run_id(run_id: str | None) -> None:
    """Raise InvalidInput for what is no run id: it becomes a path, a header and a filter."""
    if run_id and not is_run_id(run_id):
        raise InvalidInput(
            "not a run id",
            got=repr(run_id[:100]),
            wanted="one such as run-20261120-153600-9f3a1c",
            do="Leave it out to begin a new run.",
        )
