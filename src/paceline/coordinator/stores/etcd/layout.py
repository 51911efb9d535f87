"""What stands where in etcd: effects as changes of keys, and keys as what is loaded. No I/O.

Below the installation's prefix::

    meta/leader            who leads; under a lease, so it goes when the leader does
    meta/epoch             the newest epoch ever given; never goes down, never goes away
    meta/tip               changed by every commit: its id, the newest event number, what is pending
    meta/shipped           the newest event number that the audit store has
    state/deployments/ID/{record,made,manifest}   state/plans/ID/EPOCH   state/receipts/ID/WORKER
    state/workers/ID       state/tokens/ID       state/keys/DEPLOYMENT/KEY
    ledger/STAGE/DIGEST    events/LAST-NUMBER    blobs/DIGEST/PART

A value is plain JSON where it is short, else zlib; a long one is a blob, and the value names it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from paceline.coordinator.state.messages import (
    DropDeployment,
    DropStage,
    DropToken,
    DropWorker,
    Effect,
    KeepDeployment,
    KeepKey,
    KeepPlan,
    KeepReceipt,
    KeepToken,
    KeepWorker,
)
from paceline.coordinator.stores.contracts import write_memo
from paceline.coordinator.stores.etcd.client import after_prefix, delete, put
from paceline.errors import CorruptData
from paceline.schemas.events import Event

KEPT_PLANS = 3  # of each deployment, the newest
SHORT_BYTES = 512  # as they are, readable with etcdctl; longer ones compressed
INLINE_BYTES = 64 * 1024  # compressed; longer ones become blobs
PART_BYTES = 512 * 1024  # of a blob: etcd takes requests of 1.5 MiB
EVENTS_A_KEY = 200
_PACKED, _BLOB = b"z", b"@"


@dataclass(frozen=True, slots=True)
class Put:
    """A key gets a value."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """The keys in [start, end) go."""

    start: bytes
    end: bytes


Change = Put | Delete


@dataclass(frozen=True, slots=True)
class Blob:
    """A long value, cut into parts that etcd takes; its digest is over all of them."""

    digest: str
    parts: tuple[bytes, ...]

    @classmethod
    def of(cls, packed: bytes) -> Blob:
        """Return ``packed`` in parts."""
        parts = tuple(packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES))
        return cls(hashlib.sha256(packed).hexdigest(), parts)

    @property
    def name(self) -> bytes:
        """Return the value that stands for the blob."""
        return _BLOB + f"{self.digest} {len(self.parts)}".encode()


def blob_named(value: bytes) -> tuple[str, int] | None:
    """Return the digest and the number of parts of the blob that ``value`` names, if it does."""
    if value[:1] != _BLOB:
        return None
    digest, _, parts = value[1:].decode().partition(" ")
    return digest, int(parts)


def joined(digest: str, parts: Sequence[bytes]) -> bytes:
    """Return the blob's bytes; raises CorruptData where they are not what was put."""
    packed = b"".join(parts)
    if hashlib.sha256(packed).hexdigest() != digest:
        raise CorruptData("a blob in etcd is not what was written", wanted=digest)
    return packed


def pack(text: str | bytes) -> bytes:
    """Return ``text`` as a value: as it is where it is short, else compressed."""
    raw = text.encode() if isinstance(text, str) else text
    return raw if len(raw) <= SHORT_BYTES and raw[:1] in b"{[" else _PACKED + zlib.compress(raw, 3)


def unpack(value: bytes) -> bytes:
    """Return what ``pack`` was given."""
    return zlib.decompress(value[1:]) if value[:1] == _PACKED else value


