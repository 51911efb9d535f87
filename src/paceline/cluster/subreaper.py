"""The guard: a small parent process that kills its child, and all descendants, when the owner dies.

``subreaper.py run LIFE_FD GRACE_S -- argv…`` starts ``argv`` in a process group of its own and
watches a socket to its owner. When the owner dies (even by SIGKILL) the socket closes and the guard
kills all its descendants: it is a subreaper, so processes that daemonised or changed session become
its children again. ``subreaper.py exec PARENT_PID -- argv…`` only sets the parent-death signal and
execs ``argv``, for children whose descendants need no supervision.

SIGTERM and SIGINT to a guard stop the child and kill what is left after the grace; SIGUSR1 kills at
once. The guard ends with its child's exit code or by the same signal. It is run by path with
``python -I -S`` (about 15 ms and 9 MB), so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE_S = 1.0  # time for a child to clean up after its owner is gone
KILL_PATIENCE_S = 10.0  # an uninterruptible process can outlast SIGKILL; do not wait for ever


def set_parent_death_signal(number: int, parent: int) -> None:
    """Receive signal ``number`` when ``parent``'s forking thread ends; exit if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent died between fork and prctl
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the pids of all descendants of ``root``, zombies too, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue  # ended meanwhile
        parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill_descendants(keep: frozenset[int] = frozenset()) -> bool:
    """SIGKILL and reap all descendants except ``keep``; return whether they are gone."""
    patience = time.monotonic() + KILL_PATIENCE_S
    while True:
        left = [pid for pid in descendants(os.getpid()) if pid not in keep]
        if not left:
            return True
        _kill_below(left)
        for pid in left:
            # An error means a grandchild: once its parent dies, it becomes this process's child.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > patience:
            return False
        time.sleep(0.01)


def _kill_below(pids: list[int]) -> None:
    """SIGKILL those of ``pids`` that are descendants of this process.

    Pids are reused, so each one is looked up again once a pidfd refers to its process.
    """
    held = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            held[pid] = os.pidfd_open(pid)
    below = set(descendants(os.getpid()))
    for pid, descriptor in held.items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid in below:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def _start_child(argv: list[str]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        set_parent_death_signal(signal.SIGKILL, guard)
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGUSR1,
            signal.SIGPIPE,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


class _Guard:
    def __init__(self, life_fd: int, grace_s: float, argv: list[str]) -> None:
        self.life_fd = life_fd
        self.grace_s = grace_s
        self.argv = argv
        self.pid = 0
        self.kill_at: float | None = None

    def run(self) -> int:
        """Run the child until it or its owner ends, and return the child's wait status."""
        become_subreaper()
        for fd in _inherited_descriptors():
            os.set_inheritable(fd, False)  # the child must inherit no liveness socket and no lock
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
        for number in watched:
            signal.signal(number, lambda *_: None)
        self.pid = _start_child(self.argv)
        with contextlib.suppress(OSError):
            os.write(self.life_fd, f"{self.pid}\n".encode())
        silence = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # so that readers see end of file as soon as the child ends
            os.dup2(silence, fd)
        poller = select.poll()
        poller.register(wake_read, select.POLLIN)
        poller.register(self.life_fd, select.POLLIN)
        while True:
            if (status := self._reap()) is not None:
                return status
            timeout = (
                None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic()) * 1000
            )
            for fd, _ in poller.poll(timeout):
                if fd == wake_read:
                    for byte in os.read(wake_read, 4096):
                        self._signalled(byte)
                elif not _still_open(self.life_fd):
                    poller.unregister(self.life_fd)
                    self._ask_to_stop(min(self.grace_s, ORPHAN_GRACE_S))
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._group(signal.SIGKILL)
                self.kill_at = time.monotonic() + 1.0

    def _reap(self) -> int | None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0  # cannot happen: the child is reaped only here
            if pid == self.pid:
                return status
            if pid == 0:
                return None

    def _signalled(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._ask_to_stop(self.grace_s)
        elif number == signal.SIGUSR1:
            self.kill_at = 0.0

    def _ask_to_stop(self, grace_s: float) -> None:
        due = time.monotonic() + grace_s
        self.kill_at = due if self.kill_at is None else min(self.kill_at, due)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)

    def _group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _inherited_descriptors() -> list[int]:
    return [
        number
        for entry in Path("/proc/self/fd").iterdir()
        if (number := int(entry.name)) > 2 and _is_open(number)
    ]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _still_open(life_fd: int) -> bool:
    try:
        return bool(os.read(life_fd, 64))
    except OSError:
        return False


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def main(arguments: list[str]) -> None:
    """Run as a guard (``run LIFE_FD GRACE_S -- …``) or become the child (``exec PPID -- …``)."""
    cut = arguments.index("--")
    options, argv = arguments[:cut], arguments[cut + 1 :]
    if options[0] == "exec":
        set_parent_death_signal(signal.SIGKILL, int(options[1]))
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
            os._exit(127)
    status = _Guard(int(options[1]), float(options[2]), argv).run()
    kill_descendants()
    _end_like(status)


if __name__ == "__main__":
    main(sys.argv[1:])
