"""How far a publish is: bytes and files of its two stages, told now and then by whoever works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

DIGEST, UPLOAD = "digest", "upload"
TELL_S = 0.2


@dataclass(frozen=True, slots=True)
class Moved:
    """How far ``stage`` is."""

    stage: str
    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int

    @property
    def is_over(self) -> bool:
        """Return whether nothing of the stage is left."""
        return self.done_files >= self.total_files


Tell = Callable[[Moved], None]


def nobody(_moved: Moved) -> None:
    """Tell nobody."""


class Account:
    """Counts one stage; several threads add. ``tell`` hears of it every TELL_S at most, one call at
    a time, and of the end.
    """

    def __init__(self, stage: str, total_bytes: int, total_files: int, tell: Tell) -> None:
        self._lock = threading.Lock()
        self._tell = tell
        self._now = Moved(stage, 0, total_bytes, 0, total_files)
        self._told_s = float("-inf")

    def moved(self, count: int) -> None:
        """Add bytes; those that move a second time are not more than there are."""
        self._add(count, 0)

    def ended_file(self) -> None:
        """Add a file that is whole."""
        self._add(0, 1)

    def _add(self, count: int, files: int) -> None:
        with self._lock:
            was = self._now
            self._now = now = Moved(
                was.stage,
                min(was.done_bytes + count, was.total_bytes),
                was.total_bytes,
                was.done_files + files,
                was.total_files,
            )
            if now.is_over or time.monotonic() - self._told_s >= TELL_S:
                self._told_s = time.monotonic()
                self._tell(now)
