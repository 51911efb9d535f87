"""The key layout in etcd, and effects and journals as changes of keys. No I/O.

Below the installation's prefix::

    meta/leader            the leader's term; under a lease, with which it expires
    meta/epoch             the newest epoch ever used; never decreases, never deleted
    meta/tip               changed by every commit: its id, newest event number, pending journal
    meta/shipped           the newest event number that the audit store has
    state/deployments/ID/{record,made,manifest}   state/plans/ID/EPOCH   state/receipts/ID/WORKER
    state/workers/ID       state/tokens/ID       state/keys/DEPLOYMENT/KEY
    ledger/STAGE/DIGEST    events/LAST-NUMBER    blobs/DIGEST/PART

A short value is plain JSON, a longer one is compressed with zlib; a very long one is a blob, and
the key's value is a reference to it.
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
    SaveDeployment,
    SaveIdempotencyKey,
    SavePlan,
    SaveReceipt,
    SaveToken,
    SaveWorker,
)
from paceline.coordinator.stores.contracts import write_memo
from paceline.coordinator.stores.etcd.client import after_prefix, delete, put
from paceline.errors import CorruptData
from paceline.schemas.events import Event

KEPT_PLANS = 3  # of each deployment, the newest
SHORT_BYTES = 512  # uncompressed, readable with etcdctl; longer values are compressed
INLINE_BYTES = 64 * 1024  # compressed; longer values become blobs
PART_BYTES = 512 * 1024  # of a blob: etcd accepts requests of 1.5 MiB
EVENTS_A_KEY = 200
_PACKED, _BLOB = b"z", b"@"


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


@dataclass(frozen=True, slots=True)
class Blob:
    """A long value, cut into parts that etcd accepts; its digest covers all parts."""

    digest: str
    parts: tuple[bytes, ...]

    @classmethod
    def of(cls, packed: bytes) -> Blob:
        """Return ``packed`` cut into parts."""
        parts = tuple(packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES))
        return cls(hashlib.sha256(packed).hexdigest(), parts)

    @property
    def name(self) -> bytes:
        """Return the value that refers to the blob."""
        return _BLOB + f"{self.digest} {len(self.parts)}".encode()


def blob_named(value: bytes) -> tuple[str, int] | None:
    """Return the digest and part count of the blob that ``value`` refers to, or None."""
    if value[:1] != _BLOB:
        return None
    digest, _, parts = value[1:].decode().partition(" ")
    return digest, int(parts)


def joined(digest: str, parts: Sequence[bytes]) -> bytes:
    """Return the blob's bytes; raises CorruptData where the digest does not match."""
    packed = b"".join(parts)
    if hashlib.sha256(packed).hexdigest() != digest:
        raise CorruptData("a blob in etcd is not what was written", wanted=digest)
    return packed


def pack(text: str | bytes) -> bytes:
    """Return ``text`` as a value: unchanged where it is short JSON, else compressed."""
    raw = text.encode() if isinstance(text, str) else text
    return raw if len(raw) <= SHORT_BYTES and raw[:1] in b"{[" else _PACKED + zlib.compress(raw, 3)


def unpack(value: bytes) -> bytes:
    """Return the bytes that ``pack`` was given."""
    return zlib.decompress(value[1:]) if value[:1] == _PACKED else value


