"""A launcher of plain subprocesses on this machine: for tests, and training without a cluster.

Same contract as the fleet's. All ranks live in process groups of their own and are gone, whatever
happens, when ``run_gang`` returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.training.gang import GangMember, GangResult, OnLine

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
TICK_S = 0.1
SETTLE_S = 0.3  # after a first failure: which rank was really first shows once the others fell
STACKS_S = 0.3
STDERR_LINES = 60


@dataclass
class _Rank:
    member: GangMember
    process: subprocess.Popen[str]
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))
    spoke: bool = False
    said_at: float = 0.0
    ended_at: float | None = None
    readers: list[threading.Thread] = field(default_factory=list)


class LocalLauncher:
    """Runs each member as a subprocess; ``pids`` names the ranks of the gang that runs now."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}

    def run_gang(
        self,
        members: Sequence[GangMember],
        *,
        on_event: OnLine | None,
        start_deadline_s: float,
        silence_deadline_s: float,
        attempt: int,
    ) -> GangResult:
        """Run the gang; see ``GangLauncher``."""
        lines: queue.Queue[tuple[_Rank, str]] = queue.Queue()
        ranks: list[_Rank] = []
        with _reserved_port() as port:
            try:
                for member in members:
                    ranks.append(_start(member, members, port, attempt, lines))
                    self.pids[member.rank] = ranks[-1].process.pid
                fault = _follow(ranks, lines, on_event, start_deadline_s, silence_deadline_s)
            finally:
                _end(ranks)
                self.pids = {}
        _drain(lines, on_event)
        codes: dict[int, int | None] = {each.member.rank: each.process.returncode for each in ranks}
        if fault is None:
            return GangResult(ok=True, exit_codes=codes)
        guilty, what = fault
        tail = "".join(guilty.stderr)
        reason = f"rank {guilty.member.rank} on {guilty.member.worker_id} {what}"
        log.warning("gang ended reason=%s", reason)
        return GangResult(
            ok=False,
            exit_codes=codes,
            failed_rank=guilty.member.rank,
            failed_worker=guilty.member.worker_id,
            reason=reason,
            stderr_tail=tail,
        )


def _start(
    member: GangMember,
    members: Sequence[GangMember],
    port: int,
    attempt: int,
    lines: queue.Queue[tuple[_Rank, str]],
) -> _Rank:
    local = [each.rank for each in members if each.worker_id == member.worker_id]
    environment = {
        **os.environ,
        "RANK": str(member.rank),
        "WORLD_SIZE": str(len(members)),
        "LOCAL_RANK": str(local.index(member.rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "PACELINE_ATTEMPT": str(attempt),
        "OMP_NUM_THREADS": "1",
        **member.env,
    }
    process = subprocess.Popen(
        list(member.argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    rank = _Rank(member, process)

    def read_out() -> None:
        if (stream := process.stdout) is not None:
            with stream:
                for line in stream:
                    lines.put((rank, line))

    def read_err() -> None:
        if (stream := process.stderr) is not None:
            with stream:
                rank.stderr.extend(stream)

    for number, target in enumerate((read_out, read_err)):
        name = f"rank-{member.rank}-{number}"
        rank.readers.append(threading.Thread(target=target, name=name, daemon=True))
        rank.readers[-1].start()
    with contextlib.suppress(BrokenPipeError):
        if process.stdin is not None:
            with process.stdin:
                process.stdin.write(member.input_json + "\n")
    return rank


def _follow(
    ranks: list[_Rank],
    lines: queue.Queue[tuple[_Rank, str]],
    on_event: OnLine | None,
    start_deadline_s: float,
    silence_deadline_s: float,
) -> tuple[_Rank, str] | None:
    """Return once all ranks ended well (None), or which one is at fault and how."""
    started = time.monotonic()
    settle_until: float | None = None
    while True:
        with contextlib.suppress(queue.Empty):
            rank, line = lines.get(timeout=TICK_S)
            rank.spoke, rank.said_at = True, time.monotonic()
            _hand_over(line, on_event)
        now = time.monotonic()
        for each in ranks:
            if each.ended_at is None and each.process.poll() is not None:
                each.ended_at = now
        failed = [each for each in ranks if each.process.returncode not in (None, 0)]
        over = all(each.ended_at is not None for each in ranks)
        if over and not failed:
            return None
        if failed:
            settle_until = settle_until or now + SETTLE_S
            if over or now >= settle_until:
                return _blame(failed)
            continue
        living = [each for each in ranks if each.ended_at is None]
        for each in living:
            if not each.spoke and now - started > start_deadline_s:
                return each, f"said nothing within {start_deadline_s:.0f} s of its start"
        hung = [each for each in living if each.spoke and now - each.said_at > silence_deadline_s]
        if hung:
            # One frozen rank silences all that wait for it: a stopped one is the guilty one.
            guilty = max(living, key=lambda each: (_is_stopped(each), now - each.said_at))
            return guilty, f"hung: no line for {now - guilty.said_at:.1f} s"


def _blame(failed: list[_Rank]) -> tuple[_Rank, str]:
    # A killed rank takes the others down with it: a signal comes before an exit code.
    first = min(failed, key=lambda each: (each.process.returncode > 0, each.ended_at or 0.0))
    code = first.process.returncode
    return first, f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def _end(ranks: list[_Rank]) -> None:
    living = [each for each in ranks if each.process.poll() is None]
    for each in living:
        _signal(each, signal.SIGUSR1)  # stacks, to standard error
    if living:
        time.sleep(STACKS_S)
    for each in ranks:
        _signal(each, signal.SIGKILL)
    for each in ranks:
        each.process.wait()
        for reader in each.readers:
            reader.join(5)


def _signal(rank: _Rank, number: signal.Signals) -> None:
    if rank.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, number)


def _is_stopped(rank: _Rank) -> bool:
    try:
        with open(f"/proc/{rank.process.pid}/stat") as file:  # noqa: PTH123 - a file of the kernel
            return file.read().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def _hand_over(line: str, on_event: OnLine | None) -> None:
    try:
        event = json.loads(line)
    except ValueError:
        log.debug("rank said something else line=%s", line.rstrip()[:200])
        return
    if on_event is not None and isinstance(event, dict):
        on_event(event)


def _drain(lines: queue.Queue[tuple[_Rank, str]], on_event: OnLine | None) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            _hand_over(lines.get_nowait()[1], on_event)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Hold a free port that a server which sets SO_REUSEADDR can still listen on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        yield int(holder.getsockname()[1])
