"""A coordinator process, forked from one that has imported it: the imports take 2 s of CPU time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.api.app import serve
from paceline.config import load_runtime

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class Forked:
    """The process, as subprocess.Popen shows one; ``line`` is what it wrote once it was ready."""

    def __init__(self, state_dir: Path, port: int) -> None:
        self._output = state_dir.with_name(f"{state_dir.name}-output-{os.urandom(4).hex()}")
        self._output.touch()
        reader, writer = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(
            target=_serve,
            args=(state_dir, port, writer, self._output, dict(os.environ)),
            daemon=True,
        )
        self._process.start()
        writer.close()
        with os.fdopen(os.dup(reader.fileno())) as ready:
            self.line = ready.readline()
        reader.close()

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        """Wait for its end and return its output."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it does not end"
        return self._output.read_bytes(), None

    @property
    def returncode(self) -> int | None:
        """Its exit status; negative: a signal's."""
        return self._process.exitcode


def _serve(
    state_dir: Path, port: int, ready: Connection, output: Path, env: dict[str, str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    told = os.dup(ready.fileno())
    ready.close()
    sys.exit(serve(load_runtime(state_dir), "127.0.0.1", port, told))
