"""The coordination store in etcd: one leader by lease; each commit is one fenced transaction.

A commit compares two keys: the leader's, which expires with its lease, and the tip, which every
commit changes. So the leader of an older term cannot write, and a commit without an answer can be
sent again or ruled out: it took effect once, or never will. What does not fit into one etcd
transaction is written beforehand as unreferenced blobs, and takes effect with the transaction that
refers to them.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.coordinator.ledger import LedgerEntry
from paceline.coordinator.state.messages import Answer, Effect, EmitEvent, LoadedState
from paceline.coordinator.stores.audit import numbered
from paceline.coordinator.stores.contracts import (
    OUTBOX_EVENTS,
    RECENT_EVENTS,
    Candidate,
    Outbox,
    Term,
    boot_id,
    load_first,
    outbox_is_full,
    stale,
)
from paceline.coordinator.stores.etcd.client import (
    CALL_S,
    EtcdAccess,
    EtcdClient,
    changed_at,
    created_at,
    delete,
    get,
    put,
    request,
)
from paceline.coordinator.stores.etcd.election import Election, HeldTerm
from paceline.coordinator.stores.etcd.layout import (
    Blob,
    Change,
    Delete,
    KeyLayout,
    Put,
    Tip,
    batches,
    fits,
    ops_of,
    pack,
    read_journal,
    settle,
    unpack,
    write_journal,
)
from paceline.coordinator.stores.etcd.mirror import StateCache, Watcher
from paceline.errors import PacelineError, ServiceUnavailable, StaleEpoch
from paceline.schemas.events import Event
from paceline.schemas.records import StageRecord

# Long values on keys of their own: put before anything refers to them, deleted once nothing does.

log = logging.getLogger(__name__)

NAMES_A_PAGE = 1_000


class BlobStore:
    """The blobs of one installation, written and collected by the leader of one term."""

    def __init__(self, client: EtcdClient, layout: KeyLayout, mirror: StateCache) -> None:
        self._client, self._layout, self._mirror = client, layout, mirror
        self._written: set[str] = set()  # in this term, since the last collection

    def begin(self) -> None:
        """Begin a term: another leader may have deleted blobs."""
        self._written = set()

    @property
    def written(self) -> int:
        """Return how many were put since the last collection."""
        return len(self._written)

    def put(self, blob: Blob, fenced: Callable[[Sequence[Any]], None]) -> None:
        """Put a blob's parts, each in a transaction that ``fenced`` runs."""
        if blob.digest in self._written:
            return
        for number, part in enumerate(blob.parts):
            fenced([put(self._layout.part(blob.digest, number), part)])
        self._written.add(blob.digest)

    def unnamed(self) -> list[Delete]:
        """Return the deletions of every stored blob that nothing refers to now."""
        named = self._mirror.blobs()
        start, end = self._layout.below("blobs")
        there: set[str] = set()
        more = True
        while more:
            message = request(
                "RangeRequest", key=start, range_end=end, limit=NAMES_A_PAGE, keys_only=True
            )
            answer = self._client.call("Range", message)
            there |= {self._layout.parts_of(kv.key)[1] for kv in answer.kvs}
            more = answer.more
            if more:
                start = answer.kvs[-1].key + b"\0"
        self._written.clear()
        gone = sorted(there - named)
        if gone:
            log.info("%d blobs of %d are named by nothing", len(gone), len(there))
        return [Delete(*self._layout.below("blobs", digest)) for digest in gone]


COLLECT_EVERY = 32  # written blobs, before unreferenced ones are collected
EVENT_KEYS = 50  # read at once
LEDGER_KEYS = 200


