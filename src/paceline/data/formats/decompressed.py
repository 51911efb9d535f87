"""A file's content as a forward-only stream, decompressed, with a bound on its total expansion."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

from paceline.data.formats.sample import EXPANSION_SLACK_BYTES, MAX_EXPANSION

STEP_BYTES = 64 * 1024


class Damaged(Exception):
    """The file cannot be read further; the message is the reason."""


class Decompressed:
    """The content of the file at ``path``, gunzipped where its first bytes are gzip's.

    A context manager. Raises Damaged, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self._made = 0
        is_gzip = self._raw.peek(3)[:3] == b"\x1f\x8b\x08"
        self._file = gzip.GzipFile(fileobj=self._raw) if is_gzip else self._raw

    def __enter__(self) -> Decompressed:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only at the end of the file."""
        return self._taken(self._file.read, size)

    def readline(self, size: int) -> bytes:
        """Return the rest of the line, at most ``size`` bytes of it; b"" at the end of the file."""
        return self._taken(self._file.readline, size)

    def _taken(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            found = read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise Damaged(str(error)[:300]) from error
        self._made += len(found)
        if self._made > EXPANSION_SLACK_BYTES + MAX_EXPANSION * self._raw.tell():
            raise Damaged(f"it grows to more than {MAX_EXPANSION} times its size")
        return found

    def skip(self, size: int) -> None:
        """Skip the next ``size`` bytes; raises Damaged if the file ends before."""
        while size > 0:
            passed = len(self.read(min(size, STEP_BYTES)))
            if not passed:
                raise Damaged("it ends within a member")
            size -= passed
