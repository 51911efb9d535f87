"""A local copy of the state in etcd, read at one revision; and a watch on changes.

A refresh lists the keys with their revisions, which is cheap, and then reads only the values that
changed. Parsed records are cached by revision, so a standby parses each of them once.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from paceline.coordinator.state.messages import LoadedDeployment, LoadedState, SaveIdempotencyKey
from paceline.coordinator.stores.contracts import read_memo
from paceline.coordinator.stores.etcd.client import Compacted, EtcdClient, get, request
from paceline.coordinator.stores.etcd.layout import (
    KeyLayout,
    Put,
    Tip,
    blob_named,
    joined,
    read_journal,
    unpack,
)
from paceline.errors import PacelineError, ServiceUnavailable
from paceline.manifest import parse_manifest
from paceline.schemas.access import TokenRecord
from paceline.schemas.plan import Plan
from paceline.schemas.records import Deployment, Receipt, Worker

NAMES_A_PAGE = 5_000
VALUES_A_PAGE = 300  # of at most 64 KiB each
GETS_AT_ONCE = 100
TRIES = 5  # a blob may be deleted, or a revision compacted, during a read

Parsed = TypeVar("Parsed")


class BlobMissing(ServiceUnavailable):
    """A referenced value was deleted during the read: read again."""


@dataclass(slots=True)
class Entry:
    """A key's value with its parsed form."""

    revision: int
    value: bytes
    parsed: Any = None


