"""One attempt of a gang: start all ranks or none, monitor, find the failed rank, end all.

An attempt ends when a rank fails, a node is lost, or a rank exceeds the deadline of its phase
(start, step, checkpoint). The result names the rank at fault. Times in seconds, monotonic clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import Cancelled, PacelineError
from paceline.training.deadlines import slowest_step_s
from paceline.training.launcher.ports import GangMember, GangResult, LineHandler
from paceline.training.loop import STOPPED_EXIT, waits_for_peers

if TYPE_CHECKING:
    from paceline.training.launcher.gang import GangSupervisor

log = logging.getLogger(__name__)

TICK_S = 0.25
LAUNCH_DEADLINE_S = 30.0  # for a launcher to fork its ranks, imports already done
END_DEADLINE_S = 15.0  # for a launcher to report that its ranks are gone
CANCEL_END_DEADLINE_S = 2.0  # the same after a cancel: the canceller kills this process soon
NODE_SILENCE_S = 15.0  # a launcher sends two heartbeats a second; a silent one is frozen or cut off
DRIVER_PAUSE_S = 5.0  # a longer gap between two checks is this process's own pause, not the nodes'
STOPPED_S = 2.0  # a rank in process state T for longer is frozen


@dataclass(eq=False)
class RankState:
    member: GangMember
    state: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None
    order: int = 0  # sequence number of its end
    killed: bool = False  # by its launcher, after another rank failed
    stderr: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class Fault:
    rank: RankState | None
    what: str
    hung: bool = False
    overdue: bool = False
    suspects: tuple[RankState, ...] = ()  # of a hang: other ranks that look the same from outside


class Attempt:
    """One attempt, from its first order to the end of its last rank."""

    def __init__(
        self,
        gangs: GangSupervisor,
        ranks: dict[int, RankState],
        attempt: int,
        on_event: LineHandler | None,
    ) -> None:
        self._gangs = gangs
        self._nodes = gangs.nodes
        self._ranks = ranks
        self._attempt = attempt
        self._on_event = on_event
        self._workers = list(dict.fromkeys(each.member.worker_id for each in ranks.values()))
        self._started_on: set[str] = set()  # nodes that received a "start" order
        self._started_nodes: set[str] = set()
        self._ended_nodes: set[str] = set()
        self._store: tuple[str, int] | None = None
        self._ended_count = 0
        self._sent_grace_s: float | None = None  # grace period of the stop order, in seconds
        self._stop_overdue_at = float("inf")  # when a stop order is overdue
        self._store_error = ""
        self._slowest_s: dict[int, float] = {}  # by rank, of its newest steps
        self._last_check = time.monotonic()

    def start(self, text: str) -> Fault | None:
        """Start all ranks; return the fault where a node cannot."""
        ready = self._gangs.prepare(self._workers)
        if away := [each for each in self._workers if each not in ready]:
            for each in away:
                if each not in self._gangs.lost:
                    self._gangs.drop_node(each, "its node is away")
                self._mark_lost(each)
            return self._start_fault(away[0])
        head = self._workers[0]
        store = {"do": "store", "host": self._nodes.host(head), "job": self._gangs.id}
        return (
            self._send_orders({head: store})
            or self._wait_for_nodes(
                lambda: set() if self._store else {head}, "the rendezvous store"
            )
            or self._send_orders(
                {each: self._start_order(self._ranks_on(each), text) for each in self._workers}
            )
            or self._wait_for_nodes(lambda: set(self._workers) - self._started_nodes, "its ranks")
        )

    def follow(self) -> Fault | None:
        """Monitor the ranks until they end; return the fault that ended the gang, if any."""
        self._last_check = time.monotonic()
        while self._running_nodes():
            self._receive_messages(TICK_S)
            if (
                fault := self._find_failed_rank() or self._find_late_rank() or self._stop_ranks()
            ) is not None:
                self._check_cancel()
                return fault
        self._check_cancel()
        return self._find_failed_rank()

    def end(self, *, stacks: bool, grace_s: float) -> None:
        """End every rank and collect its output; a launcher that does not answer is dropped."""
        self._ended_nodes |= (
            set(self._workers) - self._started_on
        )  # nothing of this attempt runs there
        self._send_orders(dict.fromkeys(self._running_nodes(), stop_order(grace_s, stacks=stacks)))
        until = time.monotonic() + self._report_deadline_s()
        while self._running_nodes() and time.monotonic() < until:
            try:
                self._receive_messages(TICK_S)
            except PacelineError as error:  # then no node can be reached
                log.warning("nodes do not answer: %s", error)
                break
        for worker in self._running_nodes():
            log.warning("launcher does not answer worker=%s", worker)
            self._drop_node(worker, "its launcher does not answer")

    def abandon(self) -> None:
        """End every rank without a grace period, while an exception propagates."""
        self._on_event = None  # the callback may have raised it
        self.end(stacks=False, grace_s=0.0)

    def first_failure(self) -> Fault | None:
        """Return the fault of the rank that failed first, from all exit codes so far."""
        return self._find_failed_rank()

    def find_hung_rank(self, fault: Fault) -> Fault:
        """Return ``fault``, moved to the suspect whose stack shows no wait for other ranks."""
        if fault.rank is None or not waits_for_peers(fault.rank.stderr):
            return fault
        for each in fault.suspects:
            if waits_for_peers(each.stderr) is False:
                return self._hang_fault(each)
        return fault

    def result(self, fault: Fault | None) -> GangResult:
        """Return the attempt's result."""
        codes = {rank: each.code for rank, each in self._ranks.items()}
        stderr = {rank: each.stderr for rank, each in self._ranks.items() if each.stderr}
        lost = frozenset(self._workers) & self._gangs.lost
        if fault is None:
            return GangResult(ok=True, exit_codes=codes, stderr=stderr)
        reason, member = fault.what, None
        if fault.rank is not None:
            member = fault.rank.member
            reason = describe_rank(fault.rank, fault.what, hung=fault.hung)
        log.warning("gang ended attempt=%d reason=%s", self._attempt, reason)
        return GangResult(
            ok=False,
            exit_codes=codes,
            failed_rank=None if member is None else member.rank,
            failed_worker=None if member is None else member.worker_id,
            reason=reason,
            hung=fault.hung,
            overdue=fault.overdue,
            stderr=stderr,
            preempted=frozenset(self._gangs.preempted),
            lost=lost,
        )

    # -- orders and messages

    def _start_order(self, mine: list[RankState], text: str) -> dict[str, Any]:
        assert self._store is not None
        host, port = self._store
        ranks = []
        for local, each in enumerate(mine):
            member = each.member
            env = {
                "RANK": str(member.rank),
                "WORLD_SIZE": str(len(self._ranks)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(mine)),
                "GROUP_RANK": str(self._workers.index(member.worker_id)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "PACELINE_ATTEMPT": str(self._attempt),
                "PACELINE_NODE": member.worker_id,
                "PACELINE_HOST": self._nodes.host(member.worker_id),
                **member.env,
            }
            ranks.append({"rank": member.rank, "env": env, "spare": member.spare})
            self._gangs.spares.pop(member.spare, None)
        return {
            "do": "start",
            "attempt": self._attempt,
            "ranks": ranks,
            "input": text,
        }

    def _receive_messages(self, timeout_s: float) -> None:
        for message in self._nodes.receive(timeout_s):
            kind = self._gangs.handle_message(message)
            if message.worker_id not in self._workers:
                continue
            if kind == "lost":
                self._mark_lost(message.worker_id)
            else:
                self._handle_message(kind, message.worker_id, message.line)

    def _handle_message(self, kind: str, worker: str, line: Mapping[str, Any]) -> None:
        if not kind:
            took_s = line.get("data", {}).get("step_seconds")
            if line.get("event") == "step" and isinstance(took_s, float):
                before_s = self._slowest_s.get(line["rank"], 0.0)
                self._slowest_s[line["rank"]] = slowest_step_s(before_s, took_s)
            if self._on_event is not None:
                self._on_event(dict(line))
        elif kind == "store":
            if line.get("port") and worker == self._workers[0]:  # not a late answer of another node
                self._store = (str(line["host"]), int(line["port"]))
            elif worker == self._workers[0]:
                self._store_error = str(line.get("error"))
        elif line.get("attempt") != self._attempt:
            return
        elif kind == "started":
            self._started_nodes.add(worker)
        elif kind == "beat":
            for rank, state in line.get("ranks", {}).items():
                self._ranks[int(rank)].state = state
        elif kind == "ended":
            rank = self._ranks[int(line["rank"])]
            self._ended_count += 1
            rank.has_ended, rank.order = True, self._ended_count
            rank.code, rank.killed = line["code"], bool(line.get("killed"))
            rank.stderr = str(line.get("stderr", ""))
        elif kind == "over":
            self._ended_nodes.add(worker)

    def _mark_lost(self, worker: str) -> None:
        self._ended_nodes.add(worker)
        for each in self._ranks.values():
            if each.member.worker_id == worker and not each.has_ended:
                self._ended_count += 1
                each.has_ended, each.order = True, self._ended_count

    # -- fault detection

    def _find_failed_rank(self) -> Fault | None:
        failed = [each for each in self._ranks.values() if each.has_ended and each.code != 0]
        failed = [each for each in failed if not each.killed] or failed
        if not failed or (
            all(each.code == STOPPED_EXIT for each in failed)
            and any(not each.has_ended for each in self._ranks.values())
        ):
            return None  # ranks that stop on request end by themselves

        def first(each: RankState) -> tuple[int, int]:
            # A dead rank makes the others fail: a lost node or a signal ranks before an exit code,
            # that before a lost peer (75); then the earliest counts.
            violent = each.code is None or each.code < 0
            return (0 if violent else 2 if each.code in (75, STOPPED_EXIT) else 1, each.order)

        faulty = min(failed, key=first)
        if self._sent_grace_s is not None and all(each.killed for each in failed):
            what = f"did not stop within its grace of {self._sent_grace_s:.0f} s and was killed"
            return Fault(faulty, what, overdue=True)
        return Fault(faulty, self._describe_exit(faulty))

    def _describe_exit(self, ended: RankState) -> str:
        if ended.code is None:
            why = self._gangs.lost_reasons.get(ended.member.worker_id, "")
            return "was lost with its node" + (f": {why}" if why else "")
        if ended.code < 0:
            return f"was killed by signal {-ended.code}"
        return f"exited with {ended.code}"

    def _find_late_rank(self) -> Fault | None:
        if (worker := self._drop_silent_node()) is not None:
            return Fault(self._first_rank_on(worker), "was lost with its node: it fell silent")
        living = [each for each in self._ranks.values() if not each.has_ended and each.state]
        if not any(self._is_late(each.state) for each in living):
            return None
        # One hung rank makes the others wait. In order: a stopped process, a rank without
        # heartbeats, the one with the fewest steps, the one longest in its phase.
        faulty = max(
            living,
            key=lambda each: (
                bool(each.state["stopped"]),
                each.state["silent_s"] > 3 * TICK_S + 2.0,
                -int(each.state["step"]),
                each.state["since_s"],
            ),
        )
        alike = [each for each in living if each.state["step"] == faulty.state["step"]]
        sure = faulty.state["stopped"] or faulty.state["silent_s"] > 3 * TICK_S + 2.0
        return self._hang_fault(faulty, () if sure else tuple(alike))

    def _drop_silent_node(self) -> str | None:
        """Drop the first node without heartbeats, if any, and return it."""
        now = time.monotonic()
        if (paused := now - self._last_check) > DRIVER_PAUSE_S:
            self._gangs.last_message_at = {
                at: beat + paused for at, beat in self._gangs.last_message_at.items()
            }
        self._last_check = now
        for worker in self._workers:
            silent = now - self._gangs.last_message_at.get(worker, now)
            if worker not in self._ended_nodes and silent > NODE_SILENCE_S:
                self._drop_node(worker, "it fell silent")
                return worker
        return None

    def _hang_fault(self, faulty: RankState, suspects: tuple[RankState, ...] = ()) -> Fault:
        state = faulty.state
        phase, since = state["phase"], state["since_s"]
        how = " (it is stopped)" if state["stopped"] else ""
        limit = self._deadline(phase)
        return Fault(
            faulty,
            f"hung in phase {phase!r} at step {state['step']}: nothing for {since:.1f} s of "
            f"{limit:.0f}{how}",
            hung=True,
            suspects=suspects,
        )

    def _deadline(self, phase: str) -> float:
        return self._gangs.deadlines.of(phase, max(self._slowest_s.values(), default=0.0))

    def _is_late(self, state: Mapping[str, Any]) -> bool:
        deadline = self._deadline(state["phase"])
        late = state["running_s"] if state["phase"] == "starting" else state["since_s"]
        frozen = state["stopped"] and state["silent_s"] > min(STOPPED_S, deadline)
        return bool(frozen) or late > deadline or state["silent_s"] > deadline

    # -- stopping, lost nodes, waiting

    def _running_nodes(self) -> list[str]:
        """Return the nodes on which ranks of this attempt run."""
        return [each for each in self._workers if each not in self._ended_nodes]

    def _stop_ranks(self) -> Fault | None:
        """Send a stop order where the ranks should stop; return the fault where it is overdue."""
        grace = self._stop_grace_s()
        if grace is not None and (self._sent_grace_s is None or grace < self._sent_grace_s):
            self._sent_grace_s = grace
            self._stop_overdue_at = time.monotonic() + grace + self._report_deadline_s()
            self._send_orders(dict.fromkeys(self._running_nodes(), stop_order(grace)))
        if time.monotonic() > self._stop_overdue_at:
            return Fault(None, "did not stop as asked", overdue=True)
        return None

    def _report_deadline_s(self) -> float:
        """Return the seconds that a launcher has to report that its ranks are gone."""
        cancel = self._gangs.cancel
        return CANCEL_END_DEADLINE_S if cancel is not None and cancel.is_set() else END_DEADLINE_S

    def _stop_grace_s(self) -> float | None:
        """Return the seconds that the ranks have to save and end; None where none should stop."""
        gangs = self._gangs
        wanted = []
        if gangs.cancel is not None and gangs.cancel.is_set():
            wanted.append(gangs.grace_s)
        if gangs.stop_reason:  # not urgent: the full save deadline
            wanted.append(gangs.deadlines.checkpoint_s)
        if self._stops_with_one() and (
            gangs.preempted or any(each.code == STOPPED_EXIT for each in self._ranks.values())
        ):
            # A stopped rank that had nothing to save is gone already, and the others wait for it.
            wanted.append(gangs.notice_grace_s)
        return min(wanted, default=None)

    def _stops_with_one(self) -> bool:
        return True  # where one rank or node stops, the others cannot go on

    def _check_cancel(self) -> None:
        """Raise Cancelled where the caller cancelled; the message names ranks that did not save."""
        try:
            self._gangs.check_cancel()
        except Cancelled as cancelled:
            unsaved = [r for r, each in self._ranks.items() if each.code not in (0, STOPPED_EXIT)]
            if not unsaved:
                raise
            got = f"ranks {unsaved} had not saved within {self._gangs.grace_s:.0f} s"
            last = next((each for r in unsaved if (each := _last_stderr_line(self._ranks[r]))), "")
            got = f"{got}: {last}" if last else got
            raise Cancelled(cancelled.what, got=got, where=cancelled.where) from None

    def _ranks_on(self, worker: str) -> list[RankState]:
        return [each for each in self._ranks.values() if each.member.worker_id == worker]

    def _first_rank_on(self, worker: str) -> RankState:
        return self._ranks_on(worker)[0]

    def _start_fault(self, worker: str) -> Fault:
        why = self._gangs.lost_reasons.get(worker, "its node was lost")
        return Fault(self._first_rank_on(worker), f"could not be started: {why}")

    def _drop_node(self, worker: str, why: str) -> None:
        self._gangs.drop_node(worker, why)
        self._mark_lost(worker)

    def _send_orders(self, orders: Mapping[str, Mapping[str, Any]]) -> Fault | None:
        """Send orders to nodes; a node that takes none is lost, and the first one is the fault."""
        self._started_on |= {each for each, order in orders.items() if order["do"] == "start"}
        unsent = self._nodes.send_all(orders) if orders else {}
        for worker, why in unsent.items():
            self._drop_node(worker, why)
        return self._start_fault(next(iter(unsent))) if unsent else None

    def _wait_for_nodes(self, missing: Callable[[], set[str]], what: str) -> Fault | None:
        """Wait until no node is ``missing``; return the fault where one is lost or late."""
        until = time.monotonic() + LAUNCH_DEADLINE_S
        while waited := missing():
            self._receive_messages(TICK_S)
            self._gangs.check_cancel()
            if lost := [each for each in self._workers if each not in self._gangs.ready]:
                return self._start_fault(lost[0])
            if self._store_error:
                return Fault(
                    self._first_rank_on(self._workers[0]), f"got no store: {self._store_error}"
                )
            if time.monotonic() > until and (waited := missing()):
                for worker in waited:
                    self._drop_node(
                        worker, f"it did not start {what} within {LAUNCH_DEADLINE_S:.0f} s"
                    )
                return self._start_fault(min(waited))
        return None


def _last_stderr_line(rank: RankState) -> str:
    """Return the last line of the rank's standard error."""
    return rank.stderr.strip().rsplit("\n", 1)[-1].strip()[:500]


def describe_rank(rank: RankState, what: str, *, hung: bool = False) -> str:
    """Return what happened to a rank, with the last line of its standard error."""
    member, words = rank.member, "" if hung else _last_stderr_line(rank)
    reason = f"rank {member.rank} on {member.worker_id} {what}"
    return f"{reason}: {words}" if words else reason


def stop_order(grace_s: float, *, stacks: bool = False) -> dict[str, Any]:
    """Return the order that makes a node end its ranks."""
    return {"do": "stop", "grace_s": grace_s, "stacks": stacks}
