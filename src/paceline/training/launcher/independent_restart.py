"""An attempt whose ranks may fall one by one: each is started again, elsewhere if need be.

For jobs whose ranks outlive each other (a parameter server). Ranks 0 to ``keepers`` - 1 hold the
state: the attempt ends where all of them are gone, or one says that the state is lost; one that was
started again holds it once it says so (``holds_state`` of an event "started"). Whoever else falls
is started again or left out, as ``Keeper`` says, and nobody waits for it. Where the node with the
gang's store is lost, the attempt is stopped, so that who leads can save. It is done once a rank
that holds the state ended well. Knows nothing of training.
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
from paceline.training.launcher.ports import GangMember, GangResult, OnLine
from paceline.training.loop.rank_process import STOPPED_EXIT

if TYPE_CHECKING:
    from paceline.training.launcher.gang import Gangs

log = logging.getLogger(__name__)

STACKS_S = 0.5  # for a late rank to write where it is, before it is killed
KILL_AGAIN_S = 2.0
LINGER_S = 15.0  # for the others to end by themselves, once the job is done
TRY_AGAIN_EXIT = 75
STATE_LOST_EXIT = 76

Kind = Literal["failed", "hung", "lost", "preempted"]


@dataclass(frozen=True, kw_only=True)
class Fell:
    """A rank that ended before the job did."""

    member: GangMember
    kind: Kind
    reason: str
    stderr: str = ""


class Keeper(Protocol):
    """Says what becomes of ranks that fall."""

    @property
    def keepers(self) -> int:
        """Return how many ranks, from 0, hold the state."""

    def replace(self, fell: Fell, living: Mapping[int, str]) -> GangMember | None:
        """Return where the rank starts again, None to leave it out; ``living``: rank → node."""


class LooseAttempt(Attempt):
    """One attempt of a loose gang."""

    def __init__(
        self,
        gangs: Gangs,
        ranks: dict[int, RankState],
        attempt: int,
        on_event: OnLine | None,
        keeper: Keeper,
    ) -> None:
        super().__init__(gangs, ranks, attempt, on_event)
        self._keeper = keeper
        serving = [ranks[each].member.worker_id for each in range(keeper.keepers) if each in ranks]
        # The first node has the gang's store. One node's loss is not to cost both the store and a
        # server, as long as there are others; and rather the one that stands by than who leads.
        self._workers.sort(key=lambda each: (each in serving, each in serving[:1]))
        self._text = ""
        self._key = secrets.token_hex(16)
        self._local: dict[int, int] = {}  # rank → its number among those of its node
        self._out: set[int] = set()  # left out for good
        self._holding = set(range(keeper.keepers))  # ranks that hold the state, as far as they live
        self._told_lost: set[str] = set()  # nodes that the keeper knows to be lost
        self._kill_at: dict[int, float] = {}  # late ranks,
        self._why_late: dict[int, str] = {}  # as they were found

    def start(self, text: str) -> Fault | None:
        """Start all ranks; see ``Attempt``. Until they run, the gang is like any other."""
        self._text = text
        return super().start(text)

    def follow(self) -> Fault | None:
        """Follow the ranks to the end of the job; return what ended it before, if anything did."""
        stop_at: float | None = None
        self._looked_at = time.monotonic()
        while any(not each.over for each in self._ranks.values()):
            self._hear(TICK_S)
            self._lose_silent()
            if self._done():
                self._linger()
                return None
            if self._stopping is None and self._storeless:
                # Nobody can join or take over any more. Who leads saves, and all start again.
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
        """Return nobody: who is at fault was known before the others were ended."""
        return None

    def result(self, fault: Fault | None) -> GangResult:
        """Return how it ended; what the keeper was told on the way is not told again."""
        for rank in self._out:
            self._ranks[rank].code = None  # no exit code of the attempt's
        found = super().result(fault)
        return dataclasses.replace(found, lost=found.lost - self._told_lost)

    # -- ranks that fall

    def _settle(self) -> Fault | None:
        """Start fallen ranks again, or leave them out; return what the gang cannot go on after."""
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
        fell = Fell(member=member, kind=kind, reason=reason, stderr=fallen.stderr)
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
        self._holding.discard(member.rank)  # until it says that it does
        self._over.discard(worker)
        # A node that takes no order is lost, and this rank with it: it falls again.
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

    # -- the end

    def _done(self) -> bool:
        keepers = (self._ranks[rank] for rank in range(self._keeper.keepers))
        return any(each.over and each.code == 0 for each in keepers)

    def _linger(self) -> None:
        """The job is done: let the others end, and end who does not."""
        until = time.monotonic() + LINGER_S
        while self._busy() and time.monotonic() < until:
            self._hear(TICK_S)
        if self._busy():
            self.end(stacks=False, grace_s=0.0)

    def _stopped(self) -> Fault | None:
        """Return the fault of a gang that was asked to stop: the first that saved, or fell."""
        if self._storeless and (there := self._on(self._workers[0])):
            how = self._store_error or self._how(there[0])
            return Fault(there[0], f"{how}; the gang's store lay there")
        ended = [each for each in self._ranks.values() if each.code not in (0, None)]
        ended.sort(key=lambda each: (each.code != STOPPED_EXIT, each.order))
        return Fault(ended[0], self._how(ended[0])) if ended else Fault(None, "was lost")

    def _grace(self) -> float | None:
        """Return how long ranks may take to stop; one node's notice is no reason for the others."""
        gangs = self._gangs
        wanted = []
        if gangs.cancel is not None and gangs.cancel.is_set():
            wanted.append(gangs.grace_s)
        if gangs.asked:
            wanted.append(gangs.deadlines.checkpoint_s)
        return min(wanted, default=None)

    def _take(self, kind: str, worker: str, line: Mapping[str, Any]) -> None:
        if kind == "over" and any(not each.over for each in self._on(worker)):
            return  # said before a rank was started there again
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
