"""What a test run started ends with the run, also where that is killed.

Every pytest process takes a mark and starts one reaper, in a session of its own. The reaper waits
for the end of that process (a pidfd, which no forked child can hold open) and then kills every
process that carries the mark, and those below it. ``up`` detaches servers on purpose: they have no
parent in the run, but they have inherited the mark. A program inherits it as a variable, a forked
child as an open file; a program that gets neither (``env={}``) has to die by itself.

Small disks that the run mounted (``mount_small_disk``) are unmounted.

Run as a script it is the reaper itself and needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "PACELINE_TEST_RUN"
REAPER = "PACELINE_TEST_REAPER"
OTHER = f"{REAPER}=".encode()
_own: list[str] = []  # this process's mark
PATIENCE_S = 20.0  # for processes that are slow to die


def start() -> None:
    """Have everything that this process starts from now on end with it."""
    mark = uuid.uuid4().hex
    os.memfd_create(_file(mark))  # close-on-exec, and open as long as this process lives
    clean = {key: value for key, value in os.environ.items() if key != MARK}
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        env=clean | {REAPER: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode = 0  # it outlives this process: there is nothing to wait for
    _own.append(mark)
    keep_mark()


def keep_mark() -> None:
    """Put this run's mark back into the environment: loading user code removes it from there."""
    os.environ[MARK] = _own[-1]


def mount_small_disk(path: Path, size: str) -> bool:
    """Mount a tmpfs of ``size`` ("8m") at ``path``, unmounted at the end of the run at the latest.

    Returns False where this user or machine may not.
    """
    name = f"paceline-{os.environ[MARK]}"
    options = ["-t", "tmpfs", "-o", f"size={size}", name, str(path)]
    try:
        return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(mark: str) -> None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        name, path = line.split()[:2]
        if name == f"paceline-{mark}":
            subprocess.run(["umount", "-l", path], check=False)


def _file(mark: str) -> str:
    return f"paceline-test-run-{mark}"


def _holds(process: Path, name: str) -> bool:
    with contextlib.suppress(OSError):
        for each in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if name in str(each.readlink()):
                    return True
    return False


def marked(mark: str) -> dict[int, int]:
    """Return a pidfd of each living process that carries ``mark``, or is below one that does."""
    held: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    todo: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError, ValueError):
            held[pid] = os.pidfd_open(pid)  # first: what is read next is of this process, or gone
            environment = (entry / "environ").read_bytes().split(b"\0")
            fields = (entry / "stat").read_bytes().rpartition(b") ")[2].split()
            if fields[0] in b"ZX" or any(each.startswith(OTHER) for each in environment):
                continue
            children.setdefault(int(fields[1]), []).append(pid)
            if f"{MARK}={mark}".encode() in environment or _holds(entry, _file(mark)):
                todo.append(pid)
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    for pid in held.keys() - found:
        os.close(held.pop(pid))
    return held


def main(parent: int, mark: str) -> None:
    """Wait for the end of ``parent``; then kill what carries ``mark`` until nothing does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):  # it may have ended already
        run = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([run], [], [])
    deadline = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        for descriptor in left.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        time.sleep(0.05)
    _unmount(mark)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