class StateCache:
    """The copy; not thread-safe, so its owner locks."""

    def __init__(self, client: EtcdClient, layout: KeyLayout, boot: str) -> None:
        self._client, self._layout, self._boot = client, layout, boot
        self._range = layout.below("state")
        self._entries: dict[bytes, Entry] = {}

    def load(self, now_s: float) -> LoadedState:
        """Return everything; raises ServiceUnavailable."""
        for _ in range(TRIES):
            try:
                return self._kept(self._overlaid(self._refresh()), now_s)
            except (Compacted, BlobMissing):
                continue
        raise ServiceUnavailable(
            "etcd's state changes faster than it can be read", where=self._client.where
        )

    def blobs(self) -> set[str]:
        """Return the digests of all blobs that the state refers to now."""
        for _ in range(TRIES):
            try:
                tip = self._refresh()
            except Compacted:
                continue
            named = {blob_named(each.value) for each in self._entries.values()} | {tip.pending}
            return {each[0] for each in named if each is not None}
        raise ServiceUnavailable("etcd compacts faster than it is read", where=self._client.where)

    def blob(self, named: tuple[str, int]) -> bytes:
        """Return a blob's bytes."""
        digest, parts = named
        found = []
        for number in range(parts):
            message = request("RangeRequest", key=self._layout.part(digest, number))
            answer = self._client.call("Range", message)
            if not answer.kvs:
                raise BlobMissing("a blob is not in etcd", wanted=digest, where=self._client.where)
            found.append(answer.kvs[0].value)
        return joined(digest, found)

    def _refresh(self) -> Tip:
        """Bring the entries up to date with one revision; return the tip of that revision."""
        answer = self._client.call("Range", request("RangeRequest", key=self._layout.tip))
        revision = answer.header.revision
        fresh: dict[bytes, Entry] = {}
        missing: list[bytes] = []
        for kv in self._pages(revision, NAMES_A_PAGE, keys_only=True):
            old = self._entries.get(kv.key)
            if old is not None and old.revision == kv.mod_revision:
                fresh[kv.key] = old
            else:
                missing.append(kv.key)
        if len(missing) > max(GETS_AT_ONCE, len(fresh) // 4):
            for kv in self._pages(revision, VALUES_A_PAGE):
                if kv.key not in fresh:
                    fresh[kv.key] = Entry(kv.mod_revision, kv.value)
        else:
            for kv in self._values(missing, revision):
                fresh[kv.key] = Entry(kv.mod_revision, kv.value)
        self._entries = fresh
        return Tip.read(answer.kvs)

    def _pages(self, revision: int, limit: int, *, keys_only: bool = False) -> Iterable[Any]:
        start, end = self._range
        more = True
        while more:
            message = request(
                "RangeRequest",
                key=start,
                range_end=end,
                limit=limit,
                revision=revision,
                keys_only=keys_only,
            )
            answer = self._client.call("Range", message)
            yield from answer.kvs
            more = answer.more
            if more:
                start = answer.kvs[-1].key + b"\0"

    def _values(self, keys: list[bytes], revision: int) -> Iterable[Any]:
        for at in range(0, len(keys), GETS_AT_ONCE):
            gets = [get(key, revision) for key in keys[at : at + GETS_AT_ONCE]]
            for response in self._client.call("Txn", request("TxnRequest", success=gets)).responses:
                yield from response.response_range.kvs

    def _overlaid(self, tip: Tip) -> dict[bytes, Entry]:
        """Return the entries with the pending commit, if any, applied."""
        if tip.pending is None:
            return self._entries
        entries = dict(self._entries)
        start, end = self._range
        for change in read_journal(self.blob(tip.pending)):
            if not isinstance(change, Put):
                for key in [key for key in entries if change.start <= key < change.end]:
                    del entries[key]
            elif start <= change.key < end:
                entries[change.key] = Entry(tip.revision, change.value)
        return entries

    def _kept(self, entries: dict[bytes, Entry], now_s: float) -> LoadedState:
        tables: dict[str, dict[tuple[str, ...], Entry]] = {}
        for key, entry in entries.items():
            _, table, *names = self._layout.parts_of(key)
            tables.setdefault(table, {})[tuple(names)] = entry

        def rows(table: str) -> list[tuple[tuple[str, ...], Entry]]:
            return sorted(tables.get(table, {}).items(), key=lambda row: row[0])

        plans = {names[0]: entry for names, entry in rows("plans")}  # the newest comes last
        receipts: dict[str, list[Receipt]] = {}
        for (deployment_id, _), entry in rows("receipts"):
            receipt = self._parsed(entry, Receipt.model_validate_json)
            receipts.setdefault(deployment_id, []).append(receipt)
        deployments = []
        found = tables.get("deployments", {})
        numbers = {
            names[0]: self._parsed(entry, json.loads)["number"]
            for names, entry in found.items()
            if names[1] == "made"
        }
        for deployment_id in sorted(numbers, key=numbers.__getitem__):
            record = self._parsed(found[deployment_id, "record"], json.loads)
            plan = plans.get(deployment_id)
            deployments.append(
                LoadedDeployment(
                    deployment=Deployment.model_validate(record["record"]),
                    memo=read_memo(
                        record["memo"], now_s, same_boot=record["boot_id"] == self._boot
                    ),
                    manifest=self._parsed(found[deployment_id, "manifest"], parse_manifest),
                    plan=self._parsed(plan, Plan.model_validate_json) if plan else None,
                    receipts=tuple(receipts.get(deployment_id, ())),
                )
            )
        keys = [
            SaveIdempotencyKey(key, self._parsed(entry, json.loads)["body_digest"], deployment_id)
            for (deployment_id, key), entry in rows("keys")
        ]
        return LoadedState(
            deployments=tuple(deployments),
            workers=tuple(self._parsed(e, Worker.model_validate_json) for _, e in rows("workers")),
            keys=tuple(sorted(keys, key=lambda each: each.key)),
            tokens=tuple(
                self._parsed(e, TokenRecord.model_validate_json) for _, e in rows("tokens")
            ),
        )

    def _parsed(self, entry: Entry, parse: Callable[[bytes], Parsed]) -> Parsed:
        if entry.parsed is None:
            named = blob_named(entry.value)
            entry.parsed = parse(unpack(self.blob(named) if named else entry.value))
        parsed: Parsed = entry.parsed
        return parsed


# Watches a range of keys for its newest revision. A stream delivers changes at once. A waiting
# caller also polls once a second, so that a member that froze with an open stream, or a gap between
# two streams, delays a change by a second and loses none.

log = logging.getLogger(__name__)

LOOK_S = 1.0
PAUSE_S = 0.2  # before a stream that ended is opened again


class Watcher:
    """The newest revision in [start, end); the first ``wait`` opens the stream."""

    def __init__(
        self, client: EtcdClient, start: bytes, end: bytes, look: Callable[[], int]
    ) -> None:
        """``look`` reads the newest revision from etcd; it may raise ServiceUnavailable."""
        self._client, self._look = client, look
        self._message = request(
            "WatchRequest",
            create_request=request("WatchCreateRequest", key=start, range_end=end),
        )
        self._changed = threading.Condition()
        self._revision = 0
        self._looked_s = float("-inf")
        self._closing = threading.Event()
        self._call: grpc.Call | None = None
        self._thread: threading.Thread | None = None

    def note(self, revision: int) -> int:
        """Record a change and return the newest revision seen."""
        with self._changed:
            if revision > self._revision:
                self._revision = revision
                self._changed.notify_all()
            return self._revision

    def wait(self, after: int, timeout_s: float) -> int:
        """Return the newest revision once it is above ``after``, or after ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        self._begin()
        while True:
            with self._changed:
                if self._revision > after or time.monotonic() >= until_s:
                    return max(self._revision, after)
                due_s = self._looked_s + LOOK_S - time.monotonic()
                if due_s > 0:
                    self._changed.wait(min(due_s, until_s - time.monotonic()))
                    continue
                self._looked_s = time.monotonic()
            self.note(self._look())

    def close(self) -> None:
        """Close the stream."""
        self._closing.set()
        with self._changed:
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if self._thread is not None:
            self._thread.join(5)

    def _begin(self) -> None:
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._follow, name="etcd-watch", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while not self._closing.is_set():
            channel = None
            try:
                channel, call = self._client.stream("Watch", self._message)
                with self._changed:
                    self._call = call
                for answer in call:
                    if answer.canceled or self._closing.is_set():
                        break
                    if answer.created:
                        self.note(self._look())  # changes from before the stream was open
                    for event in answer.events:
                        self.note(event.kv.mod_revision)
                call.cancel()
            except (grpc.RpcError, PacelineError, ValueError) as error:
                if channel is not None:
                    self._client.elsewhere(channel)
                log.debug("the watch is opened again: %s", error)
            self._closing.wait(PAUSE_S)
