"""Functions that run in a node's Dask worker: they start, watch and end processes for a caller.

A caller starts a process with an id of its choice, polls it for news (lines written, exit code),
and ends it. The process has a lease: ``LEASE_S`` after the last poll it is killed, so that no rank
outlives its flow. It also dies with the Dask worker, by its guard. Lines are buffered within
bounds; a caller that polls slowly slows the process down, and no lines are lost.

All calls are short except ``poll``, which waits for something to report. This module does not
depend on what the processes do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from paceline.cluster.addresses import DRIVER_S
from paceline.cluster.processes import Guarded, node_environment, start_guarded
from paceline.config import this_node
from paceline.errors import Conflict, NotFound, WorkerLost
from paceline.relay import shows_like_cards
from paceline.system import is_writable, own_program

LEASE_S = 30.0
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_BUFFERED_LINES = 2000
MAX_BUFFERED_BYTES = 16 * 1024 * 1024
STDERR_TAIL_BYTES = 32 * 1024
MAX_PROCESSES = 256
KILL_PATIENCE_S = 15.0
TELL_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """A process to start on a node."""

    process_id: str
    argv: tuple[str, ...]  # PYTHON as its first word is the node's interpreter
    env: Mapping[str, str]
    input_json: str
    directory: str = ""  # working directory, created where missing; "": the node's own
    gang_id: str | None = None
    listens: bool = False  # its standard input stays open, for ``tell``


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """Output and exit code of a process since the caller's last poll."""

    lines: tuple[str, ...] = ()
    cursor: int = 0  # send it with the next poll: lines up to it are then dropped
    exit_code: int | None = None
    stderr_tail: str = ""


@dataclass(eq=False)
class _Process:
    guarded: Guarded
    gang_id: str | None
    stdin: int | None = None  # the writing end, where ``Order.listens``
    lines: deque[tuple[int, str]] = field(default_factory=deque)
    buffered: int = 0
    written: int = 0
    exit_code: int | None = None
    ended: float = 0.0
    last_asked: float = field(default_factory=time.monotonic)
    stderr: bytearray = field(default_factory=bytearray)
    ending: bool = False


@dataclass(frozen=True)
class Share:
    """What a gang claims of a node: ``slots`` of its ``of`` slots, or the whole node (0).

    ``work`` names what the gang writes: two gangs with the same ``work`` never share a node.
    """

    slots: int = 0
    of: int = 0
    work: str = ""


WHOLE = Share()


@dataclass(frozen=True)
class _Claim:
    until: float  # when it expires, monotonic clock
    share: Share
    held: tuple[int, ...]  # the numbers of its slots; (): every one


_changed = threading.Condition()
_processes: dict[str, _Process] = {}
_claims: dict[str, _Claim] = {}  # by gang


