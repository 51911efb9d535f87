"""Independent restart: an attempt whose ranks restart one by one while the others continue.

For jobs whose ranks survive each other (parameter server). The first ``SERVING`` ranks hold the
state: the attempt succeeds once one of them exits with 0, and ends where all are gone or one
reports that the state is lost. Any other rank that ends is started again where
``RestartPlacement`` puts it. Where the node with the rendezvous store is lost, the attempt stops,
so that the leader can save.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.training.launcher.attempt import TICK_S, Attempt, Fault, RankState, describe_rank
from paceline.training.launcher.placement import NodePool
from paceline.training.launcher.ports import GangMember, GangResult, LineHandler
from paceline.training.loop import STOPPED_EXIT
from paceline.training.strategies import SERVING

if TYPE_CHECKING:
    from paceline.training.launcher.gang import GangSupervisor

log = logging.getLogger(__name__)

STACKS_S = 0.5  # for a late rank to dump its stacks before it is killed
LINGER_S = 15.0  # for the other ranks to end by themselves once the job is done
TRY_AGAIN_EXIT = 75
STATE_LOST_EXIT = 76

Kind = Literal["failed", "hung", "lost", "preempted"]


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """A rank that ended before the job did."""

    member: GangMember
    kind: Kind
    reason: str
    stderr: str = ""


@dataclass
class RestartPlacement:
    """Where a rank of one attempt starts again after it ended early.

    In a waiting spare, else on its own node, else on the one with the fewest ranks; the ranks that
    hold the state are on different nodes where possible.
    """

    pool: NodePool
    environment: Callable[[str], Mapping[str, str]]  # of a rank on a node
    max_restarts: int  # of each rank, without preemptions
    on_exit: Callable[[RankExit], None]
    _exits: Counter[int] = dataclasses.field(default_factory=Counter)

    def replace(
        self, ended: RankExit, living: Mapping[int, str], ready: set[str], spares: Mapping[str, str]
    ) -> GangMember | None:
        """Record the exit; return where the rank starts again, None where it cannot.

        ``living``: rank → node; ``ready``: nodes with a launcher; ``spares``: name → node.
        """
        rank, worker = ended.member.rank, ended.member.worker_id
        if ended.kind != "preempted" and self._exits[rank] >= self.max_restarts:
            return None  # the attempt fails with it
        self.on_exit(ended)
        if ended.kind == "preempted":
            self.pool.preempted_node(worker)
        else:
            self._exits[rank] += 1
            if worker not in self.pool.away:  # count a lost node once, not per rank
                self.pool.failed(worker, lost=ended.kind == "lost", now=time.monotonic())
        usable = [each for each in self.pool.good if each in ready]
        if not usable:
            return None
        if rank < SERVING:
            others = {living[each] for each in range(SERVING) if each in living}
            usable = [each for each in usable if each not in others] or usable
        waiting = [(at != worker, name, at) for name, at in sorted(spares.items()) if at in usable]
        if waiting:
            _, spare, node = min(waiting)
        else:
            load, spare = Counter(living.values()), ""
            node = min(usable, key=lambda each: (each != worker, load[each], usable.index(each)))
        return GangMember(node, rank, dict(self.environment(node)), spare)


class IndependentAttempt(Attempt):
    """One attempt with independent restart of its ranks."""

    def __init__(
        self,
        gangs: GangSupervisor,
        ranks: dict[int, RankState],
        attempt: int,
        on_event: LineHandler | None,
        placement: RestartPlacement,
    ) -> None:
        super().__init__(gangs, ranks, attempt, on_event)
        self._placement = placement
        serving = [ranks[each].member.worker_id for each in range(SERVING) if each in ranks]
        # The first node hosts the rendezvous store. Prefer one without a state-holding rank, so
        # that one node's loss does not cost both; else the standby's node, not the leader's.
        self._workers.sort(key=lambda each: (each in serving, each in serving[:1]))
        self._text = ""
        self._key = secrets.token_hex(16)
        self._counted_lost: set[str] = set()  # lost nodes that the placement counted
        self._late_ranks: dict[int, tuple[float, str]] = {}  # rank → when to kill it, its hang

    def start(self, text: str) -> Fault | None:
        """Start all ranks or none, like ``Attempt``; independent restart begins afterwards."""
        self._text = text
        return super().start(text)

    def follow(self) -> Fault | None:
        """Monitor the ranks until the job is done; return the fault that ended it early, if any."""
        self._looked_at = time.monotonic()
        while self._busy():
            self._hear(TICK_S)
            self._drop_silent_node()
            if self._done():
                self._linger()
                return None
            if self._stopping is None and self._store_lost:
                # Without the store no rank can join or take over: the leader saves, all restart.
                log.warning("gang's store was lost node=%s", self._workers[0])
                self._gangs.request_stop("the gang's store was lost with its node")
            elif self._stopping is None:
                if (fault := self._restart_ended()) is not None:
                    self._check_cancel()
                    return fault
                self._kill_late()
            if (fault := self._stop_ranks()) is not None:
                self._check_cancel()
                return fault
        self._check_cancel()
        if self._done():
            return None
        if self._stopping is not None:
            return self._stopped()
        return self._restart_ended() or Fault(None, "every rank ended before the job did")

    def first_failure(self) -> Fault | None:
        """Return None: the fault is determined before the other ranks are ended."""
        return None

    def result(self, fault: Fault | None) -> GangResult:
        """Return the attempt's result, without lost nodes that were already counted."""
        found = super().result(fault)
        return dataclasses.replace(found, lost=found.lost - self._counted_lost)

    # -- rank exits

    def _restart_ended(self) -> Fault | None:
        """Restart ended ranks; return a fault that ends the whole gang."""
        ended = [each for each in self._ranks.values() if each.over and each.code != 0]
        for each in ended:
            if each.code == STATE_LOST_EXIT:
                return Fault(each, "found no rank that holds the state")
            violent = each.code is None or each.code < 0
            if not violent and each.code not in (TRY_AGAIN_EXIT, STOPPED_EXIT):
                return Fault(each, f"exited with {each.code}")
        if ended and all(self._ranks[rank].over for rank in range(SERVING)):
            how = self._describe_exit(ended[0])
            return Fault(ended[0], f"{how}; no rank is left that holds the state")
        for each in ended:
            if not self._replace(each):
                return Fault(each, f"{self._describe_exit(each)}; it is not started again")
        return None

    def _replace(self, ended: RankState) -> bool:
        member = ended.member
        kind: Kind = "failed"
        hang = self._late_ranks.pop(member.rank, None)
        if hang is not None:
            kind = "hung"
        elif member.worker_id in self._gangs.preempted or ended.code == STOPPED_EXIT:
            kind = "preempted"
        elif ended.code is None:
            kind = "lost"
            self._counted_lost.add(member.worker_id)
        living = {r: e.member.worker_id for r, e in self._ranks.items() if not e.over}
        if hang is not None:
            reason = describe_rank(ended, hang[1], hung=True)
        else:
            reason = describe_rank(ended, self._describe_exit(ended))
        found = RankExit(member=member, kind=kind, reason=reason, stderr=ended.stderr)
        again = self._placement.replace(found, living, self._gangs.ready, self._gangs.spares)
        log.warning("rank ended: %s; again on %s", reason, again and again.worker_id)
        if again is None:
            return False
        worker = again.worker_id
        if worker not in self._workers:
            self._workers.append(worker)
        self._ranks[again.rank] = RankState(again)
        self._over.discard(worker)
        # A node that takes no order is lost, which is another exit of this rank.
        self._tell({worker: self._order(self._on(worker), self._text, only=again.rank)})
        return True

    def _order(self, mine: list[RankState], text: str, only: int | None = None) -> dict[str, Any]:
        order = super()._order(mine, text)
        ranks = [each for each in order["ranks"] if only in (None, each["rank"])]
        for each in ranks:
            each["env"]["PACELINE_GANG_KEY"] = self._key
        return order | {"ranks": ranks, "loose": True}

    def _kill_late(self) -> None:
        """Have late ranks dump their stacks, and kill them after ``STACKS_S``."""
        now = time.monotonic()
        for rank, each in self._ranks.items():
            if each.over or not each.state:
                continue
            if rank not in self._late_ranks and self._is_late(each.state):
                self._late_ranks[rank] = now + STACKS_S, self._hung(each).what
                log.warning("rank %d %s", rank, self._late_ranks[rank][1])
                self._signal(each, signal.SIGUSR1)
            elif rank in self._late_ranks and now >= self._late_ranks[rank][0]:
                self._signal(each, signal.SIGKILL)

    def _signal(self, rank: RankState, number: signal.Signals) -> None:
        member = rank.member
        self._tell({member.worker_id: {"do": "signal", "rank": member.rank, "number": int(number)}})

    # -- end of the attempt

    def _done(self) -> bool:
        return any(
            self._ranks[rank].over and self._ranks[rank].code == 0 for rank in range(SERVING)
        )

    def _linger(self) -> None:
        """After the job is done: wait for the other ranks, then end the remaining ones."""
        until = time.monotonic() + LINGER_S
        while self._busy() and time.monotonic() < until:
            self._hear(TICK_S)
        if self._busy():
            self.end(stacks=False, grace_s=0.0)

    def _stopped(self) -> Fault | None:
        """Return the fault of a gang stopped on request: the first rank that saved, or ended."""
        if self._store_lost and (there := self._on(self._workers[0])):
            how = self._store_error or self._describe_exit(there[0])
            return Fault(there[0], f"{how}; the gang's store lay there")
        ended = [each for each in self._ranks.values() if each.code not in (0, None)]
        ended.sort(key=lambda each: (each.code != STOPPED_EXIT, each.order))
        return Fault(ended[0], self._describe_exit(ended[0])) if ended else Fault(None, "was lost")

    def _stops_with_one(self) -> bool:
        return False  # a preempted node's ranks move, the others go on

    def _take(self, kind: str, worker: str, line: Mapping[str, Any]) -> None:
        if kind == "over" and any(not each.over for each in self._on(worker)):
            return  # sent before a rank was restarted there
        super()._take(kind, worker, line)

    @property
    def _store_lost(self) -> bool:
        return self._workers[0] in self._gangs.lost or bool(self._store_error)
