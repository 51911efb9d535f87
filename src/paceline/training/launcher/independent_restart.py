"""Independent restart: an attempt whose ranks restart one by one while the others continue.

For jobs whose ranks survive each other (parameter server). Ranks 0 to ``keepers`` - 1 hold the
state: the attempt ends where all of them are gone, or one reports that the state is lost; a
restarted one holds the state once its "started" event has ``holds_state``. The restart policy
restarts other ranks or leaves them out, and the gang does not wait for them. Where the node with
the rendezvous store is lost, the attempt stops, so that the leader can save. The attempt succeeds
once a state-holding rank exits with 0. Does not depend on training code.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.training.launcher.attempt import TICK_S, Attempt, Fault, RankState, stop_order
from paceline.training.launcher.ports import GangMember, GangResult, LineHandler
from paceline.training.loop.rank_process import STOPPED_EXIT

if TYPE_CHECKING:
    from paceline.training.launcher.gang import GangSupervisor

log = logging.getLogger(__name__)

STACKS_S = 0.5  # for a late rank to dump its stacks before it is killed
KILL_AGAIN_S = 2.0
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


class RestartPolicy(Protocol):
    """Decides whether and where a rank restarts after it ended early."""

    @property
    def keepers(self) -> int:
        """Return the number of ranks, counted from 0, that hold the state."""

    def replace(self, fell: RankExit, living: Mapping[int, str]) -> GangMember | None:
        """Return where the rank restarts, None to leave it out; ``living``: rank → node."""


class IndependentAttempt(Attempt):
    """One attempt with independent restart of its ranks."""

    def __init__(
        self,
        gangs: GangSupervisor,
        ranks: dict[int, RankState],
        attempt: int,
        on_event: LineHandler | None,
        keeper: RestartPolicy,
    ) -> None:
        super().__init__(gangs, ranks, attempt, on_event)
        self._keeper = keeper
        serving = [ranks[each].member.worker_id for each in range(keeper.keepers) if each in ranks]
        # The first node hosts the rendezvous store. Prefer one without a state-holding rank, so
        # that one node's loss does not cost both; else the standby's node, not the leader's.
        self._workers.sort(key=lambda each: (each in serving, each in serving[:1]))
        self._text = ""
        self._key = secrets.token_hex(16)
        self._local: dict[int, int] = {}  # rank → its local rank on its node
        self._out: set[int] = set()  # ranks left out for good
        self._holding = set(range(keeper.keepers))  # ranks that hold the state while they run
        self._told_lost: set[str] = set()  # lost nodes already reported to the policy
        self._kill_at: dict[int, float] = {}  # late rank → when it is killed
        self._why_late: dict[int, str] = {}  # late rank → description of its hang

    def start(self, text: str) -> Fault | None:
        """Start all ranks or none, like ``Attempt``; independent restart begins afterwards."""
        self._text = text
        return super().start(text)

    def follow(self) -> Fault | None:
        """Monitor the ranks until the job is done; return the fault that ended it early, if any."""
        stop_at: float | None = None
        self._looked_at = time.monotonic()
        while any(not each.over for each in self._ranks.values()):
            self._hear(TICK_S)
            self._lose_silent()
            if self._done():
                self._linger()
                return None
            if self._stopping is None and self._storeless:
                # Without the store no rank can join or take over: the leader saves, all restart.
                log.warning("gang's store was lost node=%s", self._workers[0])
                self._gangs.stop_soon("the gang's store was lost with its node")
            elif self._stopping is None:
                if (fault := self._settle()) is not None:
                    self._check_cancel()
                    return fault
                self._end_late()
            grace = self._grace()
            if grace is not None and (self._stopping is None or grace < self._stopping):
                self._stopping = grace
                stop_at = time.monotonic() + grace + self._patience()
                self._tell({each: stop_order(grace) for each in self._busy()})
            if stop_at is not None and time.monotonic() > stop_at:
                self._check_cancel()
                return Fault(None, "did not stop as asked", overdue=True)
        self._check_cancel()
        if self._done():
            return None
        if self._stopping is not None:
            return self._stopped()
        return self._settle() or Fault(None, "every rank ended before the job did")

    def blame(self) -> Fault | None:
        """Return None: the fault is determined before the other ranks are ended."""
        return None

    def result(self, fault: Fault | None) -> GangResult:
        """Return the attempt's result, without lost nodes that the policy already counted."""
        for rank in self._out:
            self._ranks[rank].code = None  # its exit code is not the attempt's
        found = super().result(fault)
        return dataclasses.replace(found, lost=found.lost - self._told_lost)

    # -- rank exits

    def _settle(self) -> Fault | None:
        """Restart ended ranks or leave them out; return a fault that ends the whole gang."""
        fallen = [
            each
            for rank, each in self._ranks.items()
            if each.over and each.code != 0 and rank not in self._out
        ]
        for each in fallen:
            code = each.code
            if code == STATE_LOST_EXIT:
                return Fault(each, "found nobody who holds the state")
            if code is not None and code > 0 and code not in (TRY_AGAIN_EXIT, STOPPED_EXIT):
                return Fault(each, f"exited with {code}")
        if fallen and all(self._ranks[rank].over for rank in self._holding):
            return Fault(fallen[0], f"{self._how(fallen[0])}; nobody is left who holds the state")
        for each in fallen:
            self._replace(each)
        others = range(self._keeper.keepers, len(self._ranks))
        if fallen and others and self._none_left(others):
            return Fault(fallen[0], f"{self._how(fallen[0])}; nobody is left to work")
        return None

    def _replace(self, fallen: RankState) -> None:
        member = fallen.member
        kind: Kind = "failed"
        if self._kill_at.pop(member.rank, None) is not None:
            kind = "hung"
        elif member.worker_id in self._gangs.preempted or fallen.code == STOPPED_EXIT:
            kind = "preempted"
        elif fallen.code is None:
            kind = "lost"
        living = {r: e.member.worker_id for r, e in self._ranks.items() if not e.over}
        how = self._why_late.pop(member.rank, "") or self._how(fallen)
        reason = f"rank {member.rank} on {member.worker_id} {how}"
        if kind == "lost":
            self._told_lost.add(member.worker_id)
        fell = RankExit(member=member, kind=kind, reason=reason, stderr=fallen.stderr)
        again = self._keeper.replace(fell, living)
        log.warning("rank fell: %s; again on %s", reason, again.worker_id if again else "no node")
        if again is None:
            self._out.add(member.rank)
            return
        self._start_again(again)

    def _start_again(self, member: GangMember) -> None:
        worker = member.worker_id
        if worker not in self._workers:
            self._workers.append(worker)
        if self._ranks[member.rank].member.worker_id != worker:
            self._local.pop(member.rank, None)
        self._ranks[member.rank] = again = RankState(member)
        self._holding.discard(member.rank)  # until it reports ``holds_state``
        self._over.discard(worker)
        # A node that takes no order is lost, which is another exit of this rank.
        self._tell({worker: self._order([again], self._text)})

    def _order(self, mine: list[RankState], text: str) -> dict[str, Any]:
        order = super()._order(mine, text)
        for each in order["ranks"]:
            rank = each["rank"]
            worker = self._ranks[rank].member.worker_id
            each["env"] |= {
                "LOCAL_RANK": str(self._local_of(rank, worker)),
                "PACELINE_GANG_KEY": self._key,
            }
        return order | {"loose": True}

    def _local_of(self, rank: int, worker: str) -> int:
        if rank not in self._local:
            taken = {
                self._local[each.member.rank]
                for each in self._on(worker)
                if each.member.rank in self._local
            }
            self._local[rank] = next(n for n in range(len(taken) + 1) if n not in taken)
        return self._local[rank]

    def _end_late(self) -> None:
        now = time.monotonic()
        for rank, each in self._ranks.items():
            if each.over or not each.state:
                continue
            if rank not in self._kill_at:
                if self._is_late(each.state):
                    self._why_late[rank] = self._hung(each).what
                    log.warning("rank %d %s", rank, self._why_late[rank])
                    self._kill_at[rank] = now + STACKS_S
                    self._signal(each, signal.SIGUSR1)
            elif now >= self._kill_at[rank]:
                self._kill_at[rank] = now + KILL_AGAIN_S
                self._signal(each, signal.SIGKILL)

    def _signal(self, rank: RankState, number: signal.Signals) -> None:
        member = rank.member
        self._tell({member.worker_id: {"do": "signal", "rank": member.rank, "number": int(number)}})

    # -- end of the attempt

    def _done(self) -> bool:
        keepers = (self._ranks[rank] for rank in range(self._keeper.keepers))
        return any(each.over and each.code == 0 for each in keepers)

    def _linger(self) -> None:
        """After the job is done: wait for the other ranks, then end the remaining ones."""
        until = time.monotonic() + LINGER_S
        while self._busy() and time.monotonic() < until:
            self._hear(TICK_S)
        if self._busy():
            self.end(stacks=False, grace_s=0.0)

    def _stopped(self) -> Fault | None:
        """Return the fault of a gang stopped on request: the first rank that saved, or ended."""
        if self._storeless and (there := self._on(self._workers[0])):
            how = self._store_error or self._how(there[0])
            return Fault(there[0], f"{how}; the gang's store lay there")
        ended = [each for each in self._ranks.values() if each.code not in (0, None)]
        ended.sort(key=lambda each: (each.code != STOPPED_EXIT, each.order))
        return Fault(ended[0], self._how(ended[0])) if ended else Fault(None, "was lost")

    def _grace(self) -> float | None:
        """Return the seconds that ranks have to stop; a preemption notice stops no other rank."""
        gangs = self._gangs
        wanted = []
        if gangs.cancel is not None and gangs.cancel.is_set():
            wanted.append(gangs.grace_s)
        if gangs.asked:
            wanted.append(gangs.deadlines.checkpoint_s)
        return min(wanted, default=None)

    def _take(self, kind: str, worker: str, line: Mapping[str, Any]) -> None:
        if kind == "over" and any(not each.over for each in self._on(worker)):
            return  # sent before a rank was restarted there
        if not kind and line.get("event") == "started" and line["data"].get("holds_state"):
            self._holding.add(int(line["rank"]))
        super()._take(kind, worker, line)

    @property
    def _storeless(self) -> bool:
        return self._workers[0] in self._gangs.lost or bool(self._store_error)

    def _busy(self) -> list[str]:
        return [each for each in self._workers if any(not r.over for r in self._on(each))]

    def _none_left(self, ranks: range) -> bool:
        return all(self._ranks[rank].over for rank in ranks)

    def _how(self, fallen: RankState) -> str:
        if fallen.code is None:
            why = self._gangs.why_lost.get(fallen.member.worker_id, "")
            return "was lost with its node" + (f": {why}" if why else "")
        words = fallen.stderr.strip().rsplit("\n", 1)[-1].strip()[:300]
        how = f"exited with {fallen.code}"
        if fallen.code < 0:
            how = f"was killed by signal {-fallen.code}"
        return f"{how}: {words}" if words else how
