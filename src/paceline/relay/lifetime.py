"""When a process should end: SIGTERM, SIGINT, or the death of the process that started it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from types import FrameType

PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


class SignalEvent(threading.Event):
    """An Event that a signal handler may set while any thread waits for it, the interrupted one
    too. It stays set.

    A ``threading.Event`` has a lock that ``wait`` holds for moments: a handler that comes in one of
    them, on the same thread, waits for that lock for ever. Here it is a flag and a pipe that nobody
    empties.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Let everybody go who waits, now or later."""
        if not self._is_set:
            self._is_set = True
            os.write(self._write, b"!")

    def clear(self) -> None:
        """Raise: whoever asked to stop is not to be forgotten."""
        raise RuntimeError("a signal cannot be taken back")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds and return whether it is set."""
        if not self._is_set:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        return self._is_set

    def __del__(self) -> None:
        for descriptor in (self._read, self._write):
            os.close(descriptor)


class StopSignal:
    """Waits until the process should end. Make it in the main thread.

    The kernel's parent-death signal comes when the *thread* that started us ends, even while its
    process lives on; so it only makes us look, and who decides is the parent's process id.
    """

    def __init__(self, *, die_with_parent: bool = False) -> None:
        self._event = SignalEvent()
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