class Layout:
    """The keys of one installation."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip("/") + "/"
        self.leader, self.epoch = self.key("meta", "leader"), self.key("meta", "epoch")
        self.tip, self.shipped = self.key("meta", "tip"), self.key("meta", "shipped")

    def key(self, *parts: str) -> bytes:
        """Return a key; names in it are quoted, the first two parts are ours."""
        return (self.prefix + "/".join(quote(part, safe="") for part in parts)).encode()

    def below(self, *parts: str) -> tuple[bytes, bytes]:
        """Return the range of everything below a key."""
        start = self.key(*parts) + b"/"
        return start, after_prefix(start)

    def parts_of(self, key: bytes) -> list[str]:
        """Return what ``key`` was given."""
        return [unquote(part) for part in key.decode()[len(self.prefix) :].split("/")]

    def part(self, digest: str, number: int) -> bytes:
        """Return the key of a blob's part."""
        return self.key("blobs", digest, f"{number:04d}")

    def events(self, last: int) -> bytes:
        """Return the key of the events up to number ``last``."""
        return self.key("events", f"{last:016d}")

    def changes(
        self, effects: Iterable[Effect], boot: str, made: Iterator[int]
    ) -> Iterator[Change]:
        """Return the keys that ``effects`` (without Answer and Observed) change, in order.

        ``made`` numbers created deployments. Long values come whole; see ``settle`` for blobs.
        """
        for effect in effects:
            match effect:
                case KeepDeployment(deployment, memo, manifest):
                    identity = deployment.deployment_id
                    record = {"record": deployment.model_dump(mode="json"), "boot_id": boot}
                    record["memo"] = write_memo(memo)
                    yield self._put(json.dumps(record), "state", "deployments", identity, "record")
                    if manifest is not None:
                        where = ("state", "deployments", identity)
                        yield self._put(json.dumps({"number": next(made)}), *where, "made")
                        yield self._put(manifest.to_bytes(), *where, "manifest")
                case KeepPlan(plan):
                    where = ("state", "plans", plan.deployment_id)
                    yield self._put(plan.model_dump_json(), *where, f"{plan.epoch:010d}")
                    oldest = max(0, plan.epoch - KEPT_PLANS + 1)
                    yield Delete(self.key(*where, ""), self.key(*where, f"{oldest:010d}"))
                case KeepReceipt(receipt):
                    whose = (receipt.deployment_id, receipt.worker_id)
                    yield self._put(receipt.model_dump_json(), "state", "receipts", *whose)
                case KeepWorker(worker):
                    yield self._put(worker.model_dump_json(), "state", "workers", worker.worker_id)
                case KeepKey(key, body_digest, deployment_id):
                    value = json.dumps({"body_digest": body_digest})
                    yield self._put(value, "state", "keys", deployment_id, key)
                case KeepToken(token):
                    yield self._put(token.model_dump_json(), "state", "tokens", token.token_id)
                case DropStage(stage, input_digest):
                    yield self._gone("ledger", stage, input_digest)
                case DropToken(token_id):
                    yield self._gone("state", "tokens", token_id)
                case DropWorker(worker_id):
                    yield self._gone("state", "workers", worker_id)
                case DropDeployment(deployment_id):
                    for table in ("deployments", "plans", "receipts", "keys"):
                        yield Delete(*self.below("state", table, deployment_id))
                case _:
                    raise AssertionError(f"nothing to keep in {effect}")

    def told(self, events: Sequence[Event]) -> Iterator[Put]:
        """Return the keys that hold ``events``, some hundred in each."""
        for at in range(0, len(events), EVENTS_A_KEY):
            some = events[at : at + EVENTS_A_KEY]
            text = "[" + ",".join(each.model_dump_json() for each in some) + "]"
            yield Put(self.events(some[-1].seq), pack(text))

    def _gone(self, *parts: str) -> Delete:
        key = self.key(*parts)
        return Delete(key, key + b"\0")

    def _put(self, text: str | bytes, *parts: str) -> Put:
        return Put(self.key(*parts), pack(text))


def settle(changes: Iterable[Change]) -> tuple[list[Change], list[Blob]]:
    """Return changes that no two of which touch the same key, to the same end, and their blobs.

    etcd refuses a transaction that touches a key twice; deletions come first and spare what is put.
    """
    puts: dict[bytes, bytes] = {}
    gone: list[Delete] = []
    for change in changes:
        if isinstance(change, Put):
            puts[change.key] = change.value
        elif change.start < change.end:
            for key in [key for key in puts if change.start <= key < change.end]:
                del puts[key]
            gone.append(change)
    settled: list[Change] = []
    for start, end in _disjoint(gone):
        at = start
        for key in sorted(key for key in puts if start <= key < end):
            if at < key:
                settled.append(Delete(at, key))
            at = key + b"\0"
        if at < end:
            settled.append(Delete(at, end))
    blobs = []
    for key, value in puts.items():
        if len(value) > INLINE_BYTES:
            blobs.append(Blob.of(value))
            settled.append(Put(key, blobs[-1].name))
        else:
            settled.append(Put(key, value))
    return settled, blobs


