"""A lease that a thread keeps alive, and the local clock's word on how long it surely holds."""

from __future__ import annotations

import logging
import threading
import time

from paceline.coordinator.stores.etcd.client import EtcdClient
from paceline.coordinator.stores.etcd.messages import request
from paceline.errors import PacelineError

log = logging.getLogger(__name__)

MARGIN = 0.1  # of the lease: this much earlier than etcd, its holder believes that it ran out


def lease_clock() -> float:
    """Return seconds that go on while the machine is suspended and know no wall time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One lease of etcd's; kept alive from ``keep`` until ``end``."""

    def __init__(self, client: EtcdClient, lease_s: float) -> None:
        """Ask for a lease; raises ServiceUnavailable."""
        self._client = client
        asked_s = lease_clock()
        granted = client.call("LeaseGrant", request("LeaseGrantRequest", TTL=round(lease_s)))
        self.lease_id: int = granted.ID
        self._ttl_s = float(granted.TTL)
        self._valid_until_s = asked_s + self._ttl_s * (1 - MARGIN)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_on, name="etcd-lease", daemon=True)

    def keep(self) -> None:
        """Begin to keep it alive."""
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Return whether it surely has not run out yet."""
        return not self._ended.is_set() and lease_clock() < self._valid_until_s

    def end(self, *, revoke: bool) -> None:
        """Stop keeping it alive and, where ``revoke``, give it back now; never raises."""
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
