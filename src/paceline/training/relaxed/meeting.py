"""Where the ranks of an asynchronous job find each other: the gang's store holds their addresses.

The store lies on one node and may be lost with it. Ranks then go on with the addresses they know,
until who leads has saved as it is told to, and all start again (``training.loose``); what needs the
store meanwhile (a claim, a rank that joins anew) fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput, PeerLost
from paceline.training.relaxed import SERVING
from paceline.training.relaxed.claims import StoreClaims
from paceline.training.relaxed.terms import Address
from paceline.training.voice import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 10.0
FRESH_S = 0.25  # for so long an answer of the store's is good


class Meeting:
    """The store of one attempt, as a rank sees it."""

    def __init__(self, place: Place) -> None:
        """Raises PeerLost where the store is away, InvalidInput without the gang's key."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        if not place.gang_key:
            raise InvalidInput("rank was started without its gang's key", where=place.worker_id)
        self.host, self.key = place.host, place.gang_key
        try:
            tcp = TCPStore(
                place.master_host,
                place.master_port,
                None,
                False,
                timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error
        self._store: Store = PrefixStore(f"relaxed-{place.attempt}", tcp)
        self.claims = StoreClaims(self._store)
        self._known: list[Address] = []
        self._asked_at = -FRESH_S

    def publish(self, rank: int, address: Address) -> None:
        """Say where ``rank`` listens; raises PeerLost where the store is away."""
        try:
            self._store.set(f"server-{rank}", f"{address[0]} {address[1]}")
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error

    def servers(self) -> Sequence[Address]:
        """Return where servers listen; the last that were known where the store is away."""
        if time.monotonic() - self._asked_at < FRESH_S:
            return self._known
        self._asked_at = time.monotonic()
        try:
            found = []
            for rank in range(SERVING):
                if self._store.check([f"server-{rank}"]):
                    host, port = self._store.get(f"server-{rank}").decode().rsplit(" ", 1)
                    found.append((host, int(port)))
            self._known = found
        except RuntimeError as error:
            log.warning("the gang's store is away: %s", str(error).splitlines()[0])
        return self._known
