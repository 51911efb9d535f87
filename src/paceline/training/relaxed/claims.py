"""Who may lead: one claim an epoch, first come, so that two servers never both go on.

The server claims epoch 1. When server and standby lose each other, neither can tell whether the
other is dead or only out of reach: whoever claims the next epoch first goes on, the other ends.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from paceline.errors import PeerLost


class Claims(Protocol):
    """A place where each epoch can be claimed once."""

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` has ``epoch`` now (asking again is fine)."""
        ...


class FileClaims:
    """Claims as files of one directory: for ranks that share a disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` has ``epoch``: made whole elsewhere, then linked in."""
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
        """Return whether anybody has ``epoch``; raises PeerLost where the store is away."""
        try:
            return bool(self._store.check([f"{self._prefix}/epoch-{epoch}"]))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error

    def claim(self, epoch: int, owner: str) -> bool:
        """Return whether ``owner`` has ``epoch``; raises PeerLost where the store is away."""
        try:
            found = self._store.compare_set(f"{self._prefix}/epoch-{epoch}", "", owner)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerLost("the gang's store is away", got=str(error).splitlines()[0]) from error
        return bytes(found).decode() == owner
