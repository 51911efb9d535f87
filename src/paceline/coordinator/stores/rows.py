"""The state as keys and values, in the form that SQLite and etcd both hold. No I/O.

Below the installation's prefix::

    meta/leader            the leader's term (etcd: under a lease, with which it expires)
    meta/epoch             the newest epoch ever used; never decreases, never deleted
    meta/tip               changed by every commit: its id, newest event number, pending journal
    meta/shipped           the newest event number that the audit store has
    state/deployments/ID/{record,made,manifest}   state/plans/ID/EPOCH   state/receipts/ID/WORKER
    state/workers/ID       state/tokens/ID       state/keys/DEPLOYMENT/KEY
    ledger/STAGE/DIGEST    jobs/ID    purposes/ID    events/LAST-NUMBER
    blobs/DIGEST/PART (etcd)

A short value is plain JSON, a longer one is compressed with zlib. Of a deployment's plans only the
newest is kept.
"""

from __future__ import annotations

import json
import math
import secrets
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from paceline.coordinator.state import (
    Drop,
    DropDeployment,
    Effect,
    EmitEvent,
    LoadedDeployment,
    LoadedState,
    PersistedState,
    Save,
    Saved,
    SaveDeployment,
    SaveIdempotencyKey,
    SavePlan,
)
from paceline.manifest import parse_manifest
from paceline.schemas import (
    Deployment,
    Event,
    Plan,
    PurposeRule,
    Receipt,
    StageRecord,
    TokenRecord,
    TrainingJob,
    Worker,
)

SHORT_BYTES = 512  # uncompressed, readable with etcdctl; longer values are compressed
EVENTS_A_ROW_BYTES = 32 * 1024  # before they are compressed
COMPRESSED = b"z"
# kind of record: the key above its table, and the fields of its own key
TABLES: dict[type[Saved], tuple[tuple[str, ...], tuple[str, ...]]] = {
    Worker: (("state", "workers"), ("worker_id",)),
    Receipt: (("state", "receipts"), ("deployment_id", "worker_id")),
    TokenRecord: (("state", "tokens"), ("token_id",)),
    StageRecord: (("ledger",), ("stage", "input_digest")),
    TrainingJob: (("jobs",), ("job_id",)),
    PurposeRule: (("purposes",), ("rule_id",)),
}
_quoted = lru_cache(10_000)(partial(quote, safe=""))  # most parts repeat


@dataclass(frozen=True, slots=True)
class Put:
    """Sets a key's value."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes the keys in [start, end)."""

    start: bytes
    end: bytes


Change = Put | Delete


@dataclass(slots=True)
class Row:
    """A key's value, with its parsed form once it was needed."""

    value: bytes
    revision: int = 0  # etcd's, of the key's last change
    parsed: Any = None


def pack(text: str | bytes) -> bytes:
    """Return ``text`` as a value: unchanged where it is short JSON, else compressed."""
    raw = text.encode() if isinstance(text, str) else text
    short = len(raw) <= SHORT_BYTES and raw[:1] in b"{["
    return raw if short else COMPRESSED + zlib.compress(raw, 3)


def unpack(value: bytes) -> bytes:
    return zlib.decompress(value[1:]) if value[:1] == COMPRESSED else value


