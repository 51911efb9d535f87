"""Leader election in etcd: the leader's key is bound to a lease, beside the epoch counter.

A candidate that finds no such key puts it, together with the next epoch, in one transaction. Each
write of a term compares the key's creation revision: no other term has the same one, and the key is
deleted with the lease.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict, dataclass

from paceline.coordinator.stores.coordination import Candidate, Term
from paceline.coordinator.stores.etcd.client import (
    EtcdClient,
    get,
    if_changed_at,
    if_created_at,
    put,
    request,
)
from paceline.coordinator.stores.rows import KeyLayout
from paceline.errors import PacelineError

log = logging.getLogger(__name__)

MARGIN = 0.1  # of the lease: the holder stops this much earlier than etcd


def lease_clock() -> float:
    """Return seconds of a clock that runs during suspend and ignores wall-time changes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One etcd lease, with a local estimate of how long it certainly holds.

    A thread keeps it alive from ``keep`` until ``end``.
    """

    def __init__(self, client: EtcdClient, lease_s: float) -> None:
        """Request a lease; raises ServiceUnavailable."""
        self._client = client
        asked_s = lease_clock()
        granted = client.call("LeaseGrant", request("LeaseGrantRequest", TTL=round(lease_s)))
        self.lease_id: int = granted.ID
        self._ttl_s = float(granted.TTL)
        self._valid_until_s = asked_s + self._ttl_s * (1 - MARGIN)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_on, name="etcd-lease", daemon=True)

    def keep(self) -> None:
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Return whether it certainly has not expired yet."""
        return not self._ended.is_set() and lease_clock() < self._valid_until_s

    def end(self, *, revoke: bool) -> None:
        """Stop keeping it alive and, where ``revoke``, revoke it now; never raises."""
        self._ended.set()
        if revoke:
            try:
                message = request("LeaseRevokeRequest", ID=self.lease_id)
                self._client.call("LeaseRevoke", message, within_s=1.0)
            except PacelineError as error:
                log.info("a lease was not revoked and expires by itself: %s", error)

    def _keep_on(self) -> None:
        message = request("LeaseKeepAliveRequest", ID=self.lease_id)
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            pause_s = self._ttl_s / 4
            asked_s = lease_clock()
            try:
                answer = self._client.call("LeaseKeepAlive", message, within_s=self._ttl_s / 2)
            except PacelineError as error:
                if self._client.is_closed:  # its owner is gone, and the lease expires by itself
                    return
                log.warning("the lease could not be renewed: %s", error)
                continue
            if answer.TTL <= 0:
                log.warning("the lease has expired")
                self._ended.set()
                return
            self._valid_until_s = asked_s + float(answer.TTL) * (1 - MARGIN)


@dataclass(frozen=True, slots=True)
class HeldTerm:
    """The term that this process won, and the key that proves it."""

    term: Term
    lease: Lease
    created: int  # revision at which the leader's key was created


def claim(
    client: EtcdClient, layout: KeyLayout, candidate: Candidate, lease_s: float
) -> HeldTerm | None:
    """Claim leadership where there is no leader; return the term, or None where there is one.

    Raises what calls to etcd raise; the claim has then failed, or ends with its lease.
    """
    gets = request("TxnRequest", success=[get(layout.leader), get(layout.epoch)])
    answer = client.call("Txn", gets)
    leader, epochs = (each.response_range.kvs for each in answer.responses)
    if leader:
        return None
    newest, changed = (int(epochs[0].value), epochs[0].mod_revision) if epochs else (0, 0)
    lease = Lease(client, lease_s)
    try:
        term = Term(newest + 1, **asdict(candidate))
        message = request(
            "TxnRequest",
            compare=[if_created_at(layout.leader, 0), if_changed_at(layout.epoch, changed)],
            success=[
                put(layout.leader, json.dumps(asdict(term)).encode(), lease.lease_id),
                put(layout.epoch, str(term.epoch).encode()),
            ],
        )
        client.call("Txn", message)
        # Read it back: a transaction that was sent twice is refused the second time.
        leader = client.call("Range", request("RangeRequest", key=layout.leader)).kvs
        if leader and leader[0].lease == lease.lease_id:
            return HeldTerm(term, lease, leader[0].create_revision)
    except BaseException:
        lease.end(revoke=True)
        raise
    lease.end(revoke=True)  # another replica won
    return None
