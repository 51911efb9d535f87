"""Leader election in etcd: the leader's key is bound to a lease, beside the epoch counter.

A candidate waits until there is no such key and puts it, together with the next epoch, in one
transaction. Each write of a term compares the key's creation revision: no other term has the same
one, and the key is deleted with the lease.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.coordinator.stores.contracts import Candidate, Term
from paceline.coordinator.stores.etcd.client import (
    EtcdClient,
    changed_at,
    created_at,
    get,
    put,
    request,
)
from paceline.coordinator.stores.etcd.layout import KeyLayout
from paceline.coordinator.stores.etcd.mirror import Watcher
from paceline.errors import PacelineError

# A lease that a thread keeps alive, with a local estimate of how long it certainly holds.

log = logging.getLogger(__name__)

MARGIN = 0.1  # of the lease: the holder stops this much earlier than etcd


def lease_clock() -> float:
    """Return seconds of a clock that runs during suspend and ignores wall-time changes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One etcd lease; kept alive from ``keep`` until ``end``."""

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
        """Start the keep-alive thread."""
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
                log.info("a lease runs out by itself: %s", error)

    def _keep_on(self) -> None:
        message = request("LeaseKeepAliveRequest", ID=self.lease_id)
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            pause_s = self._ttl_s / 4
            asked_s = lease_clock()
            try:
                answer = self._client.call("LeaseKeepAlive", message, within_s=self._ttl_s / 2)
            except PacelineError as error:
                log.warning("the lease could not be renewed: %s", error)
                continue
            if answer.TTL <= 0:
                log.warning("the lease has run out")
                self._ended.set()
                return
            self._valid_until_s = asked_s + float(answer.TTL) * (1 - MARGIN)


ASK_S = 0.2  # interval at which a candidate checks whether to give up


@dataclass(frozen=True, slots=True)
class HeldTerm:
    """The term that this process won, and the key that proves it."""

    term: Term
    lease: Lease
    created: int  # revision at which the leader's key was created


@dataclass(frozen=True, slots=True)
class LeaderKeys:
    """The leader's key and the epoch's key, as read from etcd."""

    leader: Any | None
    epoch: Any | None

    @property
    def newest(self) -> int:
        """Return the newest epoch ever used, 0 before the first."""
        return int(self.epoch.value) if self.epoch is not None else 0

    def term(self) -> Term | None:
        """Return the leader's term, or None."""
        return None if self.leader is None else Term(**json.loads(self.leader.value))


class Election:
    """Campaigns for leadership; one candidate at a time."""

    def __init__(
        self, client: EtcdClient, layout: KeyLayout, watcher: Watcher, lease_s: float
    ) -> None:
        self._client, self._layout = client, layout
        self._watcher, self._lease_s = watcher, lease_s

    def standing(self) -> LeaderKeys:
        """Return the leader's and the epoch's key as they are now."""
        gets = [get(self._layout.leader), get(self._layout.epoch)]
        answer = self._client.call("Txn", request("TxnRequest", success=gets))
        leader, epoch = (each.response_range.kvs for each in answer.responses)
        return LeaderKeys(leader[0] if leader else None, epoch[0] if epoch else None)

    def stand(
        self, candidate: Candidate, give_up: Callable[[], bool], take: Callable[[HeldTerm], None]
    ) -> HeldTerm | None:
        """Wait until there is no leader, and claim leadership; ``take`` is called after success.

        Any PacelineError, also in ``take``, is retried until ``give_up()``.
        """
        lease: Lease | None = None
        trouble = ""
        try:
            while not give_up():
                try:
                    seen = self._watcher.note(0)
                    if lease is not None and not lease.holds:
                        lease = None  # expired while etcd was unavailable
                    found = self.standing()
                    if found.leader is None:
                        lease = lease or Lease(self._client, self._lease_s)
                        self._claim(candidate, lease, found)
                        found = self.standing()  # read it back: the claim's answer may be lost
                    leader, term = found.leader, found.term()
                    if lease is not None and leader is not None and term is not None:
                        if leader.lease == lease.lease_id:
                            held = HeldTerm(term, lease, leader.create_revision)
                            take(held)
                            lease.keep()
                            lease = None
                            self._watcher.note(leader.mod_revision)
                            return held
                        lease.end(revoke=True)  # another won; a new claim needs a new lease
                        lease = None
                    trouble = ""
                    self._watcher.wait(seen, ASK_S)
                except PacelineError as error:
                    if error.what != trouble:
                        log.warning("the campaign waits: %s", error)
                    trouble = error.what
                    threading.Event().wait(ASK_S)
            return None
        finally:
            if lease is not None:
                lease.end(revoke=True)

    def _claim(self, candidate: Candidate, lease: Lease, found: LeaderKeys) -> None:
        layout, number = self._layout, found.newest + 1
        fields = {"epoch": number, "replica_id": candidate.replica_id, "url": candidate.url}
        message = request(
            "TxnRequest",
            compare=[
                created_at(layout.leader, 0),
                changed_at(layout.epoch, found.epoch.mod_revision if found.epoch else 0),
            ],
            success=[
                put(layout.leader, json.dumps(fields).encode(), lease.lease_id),
                put(layout.epoch, str(number).encode()),
            ],
        )
        self._client.call("Txn", message)
