"""A launcher's children: what they say, how they end, and what they leave behind.

``Children`` owns their pipes and their table: it reads without blocking, keeps the tail of each
one's standard error and its last beat, reaps who ended, and kills what ranks started and left.
Lines and ends are handed on; what follows from them is the launcher's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from paceline.training.launcher.watchers import die_with_thread

# Processes forked by a node's launcher: how one is made, and what the launcher knows of it.
#
# Each gets a process group of its own, dies with the launcher (parent-death signal), and keeps none
# of its descriptors. The launcher must have one thread only. Knows nothing of orders or words.

MAX_FD = 1 << 20


@dataclass(eq=False)
class Child:
    """A forked process: a rank, a spare, the store, a watcher."""

    kind: str  # "rank", "spare", "store", "abort", "preemption"
    pid: int
    attempt: int = 0
    rank: int = -1
    name: str = ""
    stdin: int = -1
    pipes: dict[int, str] = field(default_factory=dict)  # fd → "out" or "err"
    partial: bytes = b""
    stderr: bytearray = field(default_factory=bytearray)
    started: float = field(default_factory=time.monotonic)
    said_at: float = field(default_factory=time.monotonic)
    state: dict[str, Any] = field(default_factory=dict)  # its last beat
    status: int | None = None
    killed: bool = False  # by us: no fault of its own


def fork(
    kind: str,
    run: Callable[[], int],
    *,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
    keep_fd: int = -1,
) -> Child:
    """Fork a process that ends with the code that ``run`` returns.

    With ``text`` it has pipes as its standard streams, and ``text`` as its first line of input;
    without, it has the launcher's, and of other descriptors ``keep_fd`` alone.
    """
    launcher = os.getpid()
    pipes = [os.pipe() for _ in range(3)] if text is not None else []
    gc.freeze()  # a collection in a child would touch, and so copy, every page of ours
    pid = os.fork()
    if pid == 0:
        _become(launcher, env or {}, pipes, run, keep_fd)
    gc.unfreeze()
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # here too: whoever comes first, it can be killed by group
    child = Child(kind, pid)
    if text is not None:
        (stdin_read, child.stdin), (out, out_write), (err, err_write) = pipes
        for fd in (stdin_read, out_write, err_write):
            os.close(fd)
        child.pipes = {out: "out", err: "err"}
        for fd in child.pipes:
            os.set_blocking(fd, False)
        write_all(child.stdin, text.encode() + b"\n")
    return child


def _become(
    launcher: int,
    env: Mapping[str, str],
    pipes: list[tuple[int, int]],
    run: Callable[[], int],
    keep_fd: int,
) -> NoReturn:
    """Be the child; never returns."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die_with_thread(launcher)
        if pipes:
            (stdin, _), (_, out), (_, err) = pipes
            for standard, fd in enumerate((stdin, out, err)):
                os.dup2(fd, standard)
        # Nothing of the launcher's or of another rank's: an end of file must be seen at once.
        os.closerange(3, keep_fd)
        os.closerange(max(3, keep_fd + 1), MAX_FD)
        if pipes:
            os.environ.update(env)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of it
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a process's last word
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``; the reader must read. One that died is told of when it is reaped."""
    view = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(fd, view) :]


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (state T)."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :][:1] == b"T"
    return False


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
