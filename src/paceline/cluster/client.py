"""Fleet: start agents, calls and processes on an installation's nodes, and hold nodes for a job.

A thin adapter over Dask, which only places and watches processes. Every call is pinned to one
node's worker, is never retried elsewhere, has a deadline, and ends with WorkerLost when that worker
dies. Dask's errors are translated here.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from paceline import __version__
from paceline.cluster.addresses import AgentInfo, Machine, Node, by_number
from paceline.cluster.agents import AGENT, REPORT, ensure_agent
from paceline.cluster.held_nodes import LAUNCH_DEADLINE_S, HeldNodes, events_in
from paceline.cluster.pinned_calls import (
    Calls,
    Crew,
    Member,
    check_cancel,
    claimed,
    one_accelerator,
)
from paceline.cluster.worker_processes import Order, Share
from paceline.config import Runtime
from paceline.errors import Conflict, PacelineError, ServiceUnavailable, WorkerLost

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
# Dask's client asserts that the scheduler's welcome comes alone; while workers come and go, other
# messages may come with it.
HANDSHAKES = 3
RETURN_DEADLINE_S = 15.0  # a lost worker restarts within a second or two, unless its node is gone
TICK_S = 0.25
LAPSE_S = 15.0  # in which the nodes that the scheduler named last count, where it does not answer


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How a process ended."""

    exit_code: int  # negative: by that signal
    ended: Literal["exited", "deadline"]
    last_line: str | None  # of its standard output
    stderr_tail: str
    seconds: float