def after_prefix(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with ``prefix``."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def boot_id() -> str:
    """Return an identifier of this machine's current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown boot"


class KeyLayout:
    """The keys of one installation, and its records as rows."""

    def __init__(self, prefix: str) -> None:
        self.prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        self.leader, self.epoch = self.key("meta", "leader"), self.key("meta", "epoch")
        self.tip, self.shipped = self.key("meta", "tip"), self.key("meta", "shipped")

    def key(self, *parts: str) -> bytes:
        """Return a key; each part is URL-quoted."""
        return (self.prefix + "/".join(map(_quoted, parts))).encode()

    def below(self, *parts: str) -> tuple[bytes, bytes]:
        """Return the range of all keys below a key."""
        start = self.key(*parts) + b"/"
        return start, after_prefix(start)

    def parts_of(self, key: bytes) -> list[str]:
        return [unquote(part) for part in key.decode()[len(self.prefix) :].split("/")]

    def events(self, last: int) -> bytes:
        """Return the key of the events up to number ``last``."""
        return self.key("events", f"{last:016d}")

    def changes(self, effects: Iterable[Effect], boot: str, made: int) -> Iterator[Change]:
        """Yield the changes of ``effects``, in order; the first new deployment is number ``made``.

        Answers and events are not among them: see ``event_rows``.
        """
        for effect in effects:
            match effect:
                case SaveDeployment(deployment, persisted, manifest):
                    where = ("state", "deployments", deployment.deployment_id)
                    stored = {
                        "record": deployment.model_dump(mode="json"),
                        "boot_id": boot,
                        "memo": persisted.to_json(),
                    }
                    yield self._put(json.dumps(stored), *where, "record")
                    if manifest is not None:
                        yield self._put(json.dumps({"number": made}), *where, "made")
                        yield self._put(manifest.to_bytes(), *where, "manifest")
                        made += 1
                case SavePlan(plan):
                    where = ("state", "plans", plan.deployment_id)
                    epoch = f"{plan.epoch:010d}"
                    yield Delete(self.key(*where, ""), self.key(*where, epoch))
                    yield self._put(plan.model_dump_json(), *where, epoch)
                case Save(record):
                    above, fields = TABLES[type(record)]
                    own = [getattr(record, name) for name in fields]
                    yield self._put(record.model_dump_json(), *above, *own)
                case Drop(kind, own):
                    gone = self.key(*TABLES[kind][0], *own)
                    yield Delete(gone, gone + b"\0")
                case SaveIdempotencyKey(key, body_digest, deployment_id):
                    value = json.dumps({"body_digest": body_digest})
                    yield self._put(value, "state", "keys", deployment_id, key)
                case DropDeployment(deployment_id):
                    for table in ("deployments", "plans", "receipts", "keys"):
                        yield Delete(*self.below("state", table, deployment_id))
                case _:
                    raise AssertionError(f"nothing to keep in {effect}")

    def event_rows(self, events: Sequence[Event]) -> Iterator[Put]:
        """Yield the rows that hold ``events``; a row ends after EVENTS_A_ROW_BYTES."""
        texts: list[str] = []
        for event in events:
            texts.append(event.model_dump_json())
            if event is events[-1] or sum(map(len, texts)) > EVENTS_A_ROW_BYTES:
                yield Put(self.events(event.seq), pack(f"[{','.join(texts)}]"))
                texts = []

    def read_state(
        self, rows: Mapping[bytes, Row], parsed: Parse, boot: str, now_s: float
    ) -> LoadedState:
        """Return the state in ``rows``, whose values ``parsed`` reads.

        The monotonic clock is shared by all processes of a machine and starts anew with each boot:
        durations that another boot stored continue from their stored values.
        """
        tables: defaultdict[str, dict[tuple[str, ...], Row]] = defaultdict(dict)
        for key, row in rows.items():
            _, table, *names = self.parts_of(key)
            tables[table][tuple(names)] = row

        def records(table: str, parse: Callable[[bytes], Any]) -> list[tuple[tuple[str, ...], Any]]:
            return [(names, parsed(row, parse)) for names, row in sorted(tables[table].items())]

        # The newest comes last; earlier versions kept several.
        plans = {names[0]: row for names, row in sorted(tables["plans"].items())}
        receipts: defaultdict[str, list[Receipt]] = defaultdict(list)
        for (deployment_id, _), receipt in records("receipts", Receipt.model_validate_json):
            receipts[deployment_id].append(receipt)
        found = tables["deployments"]
        made = {
            names[0]: parsed(row, json.loads)["number"]
            for names, row in found.items()
            if names[1] == "made"
        }
        deployments = []
        for deployment_id in sorted(made, key=made.__getitem__):
            fields = parsed(found[deployment_id, "record"], json.loads)
            persisted = PersistedState.from_json(fields["memo"])
            plan = plans.get(deployment_id)
            deployments.append(
                LoadedDeployment(
                    deployment=Deployment.model_validate(fields["record"]),
                    persisted=persisted if fields["boot_id"] == boot else persisted.rebased(now_s),
                    manifest=parsed(found[deployment_id, "manifest"], parse_manifest),
                    plan=parsed(plan, Plan.model_validate_json) if plan else None,
                    receipts=tuple(receipts[deployment_id]),
                )
            )
        keys = [
            SaveIdempotencyKey(key, fields["body_digest"], deployment_id)
            for (deployment_id, key), fields in records("keys", json.loads)
        ]
        workers = records("workers", Worker.model_validate_json)
        tokens = records("tokens", TokenRecord.model_validate_json)
        return LoadedState(
            deployments=tuple(deployments),
            workers=tuple(worker for _, worker in workers),
            keys=tuple(sorted(keys, key=lambda each: each.key)),
            tokens=tuple(token for _, token in tokens),
        )

    def _put(self, text: str | bytes, *parts: str) -> Put:
        return Put(self.key(*parts), pack(text))


Parse = Callable[[Row, Callable[[bytes], Any]], Any]


@dataclass(frozen=True, slots=True)
class Tip:
    """The newest commit's result; the leader's copy of it numbers its next events.

    ``commit`` identifies it, so that a commit that was sent to etcd twice is recognised. There a
    commit requires the tip that its sender read: after another commit, an older one can no longer
    take effect.
    """

    revision: int = 0  # of etcd, when it was written; 0: none yet
    commit: str = ""
    last: int = 0  # the newest event's number
    made: int = 0  # deployments created so far
    pending: tuple[str, int] | None = None  # etcd: the journal of a commit that is not applied yet

    @classmethod
    def read(cls, row: Row | None) -> Tip:
        if row is None:
            return cls()
        raw = json.loads(row.value)
        pending = raw.pop("pending")
        return cls(revision=row.revision, pending=pending and tuple(pending), **raw)

    def next(self, **changes: Any) -> Tip:
        """Return the tip of a new commit, not yet written."""
        return replace(self, commit=secrets.token_hex(8), **changes)

    def value(self) -> bytes:
        fields = {"commit": self.commit, "last": self.last, "made": self.made}
        return json.dumps({**fields, "pending": self.pending}).encode()


# Events are cleaned before they are stored: one event that JSON, UTF-8 or a database refuses would
# block all later ones.

MAX_TEXT_CHARS = 16_384  # characters of one text: 10,000 events may wait, and a million are kept


def to_event(emitted: EmitEvent, seq: int) -> Event:
    """Return ``emitted`` as an event with this number, cleaned."""
    fields = ("name", "at", "deployment_id", "worker_id", "data")
    values = {name: getattr(emitted, name) for name in fields}
    return sanitized(Event.model_construct(seq=seq, **values))


def sanitized(event: Event) -> Event:
    """Return ``event`` in a form that every backend stores unchanged."""
    changed = {
        "deployment_id": _name(event.deployment_id),
        "worker_id": _name(event.worker_id),
        "data": _json_safe(event.data),
    }
    return event.model_copy(update=changed)


def _json_safe(value: object) -> object:
    """Return ``value`` as valid JSON data: no NaN, no lone surrogates, other types as text."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case str():
            return _text(value)
        case dict():
            return {_text(str(key)): _json_safe(each) for key, each in value.items()}
        case list() | tuple():
            return [_json_safe(each) for each in value]
        case _:
            return _text(str(value))


def _text(text: str) -> str:
    text = text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"
    return text.encode("utf-8", "replace").decode()


def _name(name: str | None) -> str | None:
    return None if name is None else _text(name).replace("\0", "\ufffd")