class KeyLayout:
    """The keys of one installation."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip("/") + "/"
        self.leader, self.epoch = self.key("meta", "leader"), self.key("meta", "epoch")
        self.tip, self.shipped = self.key("meta", "tip"), self.key("meta", "shipped")

    def key(self, *parts: str) -> bytes:
        """Return a key; each part is URL-quoted."""
        return (self.prefix + "/".join(quote(part, safe="") for part in parts)).encode()

    def below(self, *parts: str) -> tuple[bytes, bytes]:
        """Return the range of all keys below a key."""
        start = self.key(*parts) + b"/"
        return start, after_prefix(start)

    def parts_of(self, key: bytes) -> list[str]:
        """Return the parts that ``key`` was built from."""
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
        """Return the key changes of ``effects`` (without Answer and Observed), in order.

        ``made`` numbers new deployments. Long values are not split here; see ``settle``.
        """
        for effect in effects:
            match effect:
                case SaveDeployment(deployment, memo, manifest):
                    identity = deployment.deployment_id
                    record = {"record": deployment.model_dump(mode="json"), "boot_id": boot}
                    record["memo"] = write_memo(memo)
                    yield self._put(json.dumps(record), "state", "deployments", identity, "record")
                    if manifest is not None:
                        where = ("state", "deployments", identity)
                        yield self._put(json.dumps({"number": next(made)}), *where, "made")
                        yield self._put(manifest.to_bytes(), *where, "manifest")
                case SavePlan(plan):
                    where = ("state", "plans", plan.deployment_id)
                    yield self._put(plan.model_dump_json(), *where, f"{plan.epoch:010d}")
                    oldest = max(0, plan.epoch - KEPT_PLANS + 1)
                    yield Delete(self.key(*where, ""), self.key(*where, f"{oldest:010d}"))
                case SaveReceipt(receipt):
                    whose = (receipt.deployment_id, receipt.worker_id)
                    yield self._put(receipt.model_dump_json(), "state", "receipts", *whose)
                case SaveWorker(worker):
                    yield self._put(worker.model_dump_json(), "state", "workers", worker.worker_id)
                case SaveIdempotencyKey(key, body_digest, deployment_id):
                    value = json.dumps({"body_digest": body_digest})
                    yield self._put(value, "state", "keys", deployment_id, key)
                case SaveToken(token):
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
        """Yield the keys that hold ``events``, up to EVENTS_A_KEY in each."""
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
    """Return equivalent changes that touch each key at most once, and the blobs of long values.

    etcd refuses a transaction that touches a key twice; deletions come first and exclude the keys
    that are put.
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
    """Return ``changes`` as one value, for a commit too large for one transaction."""
    rows = []
    for each in changes:
        put = isinstance(each, Put)
        first, second = (each.key, each.value) if isinstance(each, Put) else (each.start, each.end)
        rows.append(_LENGTHS.pack(put, len(first), len(second)) + first + second)
    return _PACKED + zlib.compress(b"".join(rows), 3)


def read_journal(value: bytes) -> list[Change]:
    """Return the changes that ``write_journal`` was given."""
    raw, at = unpack(value), 0
    changes: list[Change] = []
    while at < len(raw):
        put, first, second = _LENGTHS.unpack_from(raw, at)
        at += _LENGTHS.size
        pair = raw[at : at + first], raw[at + first : at + first + second]
        changes.append(Put(*pair) if put else Delete(*pair))
        at += first + second
    return changes


# Sizes of etcd's transactions, and changes as their operations.

OPS = 100  # of one transaction: etcd accepts 128
BYTES = 1_000_000  # of one transaction: etcd accepts 1.5 MiB


def _size(change: Change) -> int:
    if isinstance(change, Put):
        return len(change.key) + len(change.value)
    return len(change.start) + len(change.end)


def fits(changes: Sequence[Change]) -> bool:
    """Return whether ``changes`` fit into one transaction, together with the tip."""
    return len(changes) < OPS and sum(map(_size, changes)) < BYTES


def batches(changes: Iterable[Change]) -> Iterable[list[Change]]:
    """Yield ``changes`` in order, in batches that fit into one transaction."""
    batch: list[Change] = []
    for each in changes:
        if not fits([*batch, each]):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def ops_of(changes: Iterable[Change]) -> list[Any]:
    """Return ``changes`` as etcd operations."""
    return [
        put(each.key, each.value) if isinstance(each, Put) else delete(each.start, each.end)
        for each in changes
    ]


# The one key that every commit changes, so that a commit takes effect at most once.


@dataclass(frozen=True, slots=True)
class Tip:
    """The newest commit's result.

    ``commit`` identifies it, so that a commit that was sent twice is recognised. A commit requires
    the tip that its sender read: after another commit, an older one can no longer take effect.
    """

    revision: int = 0  # of etcd, when it was written; 0: none yet
    commit: str = ""
    last: int = 0  # the newest event's number
    made: int = 0  # deployments created so far
    pending: tuple[str, int] | None = None  # the journal of a commit that is not applied yet

    @classmethod
    def read(cls, kvs: Sequence[Any]) -> Tip:
        """Return the tip from a read of its key."""
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
        """Return the key's value."""
        fields = {"commit": self.commit, "last": self.last, "made": self.made}
        return json.dumps({**fields, "pending": self.pending}).encode()
