"""Rendezvous of an asynchronous job: server addresses and leadership claims in a torch store.

*Claims*: each epoch can be claimed once, so two servers never both lead. When server and standby
lose each other, neither can distinguish a dead peer from an unreachable one: the first to claim
the next epoch continues, the other ends. *Finished*: all work is done and no server leads any more,
so a rank that starts late ends instead of looking for one.

The gang's store is on one node and may be lost with it. Ranks then continue with the last known
addresses until the leader has saved and all restart (``launcher.served_attempt``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.errors import InvalidInput, PeerLost
from paceline.training.loop import RankIdentity
from paceline.training.parallel import SERVING
from paceline.training.strategies.port import Address

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 10.0
FRESH_S = 0.25  # lifetime of a cached answer of the store


class Rendezvous:
    """A rank's client of the store, for one attempt of a gang."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: list[Address] = []
        self._asked_at = -FRESH_S

    @classmethod
    def of(cls, place: RankIdentity) -> Rendezvous:
        """Return the client of the rank's gang; raises PeerLost where its store is unreachable."""
        if not place.gang_key:
            raise InvalidInput("rank was started without its gang's key", where=place.worker_id)
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        with _reachable():
            tcp = TCPStore(
                place.master_host, place.master_port, None, False, timeout, wait_for_workers=False
            )
        return cls(PrefixStore(f"relaxed-{place.attempt}", tcp))

    def publish(self, rank: int, address: Address) -> None:
        """Publish the server address of ``rank``."""
        with _reachable():
            self._store.set(f"server-{rank}", f"{address[0]} {address[1]}")

    def servers(self) -> Sequence[Address]:
        """Return the servers' addresses; the last known ones where the store is unreachable."""
        if time.monotonic() - self._asked_at < FRESH_S:
            return self._known
        self._asked_at = time.monotonic()
        try:
            with _reachable():
                names = [f"server-{rank}" for rank in range(SERVING)]
                found = [self._store.get(n).decode() for n in names if self._store.check([n])]
            pairs = [each.rsplit(" ", 1) for each in found]
            self._known = [(host, int(port)) for host, port in pairs]
        except PeerLost as error:
            log.warning("%s", error)
        return self._known

    def finish(self) -> None:
        """Publish that all work is done and the leader is about to end."""
        with _reachable():
            self._store.set("finished", "1")

    def finished(self) -> bool:
        """Return whether all work is done; False where the store is unreachable."""
        with contextlib.suppress(PeerLost), _reachable():
            return bool(self._store.check(["finished"]))
        return False

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` holds ``epoch`` now; repeating the call is safe."""
        with _reachable():
            found = self._store.compare_set(f"epoch-{epoch}", "", owner)
        return bytes(found).decode() == owner


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError: reset, refused, timed out
        why = str(error).splitlines()[0]
        raise PeerLost("the gang's store is unreachable", got=why) from error
