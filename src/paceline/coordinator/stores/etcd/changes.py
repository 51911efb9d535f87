"""Changes in the sizes that etcd accepts: its transactions, long values, and journals. No I/O.

A very long value is a blob: parts on keys of their own, and a reference to them as the key's value.
A commit that does not fit into one transaction is written as a blob too, its journal.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from paceline.coordinator.stores.etcd.client import delete, put
from paceline.coordinator.stores.rows import COMPRESSED, Change, Delete, Put, unpack
from paceline.errors import CorruptData

INLINE_BYTES = 64 * 1024  # compressed; longer values become blobs
PART_BYTES = 512 * 1024  # of a blob: etcd accepts requests of 1.5 MiB
MAX_TXN_OPS = 100  # of one transaction: etcd accepts 128
MAX_TXN_BYTES = 1_000_000  # of one transaction
_BLOB = b"@"
_LENGTHS = struct.Struct(">BII")


@dataclass(frozen=True, slots=True)
class Blob:
    """A long value, cut into parts that etcd accepts; its digest covers all parts."""

    digest: str
    parts: tuple[bytes, ...]

    @classmethod
    def of(cls, packed: bytes) -> Blob:
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


def join_blob(digest: str, parts: Sequence[bytes]) -> bytes:
    """Return the blob's bytes; raises CorruptData where the digest does not match."""
    packed = b"".join(parts)
    if hashlib.sha256(packed).hexdigest() != digest:
        raise CorruptData("a blob in etcd is not what was written", wanted=digest)
    return packed


def normalize_changes(changes: Iterable[Change]) -> tuple[list[Change], list[Blob]]:
    """Return equivalent changes that put each key at most once, and the blobs of long values.

    etcd refuses a transaction that puts a key twice, or puts and deletes it; deletions come first
    and exclude the keys that are put.
    """
    puts: dict[bytes, bytes] = {}
    deletes: list[Delete] = []
    for change in changes:
        if isinstance(change, Put):
            puts[change.key] = change.value
        else:
            for key in [key for key in puts if change.start <= key < change.end]:
                del puts[key]
            deletes.append(change)
    ranges: list[Delete] = []
    for each in deletes:
        start = each.start
        for key in sorted(key for key in puts if each.start <= key < each.end):
            ranges.append(Delete(start, key))
            start = key + b"\0"
        ranges.append(Delete(start, each.end))
    ranges = [each for each in ranges if each.start < each.end]
    blobs = {key: Blob.of(value) for key, value in puts.items() if len(value) > INLINE_BYTES}
    values = puts | {key: blob.name for key, blob in blobs.items()}
    return [*ranges, *(Put(*row) for row in values.items())], list(blobs.values())


def write_journal(changes: Iterable[Change]) -> bytes:
    rows = []
    for each in changes:
        first, second = astuple(each)
        rows.append(_LENGTHS.pack(isinstance(each, Put), len(first), len(second)) + first + second)
    return COMPRESSED + zlib.compress(b"".join(rows), 3)


def read_journal(value: bytes) -> list[Change]:
    raw, at = unpack(value), 0
    changes: list[Change] = []
    while at < len(raw):
        is_put, first, second = _LENGTHS.unpack_from(raw, at)
        at += _LENGTHS.size
        pair = raw[at : at + first], raw[at + first : at + first + second]
        changes.append(Put(*pair) if is_put else Delete(*pair))
        at += first + second
    return changes


def batches(changes: Iterable[Change]) -> list[list[Change]]:
    """Return ``changes`` in order, in batches that fit into one transaction, with the tip."""
    batched: list[list[Change]] = [[]]
    size = 0
    for each in changes:
        own = sum(map(len, astuple(each)))
        size += own
        if batched[-1] and (len(batched[-1]) + 1 >= MAX_TXN_OPS or size >= MAX_TXN_BYTES):
            batched.append([])
            size = own
        batched[-1].append(each)
    return batched


def ops_of(changes: Iterable[Change]) -> list[Any]:
    return [
        put(each.key, each.value) if isinstance(each, Put) else delete(each.start, each.end)
        for each in changes
    ]
