"""Signals by pid that reach no unrelated process; programs for any machine; waiting for a pipe.

The kernel reuses pids. Here a signal goes through a process descriptor (pidfd), and only if that
process has a given file open, such as the lock of its state directory or store.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PYTHON = "python"  # as the first word of an argv: the interpreter of the machine that runs it


def own_program(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with this process's interpreter in the place of ``PYTHON``."""
    return [sys.executable if argv[0] == PYTHON else argv[0], *argv[1:]]


def is_writable(descriptor: int, timeout_s: float) -> bool:
    """Return whether ``descriptor`` takes bytes (or is broken) within ``timeout_s``."""
    return _occurs(descriptor, select.POLLOUT, timeout_s)


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Return whether ``descriptor`` has bytes (or its end) within ``timeout_s``."""
    return _occurs(descriptor, select.POLLIN, timeout_s)


def _occurs(descriptor: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()  # select.select refuses descriptors from 1,024 on
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


class ProcessHandle:
    """A process, identified by a pidfd, that had a given file open."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor

    def send(self, number: signal.Signals) -> bool:
        """Send a signal and return whether the process still existed."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def ends_within(self, timeout_s: float) -> bool:
        """Return whether the process ends in time."""
        return is_readable(self._descriptor, timeout_s)


@contextlib.contextmanager
def process_holding(path: Path, pid: int) -> Iterator[ProcessHandle | None]:
    """Yield process ``pid`` if it has ``path`` open, else None (it ended or the pid was reused)."""
    try:
        descriptor = os.pidfd_open(pid) if 0 < pid < 2**31 else -1
    except ProcessLookupError:
        descriptor = -1
    if descriptor < 0:
        yield None
        return
    try:  # the pidfd was opened before the check: if the pid is reused later, the signal fails
        yield ProcessHandle(pid, descriptor) if _has_open(pid, path) else None
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


def without_proxy_to_loopback() -> dict[str, str]:
    """Return the variables that keep this process's proxies, if it has any, from what listens on
    loopback, beside the hosts that they leave out already. Clients that read them know no networks.
    """
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    given = [each.strip(" []") for each in named.split(",")]
    # httpx reads the last ":" of a network of IPv6 as one before a port, and raises
    given = [each for each in given if each and not ("/" in each and each.count(":") > 1)]
    hosts = dict.fromkeys(["127.0.0.1", "localhost", "::1", *given])
    value = "*" if "*" in hosts else ",".join(hosts)
    return {"NO_PROXY": value, "no_proxy": value}
