"""Helper processes of a node's launcher: rendezvous store, abort-key watch, preemption watch.

``keep_store`` serves the rendezvous of all attempts of a job; it survives the ranks, so that a new
attempt needs only a new key prefix. ``watch_abort_key`` ends when any node aborts the attempt or
the store is gone, and sets the key when its own node aborts. ``watch_preemption`` ends when there
is a preemption notice. Each runs in a process forked by the launcher and dies with it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

ABORTED = 3  # exit code of the abort-key watch: another node set the key
LOST = 4  # exit code of the abort-key watch: the store does not answer
ABORT_KEY = "abort"
POLL_S = 0.25
STORE_TIMEOUT_S = 30.0
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


def keep_store(host: str, answer_fd: int) -> NoReturn:
    """Serve a TCPStore on ``host``; write its port to ``answer_fd``, then sleep until killed."""
    from torch._C._distributed_c10d import TCPStore

    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind((host, 0))
    server.listen(1024)
    port = int(server.getsockname()[1])
    # With its own socket; by default torch listens on every interface.
    store = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    os.write(answer_fd, str(port).encode())
    os.close(answer_fd)
    while True:
        signal.pause()
        store.num_keys()  # keeps the object, and with it the server, alive


def watch_abort_key(host: str, port: int, attempt: int, order_fd: int) -> int:
    """Return ABORTED once the attempt's abort key is set, LOST once the store is gone.

    A byte on ``order_fd`` sets the key for the other nodes; the function then returns 0, as it does
    at the end of file.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    try:
        store = PrefixStore(
            f"abort-{attempt}",
            TCPStore(
                host,
                port,
                None,
                False,
                timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
            ),
        )
        while not store.check([ABORT_KEY]):
            readable, _, _ = select.select([order_fd], [], [], POLL_S)
            if readable:
                if os.read(order_fd, 1):
                    store.set(ABORT_KEY, "1")
                return 0
    except RuntimeError:  # torch's DistError: reset, refused, timed out
        return LOST
    return ABORTED


def watch_preemption(named: str, state_dir: str) -> int:
    """Return 0 once the watcher ``named`` (URL or code reference) reports a notice.

    The profile in ``state_dir`` lists the allowed code sources; with "" no code is allowed.
    """
    from paceline.config import load_runtime
    from paceline.training.loop.preemption import open_watcher

    sources: tuple[str, ...] = ()
    if state_dir:
        sources = load_runtime(state_dir).profile.security.code_sources
    open_watcher(named, sources, Path(state_dir) / "code").wait()
    return 0
