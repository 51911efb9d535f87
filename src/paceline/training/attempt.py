"""One attempt of a gang: start all or none, follow, find who is at fault, end everywhere.

An attempt is ended when a rank fails, a node is lost, or a rank is late in its phase (start, step,
checkpoint). The result names the rank at fault.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import NotReady, WorkerLost
from paceline.training.ports import GangMember, GangResult, Heard, OnLine
from paceline.training.watch import STOPPED_EXIT

if TYPE_CHECKING:
    from paceline.training.gang import Gangs

log = logging.getLogger(__name__)

TICK_S = 0.25
LAUNCH_DEADLINE_S = 30.0  # for a launcher to fork its ranks, all their imports done
END_DEADLINE_S = 15.0
NODE_SILENCE_S = 15.0  # a launcher beats twice a second; one that does not is frozen or cut off
STOPPED_S = 2.0  # a rank in state T for so long is frozen, not looked at by a debugger


@dataclass(eq=False)
class RankState:
    member: GangMember
    state: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None
    order: int = 0  # in which they ended
    killed: bool = False  # by its launcher, after another had failed
    stderr: str = ""
    over: bool = False


@dataclass(frozen=True)
class Fault:
    rank: RankState | None
    what: str
    hung: bool = False


class Attempt:
    """One attempt: from its first order to its last word."""

    def __init__(
        self, gangs: Gangs, ranks: dict[int, RankState], attempt: int, on_event: OnLine | None
    ) -> None:
        self._gangs = gangs
        self._nodes = gangs.nodes
        self._ranks = ranks
        self._attempt = attempt
        self._on_event = on_event
        self._workers = list(dict.fromkeys(each.member.worker_id for each in ranks.values()))
        self._begun: set[str] = set()
        self._over: set[str] = set()
        self._store: tuple[str, int] | None = None
        self._ended = 0
        self._stopping = False

    def start(self, text: str) -> Fault | None:
        """Start all ranks; return why not, where one node could not."""
        ready = self._gangs.prepare(self._workers)
        if away := [each for each in self._workers if each not in ready]:
            self._mark_lost(away[0])
            return Fault(self._first_on(away[0]), "could not be started: its node is away")
        head = self._workers[0]
        host = self._nodes.host(head)
        try:
            self._nodes.tell(head, {"do": "store", "host": host, "job": self._gangs.id})
            self._await(lambda: self._store is not None, "the rendezvous store")
            assert self._store is not None
            for worker in self._workers:
                mine = [each for each in self._ranks.values() if each.member.worker_id == worker]
                self._nodes.tell(worker, self._order(mine, text))
            self._await(lambda: self._begun >= set(self._workers), "its ranks")
        except (WorkerLost, NotReady) as error:
            lost = next((each for each in self._workers if each not in self._gangs.ready), head)
            return Fault(self._first_on(lost), f"could not be started: {error.one_line()}")
        return None

    def follow(self) -> Fault | None:
        """Follow the ranks to their end; return the fault that ended the gang, if one did."""
        stop_at: float | None = None
        while len(self._over) < len(self._workers):
            self._hear(TICK_S)
            if (fault := self._failed()) is not None:
                self._gangs.check_cancel()
                return fault
            cancel = self._gangs.cancel
            cancelled = cancel is not None and cancel.is_set()
            if (cancelled or self._gangs.asked) and not self._stopping:
                self._stopping = True
                grace = self._gangs.grace_s
                stop_at = time.monotonic() + grace + END_DEADLINE_S
                self._tell_all({"do": "stop", "grace_s": grace})
            if stop_at is not None and time.monotonic() > stop_at:
                self._gangs.check_cancel()
                return Fault(None, "did not stop as asked")
            if not self._stopping and (fault := self._late()) is not None:
                return fault
        self._gangs.check_cancel()
        return self._failed()

    def end(self, *, stacks: bool, grace_s: float) -> None:
        """End every rank, and hear their last words; a launcher that is silent is ended too."""
        self._tell_all({"do": "stop", "grace_s": grace_s, "stacks": stacks})
        until = time.monotonic() + END_DEADLINE_S
        while len(self._over) < len(self._workers) and time.monotonic() < until:
            self._hear(TICK_S)
        for worker in self._workers:
            if worker not in self._over:
                log.warning("launcher does not answer worker=%s", worker)
                self._nodes.drop(worker)
                self._gangs.note(Heard(worker, lost="its launcher does not answer"))
                self._mark_lost(worker)

    def blame(self) -> Fault | None:
        """Return the rank that failed first, by all that is known now."""
        return self._failed()

    def result(self, fault: Fault | None) -> GangResult:
        """Return how it ended."""
        codes = {rank: each.code for rank, each in self._ranks.items()}
        stderr = {rank: each.stderr for rank, each in self._ranks.items() if each.stderr}
        lost = frozenset(self._workers) & self._gangs.lost
        if fault is None:
            return GangResult(ok=True, exit_codes=codes, stderr=stderr)
        reason, member = fault.what, None
        if fault.rank is not None:
            member = fault.rank.member
            reason = f"rank {member.rank} on {member.worker_id} {fault.what}"
            words = fault.rank.stderr.strip().rsplit("\n", 1)[-1].strip()[:300]
            if words and not fault.hung:
                reason = f"{reason}: {words}"
        log.warning("gang ended attempt=%d reason=%s", self._attempt, reason)
        return GangResult(
            ok=False,
            exit_codes=codes,
            failed_rank=None if member is None else member.rank,
            failed_worker=None if member is None else member.worker_id,
            reason=reason,
            hung=fault.hung,
            stderr=stderr,
            preempted=frozenset(self._gangs.preempted),
            lost=lost,
        )

    # -- what is heard

    def _order(self, mine: list[RankState], text: str) -> dict[str, Any]:
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
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "PACELINE_ATTEMPT": str(self._attempt),
                "PACELINE_NODE": member.worker_id,
                **member.env,
            }
            ranks.append({"rank": member.rank, "env": env, "spare": member.spare})
            self._gangs.spares.pop(member.spare, None)
        return {
            "do": "start",
            "attempt": self._attempt,
            "ranks": ranks,
            "host": host,
            "port": port,
            "input": text,
        }

    def _hear(self, timeout_s: float) -> None:
        for heard in self._nodes.hear(timeout_s):
            kind = self._gangs.note(heard)
            if heard.worker_id not in self._workers:
                continue
            if kind == "lost":
                self._mark_lost(heard.worker_id)
            else:
                self._take(kind, heard.worker_id, heard.line)

    def _take(self, kind: str, worker: str, line: Mapping[str, Any]) -> None:
        if not kind:
            if self._on_event is not None:
                self._on_event(dict(line))
        elif kind == "store":
            if line.get("port"):
                self._store = (str(line["host"]), int(line["port"]))
            else:
                raise NotReady("no rendezvous store", got=line.get("error"), where=worker)
        elif line.get("attempt") != self._attempt:
            return
        elif kind == "started":
            self._begun.add(worker)
        elif kind == "beat":
            for rank, state in line.get("ranks", {}).items():
                self._ranks[int(rank)].state = state
        elif kind == "ended":
            rank = self._ranks[int(line["rank"])]
            self._ended += 1
            rank.over, rank.order = True, self._ended
            rank.code, rank.killed = line["code"], bool(line.get("killed"))
            rank.stderr = str(line.get("stderr", ""))
        elif kind == "over":
            self._over.add(worker)

    def _mark_lost(self, worker: str) -> None:
        self._over.add(worker)
        for each in self._ranks.values():
            if each.member.worker_id == worker and not each.over:
                self._ended += 1
                each.over, each.order = True, self._ended

    # -- who is at fault

    def _failed(self) -> Fault | None:
        failed = [each for each in self._ranks.values() if each.over and each.code != 0]
        failed = [each for each in failed if not each.killed] or failed
        if not failed or (
            all(each.code == STOPPED_EXIT for each in failed)
            and any(not each.over for each in self._ranks.values())
        ):
            return None  # those that stop as asked end by themselves

        def first(each: RankState) -> tuple[int, int]:
            # A killed rank takes the others down with it: a lost node or a signal comes before an
            # exit code, that before having lost a peer, then the earliest counts.
            violent = each.code is None or each.code < 0
            return (0 if violent else 2 if each.code in (75, STOPPED_EXIT) else 1, each.order)

        guilty = min(failed, key=first)
        if guilty.code is None:
            return Fault(guilty, "was lost with its node")
        if guilty.code < 0:
            return Fault(guilty, f"was killed by signal {-guilty.code}")
        return Fault(guilty, f"exited with {guilty.code}")

    def _late(self) -> Fault | None:
        now = time.monotonic()
        for worker in self._workers:
            silent = now - self._gangs.beaten.get(worker, now)
            if worker not in self._over and silent > NODE_SILENCE_S:
                self._nodes.drop(worker)
                self._gangs.note(Heard(worker, lost="silent"))
                self._mark_lost(worker)
                return Fault(self._first_on(worker), "was lost with its node: it fell silent")
        living = [each for each in self._ranks.values() if not each.over and each.state]
        if not any(self._is_late(each.state) for each in living):
            return None
        # One rank that hangs silences all that wait for it: a stopped one is to blame, then one
        # that does not even beat, then the one that got least far, then the one longest there.
        guilty = max(
            living,
            key=lambda each: (
                bool(each.state["stopped"]),
                each.state["silent_s"] > 3 * TICK_S + 2.0,
                -int(each.state["step"]),
                each.state["since_s"],
            ),
        )
        state = guilty.state
        phase, since = state["phase"], state["since_s"]
        how = " (it is stopped)" if state["stopped"] else ""
        limit = self._gangs.deadlines.of(phase)
        return Fault(
            guilty,
            f"hung in phase {phase!r} at step {state['step']}: nothing for {since:.1f} s of "
            f"{limit:.0f}{how}",
            hung=True,
        )

    def _is_late(self, state: Mapping[str, Any]) -> bool:
        deadline = self._gangs.deadlines.of(state["phase"])
        late = state["running_s"] if state["phase"] == "starting" else state["since_s"]
        frozen = state["stopped"] and state["silent_s"] > min(STOPPED_S, deadline)
        return bool(frozen) or late > deadline or state["silent_s"] > deadline

    def _first_on(self, worker: str) -> RankState:
        return next(each for each in self._ranks.values() if each.member.worker_id == worker)

    def _tell_all(self, order: Mapping[str, Any]) -> None:
        for worker in self._workers:
            if worker not in self._over:
                try:
                    self._nodes.tell(worker, order)
                except WorkerLost as error:
                    self._gangs.note(Heard(worker, lost=error.one_line()))
                    self._mark_lost(worker)

    def _await(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LAUNCH_DEADLINE_S
        while not true():
            self._hear(TICK_S)
            self._gangs.check_cancel()
            if lost := [each for each in self._workers if each not in self._gangs.ready]:
                raise WorkerLost("a node was lost while the gang started", where=lost[0])
            if time.monotonic() > until:
                raise NotReady(f"a launcher did not start {what} in time", wanted=LAUNCH_DEADLINE_S)
