"""Decompress a file as a forward-only stream, with bounds on memory and on total expansion.

Detects gzip, bzip2 and xz by their first bytes; reads other files unchanged.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from paceline.data.formats.sample import EXPANSION_SLACK_BYTES, MAX_EXPANSION

STEP_BYTES = 64 * 1024
XZ_MEMORY_BYTES = 128 * 1024 * 1024  # ``xz -9`` needs 65 MiB; a header may demand 4 GiB


class Damaged(Exception):
    """The file cannot be read further; the message is the reason."""


class Decompressed:
    """The decompressed content of the file at ``path``; a context manager. Raises Damaged,
    OSError."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self._made = 0
        self._file: BinaryIO | gzip.GzipFile = self._raw
        magic = self._raw.peek(10)[:10]
        if magic.startswith(b"\x1f\x8b\x08"):
            self._file = gzip.GzipFile(fileobj=self._raw)
        elif magic.startswith(b"BZh") and magic[4:] == b"1AY&SY":
            self._file = io.BufferedReader(_Inflated(self._raw, _bunzip))
        elif magic.startswith((b"\xfd7zXZ", b"\x5d\0\0\x80")):
            self._file = io.BufferedReader(_Inflated(self._raw, _unxz))

    def __enter__(self) -> Decompressed:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only at the end of the file."""
        try:
            found = self._file.read(size)
        except (OSError, EOFError, zlib.error, _Malformed) as error:
            raise Damaged(str(error)[:300]) from error
        self._made += len(found)
        if self._file is not self._raw:
            most = EXPANSION_SLACK_BYTES + MAX_EXPANSION * self._raw.tell()
            if self._made > most:
                raise Damaged(f"it grows to more than {MAX_EXPANSION} times its size")
        return found

    def skip(self, size: int) -> None:
        """Skip the next ``size`` bytes; raises Damaged if the file ends before."""
        while size > 0:
            passed = len(self.read(min(size, STEP_BYTES)))
            if not passed:
                raise Damaged("it ends within a member")
            size -= passed


class _Malformed(Exception):
    """A decompressor rejected its input."""


class _Inflated(io.RawIOBase):
    """Concatenated streams of one format, each read decompressing at most the caller's buffer."""

    def __init__(self, raw: BinaryIO, make: Callable[[], Any]) -> None:
        self._raw, self._make = raw, make
        self._stream = make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            given = b""
            if self._stream.eof:
                given = self._stream.unused_data or self._raw.read(STEP_BYTES)
                if not given:
                    return 0
                self._stream = self._make()
            elif self._stream.needs_input and not (given := self._raw.read(STEP_BYTES)):
                raise EOFError("it ends within compressed data")
            try:
                made = self._stream.decompress(given, len(buffer))
            except Exception as error:  # each module has its own exception, and may be missing
                raise _Malformed(str(error)) from error
            if made:
                buffer[: len(made)] = made
                return len(made)


def _bunzip() -> Any:
    import bz2

    return bz2.BZ2Decompressor()


def _unxz() -> Any:
    import lzma

    return lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)
