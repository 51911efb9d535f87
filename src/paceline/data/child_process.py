"""A child process that answers requests over a socket, one at a time, each within a deadline.

It is a fresh interpreter without this process's secrets and exits when its socket closes, so that
it never outlives this process. ``ChildProcess`` is the parent's side, ``serve`` the child's. Does
not depend on transforms or formats.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import BinaryIO

from paceline.config import scrub_variables
from paceline.errors import WorkerLost

START_DEADLINE_S = 120.0  # it may import many modules
END_DEADLINE_S = 2.0
LENGTH_BYTES = 8
READY, DONE, FAILED = b"r", b"d", b"f"


class ChildProcess:
    """One child process and the parent's end of its socket; for one thread, except ``kill``."""

    def __init__(
        self,
        what: str,
        module: str,
        argument: str = "",
        env: Mapping[str, str] | None = None,
        secrets_only: bool = True,
    ) -> None:
        """Start ``python -m module SOCKET argument``; ``what`` names it in errors.

        It does not get this process's secrets, nor with ``secrets_only=False`` any variable that
        user code does not need.
        """
        self._what, self._name = what, argument or module
        environment = dict(os.environ)
        scrub_variables(environment, secrets_only=secrets_only)  # it handles untrusted things
        environment |= env or {}
        environment["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), argument],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints is not part of this process's output
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the child is ready for requests; raises WorkerLost with the reason."""
        try:
            kind, answer = self.receive(START_DEADLINE_S)
            got = answer.decode(errors="replace")
        except (OSError, EOFError) as error:
            kind, got = FAILED, how_ended(self.end()) or str(error)
        if kind != READY:
            self.end()
            raise WorkerLost(
                f"{self._what} did not start",
                got=got,
                wanted=f"ready within {START_DEADLINE_S:.0f} s",
                where=self._name,
            )

    def send(self, data: bytes, deadline_s: float) -> None:
        """Write one request; raises TimeoutError, OSError."""
        self._socket.settimeout(deadline_s)
        self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    def receive(self, deadline_s: float, most_bytes: int | None = None) -> tuple[bytes, bytes]:
        """Return the kind and content of the answer to a request that was sent.

        Raises TimeoutError where nothing comes for ``deadline_s``, OSError, and EOFError, also for
        an answer of more than ``most_bytes``.
        """
        self._socket.settimeout(deadline_s)
        head = self._read(1 + LENGTH_BYTES)
        size = int.from_bytes(head[1:], "little")
        if most_bytes is not None and size > most_bytes:
            raise EOFError(f"an answer of {size} bytes")
        return head[:1], self._read(size)

    def kill(self) -> None:
        """Kill the process; any thread may call this."""
        self._process.kill()

    def end(self) -> int:
        """Close the socket and return the process's exit code; kills it if it does not end."""
        self._answers.close()
        self._socket.close()
        try:
            return self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(END_DEADLINE_S)

    def _read(self, size: int) -> bytes:
        found = self._answers.read(size)
        if len(found) < size:
            raise EOFError("its socket is closed")
        return found


def how_ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def serve(start: Callable[[str], Callable[[bytes], tuple[bytes, bytes]]]) -> None:
    """Answer requests until the parent's end of the socket closes; the main function of a child.

    ``start`` takes the child's argument and returns the function of a request that returns the
    answer and its kind; an error that it raises is reported as the reason for not starting.
    """
    # Only the parent handles signals: while it saves, its batches must not change.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        pipe.set_inheritable(False)
        try:
            answer = start(sys.argv[2])
        except Exception as error:  # noqa: BLE001 - reported to the parent
            return _send(pipe, FAILED, f"{type(error).__name__}: {error}".encode())
        requests: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_take, args=(pipe.makefile("rb"), requests), daemon=True).start()
        _send(pipe, READY, b"")
        while True:
            _send(pipe, *answer(requests.get()))


def _send(pipe: socket.socket, kind: bytes, data: bytes) -> None:
    pipe.sendall(kind + len(data).to_bytes(LENGTH_BYTES, "little") + data)


def _take(asked: BinaryIO, requests: SimpleQueue[bytes]) -> None:
    """Queue requests; end the process, busy or not, once the socket closes."""
    with contextlib.suppress(OSError):  # reset, where the parent had not read an answer
        while size := asked.read(LENGTH_BYTES):
            requests.put(asked.read(int.from_bytes(size, "little")))
    os._exit(0)
