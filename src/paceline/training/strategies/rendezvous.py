"""Rendezvous of an asynchronous job: server addresses and leadership claims in the gang's store.

The store is on one node and may be lost with it. Ranks then continue with the last known addresses
until the leader has saved and all restart (``launcher.independent_restart``); operations that need
the store meanwhile (a claim, a rank that joins anew) fail.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import InvalidInput, PeerLost
from paceline.training.loop.event_writer import RankIdentity
from paceline.training.strategies import SERVING
from paceline.training.strategies.protocol import Address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Claims(Protocol):
    """Leadership claims: each epoch can be claimed once, so that two servers never both lead.

    The server claims epoch 1. When server and standby lose each other, neither can distinguish a
    dead peer from an unreachable one: the first to claim the next epoch continues, the other ends.
    """

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` holds ``epoch`` now (repeating the call is safe)."""
        ...


class FileClaims:
    """Claims as files of one directory, for ranks that share a disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` holds ``epoch``: written whole elsewhere, then linked in."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"epoch-{epoch}"
        mine = self._directory / f"{owner}-{epoch}-{os.getpid()}"
        mine.write_text(owner)
        try:
            os.link(mine, path)  # fails where it exists, also over NFS
        except FileExistsError:
            return path.read_text() == owner
        finally:
            mine.unlink()
        return True


class StoreClaims:
    """Claims in the gang's torch store, which must outlive its ranks."""

    def __init__(self, store: object, prefix: str = "relaxed") -> None:
        self._store, self._prefix = store, prefix

    def claimed(self, epoch: int) -> bool:
        """Return whether ``epoch`` is claimed; raises PeerLost where the store is unreachable."""
        try:
            return bool(self._store.check([f"{self._prefix}/epoch-{epoch}"]))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` holds ``epoch``; raises PeerLost if the store is unreachable."""
        try:
            found = self._store.compare_set(f"{self._prefix}/epoch-{epoch}", "", owner)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error
        return bytes(found).decode() == owner


log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 10.0
FRESH_S = 0.25  # lifetime of a cached answer of the store


class RendezvousStore:
    """A rank's client of the gang's store, for one attempt."""

    def __init__(self, place: RankIdentity) -> None:
        """Raises PeerLost where the store is unreachable, InvalidInput without the gang's key."""
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
        """Publish the address of ``rank``; raises PeerLost where the store is unreachable."""
        try:
            self._store.set(f"server-{rank}", f"{address[0]} {address[1]}")
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error

    def servers(self) -> Sequence[Address]:
        """Return the servers' addresses; the last known ones where the store is unreachable."""
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
