"""Nodes that one job holds, with one process on each: started, sent orders, read and ended.

Implements on Dask the port that ``paceline.training`` defines for its launchers. A process is an
argv; orders and events are JSON objects, one per line. The loss of a node's process or Dask worker
is reported once; the process can be started again when the node is back. This module does not
import training.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster import worker_processes as remote
from paceline.cluster.pinned_calls import CLAIM_DEADLINE_S, Calls, Crew, Member, call, release
from paceline.cluster.worker_processes import Order, Share
from paceline.errors import PacelineError, WorkerLost
from paceline.text import printable

log = logging.getLogger(__name__)

LAUNCH_DEADLINE_S = 20.0


def events_in(lines: Sequence[tuple[Member, str]]) -> Iterator[tuple[Member, dict[str, Any]]]:
    """Yield each line that is a JSON object; log the others."""
    for member, line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            yield member, event
        else:
            log.info("%s: %s", member.worker_id, printable(line, 500))


END_GRACE_S = 5.0
# Short: while the caller waits for nodes that may be frozen it does not poll the others, and their
# leases (30 s) expire.
DROP_PATIENCE_S = 3.0
START_PATIENCE_S = 3.0
ENDING_S = 60.0  # time for a dropped process to end, in the background
# Forking a process that has threads is unsafe; numpy's OpenBLAS would start threads at import.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class NodeOutput:
    """A line that a node's process wrote, or the reason why the process is lost."""

    worker_id: str
    line: Mapping[str, Any] = field(default_factory=dict)
    lost: str = ""


class HeldNodes:
    """The nodes of one job; see `Fleet.open_nodes`."""

    def __init__(
        self, fleet: Any, job_id: str, argv: Sequence[str], shares: Mapping[str, Share]
    ) -> None:
        self._fleet, self._shares = fleet, shares
        self._job_id = job_id
        self._argv = tuple(argv)
        self._members: dict[str, Member] = {}
        self._following = Crew(fleet, [])  # all of them: one request a node at a time
        self._count = 0
        self._endings: list[tuple[Calls, float]] = []  # of dropped processes, with a deadline

    def send_all(self, orders: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Send each node its order, concurrently; return the reason for each node that failed."""
        calls = self._fleet._calls(slot=False)
        failed: dict[str, str] = {}
        for worker_id, order in orders.items():
            if (member := self._members.get(worker_id)) is None:
                failed[worker_id] = "no process runs there"
                continue
            text = json.dumps(order) + "\n"
            process_id = member.order.process_id
            calls.submit(worker_id, member.address, remote.tell, process_id, text)
        try:
            answers = calls.gather(CLAIM_DEADLINE_S)
        except PacelineError as error:  # the scheduler is gone: perhaps no node was reached
            answers = {each: error for each in orders if each not in failed}
        for worker_id, answer in answers.items():
            if isinstance(answer, PacelineError):
                failed[worker_id] = answer.one_line()
            elif isinstance(answer, BaseException):
                failed[worker_id] = repr(answer)
        return failed

    def receive(self, timeout_s: float) -> list[NodeOutput]:
        """Return lines and losses as soon as there are any, and [] after ``timeout_s``."""
        if not self._members:
            time.sleep(min(0.1, timeout_s))
            return []
        self._look_after_endings()
        lines = self._following.follow(timeout_s)
        received = [NodeOutput(member.worker_id, event) for member, event in events_in(lines)]
        for member in [each for each in self._members.values() if each.over]:
            why = member.lost or f"its process ended with {member.report.exit_code}"
            if tail := member.report.stderr_tail.strip():
                why = f"{why}: {tail.splitlines()[-1][:300]}"
            self.drop(member.worker_id)
            received.append(NodeOutput(member.worker_id, lost=why))
        return received

    def host(self, worker_id: str) -> str:
        """Return the address at which other nodes reach this one."""
        return self._member(worker_id).address.split("://", 1)[-1].rsplit(":", 1)[0]

    def start(self, worker_id: str) -> bool:
        """Start the node's process unless it runs; return whether it runs now."""
        if worker_id in self._members:
            return True
        address = self._fleet._addresses().get(worker_id)
        if address is None:
            return False
        try:
            share = self._shares.get(worker_id, remote.WHOLE)
            holder = call(
                self._fleet, worker_id, address, remote.claim, self._job_id, share,
                deadline_s=START_PATIENCE_S,
            )  # fmt: skip
            if holder:
                log.warning("node is held by another worker=%s holder=%s", worker_id, holder)
                return False
            self.start_all({worker_id: address})
        except PacelineError as error:
            log.warning("node's process was not started worker=%s why=%s", worker_id, error)
            return False
        return True

    def start_all(self, addresses: Mapping[str, str]) -> None:
        """Start the processes of claimed nodes concurrently; where one fails, raise its error.

        None of them runs then.
        """
        members = [self._new(each, address) for each, address in addresses.items()]
        crew = Crew(self._fleet, members)
        try:
            crew.start(LAUNCH_DEADLINE_S)
        except BaseException:
            crew.end(0.0, DROP_PATIENCE_S)
            raise
        self._members |= {each.worker_id: each for each in members}
        self._following.members += members

    def _new(self, worker_id: str, address: str) -> Member:
        self._count += 1
        order = Order(
            process_id=f"{self._job_id}-{worker_id}-{self._count}",
            argv=self._argv,
            env=_ENVIRONMENT,
            input_json="",
            gang_id=self._job_id,
            listens=True,
        )
        return Member(worker_id, order, address)

    def drop(self, worker_id: str) -> None:
        """Kill the node's process without waiting, because many nodes may be cut off at once.

        A process that cannot be reached ends when its lease expires.
        """
        if (member := self._members.pop(worker_id, None)) is not None:
            self._following.members.remove(member)
            calls = self._fleet._calls(slot=False)
            process_id = member.order.process_id
            calls.submit(worker_id, member.address, remote.end, [process_id], 0.0)
            self._endings.append((calls, time.monotonic() + ENDING_S))

    def _look_after_endings(self, patience_s: float = 0.0) -> None:
        for calls, until in list(self._endings):
            try:
                ended = bool(calls.some(min(patience_s, max(0.0, until - time.monotonic()))))
            except PacelineError as error:
                log.warning("a dropped process ends with its lease: %s", error)
                ended = True
            if ended or time.monotonic() > until:
                calls.give_up()
                self._endings.remove((calls, until))

    def close(self) -> None:
        """End every node's process."""
        self._following.end(END_GRACE_S)
        deadline = time.monotonic() + DROP_PATIENCE_S
        while self._endings and time.monotonic() < deadline:
            self._look_after_endings(0.1)
        for calls, _ in self._endings:
            calls.give_up()
        addresses = {each: member.address for each, member in self._members.items()}
        self._members.clear()
        release(self._fleet, self._job_id, addresses)  # a restarted node has a new address

    def _member(self, worker_id: str) -> Member:
        if (member := self._members.get(worker_id)) is None:
            raise WorkerLost("no process runs there", where=worker_id)
        return member
