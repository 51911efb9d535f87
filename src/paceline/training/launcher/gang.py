"""Gang scheduling of ranks: they start together on several nodes and end together.

``GangSupervisor`` runs one attempt after another on nodes whose launchers (forkserver.py) stay
warm in between, and tracks which nodes are ready, lost, or preempted. Does not depend on training
code.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import Cancelled
from paceline.training.deadlines import Deadlines
from paceline.training.launcher.attempt import TICK_S, Attempt, RankState
from paceline.training.launcher.ports import (
    GangMember,
    GangResult,
    LineHandler,
    NodeMessage,
    NodeMessageLike,
    Nodes,
)
from paceline.training.launcher.served_attempt import ServedAttempt

log = logging.getLogger(__name__)

RETURN_DEADLINE_S = 15.0  # for an unreachable node to return
READY_DEADLINE_S = 120.0  # for a launcher to import torch on a busy machine


class GangSupervisor:
    """Runs attempts on one set of nodes and tracks the nodes' state."""

    def __init__(
        self,
        nodes: Nodes,
        deadlines: Deadlines,
        *,
        cancel: threading.Event | None = None,
        grace_s: float = 10.0,
        node_wait_s: float = 0.0,
    ) -> None:
        self.nodes = nodes
        self.deadlines = deadlines
        self.cancel = cancel
        self.grace_s = grace_s
        self.node_wait_s = node_wait_s  # for one of the nodes, where none can be reached
        self.id = uuid.uuid4().hex[:12]
        self.ready: set[str] = set()
        self.last_message_at: dict[str, float] = {}
        self.preempted: set[str] = set()
        self._watch_order: Mapping[str, Any] | None = None
        self.stop_reason: str = ""
        self.spares: dict[str, str] = {}  # name → worker
        self.lost: set[str] = set()
        self.lost_reasons: dict[str, str] = {}
        self.notice_grace_s = grace_s  # from a notice, or a rank's SIGTERM, to the gang's end

    # -- nodes

    def watch_for_preemption(self, url: str, grace_s: float) -> None:
        """Make every node's launcher poll ``url`` for preemption notices (see preemption.py)."""
        self._watch_order = {"do": "watch", "preemption": url, "grace_s": grace_s}
        self.notice_grace_s = grace_s

    def prepare(self, workers: Sequence[str], deadline_s: float = READY_DEADLINE_S) -> set[str]:
        """Return which of ``workers`` have a ready launcher; start the missing ones.

        Waits for launchers that start, and up to ``RETURN_DEADLINE_S`` for unreachable nodes: a
        Dask worker that died is back within seconds. Where none can be reached (Slurm took the
        allocation back), it first waits ``node_wait_s`` for one. Raises Cancelled.
        """
        unreachable = [each for each in dict.fromkeys(workers) if each not in self.ready]
        starting: set[str] = set()
        began = time.monotonic()
        wait_until_s = began + self.node_wait_s
        while True:
            now = time.monotonic()
            if not starting and not self.ready.intersection(workers) and now < wait_until_s:
                began = now
            if (passed := now - began) >= deadline_s:
                break
            settled = starting <= self.ready | self.lost
            if settled and (not unreachable or passed > RETURN_DEADLINE_S):
                break
            for worker in list(unreachable):
                if self.nodes.start(worker):
                    unreachable.remove(worker)
                    starting.add(worker)
                    self.lost.discard(worker)
                self._receive_messages(0.0)  # a slow start must not delay other nodes' messages
            self.check_cancel()
            self._receive_messages(TICK_S)
        return self.ready & set(workers)

    def drop_node(self, worker_id: str, why: str) -> None:
        """End the node's launcher and mark the node lost until it is started again."""
        self.nodes.drop(worker_id)
        self.handle_message(NodeMessage(worker_id, lost=why))

    def restart_node(self, worker_id: str) -> bool:
        """Restart a lost node's launcher where possible; return whether the node is ready now."""
        if worker_id in self.ready:
            return True
        if worker_id in self.lost and self.nodes.start(worker_id):
            self.lost.discard(worker_id)
        return False

    def request_stop(self, why: str) -> None:
        """Ask the running attempt to save its state and end (from ``on_event``, any thread)."""
        self.stop_reason = why

    def start_spare(self, name: str, worker_id: str, env: Mapping[str, str], text: str) -> None:
        """Start a spare on ``worker_id``: a process that preloads and waits to become a rank."""
        order = {"do": "spare", "name": name, "env": dict(env), "input": text}
        if why := self.nodes.send_all({worker_id: order}):
            log.warning("no spare on that node worker=%s why=%s", worker_id, why[worker_id])
            return
        self.spares[name] = worker_id

    # -- an attempt

    def run_gang(
        self,
        members: Sequence[GangMember],
        text: str,
        attempt: int,
        on_event: LineHandler | None,
        *,
        served: bool = False,
    ) -> GangResult:
        """Run one rank per member, each with ``text`` as its input; return how the gang ended.

        ``served``: the first ranks serve the others (served_attempt.py). Raises Cancelled once
        ``cancel`` is set and every rank has ended.
        """
        ranks = {each.rank: RankState(each) for each in sorted(members, key=lambda m: m.rank)}
        assert ranks and list(ranks) == list(range(len(members))), "ranks count up from 0"
        self.stop_reason = ""
        self.preempted.clear()
        kind = ServedAttempt if served else Attempt
        running = kind(self, ranks, attempt, on_event)
        try:
            fault = running.start(text) or running.follow()
        except BaseException:
            running.abandon()
            raise
        found_at = time.monotonic()
        if fault is not None:
            running.end(stacks=fault.hung, grace_s=0.0)
            found = running.find_hung_rank(fault) if fault.hung else running.first_failure()
            fault = found or fault
        return dataclasses.replace(running.result(fault), found_at=found_at)

    def _receive_messages(self, timeout_s: float) -> None:
        for message in self.nodes.receive(timeout_s):
            self.handle_message(message)

    def check_cancel(self) -> None:
        """Raise Cancelled where the caller cancelled."""
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled("cancelled by the caller", where="a gang of ranks")

    def handle_message(self, message: NodeMessageLike) -> str:
        """Update the node's state from a message; return the message's kind ("": a rank's line)."""
        worker, line = message.worker_id, message.line
        if message.lost:
            self.ready.discard(worker)
            self.lost.add(worker)
            self.lost_reasons[worker] = message.lost
            self.spares = {name: at for name, at in self.spares.items() if at != worker}
            return "lost"
        self.last_message_at[worker] = time.monotonic()
        kind = str(line.get("launcher", ""))
        if kind == "ready":
            self.ready.add(worker)
            if self._watch_order is not None and (
                why := self.nodes.send_all({worker: self._watch_order})
            ):
                self.drop_node(worker, why[worker])
                return "lost"
        elif kind == "preempted":
            log.warning("node is taken away worker=%s why=%s", worker, line.get("reason"))
            self.preempted.add(worker)
        elif kind == "unwatched":
            log.warning("notices are no longer watched for worker=%s code=%s", worker, line["code"])
        elif kind == "spare":
            log.warning("spare ended name=%s code=%s", line.get("name"), line.get("code"))
            self.spares.pop(str(line.get("name")), None)
        return kind
