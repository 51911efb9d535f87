"""A node's launcher: a small parent with torch imported, from which ranks start in 0.3 s.

``python -m paceline.training.forkserver`` reads orders on standard input and writes what happens on
standard output, a JSON object a line (see ``Launcher`` for both). Ranks are forked, each into a
session and process group of its own; none outlives the launcher (parent-death signal), the launcher
ends when its standard input closes, and what a rank leaves behind comes back to the launcher, which
is a subreaper, and is killed. Nothing here blocks and no thread is ever started: what must wait
(the rendezvous store, the watch on its abort key, a preemption watcher) is a forked child as well,
for forking a process with threads deadlocks sooner or later.

What runs as a rank is ``module:function``, imported before the first fork; the function reads its
own standard input and environment like any program. Knows nothing of training.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.training.keepers import (
    ABORTED,
    become_subreaper,
    die_with_thread,
    keep_store,
    watch_abort_key,
    watch_preemption,
)

BEAT_S = 0.5
SETTLE_S = 0.05  # after a first failure: the others fall by themselves, and tell why
STACKS_S = 0.4  # a frozen rank goes on for this long, to write where it was
STDERR_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024
MAX_WAITING_BYTES = 4 * 1024 * 1024  # towards the driver; then ranks are not read any more
MAX_FD = 1 << 20
STOPPED = 143  # a rank's exit code: stopped as asked, its state saved; the others end by themselves


@dataclass(eq=False)
class _Child:
    """A forked process: a rank, a spare, the store, a watcher."""

    kind: str  # "rank", "spare", "store", "abort", "preemption"
    pid: int
    attempt: int = 0
    rank: int = -1
    name: str = ""
    stdin: int = -1
    pipes: dict[int, str] = field(default_factory=dict)  # fd → "out" or "err"
    partial: bytes = b""
    stderr: bytearray = field(default_factory=bytearray)
    started: float = field(default_factory=time.monotonic)
    said_at: float = field(default_factory=time.monotonic)
    state: dict[str, Any] = field(default_factory=dict)  # its last beat
    status: int | None = None
    killed: bool = False  # by us: no fault of its own


class Launcher:
    """The event loop.

    Orders: ``store`` (host, job), ``start`` (attempt, ranks, env, input, host, port), ``spare``
    (name, env, input), ``stop`` (grace_s, stacks), ``watch`` (preemption, grace_s). Told:
    ``ready``, ``store`` (port), ``started`` (pids), ``beat`` (ranks), ``ended`` (rank, code,
    stderr), ``over`` (attempt), ``spare``, ``preempted``; lines of ranks pass through as they are.
    """

    def __init__(self, run: Callable[[], int], read_fd: int, write_fd: int) -> None:
        self._run = run
        self._in, self._out = read_fd, write_fd
        self._orders = b""
        self._waiting = bytearray()
        self._children: dict[int, _Child] = {}
        self._by_fd: dict[int, _Child] = {}
        self._kill_at: float | None = None
        self._port: tuple[str, str, int] | None = None
        self._attempt = 0
        self._grace_s = 30.0
        self._over = True
        self._closing = False
        self._pid = os.getpid()
        self._parent = os.getppid()

    # -- the loop

    def serve(self) -> int:
        """Serve until standard input closes or SIGTERM; return once no child is left."""
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write, self._in, self._out):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._tell("ready", pid=self._pid)
        next_beat = time.monotonic() + BEAT_S
        while not (self._closing and not self._living("rank")):
            for fd, event in self._ready(wake_read, next_beat):
                if fd == wake_read:
                    self._on_signals(os.read(wake_read, 4096))
                elif fd == self._in:
                    self._on_orders()
                elif fd == self._out:
                    self._flush()
                elif child := self._by_fd.get(fd):
                    self._on_output(child, fd, event)
            self._reap()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._beat(now)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_ranks()
        self._end_all()
        return 0

    def _ready(self, wake: int, next_beat: float) -> list[tuple[int, int]]:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        if not self._closing:
            poller.register(self._in, select.POLLIN)
        if self._waiting:
            poller.register(self._out, select.POLLOUT)
        if len(self._waiting) < MAX_WAITING_BYTES:
            for fd in self._by_fd:
                poller.register(fd, select.POLLIN)
        due = min(next_beat, self._kill_at or next_beat)
        return poller.poll(max(0.0, due - time.monotonic()) * 1000)

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._tell("preempted", reason="the node's launcher got SIGTERM")
            self._closing = True
            self._ask_to_stop(self._grace_s)

    def _on_orders(self) -> None:
        try:
            chunk = os.read(self._in, 1 << 20)
        except BlockingIOError:
            return
        if not chunk:  # the driver is gone, and with it every reason to run
            self._closing = True
            self._kill_ranks()
            return
        self._orders += chunk
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            if line.strip():
                self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        do = order.pop("do")
        if do == "store":
            self._store(order["host"], order["job"])
        elif do == "start":
            self._start(**order)
        elif do == "spare":
            child = self._fork("spare", order["env"], order["input"])
            child.name = order["name"]
        elif do == "dismiss":
            for child in self._living("spare"):
                self._kill(child)
        elif do == "stop":
            if order.get("stacks"):
                self._dump_stacks()
                self._kill_at = time.monotonic() + STACKS_S
            else:
                self._ask_to_stop(float(order["grace_s"]))
        elif do == "watch":
            self._grace_s = float(order["grace_s"])
            self._watch(order["preemption"])
        else:
            raise ValueError(f"no such order: {do}")

    # -- orders

    def _store(self, host: str, job: str) -> None:
        # A new job begins with an empty store: its attempts are counted from 1 again.
        if not self._living("store") or self._port is None or self._port[:2] != (host, job):
            for child in self._living("store"):
                self._kill(child)
            read, write = os.pipe()
            self._fork("store", {}, "", lambda: keep_store(host, write), write)
            os.close(write)
            with os.fdopen(read, "rb") as pipe:  # the child binds and answers at once
                answer = pipe.read()
            if not answer:
                self._tell("store", error=f"cannot listen on {host}")
                return
            self._port = (host, job, int(answer))
        self._tell("store", host=host, port=self._port[2])

    def _start(
        self, attempt: int, ranks: list[dict[str, Any]], host: str, port: int, input: str
    ) -> None:
        self._attempt, self._over, self._kill_at = attempt, False, None
        spares = {each.name: each for each in self._living("spare")}
        pids: dict[int, int] = {}
        for each in ranks:
            child = spares.get(each.get("spare") or "")
            if child is not None:
                place = json.dumps(each["env"]) + "\n" + input + "\n"
                _write_all(child.stdin, place.encode())
                child.kind = "rank"
            else:
                child = self._fork("rank", each["env"], input)
            child.attempt, child.rank = attempt, int(each["rank"])
            child.said_at = time.monotonic()
            if child.stdin >= 0:
                os.close(child.stdin)
                child.stdin = -1
            pids[child.rank] = child.pid
        read, write = os.pipe()
        watcher = self._fork(
            "abort", {}, "", lambda: watch_abort_key(host, port, attempt, read), read
        )
        os.close(read)
        watcher.attempt, watcher.stdin = attempt, write
        self._tell("started", attempt=attempt, pids=pids)

    def _watch(self, preemption: str) -> None:
        if preemption and not self._living("preemption"):
            self._fork("preemption", {}, "", lambda: watch_preemption(preemption))

    def _ask_to_stop(self, grace_s: float) -> None:
        for child in self._living("rank"):
            _signal(child.pid, signal.SIGTERM)
            _signal(child.pid, signal.SIGCONT)
        due = time.monotonic() + grace_s
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _dump_stacks(self) -> None:
        for child in self._living("rank"):
            _signal(child.pid, signal.SIGUSR1)
            _signal(child.pid, signal.SIGCONT)  # a stopped process takes no signal

    def _kill_ranks(self) -> None:
        living = self._living("rank")
        self._kill_at = time.monotonic() + 1.0 if living else None
        for child in living:
            child.killed = True
            self._kill(child)

    def _kill(self, child: _Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    # -- children

    def _fork(
        self,
        kind: str,
        env: dict[str, str],
        text: str,
        run: Callable[[], int] | None = None,
        keep_fd: int = -1,
    ) -> _Child:
        pipes = [os.pipe() for _ in range(3)] if run is None else []
        gc.freeze()  # a collection in a child would touch, and so copy, every page of ours
        pid = os.fork()
        if pid == 0:
            self._become(env, pipes, run or self._run, keep_fd)
        gc.unfreeze()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too: whoever comes first, it can be killed by group
        child = _Child(kind, pid)
        if pipes:
            (stdin_read, child.stdin), (out, out_write), (err, err_write) = pipes
            for fd in (stdin_read, out_write, err_write):
                os.close(fd)
            child.pipes = {out: "out", err: "err"}
            for fd in child.pipes:
                os.set_blocking(fd, False)
                self._by_fd[fd] = child
            _write_all(child.stdin, text.encode() + b"\n")
        self._children[pid] = child
        return child

    def _become(
        self,
        env: dict[str, str],
        pipes: list[tuple[int, int]],
        run: Callable[[], int],
        keep_fd: int,
    ) -> None:
        """Be the child; never returns."""
        code = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            die_with_thread(self._pid)
            if pipes:
                (stdin, _), (_, out), (_, err) = pipes
                for standard, fd in enumerate((stdin, out, err)):
                    os.dup2(fd, standard)
            # Nothing of the launcher's or of another rank's: an end of file must be seen at once.
            os.closerange(3, keep_fd)
            os.closerange(max(3, keep_fd + 1), MAX_FD)
            if pipes:
                os.environ.update(env)
                sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of it
                sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            code = run()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - a process's last word
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _living(self, kind: str) -> list[_Child]:
        return [each for each in self._children.values() if each.kind == kind]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if (child := self._children.pop(pid, None)) is not None:
                child.status = os.waitstatus_to_exitcode(status)
                self._ended(child)

    def _ended(self, child: _Child) -> None:
        for fd in list(child.pipes):
            self._on_output(child, fd, select.POLLHUP)
            self._forget(child, fd)
        if child.stdin >= 0:
            os.close(child.stdin)
        if child.kind == "rank":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it started and left
            self._tell(
                "ended",
                attempt=child.attempt,
                rank=child.rank,
                code=child.status,
                killed=child.killed and child.status < 0,  # not if it ended by itself meanwhile
                stderr=child.stderr.decode(errors="replace"),
            )
            if child.status not in (0, STOPPED):
                self._abort(child.attempt)
        elif child.kind == "spare":
            self._tell(
                "spare",
                name=child.name,
                code=child.status,
                stderr=child.stderr.decode(errors="replace")[-2000:],
            )
        elif child.kind == "abort" and child.status and not child.killed:
            if child.attempt == self._attempt and self._living("rank"):
                why = "aborted elsewhere" if child.status == ABORTED else "the store was lost"
                self._tell("abort", attempt=child.attempt, why=why)
                self._due(SETTLE_S)
        elif child.kind == "preemption" and child.status == 0:
            self._tell("preempted", reason="the machine's owner takes it back")
            self._ask_to_stop(self._grace_s)
        if not self._living("rank") and not self._over:
            self._over = True
            self._kill_at = None
            for each in self._living("abort"):
                each.killed = True
                self._kill(each)
            self._sweep()
            self._tell("over", attempt=self._attempt)

    def _abort(self, attempt: int) -> None:
        for child in self._living("abort"):
            if child.attempt == attempt and child.stdin >= 0:
                with contextlib.suppress(OSError):
                    os.write(child.stdin, b"x")
        if self._living("rank"):
            self._due(SETTLE_S)

    def _due(self, delay_s: float) -> None:
        due = time.monotonic() + delay_s
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _sweep(self) -> None:
        """Kill what ranks started in sessions of their own: they are our children by now."""
        known = set(self._children)
        path = Path(f"/proc/self/task/{self._pid}/children")
        with contextlib.suppress(OSError):
            for pid in map(int, path.read_text().split()):
                if pid not in known:
                    _signal(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        for child in list(self._children.values()):
            self._kill(child)
        deadline = time.monotonic() + 5.0
        while self._children and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        self._sweep()
        with contextlib.suppress(OSError):
            self._flush()

    # -- words

    def _on_output(self, child: _Child, fd: int, event: int) -> None:
        while True:
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not chunk:
                self._forget(child, fd)
                return
            if child.pipes.get(fd) == "err":
                child.stderr += chunk
                del child.stderr[:-STDERR_BYTES]
            else:
                self._take_lines(child, chunk)
            if len(chunk) < 65536 and not event & select.POLLHUP:
                return

    def _take_lines(self, child: _Child, chunk: bytes) -> None:
        *lines, child.partial = (child.partial + chunk).split(b"\n")
        child.partial = child.partial[:MAX_LINE_BYTES]
        child.said_at = time.monotonic()
        for line in lines:
            if line.startswith(b'{"event":"beat"'):
                with contextlib.suppress(ValueError):
                    child.state = json.loads(line)
            elif line:
                self._say(line)

    def _forget(self, child: _Child, fd: int) -> None:
        if child.pipes.pop(fd, None) is not None:
            self._by_fd.pop(fd, None)
            os.close(fd)

    def _beat(self, now: float) -> None:
        if os.getppid() != self._parent:
            self._closing = True
            self._kill_ranks()
        ranks = {}
        for child in self._living("rank"):
            state = child.state
            ranks[child.rank] = {
                "phase": state.get("phase", "starting"),
                "step": state.get("step", 0),
                "since_s": round(float(state.get("since_s", 0.0)) + now - child.said_at, 3),
                "silent_s": round(now - child.said_at, 3),
                "running_s": round(now - child.started, 3),
                "stopped": _is_stopped(child.pid),
            }
        spares = {each.name: each.state.get("phase", "loading") for each in self._living("spare")}
        self._tell("beat", attempt=self._attempt, ranks=ranks, spares=spares)

    def _tell(self, what: str, **data: Any) -> None:
        self._say(json.dumps({"launcher": what, **data}).encode())

    def _say(self, line: bytes) -> None:
        self._waiting += line + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                sent = os.write(self._out, self._waiting)
                del self._waiting[:sent]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._closing = True
            self._waiting.clear()
            self._kill_ranks()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :][:1] == b"T"
    return False


def main(arguments: list[str]) -> int:
    """Serve ranks of ``module:function``; ``--die`` ends with the thread that started us."""
    from paceline.training.watch import share_cores

    share_cores()
    if "--die" in arguments:
        die_with_thread(os.getppid())
    become_subreaper()
    importlib.import_module("torch.distributed")  # once here, not in each child
    module, function = arguments[0].split(":")
    found = importlib.import_module(module)
    if (preload := getattr(found, "preload", None)) is not None:
        preload()
    out = os.dup(1)
    os.dup2(2, 1)  # whatever an import prints is no line of ours
    return Launcher(getattr(found, function), os.dup(0), out).serve()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
