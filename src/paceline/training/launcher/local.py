"""Local launcher: nodes as subprocesses of this process, for training on one machine.

Implements the same ports as the cluster's (ports.py). Each node is a launcher process
(forkserver.py); launchers and ranks end with the ``with`` block and with this process, even if it
is killed. Launchers stay warm between jobs while the ``LocalLauncher`` itself is open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from paceline.errors import WorkerLost
from paceline.extras import require_extras
from paceline.system import PYTHON, is_writable, own_program
from paceline.training.launcher.ports import NodeMessage

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
END_S = 5.0
SEND_DEADLINE_S = 5.0
MAX_UNREAD_MESSAGES = 10_000  # unread messages; above it back-pressure reaches launchers and ranks
_LAUNCHER_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # fork needs one thread


class LocalLauncher:
    """Runs nodes on this machine; ``pids`` maps the current gang's ranks to process ids.

    As a context manager it keeps its launchers warm until the end of the ``with``; without, they
    end with each job. Supports one job at a time.
    """

    def __init__(self) -> None:
        require_extras("train")  # a launcher that cannot import torch would only be lost
        self.pids: dict[int, int] = {}
        self.launcher_pids: dict[str, int] = {}
        self._running: dict[str, _Node] = {}
        self._lines: queue.Queue[NodeMessage] = queue.Queue(MAX_UNREAD_MESSAGES)
        self._ready_again: list[NodeMessage] = []
        self._argv: tuple[str, ...] = ()
        self._kept = False

    def __enter__(self) -> LocalLauncher:
        self._kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self._kept = False
        self._end_all()

    @contextlib.contextmanager
    def open_nodes(
        self,
        workers: Sequence[str],
        argv: Sequence[str],
        *,
        wait_s: float,  # noqa: ARG002 - local nodes are not shared
        cancel: threading.Event | None,  # noqa: ARG002
        on_wait: Callable[[str], None] | None,  # noqa: ARG002
        slots: Mapping[str, tuple[int, int]] | None = None,  # noqa: ARG002
        work: str = "",  # noqa: ARG002
    ) -> Iterator[LocalLauncher]:
        """Run ``argv`` once for each of ``workers``; see ``ForkServer`` (it never waits)."""
        if tuple(argv) != self._argv:
            self._end_all()
            self._argv = tuple(argv)
        try:
            for each in dict.fromkeys(workers):
                if not self.start(each):
                    raise WorkerLost("launcher could not be started", where=each)
            yield self
        finally:
            self.pids = {}
            if not self._kept:
                self._end_all()

    # -- Nodes

    def send_all(self, orders: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Send each node its order; see ``Nodes``."""
        unsent: dict[str, str] = {}
        for worker_id, order in orders.items():
            node = self._running.get(worker_id)
            if why := "its launcher is gone" if node is None else node.tell(order):
                unsent[worker_id] = why
        return unsent

    def receive(self, timeout_s: float) -> list[NodeMessage]:
        """Return the received messages; see ``Nodes``."""
        found, self._ready_again = self._ready_again, []
        with contextlib.suppress(queue.Empty):
            found.append(self._lines.get(timeout=0.0 if found else timeout_s))
            while True:
                found.append(self._lines.get_nowait())
        for message in found:
            if message.line.get("launcher") == "started":
                self.pids |= {int(rank): pid for rank, pid in message.line["pids"].items()}
            if message.lost:
                self._forget(message.worker_id)
        return found

    def host(self, worker_id: str) -> str:  # noqa: ARG002
        """Return the loopback address."""
        return HOST

    def start(self, worker_id: str) -> bool:
        """Start the node's launcher unless it runs; return False where the process cannot start."""
        node = self._running.get(worker_id)
        if node is not None and node.process.poll() is None:
            if node.is_ready:
                self._ready_again.append(NodeMessage(worker_id, {"launcher": "ready"}))
            return True
        try:
            node = _Node(worker_id, self._argv, self._lines)
        except OSError as error:  # no memory, no more processes
            log.warning("launcher cannot be started worker=%s why=%s", worker_id, error)
            return False
        self._running[worker_id] = node
        self.launcher_pids[worker_id] = node.process.pid
        return True

    def drop(self, worker_id: str) -> None:
        """Kill the node's launcher; its ranks die with it."""
        if (node := self._running.get(worker_id)) is not None:
            node.kill()
            self._forget(worker_id)

    def _forget(self, worker_id: str) -> None:
        if (node := self._running.pop(worker_id, None)) is not None:
            node.wait(END_S)
        self.launcher_pids.pop(worker_id, None)

    def _end_all(self) -> None:
        for node in self._running.values():
            node.close()
        deadline = time.monotonic() + END_S
        for node in self._running.values():
            node.wait(deadline - time.monotonic())
        self._running.clear()
        self.launcher_pids.clear()
        self._ready_again = []
        self._lines = queue.Queue(MAX_UNREAD_MESSAGES)


class _Node:
    """A launcher process and the thread that reads it."""

    def __init__(
        self, worker_id: str, argv: Sequence[str], lines: queue.Queue[NodeMessage]
    ) -> None:
        self.worker_id = worker_id
        self.is_ready = False
        self._lines = lines
        self._discard = False  # True: further messages are discarded
        self._lock = threading.Lock()
        self.process = subprocess.Popen(
            [*own_program(argv), "--die"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **_LAUNCHER_ENV},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"node-{worker_id}", daemon=True)
        self._reader.start()

    def tell(self, order: Mapping[str, Any]) -> str:
        """Send one order; return "" on success, else the reason of the failure."""
        assert self.process.stdin is not None
        deadline = time.monotonic() + SEND_DEADLINE_S
        try:
            with self._lock:
                pipe = self.process.stdin.fileno()
                data = memoryview(json.dumps(order).encode() + b"\n")
                while data:
                    left = deadline - time.monotonic()
                    if left <= 0 or not is_writable(pipe, left):
                        return "its launcher does not read its orders"
                    data = data[os.write(pipe, data[: select.PIPE_BUF]) :]
        except (OSError, ValueError) as error:
            return f"its launcher is gone: {error}"
        return ""

    def close(self) -> None:
        """Close the launcher's standard input, which makes it end its ranks and exit."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill the launcher; the kernel kills its ranks (parent-death signal)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        """Wait for the launcher's end; kill it after ``timeout_s``. Later messages are dropped."""
        self._discard = True
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait(END_S)
        self._reader.join(END_S)
        self.close()

    def _read(self) -> None:
        pipe: IO[bytes] | None = self.process.stdout
        assert pipe is not None
        with pipe:
            for raw in pipe:
                try:
                    line = json.loads(raw)
                except ValueError:
                    log.info("%s: %s", self.worker_id, raw[:500])
                    continue
                if isinstance(line, dict):
                    self.is_ready = self.is_ready or line.get("launcher") == "ready"
                    self._say(NodeMessage(self.worker_id, line))
        code = self.process.wait()
        self._say(NodeMessage(self.worker_id, lost=f"its launcher ended with {code}"))

    def _say(self, message: NodeMessage) -> None:
        while not self._discard:
            with contextlib.suppress(queue.Full):
                self._lines.put(message, timeout=0.5)
                return


def launcher_argv(run: str) -> list[str]:
    """Return the argv of a launcher whose ranks are ``run`` (``module:function``)."""
    return [PYTHON, "-m", "paceline.training.launcher.forkserver", run]
