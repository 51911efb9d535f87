"""A rank's ties to the world: a request to stop, a parent that may die, stacks, threads' manners.

SIGTERM only sets a flag (saving inside a signal handler deadlocks); the loop agrees on it at the
next step's end. Knows nothing of training.
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

STOPPED_EXIT = 143  # 128 + SIGTERM: stopped as asked, state saved
ORPHAN_EXIT = 70
POLL_S = 0.5


class StopFlag:
    """Set by SIGTERM; before the loop listens there is nothing to save, and the process ends."""

    def __init__(self) -> None:
        self.listening = False
        self._asked = False

    def install(self) -> None:
        """Take over SIGTERM; SIGUSR1 writes every thread's stack to standard error."""
        signal.signal(signal.SIGTERM, self._on_signal)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)

    def __call__(self) -> bool:
        return self._asked

    def _on_signal(self, *_: object) -> None:
        if not self.listening:
            os._exit(STOPPED_EXIT)
        self._asked = True


def share_cores() -> None:
    """Let threads that wait for each other sleep; call it before torch is imported.

    Spinning costs 3 x on a busy machine (2 threads, 1 M parameters: 7 s a step against 2.3 s at a
    load of 12 on 2 cores) and saves nothing worth having on a quiet one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def stand_somewhere() -> None:
    """Leave a working directory that was removed; call it before torch is imported.

    oneMKL asks for it as it is loaded, and where there is none the first product ends the process:
    "Intel oneMKL FATAL ERROR: Cannot load …/libtorch_cpu.so", exit code 2.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def die_with_parent() -> None:
    """End this process within a second of its parent's death.

    By polling, because Linux's parent-death signal fires when the *thread* that started us ends,
    and launchers start processes from pools of threads.
    """
    parent = os.getppid()

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(ORPHAN_EXIT)

    threading.Thread(target=poll, name="parent-watch", daemon=True).start()


# What a rank's stacks say: whether its main thread waits for other ranks, or hangs by itself.
#
# Ranks that hang in the same phase since the same moment look alike from outside: all but one wait
# for that one. Their stacks (Python's ``faulthandler``) tell them apart.

# Where the innermost frame of a rank is that waits: collectives, also those within a backward pass.
_WAITING = (
    "/torch/distributed/",
    "/torch/_ops.py",
    "/torch/autograd/graph.py",
    "/paceline/training/loop/group.py",
    "/paceline/training/checkpoint/staging.py",
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"]*)", line \d+ in (\S+)', re.MULTILINE)
_MAIN = ("run_rank", "main")  # functions that only a rank's main thread is in


def waits(text: str) -> bool | None:
    """Return whether the main thread in ``text`` waits for other ranks; None where it has none."""
    for section in reversed(_THREAD.split(text)):
        frames = _FRAME.findall(section)
        if any(path.endswith("/training/rank.py") and at in _MAIN for path, at in frames):
            return any(each in frames[0][0] for each in _WAITING)
    return None


# Keeping freed memory in the process: every step takes the same tens of megabytes as the last.
#
# glibc gives the top of its heap back to the kernel whenever enough of it is free, and maps large
# blocks one by one. A training step frees all it took, so the next one finds its pages gone, and
# the kernel clears thousands of them anew: 4,300 to 7,100 faults and 9 to 12 ms of a 330 ms step (1
# M parameters, 4,096 tokens), none of either with this. Knows nothing of torch.

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)
_NEVER = -1


def keep_memory() -> bool:
    """Keep from now on what this process frees; return whether its C library can (glibc's can)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_MAX, 0))
