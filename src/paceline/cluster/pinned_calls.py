"""Calls pinned to nodes, processes on nodes as seen from the caller, and claims on nodes.

``Calls`` are Dask futures with a deadline that detect a dead worker. ``Crew`` starts processes on
several nodes, all or none, and follows them by polling each node. ``claimed`` holds nodes for one
gang: they are claimed in one order and kept while the next is waited for, so gangs neither
interleave nor deadlock; the claim of a gang that is gone expires (the lease in worker_processes).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.cluster import worker_processes as remote
from paceline.cluster.worker_processes import Order, ProcessReport, Share
from paceline.errors import Cancelled, Conflict, ServiceUnavailable, WorkerLost

log = logging.getLogger(__name__)

PRESENCE_EVERY_S = 0.5
REPORT_WAIT_S = 0.5
REPORT_PATIENCE_S = 15.0  # a node that does not answer for this long counts as lost
RESULT_TIMEOUT_S = 10.0
RESULT_TRY_S = 1.0  # then it is asked whether the worker that has the result lives
PAUSE_S = 5.0  # a longer gap between two polls means that this process was stopped or busy


class Calls:
    """Pending calls, each pinned to a node's worker; never retried, never moved."""

    def __init__(self, client: Any, addresses: Callable[[], dict[str, str]], *, slot: bool) -> None:
        self._client = client
        self._addresses = addresses
        # Work takes one of the node's slots; control calls take none and never wait for work.
        self._resources = {"slot": 1} if slot else None
        self._pending: dict[Any, tuple[str, str]] = {}  # future → key, address
        self._next_presence = time.monotonic() + PRESENCE_EVERY_S
        self._news = threading.Event()

    def submit(
        self, key: str, address: str, fn: Callable[..., Any], *args: Any, **named: Any
    ) -> None:
        """Start ``fn`` on the worker at ``address``; its answer is returned under ``key``."""
        future = self._client.submit(
            fn,
            *args,
            **named,
            key=f"paceline-{getattr(fn, '__name__', 'call')}-{uuid.uuid4().hex}",
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
            resources=self._resources,
        )
        self._pending[future] = (key, address)
        future.add_done_callback(lambda _: self._news.set())

    def some(self, timeout_s: float) -> dict[str, Any]:
        """Return answers (or errors) as soon as there is one, or {} after ``timeout_s``."""
        if not self._pending:
            time.sleep(timeout_s)
            return {}
        self._news.wait(timeout_s)
        self._news.clear()
        done = [each for each in self._pending if each.status != "pending"]
        answers = {self._pending[each][0]: self._outcome(each) for each in done}
        if time.monotonic() >= self._next_presence:
            self._next_presence = time.monotonic() + PRESENCE_EVERY_S
            present = set(self._addresses().values())
            gone = {
                future for future, (_, address) in self._pending.items() if address not in present
            }
            for future in gone:  # Dask would keep it pending until no-workers-timeout
                key, address = self._pending.pop(future)
                future.cancel()
                answers[key] = _died(key, address)
        return answers

    def gather(self, timeout_s: float) -> dict[str, Any]:
        """Return all answers; calls pending after ``timeout_s`` are cancelled and become errors."""
        deadline = time.monotonic() + timeout_s
        answers: dict[str, Any] = {}
        while self._pending and (left := deadline - time.monotonic()) > 0:
            answers |= self.some(min(left, PRESENCE_EVERY_S))
        for key in self.give_up():
            answers[key] = ServiceUnavailable(
                "the node did not answer in time", wanted=f"within {timeout_s:.0f} s", where=key
            )
        return answers

    def _outcome(self, future: Any) -> Any:
        """Return the answer of a call that ended, or the error that it ended with."""
        from distributed.client import FuturesCancelledError
        from distributed.scheduler import KilledWorker, NoValidWorkerError

        key, address = self._pending.pop(future)
        fetched: Any = future
        while True:
            try:
                return fetched.result(timeout=RESULT_TRY_S)
            except (KilledWorker, NoValidWorkerError):
                return _died(key, address)
            except FuturesCancelledError as error:
                return ServiceUnavailable(
                    "the fleet's scheduler was lost", got=error, where=address
                )
            except TimeoutError as error:
                if future.status == "error":  # of the call itself
                    return error
                if address not in self._addresses().values():
                    return _died(key, address)  # with its result, which Dask would wait for
                if fetched is future:  # in one piece: a fetch that is given up begins anew
                    fetched = _in_background(future.result, RESULT_TIMEOUT_S)
                elif fetched.done():
                    return ServiceUnavailable(
                        "the node has answered, but the answer does not come",
                        wanted=f"within {RESULT_TIMEOUT_S:.0f} s",
                        where=f"{key} ({address})",
                        do="Run it again: the scheduler or the network is busy.",
                    )
            except Exception as error:  # noqa: BLE001 - the call's own error is its answer
                return error

    def give_up(self) -> list[str]:
        """Cancel pending calls and return their keys."""
        keys = [key for key, _ in self._pending.values()]
        for future in self._pending:
            with contextlib.suppress(Exception):  # the scheduler may be gone as well
                future.cancel()
        self._pending.clear()
        return keys


