"""The coordination store in etcd: one leader by lease; each commit is one fenced transaction.

A commit compares two keys: the leader's, which expires with its lease, and the tip, which every
commit changes. So the leader of an older term cannot write, and a commit without an answer can be
sent again or ruled out: it took effect once, or never will. What does not fit into one etcd
transaction is written beforehand as unreferenced blobs, and takes effect with the transaction that
refers to them.

A local copy makes repeated loads cheap: they list the keys, and read the values that changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.coordinator.state import LoadedState
from paceline.coordinator.stores.coordination import Candidate, Coordination, Term
from paceline.coordinator.stores.etcd.changes import (
    Blob,
    batches,
    blob_named,
    join_blob,
    normalize_changes,
    ops_of,
    read_journal,
    write_journal,
)
from paceline.coordinator.stores.etcd.client import (
    CALL_S,
    Compacted,
    EtcdAccess,
    EtcdClient,
    get,
    if_changed_at,
    if_created_at,
    put,
    request,
)
from paceline.coordinator.stores.etcd.election import HeldTerm, claim
from paceline.coordinator.stores.rows import Change, Delete, KeyLayout, Put, Row, Tip
from paceline.errors import PacelineError, ServiceUnavailable, StaleEpoch

log = logging.getLogger(__name__)

CAMPAIGN_S = 0.2  # between two attempts
COLLECT_EVERY = 32  # written blobs, before unreferenced ones are collected
NAMES_A_PAGE = 5_000
VALUES_A_PAGE = 200  # of at most 64 KiB each
TRIES = 5  # a blob may be deleted, or a revision compacted, during a read


class BlobMissing(ServiceUnavailable):
    """A referenced value was deleted during the read: read again."""


class EtcdCoordination(Coordination):
    """The coordination store in an etcd cluster."""

    standbys = True

    def __init__(self, access: EtcdAccess, prefix: str, *, lease_s: float) -> None:
        self._client = EtcdClient(access)
        super().__init__(KeyLayout(prefix), f"{self._client.where} {prefix}")
        self._lease_s = lease_s
        self._held: HeldTerm | None = None
        self._cache: dict[bytes, Row] = {}  # the rows below ``state``,
        self._cached = 0  # as of this revision
        self._blobs: set[str] = set()  # written in this term since the last collection
        self._version = ""

    @property
    def backend(self) -> str:  # type: ignore[override]
        """Return ``etcd`` and the version of the first member that answered."""
        if not self._version:
            try:
                self._version = self._client.version()
            except PacelineError:
                return "etcd"
        return f"etcd {self._version}"

    def check(self) -> None:
        """Raise ServiceUnavailable where no majority answers."""
        self.revision(within_s=2.0)

    def close(self) -> None:
        if self._held is not None:
            self._held.lease.end(revoke=False)
        self._client.close()

    # --- leadership ------------------------------------------------------------------------------

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Wait until there is no leader, and claim leadership."""
        if self._held is not None:
            self.resign(self._held.term)  # otherwise it would wait for its own lease
        trouble = ""
        while not give_up():
            held = None
            try:
                held = claim(self._client, self._layout, candidate, self._lease_s)
                if held is not None:
                    self._begin(held.term)
                    self._held, self._blobs = held, set()
                    held.lease.keep()
                    return held.term
            except PacelineError as error:
                if held is not None:
                    held.lease.end(revoke=True)
                if error.what != trouble:
                    log.warning("the campaign waits: %s", error)
                trouble = error.what
            threading.Event().wait(CAMPAIGN_S)
        return None

    def resign(self, term: Term) -> None:
        """Revoke the lease, which deletes the leader's key."""
        with self._lock:
            if self._term != term or self._lost or self._held is None:
                return
            self._lost = True
        self._held.lease.end(revoke=True)

    def is_leading(self, term: Term) -> bool:
        """Return whether the lease certainly holds by the local clock."""
        held = self._held
        return held is not None and held.term == term and not self._lost and held.lease.holds

    # --- reading ---------------------------------------------------------------------------------

    def revision(self, within_s: float = CALL_S) -> int:
        """Return etcd's revision of the newest change."""
        start, end = self._layout.below("meta")
        message = request("RangeRequest", key=start, range_end=end, keys_only=True)
        answer = self._client.call("Range", message, within_s=within_s)
        return max((kv.mod_revision for kv in answer.kvs), default=0)

    def _read(self, *keys: bytes) -> list[Row | None]:
        message = request("TxnRequest", success=[get(key) for key in keys])
        found = (each.response_range.kvs for each in self._client.call("Txn", message).responses)
        return [Row(kvs[0].value, kvs[0].mod_revision) if kvs else None for kvs in found]

    def _scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, Row]]:
        for kv in self._pages(start, end, VALUES_A_PAGE):
            yield kv.key, Row(kv.value, kv.mod_revision)

    def _pages(self, start: bytes, end: bytes, limit: int, **more: Any) -> Iterator[Any]:
        is_last = False
        while not is_last:
            message = request("RangeRequest", key=start, range_end=end, limit=limit, **more)
            answer = self._client.call("Range", message)
            yield from answer.kvs
            is_last = not answer.more
            if answer.kvs:
                start = answer.kvs[-1].key + b"\0"

    def _whole(self, value: bytes) -> bytes:
        named = blob_named(value)
        return value if named is None else self._read_blob(*named)

    def _read_blob(self, digest: str, parts: int) -> bytes:
        found = []
        for number in range(parts):
            message = request("RangeRequest", key=self._part(digest, number))
            kvs = self._client.call("Range", message).kvs
            if not kvs:
                raise BlobMissing("a blob is not in etcd", wanted=digest, where=self._where)
            found.append(kvs[0].value)
        return join_blob(digest, found)

    def load(self, now_s: float) -> LoadedState:
        """Return everything, as of one revision."""
        for _ in range(TRIES):
            try:
                return super().load(now_s)
            except (Compacted, BlobMissing):
                continue
        raise ServiceUnavailable("etcd's state changes faster than it is read", where=self._where)

    def _settle(self) -> None:
        if self._held is None or self._lost:
            return
        try:
            if self._unsure:
                self._bar(self._held)
            self._apply_journal(self._held)
        except StaleEpoch as error:
            log.info("read as a standby from here on: %s", error)

    def _snapshot(self) -> Mapping[bytes, Row]:
        tip = self._refresh()
        if tip.pending is None:
            return self._cache
        rows = dict(self._cache)
        start, end = self._layout.below("state")
        for change in read_journal(self._read_blob(*tip.pending)):
            if not isinstance(change, Put):
                for key in [key for key in rows if change.start <= key < change.end]:
                    del rows[key]
            elif start <= change.key < end:
                rows[change.key] = Row(change.value)
        return rows

    def _refresh(self) -> Tip:
        """Bring the local copy up to date; return the tip of the same revision."""
        answer = self._client.call("Range", request("RangeRequest", key=self._layout.tip))
        now = answer.header.revision
        start, end = self._layout.below("state")
        names = [
            kv.key for kv in self._pages(start, end, NAMES_A_PAGE, revision=now, keys_only=True)
        ]
        changed = self._pages(
            start, end, VALUES_A_PAGE, revision=now, min_mod_revision=self._cached + 1
        )
        fresh = {kv.key: Row(kv.value, kv.mod_revision) for kv in changed}
        self._cache = {key: fresh.get(key) or self._cache[key] for key in names}
        self._cached = now
        return Tip.read(Row(kvs[0].value, kvs[0].mod_revision) if (kvs := answer.kvs) else None)

    # --- writing ---------------------------------------------------------------------------------

    def _write(self, changes: list[Change], tip: Tip | None) -> None:
        held = self._held
        assert held is not None
        normal, blobs = normalize_changes(changes)
        if tip is None:
            self._fenced(held, ops_of(normal))
            return
        self._apply_journal(held)
        for blob in blobs:
            self._put_blob(held, blob)
        pending = None
        if len(batches(normal)) > 1:
            journal = Blob.of(write_journal(normal))
            self._put_blob(held, journal)
            pending, normal = (journal.digest, len(journal.parts)), []
        self._move_tip(held, replace(tip, pending=pending), ops_of(normal))
        self._follow_up(held)

    def _fenced(self, held: HeldTerm, ops: Sequence[Any]) -> None:
        compare = [if_created_at(self._layout.leader, held.created)]
        message = request("TxnRequest", compare=compare, success=ops)
        if not self._client.call("Txn", message).succeeded:
            self._require_held(held)

    def _move_tip(self, held: HeldTerm, tip: Tip, ops: Sequence[Any] = ()) -> None:
        """Run ``ops`` in one transaction with the change from the known tip to ``tip``."""
        layout = self._layout
        message = request(
            "TxnRequest",
            compare=[
                if_created_at(layout.leader, held.created),
                if_changed_at(layout.tip, self._tip.revision),
            ],
            success=[*ops, put(layout.tip, tip.value())],
            failure=[get(layout.tip)],
        )
        answer, sent_once = self._client.send("Txn", message)
        if answer.succeeded:
            self._tip = replace(tip, revision=answer.header.revision)
            return
        kvs = answer.responses[0].response_range.kvs
        found = Tip.read(Row(kvs[0].value, kvs[0].mod_revision) if kvs else None)
        if found.commit != tip.commit:  # equal: an earlier attempt took effect
            if sent_once:  # an earlier attempt may have won first
                self._require_held(held)
            raise ServiceUnavailable(
                "another write took effect meanwhile, or an earlier one late",
                where=self._where,
                do="Ask again; the state is read anew first.",
            )
        self._tip = found

    def _require_held(self, held: HeldTerm) -> None:
        leader, epoch = self._read(self._layout.leader, self._layout.epoch)
        if leader is None or leader.revision != held.created:
            self._lost = True
            raise self._stale(held.term, int(epoch.value) if epoch else 0)

    def _bar(self, held: HeldTerm) -> None:
        """Move the tip, so that every earlier request has taken effect or never will."""
        while True:
            self._tip, self._shipped = self._read_tip()
            try:
                return self._move_tip(held, self._tip.next())
            except ServiceUnavailable:
                if self._read_tip()[0].revision == self._tip.revision:
                    raise  # no late request moved the tip: etcd is unavailable

    def _apply_journal(self, held: HeldTerm) -> None:
        """Apply a pending journal; applying it twice does no harm."""
        if self._tip.pending is None:
            return
        for some in batches(read_journal(self._read_blob(*self._tip.pending))):
            self._fenced(held, ops_of(some))
        self._move_tip(held, self._tip.next(pending=None))

    def _follow_up(self, held: HeldTerm) -> None:
        """Run the follow-up work of a commit; the commit is done whatever happens here."""
        try:
            self._apply_journal(held)
            if len(self._blobs) >= COLLECT_EVERY:
                self._collect(held)
        except (PacelineError, Compacted) as error:
            self._unsure = True  # of the tip: the caller loads before the next commit
            log.warning("to be done later: %s", error)

    # --- blobs: put before anything refers to them, deleted once nothing does --------------------

    def _part(self, digest: str, number: int) -> bytes:
        return self._layout.key("blobs", digest, f"{number:04d}")

    def _put_blob(self, held: HeldTerm, blob: Blob) -> None:
        if blob.digest not in self._blobs:
            for number, part in enumerate(blob.parts):
                self._fenced(held, [put(self._part(blob.digest, number), part)])
            self._blobs.add(blob.digest)

    def _collect(self, held: HeldTerm) -> None:
        """Delete unreferenced blobs; with the tip, so that a late deletion is ruled out too."""
        named = {blob_named(row.value) for row in self._snapshot().values()}
        used = {each[0] for each in named if each is not None}
        keys = self._pages(*self._layout.below("blobs"), NAMES_A_PAGE, keys_only=True)
        there = {self._layout.parts_of(kv.key)[1] for kv in keys}
        self._blobs.clear()
        gone = [Delete(*self._layout.below("blobs", digest)) for digest in sorted(there - used)]
        for some in batches(gone):
            self._move_tip(held, self._tip.next(), ops_of(some))
