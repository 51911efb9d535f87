"""Processes forked by a node's launcher: how one is made, and what the launcher knows of it.

Each gets a process group of its own, dies with the launcher (parent-death signal), and keeps none
of its descriptors. The launcher must have one thread only. Knows nothing of orders or words.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from paceline.training.keepers import die_with_thread

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
