"""Group commit, and the log of durable pieces: which ones of an earlier process can be trusted.

Verified pieces become durable every 64 MiB or second, and at once at the end, on one thread a
deployment: neither receiving nor planning ever waits for a disk's fsync. The log gets records, each
with a checksum, after the bytes of their pieces were synced. So after ``kill -9`` or power loss it
ends with a torn record at worst, and whatever follows one is ignored.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import Cancelled, PacelineError, StorageFailed
from paceline.relay.protocol import Extent, LocalFailed, PiecesDurable, SessionEvent

if TYPE_CHECKING:
    from paceline.relay.store.staging import Staging

_RUN = struct.Struct(">II")  # first piece, stop
_MARK = struct.Struct(">III")  # and the CRC-32 of both


class PieceLog:
    """The log at ``path``, created if missing; raises OSError."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o644)

    def load(self, pieces: int) -> list[Extent]:
        """Return the runs of ``pieces`` pieces up to the first torn one; truncate the rest."""
        raw = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        found: list[Extent] = []
        for at in range(0, len(raw) - _MARK.size + 1, _MARK.size):
            first, stop, check = _MARK.unpack_from(raw, at)
            torn = check != zlib.crc32(raw[at : at + _RUN.size])
            if torn or not first < stop <= pieces:
                break
            found.append(Extent(first, stop))
        os.ftruncate(self._descriptor, len(found) * _MARK.size)
        return found

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)

    def append(self, runs: Iterable[Extent]) -> None:
        """Add ``runs`` and return when they are durable."""
        record = memoryview(
            b"".join(
                _MARK.pack(first, stop, zlib.crc32(_RUN.pack(first, stop))) for first, stop in runs
            )
        )
        os.lseek(self._descriptor, 0, os.SEEK_END)
        while record:  # a disk that fills up takes part of it first
            record = record[os.write(self._descriptor, record) :]
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


log = logging.getLogger(__name__)

GROUP_BYTES = 64 * 1024 * 1024
GROUP_S = 1.0


class Committer:
    """Commits ``staging`` and reports PiecesDurable or LocalFailed."""

    def __init__(self, staging: Staging, report: Callable[[SessionEvent], None]) -> None:
        self._staging = staging
        self._report = report
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Commit at once: a group is full, or no piece is missing any more."""
        self._wake.set()

    def stop(self, *, wait: bool = False) -> None:
        """Stop after the commit in progress, without a last commit.

        ``wait`` is only for a thread that the reports do not wait for.
        """
        self._stopped = True
        self._wake.set()
        if wait:
            self._thread.join(30.0)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(GROUP_S)
            self._wake.clear()
            try:
                for extent in self._staging.commit():
                    self._report(PiecesDurable(extent))
            except Cancelled:
                return
            except PacelineError as error:
                self._report(LocalFailed(error))
                return
            except Exception as error:  # without this thread nothing ever becomes durable
                if not isinstance(error, OSError):
                    log.exception("committing broke")
                self._report(LocalFailed(StorageFailed("the disk failed", got=error)))
                return