class EtcdCoordination:
    """Implements the Coordination contract with an etcd cluster."""

    standbys = True

    def __init__(self, access: EtcdAccess, prefix: str, *, lease_s: float) -> None:
        self._client = EtcdClient(access)
        self._layout = KeyLayout(prefix)
        self._where = f"{self._client.where} {prefix}"
        self._boot = boot_id()
        self._lock = threading.RLock()  # one decision at a time; never held by a campaign
        self._held: HeldTerm | None = None
        self._lost = False  # a write of the held term was refused
        self._unsure = False  # a decision failed, and nothing was loaded since
        self._tip = Tip()
        self._shipped = 0
        self._mirror = StateCache(self._client, self._layout, self._boot)
        self._blobs = BlobStore(self._client, self._layout, self._mirror)
        self._watcher = Watcher(self._client, *self._layout.below("meta"), self._look)
        self._election = Election(self._client, self._layout, self._watcher, lease_s)
        self._version = ""

    @property
    def backend(self) -> str:
        """Return ``etcd`` and the version of the first member that answered."""
        if not self._version:
            try:
                self._version = self._client.version()
            except PacelineError:
                return "etcd"
        return f"etcd {self._version}"

    def check(self) -> None:
        """Raise ServiceUnavailable where no majority answers."""
        self._look(within_s=2.0)

    def close(self) -> None:
        """Close the streams and connections; a held lease expires."""
        held = self._held
        if held is not None:
            held.lease.end(revoke=False)
        self._watcher.close()
        self._client.close()

    # --- leadership ------------------------------------------------------------------------------

    def campaign(self, candidate: Candidate, give_up: Callable[[], bool]) -> Term | None:
        """Wait until there is no leader, and claim leadership."""
        if self._held is not None:
            self.resign(self._held.term)  # otherwise it would wait for its own lease
        held = self._election.stand(candidate, give_up, self._take)
        return None if held is None else held.term

    def _take(self, held: HeldTerm) -> None:
        with self._lock:
            tip, shipped = self._read_tip()
            self._held, self._lost, self._unsure = held, False, False
            self._tip, self._shipped = tip, shipped
            self._blobs.begin()

    def resign(self, term: Term) -> None:
        """Revoke the lease, which deletes the leader's key."""
        with self._lock:
            held = self._held
            if held is None or held.term != term:
                return
            self._lost = True
        held.lease.end(revoke=True)

    def is_leading(self, term: Term) -> bool:
        """Return whether the lease certainly holds by the local clock."""
        held = self._held
        return held is not None and held.term == term and not self._lost and held.lease.holds

    def leader(self) -> Term | None:
        """Return the term in the leader's key, or None."""
        return self._election.standing().term()

    # --- state -----------------------------------------------------------------------------------

    def commit(self, term: Term, effects: Iterable[Effect]) -> list[Event]:
        """Commit all of ``effects`` atomically, or none."""
        kept = [each for each in effects if not isinstance(each, Answer)]
        if not kept:
            return []
        told = [each for each in kept if isinstance(each, EmitEvent)]
        rest = [each for each in kept if not isinstance(each, EmitEvent)]
        with self._lock:
            held = self._leading(term)
            made = itertools.count(self._tip.made + 1)
            changes = list(self._layout.changes(rest, self._boot, made))
            return self._decide(held, changes, told, made=next(made) - 1)

    def load(self, now_s: float) -> LoadedState:
        """Return everything, as of one revision."""
        with self._lock:
            held = self._held
            if held is not None and not self._lost:
                try:
                    if self._unsure:
                        self._bar(held)
                    self._carry_out(held)
                except StaleEpoch as error:
                    log.info("read as a standby from here on: %s", error)
            loaded = self._mirror.load(now_s)
            self._unsure = False
        return loaded

    def revision(self) -> int:
        """Return etcd's revision of the newest change."""
        return self._watcher.note(self._look())

    def wait(self, after: int, timeout_s: float) -> int:
        """Block until the watch reports a change."""
        return self._watcher.wait(after, timeout_s)

    # --- the ledger of stages --------------------------------------------------------------------

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        key = self._layout.key("ledger", stage, input_digest)
        found = self._client.call("Range", request("RangeRequest", key=key)).kvs
        return StageRecord.model_validate_json(unpack(found[0].value)) if found else None

    def ledger(self) -> Iterator[LedgerEntry]:
        """Yield the size and age of each ledger record."""
        start, end = self._layout.below("ledger")
        more = True
        while more:
            message = request("RangeRequest", key=start, range_end=end, limit=LEDGER_KEYS)
            answer = self._client.call("Range", message)
            for kv in answer.kvs:
                yield LedgerEntry.of(StageRecord.model_validate_json(unpack(kv.value)))
                start = kv.key + b"\0"
            more = answer.more

    def keep_stage(self, term: Term, record: StageRecord, told: EmitEvent) -> list[Event]:
        """Put ``record`` into the ledger and return the numbered event."""
        value = pack(record.model_dump_json())
        change = Put(self._layout.key("ledger", record.stage, record.input_digest), value)
        with self._lock:
            return self._decide(self._leading(term), [change], [told])

    # --- the outbox of events --------------------------------------------------------------------

    def outbox(self) -> Outbox:
        """Return the range of event numbers that wait for the audit store."""
        tip, shipped = self._read_tip()
        return Outbox(shipped, tip.last)

    def events_after(self, seq: int, limit: int) -> list[Event]:
        """Return up to ``limit`` kept events after ``seq``."""
        start, end = self._layout.events(seq + 1), self._layout.below("events")[1]
        found: list[Event] = []
        more = True
        while more and len(found) < limit:
            message = request("RangeRequest", key=start, range_end=end, limit=EVENT_KEYS)
            answer = self._client.call("Range", message)
            for kv in answer.kvs:
                told = [Event.model_validate(each) for each in json.loads(unpack(kv.value))]
                found += [event for event in told if event.seq > seq]
                start = kv.key + b"\0"
            more = answer.more
        return found[:limit]

    def trim_events(self, term: Term, seq: int) -> None:
        """Record what was shipped, and delete events that are shipped and not recent.

        Nothing depends on its outcome, so it does not change the tip.
        """
        held = self._leading(term, sure=False)
        last = self._tip.last
        shipped = max(self._shipped, min(seq, last))
        oldest = max(0, min(shipped, last - RECENT_EVENTS))
        ops = [put(self._layout.shipped, str(shipped).encode())]
        ops.append(delete(self._layout.events(0), self._layout.events(oldest + 1)))
        self._fenced(held, ops)
        self._shipped = max(self._shipped, shipped)

    def number_after(self, term: Term, seq: int) -> None:
        """Continue the numbering above ``seq``."""
        with self._lock:
            held = self._leading(term)
            if seq <= self._tip.last:
                return
            nothing_waits = self._shipped == self._tip.last
            changes = [Put(self._layout.shipped, str(seq).encode())] if nothing_waits else []
            self._decide(held, changes, [], last=seq)
            if nothing_waits:
                self._shipped = seq

    # --- inside: deciding ------------------------------------------------------------------------

    def _leading(self, term: Term, *, sure: bool = True) -> HeldTerm:
        held = self._held
        if held is None or held.term != term or self._lost:
            newest = self.leader() or term
            raise stale(term, max(newest.epoch, term.epoch), self._where)
        if sure and self._unsure:
            raise load_first(self._where)
        return held

    def _decide(
        self, held: HeldTerm, changes: Sequence[Change], told: Sequence[EmitEvent], **fields: int
    ) -> list[Event]:
        """Commit ``changes`` and the events in ``told``; after an error the outcome is unknown."""
        try:
            self._carry_out(held)
            waiting = self._tip.last - self._shipped
            if told and waiting >= OUTBOX_EVENTS:
                raise outbox_is_full(waiting)
            events = [numbered(each, self._tip.last + n) for n, each in enumerate(told, 1)]
            if events:
                fields["last"] = events[-1].seq
            settled, blobs = settle([*changes, *self._layout.told(events)])
            for blob in blobs:
                self._blobs.put(blob, lambda ops: self._fenced(held, ops))
            if fits(settled):
                self._move_tip(held, self._tip.next(**fields), ops_of(settled))
            else:
                journal = Blob.of(write_journal(settled))
                self._blobs.put(journal, lambda ops: self._fenced(held, ops))
                pending = (journal.digest, len(journal.parts))
                self._move_tip(held, self._tip.next(**fields, pending=pending))
        except BaseException:
            self._unsure = True
            raise
        self._tidy(held)
        return events

    def _move_tip(self, held: HeldTerm, tip: Tip, ops: Sequence[Any] = ()) -> None:
        """Run ``ops`` in one transaction with the change from the known tip to ``tip``."""
        layout = self._layout
        message = request(
            "TxnRequest",
            compare=[
                created_at(layout.leader, held.created),
                changed_at(layout.tip, self._tip.revision),
            ],
            success=[*ops, put(layout.tip, tip.value())],
            failure=[get(layout.tip)],
        )
        answer, sent_once = self._client.send("Txn", message)
        if answer.succeeded:
            self._tip = replace(tip, revision=answer.header.revision)
        else:
            found = Tip.read(answer.responses[0].response_range.kvs)
            if found.commit != tip.commit:  # equal: an earlier attempt took effect
                if sent_once:  # an earlier attempt may have won first
                    self._require_leading(held)
                raise ServiceUnavailable(
                    "somebody else wrote meanwhile, or an earlier write came late",
                    where=self._where,
                    do="Ask again; the state is read anew first.",
                )
            self._tip = found
        self._watcher.note(self._tip.revision)

    def _bar(self, held: HeldTerm) -> None:
        """Move the tip, so that every earlier request has taken effect or never will."""
        while True:
            self._tip, self._shipped = self._read_tip()
            try:
                return self._move_tip(held, self._tip.next())
            except ServiceUnavailable:
                if self._read_tip()[0].revision == self._tip.revision:
                    raise  # no late request moved the tip: etcd is unavailable

    def _carry_out(self, held: HeldTerm) -> None:
        """Apply a pending journal; applying it twice does no harm."""
        if self._tip.pending is None:
            return
        for some in batches(read_journal(self._mirror.blob(self._tip.pending))):
            self._fenced(held, ops_of(some))
        self._move_tip(held, self._tip.next(pending=None))

    def _tidy(self, held: HeldTerm) -> None:
        """Run the follow-up work of a commit; the commit is done whatever happens here."""
        try:
            self._carry_out(held)
            if self._blobs.written >= COLLECT_EVERY:
                self._collect(held)
        except PacelineError as error:
            self._unsure = True  # of the tip: the caller loads before the next commit
            log.warning("to be done later: %s", error)

    def _collect(self, held: HeldTerm) -> None:
        """Delete unreferenced blobs; with the tip, so that a late deletion is ruled out too."""
        for some in batches(self._blobs.unnamed()):
            self._move_tip(held, self._tip.next(), ops_of(some))

    # --- inside: etcd ----------------------------------------------------------------------------

    def _fenced(self, held: HeldTerm, ops: Sequence[Any]) -> None:
        compare = [created_at(self._layout.leader, held.created)]
        message = request("TxnRequest", compare=compare, success=ops)
        if not self._client.call("Txn", message).succeeded:
            self._require_leading(held)

    def _require_leading(self, held: HeldTerm) -> None:
        found = self._election.standing()
        if found.leader is None or found.leader.create_revision != held.created:
            self._lost = True
            raise stale(held.term, found.newest, self._where)

    def _read_tip(self) -> tuple[Tip, int]:
        gets = [get(self._layout.tip), get(self._layout.shipped)]
        answer = self._client.call("Txn", request("TxnRequest", success=gets))
        tip, shipped = (each.response_range.kvs for each in answer.responses)
        return Tip.read(tip), int(shipped[0].value) if shipped else 0

    def _look(self, within_s: float = CALL_S) -> int:
        start, end = self._layout.below("meta")
        message = request("RangeRequest", key=start, range_end=end, keys_only=True)
        answer = self._client.call("Range", message, within_s=within_s)
        return max((kv.mod_revision for kv in answer.kvs), default=0)
