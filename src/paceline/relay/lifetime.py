"""When a process should end: SIGTERM, SIGINT, or the death of the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


class StopSignal:
    """Waits until the process should end. Make it in the main thread.

    The kernel's parent-death signal comes when the *thread* that started us ends, even while its
    process lives on; so it only makes us look, and who decides is the parent's process id.
    """

    def __init__(self, *, die_with_parent: bool = False) -> None:
        self._event = threading.Event()
        self._parent = os.getppid() if die_with_parent else 0
        signal.signal(signal.SIGTERM, self._asked)
        signal.signal(signal.SIGINT, self._asked)
        if die_with_parent:
            signal.signal(signal.SIGUSR1, self._look)
            if sys.platform == "linux":
                ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)

    def wait(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` and return whether the process should end."""
        end = time.monotonic() + wait_s
        while not self._event.is_set():
            if self._orphaned():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._event.wait(min(left, PARENT_POLL_S))
        return True

    def set(self) -> None:
        """End, as a signal would have it."""
        self._event.set()

    def _orphaned(self) -> bool:
        return bool(self._parent) and os.getppid() != self._parent

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()

    def _look(self, _number: int, _frame: FrameType | None) -> None:
        if self._orphaned():
            self._event.set()
