"""A node's rank launcher: a fork server with torch imported that starts a rank in 0.3 s.

``python -m paceline.training.launcher.forkserver MODULE:FUNCTION`` reads orders from standard
input and writes events to standard output, one JSON object a line (listed at ``ForkServer``). It
forks each rank into its own process group; ranks die with the launcher (parent-death signal), the
launcher ends when its standard input closes, and it kills orphans of ranks as their subreaper. It
is single-threaded and never blocks: forking a process with threads can deadlock, so everything
that waits (rendezvous store, preemption watcher) is a forked child, too.

MODULE is imported before the first fork; FUNCTION runs as the rank and reads its own standard input
and environment. Does not depend on training code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from paceline.training.launcher.children import (
    Child,
    Children,
    become_subreaper,
    die_with_thread,
    fork,
    is_stopped,
    send_signal,
    write_all,
)

BEAT_S = 0.5
PEER_EXIT_S = 0.05  # after a first failure: time for the other ranks to fail and report why
STACKS_S = 0.4  # time for ranks to dump their stacks before they are killed
STORE_TIMEOUT_S = 30.0
MAX_WAITING_BYTES = 4 * 1024 * 1024  # unsent output; above it the ranks' pipes are not read
STOPPED = 143  # a rank's exit code: stopped on request, state saved; no reason to end the others


class ForkServer:
    """The fork server's event loop.

    Orders received: ``store`` (host, job), ``start`` (attempt, ranks, input, loose), ``spare``
    (name, env, input), ``signal`` (number, rank), ``stop`` (grace_s, stacks), ``watch``
    (preemption, grace_s). With ``loose`` one rank's failure does not end the others.

    Events sent: ``ready``, ``store`` (host, port or error), ``started`` (pids), ``beat`` (ranks,
    spares), ``ended`` (rank, code, killed, stderr), ``over`` (attempt), ``spare``, ``preempted``,
    ``unwatched``; lines of ranks are forwarded unchanged.
    """

    def __init__(self, run: Callable[[], int], read_fd: int, write_fd: int) -> None:
        self._run = run
        self._in, self._out = read_fd, write_fd
        self._input = b""
        self._unsent = bytearray()
        self._children = Children(self._send_line, self._ended)
        self._kill_at: float | None = None
        self._port: tuple[str, str, int] | None = None
        self._attempt = 0
        self._grace_s = 30.0
        self._all_ended = True
        self._independent_ranks = False
        self._closing = False
        self._pid = os.getpid()
        self._parent = os.getppid()

    # -- event loop

    def serve(self) -> int:
        """Serve until standard input closes or SIGTERM arrives; return once all ranks ended."""
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write, self._in, self._out):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._send_message("ready", pid=self._pid)
        next_beat = time.monotonic() + BEAT_S
        while not (self._closing and not self._children.living("rank")):
            for fd, event in self._ready(wake_read, next_beat):
                if fd == wake_read:
                    self._on_signals(os.read(wake_read, 4096))
                elif fd == self._in:
                    self._on_orders()
                elif fd == self._out:
                    self._flush()
                else:
                    self._children.read(fd, event)
            self._children.reap()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._send_heartbeat(now)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_ranks()
        self._children.end_all()
        with contextlib.suppress(OSError):
            self._flush()
        return 0

    def _ready(self, wake: int, next_beat: float) -> list[tuple[int, int]]:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        if not self._closing:
            poller.register(self._in, select.POLLIN)
        if self._unsent:
            poller.register(self._out, select.POLLOUT)
        if len(self._unsent) < MAX_WAITING_BYTES:
            for fd in self._children.pipes:
                poller.register(fd, select.POLLIN)
        due = min(next_beat, self._kill_at or next_beat)
        return poller.poll(max(0.0, due - time.monotonic()) * 1000)

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._send_message("preempted", reason="the node's launcher got SIGTERM")
            self._closing = True
            self._stop_ranks(self._grace_s)

    def _on_orders(self) -> None:
        try:
            chunk = os.read(self._in, 1 << 20)
        except BlockingIOError:
            return
        if not chunk:  # the driver is gone
            self._closing = True
            self._kill_ranks()
            return
        self._input += chunk
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            if line.strip():
                self._execute_order(json.loads(line))

    def _execute_order(self, order: dict[str, Any]) -> None:
        do = order.pop("do")
        if do == "store":
            self._store(order["host"], order["job"])
        elif do == "start":
            self._start(**order)
        elif do == "spare":
            child = self._children.keep(
                fork("spare", self._run, env=order["env"], text=order["input"])
            )
            child.name = order["name"]
        elif do == "signal":
            self._signal(int(order["number"]), int(order["rank"]))
        elif do == "stop":
            if order.get("stacks"):
                self._signal(signal.SIGUSR1)  # the ranks dump their stacks
                self._kill_at = time.monotonic() + STACKS_S
            else:
                self._stop_ranks(float(order["grace_s"]))
        elif do == "watch":
            self._grace_s = float(order["grace_s"])
            self._watch(order["preemption"])
        else:
            raise ValueError(f"no such order: {do}")

    # -- orders

    def _store(self, host: str, job: str) -> None:
        # A new job needs an empty store: its attempt numbers, the key prefixes, repeat.
        if (
            not self._children.living("store")
            or self._port is None
            or self._port[:2] != (host, job)
        ):
            for child in self._children.living("store"):
                child.killed = True
                self._children.kill(child)
            read, write = os.pipe()
            self._children.keep(fork("store", lambda: keep_store(host, write), keep_fd=write))
            os.close(write)
            with os.fdopen(read, "rb") as pipe:  # short wait: the child binds and answers at once
                answer = pipe.read()
            if not answer:
                self._send_message("store", error=f"cannot listen on {host}")
                return
            self._port = (host, job, int(answer))
        self._send_message("store", host=host, port=self._port[2])

    def _start(
        self,
        attempt: int,
        ranks: list[dict[str, Any]],
        input: str,
        loose: bool = False,
    ) -> None:
        self._attempt, self._all_ended, self._kill_at = attempt, False, None
        self._independent_ranks = loose
        spares = {each.name: each for each in self._children.living("spare")}
        pids: dict[int, int] = {}
        for each in ranks:
            child = spares.get(each.get("spare") or "")
            if child is not None:
                identity = json.dumps(each["env"]) + "\n" + input + "\n"
                write_all(child.stdin, identity.encode())
                child.kind = "rank"
            else:
                child = self._children.keep(fork("rank", self._run, env=each["env"], text=input))
            child.attempt, child.rank = attempt, int(each["rank"])
            child.last_output_at = time.monotonic()
            if child.stdin >= 0:
                os.close(child.stdin)
                child.stdin = -1
            pids[child.rank] = child.pid
        self._send_message("started", attempt=attempt, pids=pids)

    def _watch(self, url: str) -> None:
        if url and not self._children.living("preemption"):
            self._children.keep(fork("preemption", lambda: watch_preemption(url)))

    def _stop_ranks(self, grace_s: float) -> None:
        self._signal(signal.SIGTERM)
        self._schedule_kill(grace_s)

    def _signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all; SIGKILL ends the rank's process group."""
        for child in self._children.living("rank"):
            if rank not in (None, child.rank):
                continue
            if number == signal.SIGKILL:
                self._children.kill(child)
            else:
                send_signal(child.pid, number)
                send_signal(child.pid, signal.SIGCONT)  # a stopped process handles no signal

    def _kill_ranks(self) -> None:
        living = self._children.living("rank")
        self._kill_at = time.monotonic() + 1.0 if living else None
        for child in living:
            child.killed = True
            self._children.kill(child)

    def _ended(self, child: Child) -> None:
        if child.kind == "rank":
            self._send_message(
                "ended",
                attempt=child.attempt,
                rank=child.rank,
                code=child.status,
                killed=child.killed and (child.status or 0) < 0,  # False if it exited by itself
                stderr=child.stderr.decode(errors="replace"),
            )
            if child.status not in (0, STOPPED) and not self._independent_ranks:
                self._schedule_kill(PEER_EXIT_S)
        elif child.kind == "spare":
            self._send_message(
                "spare",
                name=child.name,
                code=child.status,
                stderr=child.stderr.decode(errors="replace")[-2000:],
            )
        elif child.kind == "preemption" and child.status == 0:
            self._send_message("preempted", reason="the machine's owner takes it back")
            self._stop_ranks(self._grace_s)
        elif child.kind == "preemption" and not self._closing:
            self._send_message("unwatched", code=child.status)
        elif child.kind == "store" and not child.killed and not self._closing:
            self._send_message("store", error="the store ended")
        if not self._children.living("rank") and not self._all_ended:
            self._all_ended = True
            self._kill_at = None
            self._children.sweep()
            self._send_message("over", attempt=self._attempt)

    def _schedule_kill(self, delay_s: float) -> None:
        due = time.monotonic() + delay_s
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    # -- output

    def _send_heartbeat(self, now: float) -> None:
        if os.getppid() != self._parent:
            self._closing = True
            self._kill_ranks()
        ranks = {}
        for child in self._children.living("rank"):
            if len(self._unsent) >= MAX_WAITING_BYTES:  # pipes are not read now
                child.last_output_at = now
            state = child.state
            ranks[child.rank] = {
                "phase": state.get("phase", "starting"),
                "step": state.get("step", 0),
                "since_s": round(float(state.get("since_s", 0.0)) + now - child.last_output_at, 3),
                "silent_s": round(now - child.last_output_at, 3),
                "running_s": round(now - child.started, 3),
                "stopped": is_stopped(child.pid),
            }
        spares = {
            each.name: each.state.get("phase", "loading") for each in self._children.living("spare")
        }
        self._send_message("beat", attempt=self._attempt, ranks=ranks, spares=spares)

    def _send_message(self, what: str, **data: Any) -> None:
        self._send_line(json.dumps({"launcher": what, **data}).encode())

    def _send_line(self, line: bytes) -> None:
        self._unsent += line + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = os.write(self._out, self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._closing = True
            self._unsent.clear()
            self._kill_ranks()


def keep_store(host: str, answer_fd: int) -> NoReturn:
    """Serve a TCPStore on ``host``; write its port to ``answer_fd``, then sleep until killed.

    It survives the ranks, so that a new attempt needs only a new key prefix.
    """
    from torch._C._distributed_c10d import TCPStore

    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind((host, 0))
    server.listen(1024)
    port = int(server.getsockname()[1])
    # With its own socket; by default torch listens on every interface.
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
        store.num_keys()  # keeps the object, and with it the server, alive


def watch_preemption(url: str) -> int:
    """Return 0 once the metadata service at ``url`` reports a notice."""
    from paceline.training.launcher.preemption import MetadataWatcher

    MetadataWatcher(url).wait()
    return 0


def main(arguments: list[str]) -> int:
    """Run the fork server for ``module:function``; ``--die``: end with the starting thread."""
    from paceline.training.loop import leave_removed_directory, use_passive_waiting

    use_passive_waiting()
    if "--die" in arguments:
        die_with_thread(os.getppid())
    become_subreaper()
    leave_removed_directory()
    # Detect GPUs through NVML: CUDA cannot be used in a fork once it is initialised.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("torch.distributed")  # once, instead of in each child
    module, function = arguments[0].split(":")
    found = importlib.import_module(module)
    if (preload := getattr(found, "preload", None)) is not None:
        preload()
    out = os.dup(1)
    os.dup2(2, 1)  # prints of imported modules go to standard error
    return ForkServer(getattr(found, function), os.dup(0), out).serve()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
