"""Real servers for tests: found or skipped, on loopback, owned by the run, told in its report.

A server dies with the process that started it, whatever happens to that (parent-death signal).
Its log stands in its directory; the report's end lists each one's version and process id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

PORT_PARTS, PART_PORTS = 4, 5_000  # at most four processes run tests (pyproject.toml)
READY_S = 60.0  # on a machine that is busy with something else
DEBIAN = (Path("/usr/bin"), Path("/usr/sbin"), *sorted(Path("/usr/lib/postgresql").glob("*/bin")))

STARTED: list[str] = []  # what this process started: "etcd 3.4.23, member n0: pid 123"


def program(name: str) -> str:
    """Return the path of Debian's program ``name``; skips, or fails under PACELINE_REQUIRE."""
    found = shutil.which(name, path=os.pathsep.join(map(str, DEBIAN))) or shutil.which(name)
    if found is not None:
        return found
    reason = f"{name} is not installed (make setup-services)"
    if "services" in os.environ.get("PACELINE_REQUIRE", "").split(","):
        pytest.fail(f"required but missing: {reason}")
    pytest.skip(reason)


_given: set[int] = set()


def free_port() -> int:
    """Return a port without a listener that no other call returns, in any process of this run.

    It lies below the range that the kernel gives out by itself: a server may start a minute later.
    """
    part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PORT_PARTS
    while True:
        port = 12_000 + part * PART_PORTS + secrets.SystemRandom().randrange(PART_PORTS)
        if port in _given:
            continue
        _given.add(port)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


class Server:
    """One server process; killed, frozen and started again with the same data and port."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        directory: Path,
        ready: Callable[[], bool],
        *,
        user: str | None = None,
    ) -> None:
        """``user``: whom the process belongs to, where the tests run as root."""
        self.name, self.directory, self._ready = name, directory, ready
        owner = ["--reuid", user, "--regid", user, "--init-groups"] if user else []
        self._argv = ["setpriv", *owner, "--pdeathsig", "KILL", "--", *argv]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Return the process's id; it must run."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and return once it answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it without waiting."""
        with (self.directory / f"{self.name.replace(' ', '-')}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.directory
            )
        STARTED.append(f"{self.name}: pid {self.pid}")

    def wait_ready(self) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + READY_S
        while not self._ready():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                logs = "".join(log.read_text() for log in self.directory.glob("*.log"))
                raise RuntimeError(f"{self.name} does not answer: {logs[-3000:]}")
            time.sleep(0.03)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it where it is."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end; kill it where it does not."""
        self._end(number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def answers(port: int) -> bool:
    """Return whether somebody listens on a loopback port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
        return True
    return False
