"""A launcher's children: what they say, how they end, and what they leave behind.

``Children`` owns their pipes and their table: it reads without blocking, keeps the tail of each
one's standard error and its last beat, reaps who ended, and kills what ranks started and left.
Lines and ends are handed on; what follows from them is the launcher's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.training.forking import Child, send_signal

STDERR_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024
END_S = 5.0


class Children:
    """The children of this process; it must be a subreaper."""

    def __init__(self, on_line: Callable[[bytes], None], on_end: Callable[[Child], None]) -> None:
        """``on_line`` gets each line but beats; ``on_end`` each child, its pipes read and shut."""
        self._on_line, self._on_end = on_line, on_end
        self._children: dict[int, Child] = {}
        self._by_fd: dict[int, Child] = {}
        self._pid = os.getpid()

    @property
    def pipes(self) -> Iterable[int]:
        """Return the descriptors to be read."""
        return self._by_fd

    def keep(self, child: Child) -> Child:
        """Take in a child that was just forked."""
        self._children[child.pid] = child
        self._by_fd |= dict.fromkeys(child.pipes, child)
        return child

    def living(self, kind: str) -> list[Child]:
        """Return the children of a kind that have not been reaped."""
        return [each for each in self._children.values() if each.kind == kind]

    def kill(self, child: Child) -> None:
        """Kill a child and all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def read(self, fd: int, event: int) -> None:
        """Take what lies in one of ``pipes``; ``event`` as poll gave it."""
        if (child := self._by_fd.get(fd)) is not None:
            self._read(child, fd, event)

    def reap(self) -> None:
        """Take in everyone who ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if (child := self._children.pop(pid, None)) is not None:
                child.status = os.waitstatus_to_exitcode(status)
                self._bury(child)

    def sweep(self) -> None:
        """Kill what ranks started in sessions of their own: they are our children by now."""
        known = set(self._children)
        path = Path(f"/proc/self/task/{self._pid}/children")
        with contextlib.suppress(OSError):
            for pid in map(int, path.read_text().split()):
                if pid not in known:
                    send_signal(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """Kill all, and wait until they are gone."""
        for child in list(self._children.values()):
            self.kill(child)
        deadline = time.monotonic() + END_S
        while self._children and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        self.sweep()

    def _bury(self, child: Child) -> None:
        for fd in list(child.pipes):
            self._read(child, fd, select.POLLHUP)
            self._shut(child, fd)
        if child.stdin >= 0:
            os.close(child.stdin)
        if child.kind == "rank":
            self.kill(child)  # what it started and left
        self._on_end(child)

    def _read(self, child: Child, fd: int, event: int) -> None:
        while True:
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not chunk:
                self._shut(child, fd)
                return
            if child.pipes.get(fd) == "err":
                child.stderr += chunk
                del child.stderr[:-STDERR_BYTES]
            else:
                self._take_lines(child, chunk)
            if len(chunk) < 65536 and not event & select.POLLHUP:
                return

    def _take_lines(self, child: Child, chunk: bytes) -> None:
        *lines, child.partial = (child.partial + chunk).split(b"\n")
        child.partial = child.partial[:MAX_LINE_BYTES]
        child.said_at = time.monotonic()
        for line in lines:
            if line.startswith(b'{"event":"beat"'):
                with contextlib.suppress(ValueError):
                    child.state = json.loads(line)
            elif line:
                self._on_line(line)

    def _shut(self, child: Child, fd: int) -> None:
        if child.pipes.pop(fd, None) is not None:
            self._by_fd.pop(fd, None)
            os.close(fd)
