"""A child process that answers requests over pipes, one at a time, each within a deadline.

It is a fresh interpreter without this process's state and exits when its pipe closes, so that it
never outlives this process. ``ChildProcess`` is the parent's side, ``RequestServer`` the child's.
Does not depend on transforms or formats.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import IO

from paceline.config.settings import scrub
from paceline.errors import WorkerLost

START_DEADLINE_S = 120.0  # it may import many modules
END_DEADLINE_S = 2.0
LENGTH_BYTES = 8
READY, DONE, FAILED = b"r", b"d", b"f"


class ChildProcess:
    """One child process and the parent's ends of its pipes; for one thread."""

    def __init__(
        self, what: str, module: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Start ``python -m module arguments…``; ``what`` names it in errors."""
        self._name, self._what = (arguments or (module,))[0], what
        environment = {**os.environ, **(env or {})}
        scrub(environment, secrets_only=True)  # it reads or imports untrusted code and data
        environment["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    def wait_until_ready(self) -> None:
        """Wait until the child is ready for requests; raises WorkerLost with the reason."""
        try:
            kind, answer = self.receive(time.monotonic() + START_DEADLINE_S)
        except (TimeoutError, OSError, EOFError) as error:
            raise WorkerLost(
                f"{self._what} did not start",
                got=how_ended(self.end()),
                wanted=f"ready within {START_DEADLINE_S:.0f} s",
                where=self._name,
            ) from error
        if kind != READY:
            self.end()
            raise WorkerLost(
                f"{self._what} did not start",
                got=answer.decode(errors="replace"),
                where=self._name,
            )

    def ask(self, request: bytes, deadline_s: float) -> tuple[bytes, bytes]:
        """Return the kind of the answer and the answer; raises TimeoutError, OSError, EOFError."""
        until_s = time.monotonic() + deadline_s
        self.send(request, until_s)
        return self.receive(until_s)

    def kill(self) -> None:
        """Kill the process; any thread may call this."""
        self._process.kill()

    def end(self) -> int:
        """Close the pipes and return the process's exit code; kills it after ``END_DEADLINE_S``."""
        for each in (self._process.stdin, self._process.stdout):
            assert each is not None
            with contextlib.suppress(OSError):  # unsent data does not matter
                each.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_DEADLINE_S)
        self._process.kill()
        return self._process.wait(END_DEADLINE_S)

    def send(self, data: bytes, until_s: float) -> None:
        """Write one request; raises TimeoutError, OSError."""
        view = memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        while view:
            _wait(self._in, select.POLLOUT, until_s)
            view = view[os.write(self._in, view[: 1 << 16]) :]

    def receive(self, until_s: float) -> tuple[bytes, bytes]:
        """Return the kind and content of the answer to a request that was sent."""
        size = int.from_bytes(self._read(LENGTH_BYTES, until_s), "little")
        answer = self._read(size, until_s)
        return answer[:1], answer[1:]

    def _read(self, size: int, until_s: float) -> bytes:
        parts = []
        while size:
            _wait(self._out, select.POLLIN, until_s)
            part = os.read(self._out, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _wait(descriptor: int, event: int, until_s: float) -> None:
    """Wait until the descriptor is ready for ``event``; raises TimeoutError."""
    waiting = select.poll()  # select is limited to descriptors below 1,024
    waiting.register(descriptor, event)
    if not waiting.poll(1000 * max(0.0, until_s - time.monotonic())):
        raise TimeoutError


def how_ended(code: int) -> str:
    """Return a description of an exit code."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class RequestServer:
    """The child's ends of the pipes."""

    def __init__(self) -> None:
        """Take over the pipes; what is printed from now on goes to standard error."""
        # Only the parent handles signals: while it saves, its batches must not change.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        self._asked, self._answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def send(self, kind: bytes, data: bytes) -> None:
        """Write one answer."""
        self._answers.write((1 + len(data)).to_bytes(LENGTH_BYTES, "little"))
        self._answers.write(kind)
        self._answers.write(data)
        self._answers.flush()

    def serve(self, answer: Callable[[bytes], tuple[bytes, bytes]]) -> None:
        """Report readiness, and answer requests until standard input ends."""
        requests: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_take, args=(self._asked, requests), daemon=True).start()
        self.send(READY, b"")
        while True:
            self.send(*answer(requests.get()))


def _take(asked: IO[bytes], requests: SimpleQueue[bytes]) -> None:
    """Queue requests; end the process, busy or not, once standard input ends."""
    while size := asked.read(LENGTH_BYTES):
        requests.put(asked.read(int.from_bytes(size, "little")))
    os._exit(0)
