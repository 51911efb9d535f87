"""A rank's ties to the world: a request to stop, a parent that may die, stacks, threads' manners.

SIGTERM only sets a flag (saving inside a signal handler deadlocks); the loop agrees on it at the
next step's end. Knows nothing of training.
"""

from __future__ import annotations

import faulthandler
import os
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
