"""Process-level setup of a rank: SIGTERM flag, parent watch, stack dumps, threads, malloc.

SIGTERM only sets a flag (saving inside a signal handler deadlocks); the ranks agree on it at the
end of the next step. Does not depend on torch or on the training loop.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

STOPPED_EXIT = 143  # 128 + SIGTERM: stopped on request, state saved
ORPHAN_EXIT = 70
POLL_S = 0.5


class StopFlag:
    """Callable flag set by SIGTERM; until ``listening`` there is nothing to save: SIGTERM exits."""

    def __init__(self) -> None:
        self.listening = False
        self._asked = False

    def install(self) -> None:
        """Install the SIGTERM handler; make SIGUSR1 write all stacks to standard error."""
        signal.signal(signal.SIGTERM, self._on_signal)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)

    def __call__(self) -> bool:
        return self._asked

    def _on_signal(self, *_: object) -> None:
        if not self.listening:
            os._exit(STOPPED_EXIT)
        self._asked = True


def use_passive_waiting() -> None:
    """Make waiting OpenMP threads sleep instead of spin; call it before torch is imported.

    Spinning is 3 x slower on a busy machine (2 threads, 1 M parameters: 7 s a step against 2.3 s at
    a load of 12 on 2 cores) and gains little on an idle one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def leave_removed_directory() -> None:
    """Change to / where the working directory was removed; call it before torch is imported.

    oneMKL reads the working directory when it loads; without one the first matrix product ends the
    process: "Intel oneMKL FATAL ERROR: Cannot load …/libtorch_cpu.so", exit code 2.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def die_with_parent() -> None:
    """End this process within a second of its parent's death.

    It polls, because Linux's parent-death signal fires when the *thread* that started the process
    ends, and launchers start processes from thread pools.
    """
    parent = os.getppid()

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(ORPHAN_EXIT)

    threading.Thread(target=poll, name="parent-watch", daemon=True).start()


# When one rank hangs, the others wait for it and look the same from outside: same phase, same time.
# Their stacks (Python's ``faulthandler``) distinguish the hung rank from the waiting ones.

# Innermost frames of a waiting rank: collectives, including those within a backward pass.
_WAITING = (
    "/torch/distributed/",
    "/torch/_ops.py",
    "/torch/autograd/graph.py",
    "/paceline/training/loop/group.py",
    "/paceline/training/checkpoint/writer.py",
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"]*)", line \d+ in (\S+)', re.MULTILINE)
_MAIN = ("run_rank", "as_rank", "main")  # functions that run only on a rank's main thread


def waits_for_peers(text: str) -> bool | None:
    """Return whether the main thread in stack dump ``text`` waits for peers; None: not found."""
    for section in reversed(_THREAD.split(text)):
        frames = _FRAME.findall(section)
        if any(path.endswith("/training/loop/rank.py") and at in _MAIN for path, at in frames):
            return any(each in frames[0][0] for each in _WAITING)
    return None


# Keep freed memory in the process. glibc returns free heap to the kernel and maps large blocks
# individually. Every training step allocates and frees the same tens of megabytes, so each step
# faults its pages in again: 4,300 to 7,100 faults and 9 to 12 ms of a 330 ms step (1 M parameters,
# 4,096 tokens); none with this.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # of mallopt(3)
_NEVER = -1
_MAPPED_BYTES = 64 * 1024


def retain_freed_memory() -> bool:
    """Stop malloc from returning freed memory to the kernel; return whether it worked (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_MAX, 0))


def return_freed_memory() -> bool:
    """Make malloc return large blocks to the kernel once they are freed; return whether it worked.

    For a rank that holds its part of a model and no more: by default two ranks with 199 MB of
    weights kept 575 MB each after six forward passes, freed buffers of blocks that were gathered;
    with 205 MB of weights and this, 132 and 118 MB at their peak. Blocks below 1 MiB count: with
    that as the bound one rank kept 240 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)) and bool(mallopt(_M_ARENA_MAX, 2))