def launch(order: Order) -> int:
    """Start ``order`` and return its pid; repeating the order returns the same pid."""
    with _changed:
        if known := _processes.get(order.process_id):
            return known.guarded.pid
        if len(_processes) >= MAX_PROCESSES:
            raise Conflict(
                "too many processes on this node", got=len(_processes), wanted=MAX_PROCESSES
            )
        if order.gang_id is not None and order.gang_id not in _claims:
            raise Conflict(
                "the node belongs to other gangs", got=", ".join(_claims), wanted=order.gang_id
            )
        directory = Path(order.directory or this_node().directory / "work")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = node_environment() | _like_cards()
        env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **order.env}
        env |= _devices(_claims.get(order.gang_id or ""), env.get("CUDA_VISIBLE_DEVICES"))
        with _input(order) as (stdin, write_end):
            guarded = start_guarded(
                own_program(order.argv),
                env=env,
                cwd=directory,
                grace_s=LEASE_S,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            process = _Process(guarded, order.gang_id, stdin=write_end)
        _processes[order.process_id] = process
        threading.Thread(
            target=_watch, args=(process,), name=f"watch-{order.process_id}", daemon=True
        ).start()
        return guarded.pid


def tell(process_id: str, text: str) -> None:
    """Write ``text`` to the standard input of a process with ``Order.listens``.

    Raises WorkerLost where the process does not read it, because it ended or is frozen.
    """
    with _changed:
        process = _known(process_id)
        if process.stdin is None or process.exit_code is not None:
            raise WorkerLost("the process listens no more", got=process.exit_code, where=process_id)
        descriptor = process.stdin
    data = memoryview(text.encode())
    deadline = time.monotonic() + TELL_PATIENCE_S
    while data:
        left = deadline - time.monotonic()
        if left <= 0 or not is_writable(descriptor, left):
            raise WorkerLost("the process does not read its orders", where=process_id)
        try:
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
        except OSError as error:
            raise WorkerLost("the process is gone", got=error, where=process_id) from error


def poll(cursors: Mapping[str, int], wait_s: float) -> dict[str, ProcessReport]:
    """Return news of the processes in ``cursors``; wait at most ``wait_s`` for some.

    Drops lines up to each cursor and renews the leases. Raises NotFound for a process that does not
    exist (any more).
    """
    deadline = time.monotonic() + wait_s
    with _changed:
        while True:
            found = {each: _known(each) for each in cursors}
            now = time.monotonic()
            for process_id, process in found.items():
                process.last_asked = now
                _forget(process, cursors[process_id])
                _renew(process.gang_id)
            fresh = any(each.lines or each.exit_code is not None for each in found.values())
            if fresh or now >= deadline:
                return {each: _report_of(process) for each, process in found.items()}
            _changed.wait(min(1.0, deadline - now))


def end(process_ids: Sequence[str], grace_s: float) -> dict[str, ProcessReport]:
    """End processes and all their descendants, remove their entries, and return their last news.

    Processes that do not exist are left out.
    """
    with _changed:
        found = {each: _processes[each] for each in process_ids if each in _processes}
        for process in found.values():
            process.ending = True
        _changed.notify_all()
    for process in found.values():
        process.guarded.ask_to_stop()
    if not _await_end(list(found.values()), grace_s):
        for process in found.values():
            process.guarded.kill()
        if not _await_end(list(found.values()), KILL_PATIENCE_S):
            for process in found.values():
                process.guarded.kill_guard()
            _await_end(list(found.values()), 5.0)
    with _changed:
        last = {each: _report_of(process) for each, process in found.items()}
        for each in found:
            _processes.pop(each, None)
    return last


def claim(gang_id: str, share: Share = WHOLE) -> str | None:
    """Claim this node, or slots of it, for ``gang_id`` and return None; where too few are free,
    return a gang that holds some.

    A claim expires ``LEASE_S`` after its gang's last poll. (Dask's own MultiLock is never released
    when its holder is killed.) Processes that such a gang left running are killed first, and it
    holds its slots until they have ended: two gangs never write at the same time.
    """
    with _changed:
        now = time.monotonic()
        for each in [each for each, known in _claims.items() if now >= known.until]:
            del _claims[each]
        left = [
            each
            for each in _processes.values()
            if each.gang_id not in (None, *_claims) and each.exit_code is None
        ]
        for process in left:
            process.ending = True
            process.guarded.kill()
        if left:
            _changed.notify_all()
            return left[0].gang_id
        if gang_id in _claims:
            _renew(gang_id)
            return None
        taken: set[int] = set()
        for other, known in _claims.items():
            same = known.share.work == share.work != ""
            if same or not share.slots or not known.held:
                return other
            taken.update(known.held)
        free = [each for each in range(share.of) if each not in taken]
        if len(free) < share.slots:
            return next(iter(_claims), "no gang: the node has fewer slots")
        _claims[gang_id] = _Claim(now + LEASE_S, share, tuple(free[: share.slots]))
        return None


def release(gang_id: str) -> None:
    """Release ``gang_id``'s claim on this node."""
    with _changed:
        _claims.pop(gang_id, None)


@functools.cache
def _like_cards() -> dict[str, str]:
    """Return what shows processes the GPUs that count as this node's slots, by their numbers."""
    return shows_like_cards(DRIVER_S)


def _devices(known: _Claim | None, visible: str | None) -> dict[str, str]:
    """Return the variable that shows a gang its accelerators, where it does not hold all of them.

    ``visible`` is the node's own value of it, of which the gang gets a part.
    """
    if known is None or not known.held or len(known.held) == known.share.of:
        return {}
    names = visible.split(",") if visible else [str(each) for each in range(known.share.of)]
    mine = [names[each] for each in known.held if each < len(names)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


@contextlib.contextmanager
def _input(order: Order) -> Iterator[tuple[int, int | None]]:
    """Yield a process's standard input, a file with its input or a pipe where ``order.listens``,
    and the pipe's writing end, which stays open unless an error ends the ``with``.
    """
    if not order.listens:
        with tempfile.TemporaryFile() as file:
            file.write(order.input_json.encode())
            file.seek(0)
            yield file.fileno(), None
        return
    read, write = os.pipe()
    try:
        yield read, write
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)


def _known(process_id: str) -> _Process:
    try:
        return _processes[process_id]
    except KeyError:
        raise NotFound("no such process on this node", got=process_id) from None


def _renew(gang_id: str | None) -> None:
    if gang_id is not None and (known := _claims.get(gang_id)) is not None:
        _claims[gang_id] = replace(known, until=time.monotonic() + LEASE_S)


def _forget(process: _Process, cursor: int) -> None:
    while process.lines and process.lines[0][0] <= cursor:
        process.buffered -= len(process.lines.popleft()[1])
        _changed.notify_all()


def _report_of(process: _Process) -> ProcessReport:
    return ProcessReport(
        lines=tuple(line for _, line in process.lines),
        cursor=process.written,
        exit_code=process.exit_code,
        stderr_tail=process.stderr.decode(errors="replace"),
    )


def _await_end(processes: Iterable[_Process], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    with _changed:
        while any(each.exit_code is None for each in processes):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            _changed.wait(left)
    return True


def _watch(process: _Process) -> None:
    """Follow one process to its end, in a thread of its own."""
    assert process.guarded.stdout is not None
    assert process.guarded.stderr is not None
    readers = [
        threading.Thread(target=_read_lines, args=(process, process.guarded.stdout), daemon=True),
        threading.Thread(target=_read_errors, args=(process, process.guarded.stderr), daemon=True),
    ]
    for reader in readers:
        reader.start()
    while (code := process.guarded.wait(1.0)) is None:
        if time.monotonic() - process.last_asked > LEASE_S and not process.ending:
            with _changed:
                process.ending = True
                process.stderr += b"\nnobody asked for this process any more: killed\n"
                _changed.notify_all()
            process.guarded.kill()
    for reader in readers:
        reader.join(LEASE_S)  # the guard has ended, and with it everything that could still write
    with _changed:
        process.exit_code = code
        process.ended = time.monotonic()
        if process.stdin is not None:
            os.close(process.stdin)
            process.stdin = None
        _changed.notify_all()
    for reader, pipe in zip(readers, (process.guarded.stdout, process.guarded.stderr), strict=True):
        if not reader.is_alive():
            pipe.close()
    while True:  # remove the entry where the caller never polls again
        with _changed:
            if time.monotonic() - max(process.last_asked, process.ended) > LEASE_S:
                for process_id in [each for each, known in _processes.items() if known is process]:
                    del _processes[process_id]
                return
            if process not in _processes.values():
                return
            _changed.wait(LEASE_S / 4)


def _read_lines(process: _Process, pipe: IO[bytes]) -> None:
    while raw := pipe.readline(MAX_LINE_BYTES):
        line = raw.decode(errors="replace").rstrip("\n")
        with _changed:
            while not process.ending and (
                len(process.lines) >= MAX_BUFFERED_LINES or process.buffered >= MAX_BUFFERED_BYTES
            ):
                _changed.wait(1.0)
            if len(process.lines) >= MAX_BUFFERED_LINES:
                continue  # it is ending: drain the pipe, so that the process can exit
            process.written += 1
            process.lines.append((process.written, line))
            process.buffered += len(line)
            _changed.notify_all()


def _read_errors(process: _Process, pipe: IO[bytes]) -> None:
    while chunk := pipe.read1(65536):  # type: ignore[attr-defined]
        with _changed:
            process.stderr += chunk
            del process.stderr[:-STDERR_TAIL_BYTES]