def _in_background(
    fetch: Callable[[float], Any], timeout_s: float
) -> concurrent.futures.Future[Any]:
    pool = ThreadPoolExecutor(1)
    made = pool.submit(fetch, timeout_s)
    pool.shutdown(wait=False)
    return made


def _died(key: str, address: str) -> WorkerLost:
    return WorkerLost(
        "the node's Dask worker died",
        got="no word from it",
        wanted="an answer",
        where=f"{key} ({address})",
        do="Run it again: the node comes back by itself.",
    )


@dataclass
class _Question:
    """A poll of a node that is not answered yet: when it was sent, and for which processes."""

    since: float
    ids: frozenset[str]


@dataclass(eq=False)
class Member:
    """A process of a crew."""

    worker_id: str
    order: Order
    address: str = ""
    pid: int = 0
    report: ProcessReport = field(default_factory=ProcessReport)
    last_line: str | None = None
    lost: str = ""  # why it cannot be polled any more

    @property
    def over(self) -> bool:
        """Return whether the process ended or its node is lost."""
        return bool(self.lost) or self.report.exit_code is not None


class Crew:
    """Processes on nodes, started together and followed together."""

    def __init__(self, fleet: Any, members: Sequence[Member]) -> None:
        self.members = list(members)
        self._fleet = fleet
        self._asking: Calls = fleet._calls(slot=False)
        self._asked: dict[str, _Question] = {}  # by address
        self._looked_at = time.monotonic()

    def start(self, deadline_s: float) -> None:
        """Start every process; where one fails to start, raise its error."""
        calls = self._fleet._calls(slot=False)
        for member in self.members:
            calls.submit(member.order.process_id, member.address, remote.launch, member.order)
        answers = calls.gather(deadline_s)
        for member in self.members:
            answer = answers[member.order.process_id]
            if isinstance(answer, OSError):  # no disk space, descriptors or processes left
                raise WorkerLost(
                    "the node cannot start a process", got=answer, where=member.worker_id
                ) from answer
            if isinstance(answer, BaseException):
                raise answer
            member.pid = answer

    def follow(self, wait_s: float) -> list[tuple[Member, str]]:
        """Wait at most ``wait_s``; return new lines, in order for each member."""
        now = time.monotonic()
        if (paused := now - self._looked_at) > PAUSE_S:
            for question in self._asked.values():
                question.since += paused
        for address, members in self._by_address(living=True).items():
            if address not in self._asked:
                cursors = {each.order.process_id: each.report.cursor for each in members}
                self._asking.submit(address, address, remote.poll, cursors, REPORT_WAIT_S)
                self._asked[address] = _Question(now, frozenset(cursors))
        lines: list[tuple[Member, str]] = []
        for address, answer in self._asking.some(wait_s).items():
            asked = self._asked.pop(address).ids
            for member in self._by_address(living=True).get(address, []):
                if member.order.process_id not in asked:
                    continue  # started after the poll was sent, in the place of one that ended
                if isinstance(answer, BaseException):
                    member.lost = str(answer)
                    continue
                member.report = answer[member.order.process_id]
                for line in member.report.lines:
                    member.last_line = line
                    lines.append((member, line))
        self._looked_at = time.monotonic()
        for address, question in self._asked.items():
            if self._looked_at - question.since > REPORT_WAIT_S + REPORT_PATIENCE_S:
                for member in self._by_address(living=True).get(address, []):
                    if member.order.process_id in question.ids:
                        member.lost = f"the node has not answered for {REPORT_PATIENCE_S:.0f} s"
        return lines

    def end(self, grace_s: float, patience_s: float | None = None) -> None:
        """End every process that may still run, and record its last output.

        ``patience_s`` limits the wait for answers; the default is what ending may take. Never
        raises: on a node that cannot be reached, processes end by their lease and guards.
        """
        calls = self._fleet._calls(slot=False)
        for address, members in self._by_address(living=False).items():
            ids = [
                each.order.process_id
                for each in members
                if not (each.lost and each.report.exit_code is None and each.pid == 0)
            ]
            if ids:
                calls.submit(address, address, remote.end, ids, grace_s)
        try:
            most_s = grace_s + remote.KILL_PATIENCE_S + REPORT_PATIENCE_S
            answers = calls.gather(most_s if patience_s is None else patience_s)
        except Exception:
            log.exception("processes could not be ended by hand; their leases will")
            answers = {}
        finally:
            self._asking.give_up()
        last: dict[str, ProcessReport] = {}
        for answer in answers.values():
            if isinstance(answer, dict):
                last |= answer
            else:
                log.warning("processes end with their node or lease: %s", answer)
        for member in self.members:
            if (report := last.get(member.order.process_id)) is not None:
                member.report = report

    def _by_address(self, *, living: bool) -> dict[str, list[Member]]:
        found: dict[str, list[Member]] = {}
        for member in self.members:
            if not (living and member.over):
                found.setdefault(member.address, []).append(member)
        return found


