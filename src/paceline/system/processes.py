"""Signals to a process that another process named by its pid.

A pid is given to a new process sooner or later. Here a signal goes through a descriptor of the
process (pidfd), and only if that process holds a file open that an innocent one would not: the
lock of its state directory or store.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


class Holder:
    """The process with ``pid`` that has ``path`` open; it stays the same process."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor

    def send(self, number: signal.Signals) -> bool:
        """Send a signal and return whether the process was there to take it."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True


@contextlib.contextmanager
def holder_of(path: Path, pid: int) -> Iterator[Holder | None]:
    """Yield the process ``pid`` if it has ``path`` open, else None: it is gone, or another one."""
    try:
        descriptor = os.pidfd_open(pid) if 0 < pid < 2**31 else -1
    except ProcessLookupError:
        descriptor = -1
    if descriptor < 0:
        yield None
        return
    try:  # the descriptor came first: if the pid is used again after it, the signal fails
        yield Holder(pid, descriptor) if _has_open(pid, path) else None
    finally:
        os.close(descriptor)


def _has_open(pid: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        wanted = path.stat()
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(each.stat(), wanted):
                    return True
    return False
