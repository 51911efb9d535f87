"""Start a process that cannot outlive this one, and neither can its descendants.

The supervisor uses this for services, a Dask worker for ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.errors import MissingTool
from paceline.system import without_proxy_to_loopback

GUARD = str(Path(__file__).with_name("subreaper.py"))
TAIL_BYTES = 8192
_FOREIGN_SETTINGS = ("PREFECT_", "MLFLOW_", "DASK_", "RCLONE_", "_MLFLOW")


class Guarded:
    """A running process under its guard."""

    def __init__(self, popen: subprocess.Popen[bytes], life: socket.socket, pid: int) -> None:
        self._popen = popen
        self._life = life
        self.pid = pid  # of the process itself
        self.guard_pid = popen.pid  # also the session's id

    @property
    def stdout(self) -> IO[bytes] | None:
        """Return the reading end of the process's standard output, where it was piped."""
        return self._popen.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """Return the reading end of the process's standard error, where it was piped."""
        return self._popen.stderr

    def exit_code(self) -> int | None:
        """Return how the process ended (negative: by that signal), or None while it runs."""
        code = self._popen.poll()
        if code is not None:
            self._life.close()
        return code

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code once the whole tree has ended, or None after ``timeout_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self.exit_code()

    def ask_to_stop(self) -> None:
        """Send SIGTERM; the guard kills the tree after the grace that it was started with."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the process, its group and all descendants, at once."""
        self._signal(signal.SIGUSR1)

    def kill_guard(self) -> None:
        """SIGKILL the guard itself, when it does not react; the kernel then kills its child."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(number)


def start_guarded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    grace_s: float,
    cwd: Path | str | None = None,
    stdin: int | IO[Any] = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.DEVNULL,
    stderr: int | IO[Any] = subprocess.DEVNULL,
    keep_fds: Sequence[int] = (),
) -> Guarded:
    """Start ``argv`` in a new session under a guard; it dies with this process.

    ``keep_fds`` stay open in the guard alone, until the last of its processes has ended: a lock on
    one of them is released at that time. Raises MissingTool when the process cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            popen = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    GUARD,
                    "run",
                    str(theirs.fileno()),
                    str(grace_s),
                    "--",
                    *argv,
                ],
                env=dict(env),
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(theirs.fileno(), *keep_fds),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise MissingTool(
                "process cannot be started", got=error, wanted=argv[0], where=cwd
            ) from error
    ours.settimeout(30)
    try:
        pid = int(ours.recv(32) or 0)
    except (OSError, ValueError):
        pid = 0
    if not pid:
        popen.kill()
        popen.wait()
        ours.close()
        raise MissingTool("guard did not start", got=popen.returncode, where=argv[0])
    ours.settimeout(None)
    return Guarded(popen, ours, pid)


def dying_with_us(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` wrapped so that it gets SIGKILL when the thread that starts it ends.

    The wrapper execs ``argv``, so there is no additional process.
    """
    return [sys.executable, "-I", "-S", GUARD, "exec", str(os.getpid()), "--", *argv]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without variables that would redirect or slow a child.

    Prefect, MLflow, Dask and rclone read settings from variables: a developer's own settings must
    not change an installation's servers. Without bytecode files every import takes two to three
    times as long.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN_SETTINGS)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["DO_NOT_TRACK"] = "1"
    return env | without_proxy_to_loopback() | dict(extra or {})


def node_environment() -> dict[str, str]:
    """Return `clean_environment` without what Dask's nanny sets for its own worker only."""
    own = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED")
    return {key: value for key, value in clean_environment().items() if key not in own}


def last_line(log: Path, since: int = 0) -> str:
    """Return the last line that is not blank in ``log`` after offset ``since``, or ""."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(min(since, size), size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")
    return ""


def resident_bytes(pids: Sequence[int]) -> int:
    """Return the sum of the resident memory of ``pids``; shared pages count for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
    return total