class Fleet:
    """A connection to the nodes of one installation; use it in a ``with``."""

    def __init__(self, runtime: Runtime, client: Any) -> None:
        self.runtime = runtime
        self._client = client
        self._last_known: tuple[float, dict[str, dict[str, Any]]] = (float("-inf"), {})

    @classmethod
    def connect(cls, runtime: Runtime, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Fleet:
        """Return a connection to ``runtime``'s fleet. Raises ServiceUnavailable."""
        import dask
        from distributed import Client

        from paceline.cluster.dask_service import dask_settings, security_of

        address, tries = runtime.endpoints.scheduler_address, HANDSHAKES
        while True:
            tries -= 1
            try:
                with dask.config.set(dask_settings()):
                    client = Client(
                        address,
                        security=security_of(runtime),
                        timeout=timeout_s,
                        set_as_default=False,
                        name="paceline",
                    )
                return cls(runtime, client)
            except (OSError, AssertionError) as error:  # refused, TLS refused, deadline passed
                if tries and isinstance(error, AssertionError):
                    continue
                raise ServiceUnavailable(
                    "the fleet's scheduler does not answer",
                    got=str(error) or "more than its welcome",
                    where=address,
                    do="Start it: `paceline up`, or the scheduler that `paceline init` named.",
                ) from error

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; agents and workers keep running."""
        self._client.close(timeout=5)

    def nodes(self) -> list[Node]:
        """Return the nodes whose workers are registered now, by name.

        Dask refuses a second worker of one name. Raises Conflict for another version of Paceline.
        """
        found: dict[str, Node] = {}
        for address, worker in self._workers().items():
            if (report := worker.get(REPORT)) is None:
                log.info("a Dask worker that is no node of Paceline name=%s", worker["name"])
                continue
            name = str(worker["name"])
            node = Node(worker_id=name, address=address, machine=Machine.model_validate(report))
            if node.machine.version != __version__:
                raise Conflict(
                    "a node runs another version of Paceline",
                    got=node.machine.version,
                    wanted=__version__,
                    where=name,
                    do="Install the same version there and start its worker again.",
                )
            found[name] = node
        return [found[each] for each in sorted(found, key=by_number)]

    def ensure_agents(
        self,
        worker_ids: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        *,
        agent_argv: Sequence[str] = AGENT,
    ) -> dict[str, AgentInfo]:
        """Return each node's running agent: adopted where one runs, otherwise started.

        Agents are kept running until their node's worker ends. Without ``worker_ids``: all nodes.
        Raises WorkerLost for an unreachable node, NotReady for an agent that does not get ready.
        """
        wanted = [e.worker_id for e in self.nodes()] if worker_ids is None else list(worker_ids)
        deadline = time.monotonic() + timeout_s
        addresses = self._await_nodes(wanted, timeout_s)
        patience_s = max(0.1, deadline - time.monotonic() - 0.5)
        calls = self._calls(slot=False)
        for worker_id in wanted:
            calls.submit(worker_id, addresses[worker_id], ensure_agent, agent_argv, patience_s)
        answers = calls.gather(max(1.0, deadline - time.monotonic()))
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
        return {each: answers[each] for each in wanted}

    def map_nodes(
        self, fn: Callable[..., Any], worker_ids: Sequence[str], *args: Any, timeout_s: float
    ) -> dict[str, Any]:
        """Return ``fn(*args, worker_id=…)`` as run on each node, or the error that it ended with.

        WorkerLost where the worker died, ServiceUnavailable past ``timeout_s``; ``fn`` itself
        cannot be stopped then. For work that must be killable see `run_process`.
        """
        calls = self._calls(slot=True)
        deadline = time.monotonic() + timeout_s
        addresses = self._await_nodes(worker_ids, min(timeout_s, RETURN_DEADLINE_S), partial=True)
        for worker_id in worker_ids:
            if worker_id in addresses:
                address = addresses[worker_id]
                calls.submit(worker_id, address, fn, *args, worker_id=worker_id)
        answers = calls.gather(max(0.1, deadline - time.monotonic()))
        return {each: answers.get(each, _away(each, addresses)) for each in worker_ids}

    def run_process(
        self,
        worker_id: str,
        *,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        input_json: str = "",
        on_event: Callable[[dict[str, Any]], None] | None = None,
        deadline_s: float,
        cancel: threading.Event | None = None,
        grace_s: float = 5.0,
        accelerators: int = 0,
    ) -> ProcessResult:
        """Run ``argv`` on ``worker_id`` in a process group of its own, and return how it ended.

        ``input_json`` is its standard input; each line on its standard output that is a JSON object
        is passed to ``on_event`` at once, in a thread of its own: a server that hangs there must
        not end the process, whose lease ends where nobody asks for it. At the deadline, on
        ``cancel`` (Cancelled) or on any exception here it gets SIGTERM and, after ``grace_s``,
        SIGKILL, with everything it started.
        Of the node's ``accelerators`` it sees one that no gang holds, and holds it meanwhile; where
        gangs hold all of them, none. Raises WorkerLost.
        """
        began = time.monotonic()
        address = self._await_nodes([worker_id], RETURN_DEADLINE_S)[worker_id]
        process_id = f"process-{uuid.uuid4().hex[:12]}"
        order = Order(
            process_id=process_id, argv=tuple(argv), env=dict(env or {}), input_json=input_json
        )
        ended: Literal["exited", "deadline"] = "exited"
        with (
            _in_a_thread(on_event) as take,
            one_accelerator(self, worker_id, address, order, accelerators) as order,
        ):
            process = Member(worker_id=worker_id, address=address, order=order)
            crew = Crew(self, [process])
            try:
                crew.start(LAUNCH_DEADLINE_S)
                while not process.over:
                    take([event for _, event in events_in(crew.follow(TICK_S))])
                    check_cancel(cancel, worker_id)
                    if time.monotonic() - began > deadline_s and not process.over:
                        ended = "deadline"
                        break
                if process.lost:
                    raise WorkerLost(
                        "the process was lost with its node", got=process.lost, where=worker_id
                    )
            finally:
                crew.end(grace_s)
        code = process.report.exit_code
        return ProcessResult(
            exit_code=-9 if code is None else code,
            ended=ended,
            last_line=process.last_line,
            stderr_tail=process.report.stderr_tail,
            seconds=time.monotonic() - began,
        )

    @contextlib.contextmanager
    def open_nodes(
        self,
        workers: Sequence[str],
        argv: Sequence[str],
        *,
        wait_s: float,
        cancel: threading.Event | None = None,
        on_wait: Callable[[str], None] | None = None,
        slots: Mapping[str, tuple[int, int]] | None = None,
        work: str = "",
    ) -> Iterator[HeldNodes]:
        """Hold ``workers`` for the time of the ``with``, with ``argv`` running on each.

        ``slots`` are how many slots of how many are held on a worker, which other gangs then share
        unless their ``work`` is the same; a worker that is not named is held whole.

        Nodes that other gangs hold are waited for, in one fixed order so that gangs cannot
        deadlock; ``on_wait`` gets a message that names the holder. Raises Conflict after
        ``wait_s``, Cancelled when ``cancel`` is set, WorkerLost for an unreachable node.
        """
        job_id = f"gang-{uuid.uuid4().hex[:12]}-{os.getpid()}"
        addresses = self._await_nodes(list(workers), RETURN_DEADLINE_S)
        wanted = {each: addresses[each] for each in workers}
        shares = {each: Share(*count, work) for each, count in (slots or {}).items()}
        with claimed(self, job_id, wanted, wait_s, cancel, shares=shares, on_wait=on_wait):
            nodes = HeldNodes(self, job_id, argv, shares)
            try:
                nodes.start_all(wanted)
                yield nodes
            finally:
                nodes.close()

    # -- used by the modules of this package

    def _calls(self, *, slot: bool) -> Calls:
        return Calls(self._client, self._addresses, slot=slot)

    def _addresses(self) -> dict[str, str]:
        """Return the address of each node's Dask worker, for nodes that have one now."""
        return {str(each["name"]): address for address, each in self._workers().items()}

    def _workers(self) -> dict[str, dict[str, Any]]:
        # Not `scheduler_info`: what it returns is replaced every 2 s by an answer without workers,
        # by a timer of the client's own thread, so that all nodes seem to have died.
        async def ask() -> dict[str, dict[str, Any]]:
            try:
                found = await self._client.scheduler.identity(n_workers=-1)
                self._last_known = time.monotonic(), found["workers"]
            except OSError:
                if time.monotonic() - self._last_known[0] > LAPSE_S:
                    raise
            return self._last_known[1]

        with _translated(self.runtime.endpoints.scheduler_address):
            found: dict[str, dict[str, Any]] = self._client.sync(ask)
        return found

    def _await_nodes(
        self, worker_ids: Sequence[str], timeout_s: float, *, partial: bool = False
    ) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        while True:
            present = self._addresses()
            missing = [each for each in worker_ids if each not in present]
            if not missing or (partial and time.monotonic() > deadline):
                return present
            if time.monotonic() > deadline:
                raise _away(missing[0], present)
            time.sleep(0.1)


@contextlib.contextmanager
def _in_a_thread(
    on_event: Callable[[dict[str, Any]], None] | None,
) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Yield what takes events at once; ``on_event`` gets each, in order, in a thread of its own
    with the caller's context. The end of the ``with`` waits for it. Its error is raised by the next
    call, or by the end.
    """
    given: deque[Future[None]] = deque()
    context = contextvars.copy_context()  # Prefect's, of the run that the events are logged to
    with ThreadPoolExecutor(1, thread_name_prefix="events") as pool:

        def take(events: list[dict[str, Any]]) -> None:
            if on_event is not None:
                given.extend(pool.submit(context.run, on_event, each) for each in events)
            while given and given[0].done():
                given.popleft().result()

        yield take
    while given:
        given.popleft().result()


def _away(worker_id: str, present: Mapping[str, str]) -> WorkerLost:
    return WorkerLost(
        "the node is away",
        got=f"workers {', '.join(sorted(present, key=by_number)) or 'none'}",
        wanted="one of that name at the scheduler",
        where=worker_id,
        do="A worker that died is back within seconds; else start it (`paceline worker`).",
    )


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    try:
        yield
    except PacelineError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # CommClosedError, timeouts, closed client
        raise ServiceUnavailable(
            "the fleet's scheduler does not answer",
            got=error,
            where=address,
            do="See `paceline status`.",
        ) from error
