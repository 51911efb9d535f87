"""The log of durable pieces: which pieces of an earlier process can be trusted.

Group commit appends records, each with a checksum, after the bytes of their pieces were synced. So
after ``kill -9`` or power loss the log ends with a torn record at worst, and whatever follows one
is ignored.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from paceline.relay.protocol import Extent

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
