"""A launcher's child processes: fork, non-blocking pipes, reaping, orphan cleanup.

``fork`` starts a child in its own process group; it dies with the launcher (parent-death signal)
and inherits no other descriptors. ``Children`` reads the pipes, keeps the tail of each child's
standard error and its last heartbeat, reaps ended children, and kills processes that ranks left
behind. The launcher must be single-threaded. Does not interpret orders or events.
"""

from __future__ import annotations

import contextlib
import ctypes
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

MAX_FD = 1 << 20
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_thread(parent: int) -> None:
    """Receive SIGKILL when the forking thread of ``parent`` ends; exit now if it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(eq=False)
class Child:
    """A forked process: a rank, a spare, the store, a watcher."""

    kind: str  # "rank", "spare", "store", "preemption"
    pid: int
    attempt: int = 0
    rank: int = -1
    name: str = ""
    stdin: int = -1
    pipes: dict[int, str] = field(default_factory=dict)  # fd → "out" or "err"
    partial: bytes = b""
    stderr: bytearray = field(default_factory=bytearray)
    started: float = field(default_factory=time.monotonic)
    last_output_at: float = field(default_factory=time.monotonic)
    state: dict[str, Any] = field(default_factory=dict)  # its last heartbeat
    status: int | None = None
    killed: bool = False  # by the launcher: not the child's failure


def fork(
    kind: str,
    run: Callable[[], int],
    *,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
    keep_fd: int = -1,
) -> Child:
    """Fork a child that exits with the return value of ``run``.

    With ``text`` its standard streams are pipes, and ``text`` is its first line of input; without,
    it shares the launcher's streams. Of the other descriptors it keeps only ``keep_fd``.
    """
    launcher = os.getpid()
    pipes = [os.pipe() for _ in range(3)] if text is not None else []
    gc.freeze()  # a collection in the child would touch, and so copy, every shared page
    pid = os.fork()
    if pid == 0:
        _run_child(launcher, env or {}, pipes, run, keep_fd)
    gc.unfreeze()
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # in parent and child: the group exists whichever runs first
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


def _run_child(
    launcher: int,
    env: Mapping[str, str],
    pipes: list[tuple[int, int]],
    run: Callable[[], int],
    keep_fd: int,
) -> NoReturn:
    """Run as the child process; never returns."""
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
        # An inherited copy of another rank's pipe would delay its end of file.
        os.closerange(3, keep_fd)
        os.closerange(max(3, keep_fd + 1), MAX_FD)
        if pipes:
            os.environ.update(env)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open for the process's life
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - report every failure before exit
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, blocking; a dead reader is ignored here and reported by reaping."""
    view = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(fd, view) :]


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that no longer exists is ignored."""
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
    """Table of this process's children; the process must be a subreaper."""

    def __init__(self, on_line: Callable[[bytes], None], on_end: Callable[[Child], None]) -> None:
        """``on_line`` receives every line except heartbeats; ``on_end`` each child after its end,
        with its pipes drained and closed."""
        self._on_line, self._on_end = on_line, on_end
        self._children: dict[int, Child] = {}
        self._by_fd: dict[int, Child] = {}
        self._pid = os.getpid()

    @property
    def pipes(self) -> Iterable[int]:
        """Return the descriptors to poll."""
        return self._by_fd

    def keep(self, child: Child) -> Child:
        """Register a newly forked child and return it."""
        self._children[child.pid] = child
        self._by_fd |= dict.fromkeys(child.pipes, child)
        return child

    def living(self, kind: str) -> list[Child]:
        """Return the children of a kind that are not reaped."""
        return [each for each in self._children.values() if each.kind == kind]

    def kill(self, child: Child) -> None:
        """Kill a child and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def read(self, fd: int, event: int) -> None:
        """Read from one of ``pipes``; ``event`` is poll's."""
        if (child := self._by_fd.get(fd)) is not None:
            self._read(child, fd, event)

    def reap(self) -> None:
        """Reap all ended children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if (child := self._children.pop(pid, None)) is not None:
                child.status = os.waitstatus_to_exitcode(status)
                self._finish_child(child)

    def sweep(self) -> None:
        """Kill orphans that ranks started in other sessions; the subreaper inherited them."""
        known = set(self._children)
        path = Path(f"/proc/self/task/{self._pid}/children")
        with contextlib.suppress(OSError):
            for pid in map(int, path.read_text().split()):
                if pid not in known:
                    send_signal(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """Kill all children and wait until they are gone, at most ``END_S``."""
        for child in list(self._children.values()):
            self.kill(child)
        deadline = time.monotonic() + END_S
        while self._children and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        self.sweep()

    def _finish_child(self, child: Child) -> None:
        for fd in list(child.pipes):
            self._read(child, fd, select.POLLHUP)
            self._shut(child, fd)
        if child.stdin >= 0:
            os.close(child.stdin)
        if child.kind == "rank":
            self.kill(child)  # processes left in its group
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
        child.last_output_at = time.monotonic()
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
