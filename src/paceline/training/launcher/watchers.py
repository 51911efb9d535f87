"""Small forked processes beside a node's ranks: each waits for one thing, so that nobody else must.

``keep_store`` is the rendezvous of all attempts of a job: it outlives the ranks, so that a new
attempt only needs a fresh prefix. ``watch_abort_key`` ends when any node of the attempt gave up, or
the store is gone, and sets the key when its own node does. ``watch_preemption`` ends when the
machine is about to be taken away. All run in processes of their own, forked by the launcher, and
die with it.
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

ABORTED = 3  # exit code of the watch: another node set the key
LOST = 4  # the store does not answer
ABORT_KEY = "abort"
POLL_S = 0.25
STORE_TIMEOUT_S = 30.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_thread(parent: int) -> None:
    """Get SIGKILL when the thread of ``parent`` that forked us ends; end now if it already did."""
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
    # Given the socket: by itself torch listens on every interface.
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
        store.num_keys()  # the server lives as long as this object


def watch_abort_key(host: str, port: int, attempt: int, order_fd: int) -> int:
    """Return ABORTED once the attempt's abort key is set, LOST once the store is gone.

    A byte on ``order_fd`` sets the key, for all other nodes to see, and returns 0.
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
    """Return 0 once the watcher that ``named`` names has seen a notice.

    The profile of the installation in ``state_dir`` says which code may be one; "": none may.
    """
    from paceline.config import load_runtime
    from paceline.training.loop.preemption import open_watcher

    sources: tuple[str, ...] = ()
    if state_dir:
        sources = load_runtime(state_dir).profile.security.code_sources
    open_watcher(named, sources, Path(state_dir) / "code").wait()
    return 0