def _disjoint(ranges: Iterable[Delete]) -> list[tuple[bytes, bytes]]:
    merged: list[tuple[bytes, bytes]] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if merged and each.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], each.end))
        else:
            merged.append((each.start, each.end))
    return merged


_LENGTHS = struct.Struct(">BII")


def write_journal(changes: Iterable[Change]) -> bytes:
    """Return ``changes`` as one value: a commit too large for one transaction."""
    rows = []
    for each in changes:
        put = isinstance(each, Put)
        first, second = (each.key, each.value) if isinstance(each, Put) else (each.start, each.end)
        rows.append(_LENGTHS.pack(put, len(first), len(second)) + first + second)
    return _PACKED + zlib.compress(b"".join(rows), 3)


def read_journal(value: bytes) -> list[Change]:
    """Return what ``write_journal`` was given."""
    raw, at = unpack(value), 0
    changes: list[Change] = []
    while at < len(raw):
        put, first, second = _LENGTHS.unpack_from(raw, at)
        at += _LENGTHS.size
        pair = raw[at : at + first], raw[at + first : at + first + second]
        changes.append(Put(*pair) if put else Delete(*pair))
        at += first + second
    return changes


# How much goes into one of etcd's transactions, and changes as the operations of one.

OPS = 100  # of one transaction: etcd takes 128
BYTES = 1_000_000  # of one transaction: etcd takes 1.5 MiB


def _size(change: Change) -> int:
    if isinstance(change, Put):
        return len(change.key) + len(change.value)
    return len(change.start) + len(change.end)


def fits(changes: Sequence[Change]) -> bool:
    """Return whether ``changes`` go into one transaction, beside the tip."""
    return len(changes) < OPS and sum(map(_size, changes)) < BYTES


def batches(changes: Iterable[Change]) -> Iterable[list[Change]]:
    """Yield ``changes`` in order, as many at once as fit."""
    batch: list[Change] = []
    for each in changes:
        if not fits([*batch, each]):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def ops_of(changes: Iterable[Change]) -> list[Any]:
    """Return ``changes`` as operations."""
    return [
        put(each.key, each.value) if isinstance(each, Put) else delete(each.start, each.end)
        for each in changes
    ]


# The one key that every commit changes: what makes a commit happen once or never.


@dataclass(frozen=True, slots=True)
class Tip:
    """What the newest commit left behind.

    ``commit`` names it, so that a commit that was sent twice is recognised as one's own. A commit
    requires the tip it knows: once another one is there, an older one cannot come to pass.
    """

    revision: int = 0  # of etcd, when it was written; 0: there is none yet
    commit: str = ""
    last: int = 0  # the newest event's number
    made: int = 0  # deployments so far
    pending: tuple[str, int] | None = None  # the journal of a commit that is not carried out yet

    @classmethod
    def read(cls, kvs: Sequence[Any]) -> Tip:
        """Return the tip in what a read of its key found."""
        if not kvs:
            return cls()
        raw = json.loads(kvs[0].value)
        pending = raw["pending"]
        return cls(
            revision=kvs[0].mod_revision,
            commit=raw["commit"],
            last=raw["last"],
            made=raw["made"],
            pending=None if pending is None else (pending[0], pending[1]),
        )

    def next(self, **changes: Any) -> Tip:
        """Return the tip of a new commit, not yet written."""
        return replace(self, commit=secrets.token_hex(8), **changes)

    def value(self) -> bytes:
        """Return what is put."""
        fields = {"commit": self.commit, "last": self.last, "made": self.made}
        return json.dumps({**fields, "pending": self.pending}).encode()