CLAIM_RETRY_S = 0.2
CLAIM_DEADLINE_S = 10.0


@contextlib.contextmanager
def claimed(
    fleet: Any,
    gang_id: str,
    addresses: Mapping[str, str],
    deadline_s: float,
    cancel: threading.Event | None,
    *,
    shares: Mapping[str, Share],
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold the nodes (by worker id, with their addresses) for the time of the ``with``: the
    ``shares`` of them, and the others whole.

    Nodes that other gangs hold are waited for, in one order; ``on_wait`` gets a message that names
    the holder. Raises Conflict after ``deadline_s``, Cancelled.
    """
    named: str | None = None
    nodes = dict(sorted(addresses.items()))
    deadline = time.monotonic() + deadline_s
    held: list[str] = []
    try:
        while len(held) < len(nodes):
            # The same order for all gangs, and held nodes are kept: gangs cannot deadlock.
            for worker_id in [*held, *[each for each in nodes if each not in held]]:
                share = shares.get(worker_id, remote.WHOLE)
                holder = call(fleet, worker_id, nodes[worker_id], remote.claim, gang_id, share)
                if holder is not None:
                    break
                if worker_id not in held:
                    held.append(worker_id)
            else:
                break
            check_cancel(cancel, gang_id)
            if time.monotonic() > deadline:
                raise Conflict(
                    "the node is taken by another gang",
                    got=holder,
                    wanted=f"free within {deadline_s:.0f} s",
                    where=worker_id,
                    do="Wait for the other job to end, or cancel it.",
                )
            if on_wait is not None and holder != named:
                named = holder
                on_wait(
                    f"waiting for {worker_id}: it is held by {holder} (at most {deadline_s:.0f} s)"
                )
            time.sleep(CLAIM_RETRY_S)
        yield
    finally:
        release(fleet, gang_id, nodes)


def release(fleet: Any, gang_id: str, addresses: Mapping[str, str]) -> None:
    """Release what ``gang_id`` claims on these nodes; never raises."""
    calls = fleet._calls(slot=False)
    for worker_id, address in addresses.items():
        calls.submit(worker_id, address, remote.release, gang_id)
    with contextlib.suppress(Exception):  # a claim expires by itself
        calls.gather(CLAIM_DEADLINE_S)


@contextlib.contextmanager
def one_accelerator(
    fleet: Any, worker_id: str, address: str, order: Order, count: int
) -> Iterator[Order]:
    """Yield ``order`` so that its process sees one of the node's ``count`` accelerators, held for
    the time of the ``with``, or none where gangs hold them all."""
    if not count:
        yield order
        return
    holder = call(fleet, worker_id, address, remote.claim, order.process_id, Share(1, count))
    if holder is not None:
        yield replace(order, env={**order.env, "CUDA_VISIBLE_DEVICES": ""})
        return
    try:
        yield replace(order, gang_id=order.process_id)
    finally:
        release(fleet, order.process_id, {worker_id: address})


def call(
    fleet: Any,
    worker_id: str,
    address: str,
    fn: Callable[..., Any],
    *args: Any,
    deadline_s: float = CLAIM_DEADLINE_S,
) -> Any:
    """Return ``fn(*args)`` as run on the node, without taking a slot; raises its own error."""
    calls = fleet._calls(slot=False)
    calls.submit(worker_id, address, fn, *args)
    answer = calls.gather(deadline_s)[worker_id]
    if isinstance(answer, BaseException):
        raise answer
    return answer


def check_cancel(cancel: threading.Event | None, where: str) -> None:
    """Raise Cancelled where ``cancel`` is set."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("cancelled by the caller", where=where)
