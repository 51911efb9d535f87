"""An attempt of a gang whose first ranks serve the others (parameter server).

The first ``SERVING`` ranks hold the state: the attempt succeeds once one of them exits with 0. It
goes on where one of them is lost, because the other one takes over. Where any other rank is lost,
or the node with the rendezvous store, the leader saves and the attempt ends; the next one resumes
without a lost step.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from typing import TYPE_CHECKING, Any

from paceline.training.launcher.attempt import TICK_S, Attempt, Fault, RankState, describe_rank
from paceline.training.launcher.ports import LineHandler
from paceline.training.loop import STOPPED_EXIT
from paceline.training.parallel import SERVING

if TYPE_CHECKING:
    from paceline.training.launcher.gang import GangSupervisor

log = logging.getLogger(__name__)

LINGER_S = 15.0  # for the other ranks to end by themselves once the job is done
TRY_AGAIN_EXIT = 75
STATE_LOST_EXIT = 76


class ServedAttempt(Attempt):
    """One attempt that survives the loss of one of its servers."""

    def __init__(
        self,
        gangs: GangSupervisor,
        ranks: dict[int, RankState],
        attempt: int,
        on_event: LineHandler | None,
    ) -> None:
        super().__init__(gangs, ranks, attempt, on_event)
        serving = [ranks[each].member.worker_id for each in range(SERVING) if each in ranks]
        # The first node hosts the rendezvous store. Prefer one without a state-holding rank, so
        # that one node's loss does not cost both; else the standby's node, not the leader's.
        self._workers.sort(key=lambda each: (each in serving, each in serving[:1]))
        self._key = secrets.token_hex(16)
        self._fault: Fault | None = None  # for which the ranks are asked to save and stop

    def follow(self) -> Fault | None:
        """Monitor the ranks until the job is done; return the fault that ended it, if any."""
        self._last_check = time.monotonic()
        while self._running_nodes():
            self._receive_messages(TICK_S)
            self._drop_silent_node()
            if self._done():
                self._linger()
                return None
            if self._sent_grace_s is None:
                self._fault = self._loss()
                if self._fault is not None and not any(self._serves()):
                    self._check_cancel()
                    return self._fault
                if self._fault is not None:
                    log.warning("ranks save and stop: %s", self._fault.what)
                    self._gangs.request_stop(self._fault.what)
            if (fault := self._stop_ranks()) is not None:
                self._check_cancel()
                return self._fault or fault
        self._check_cancel()
        if self._done():
            return None
        return (
            self._fault
            or self._find_failed_rank()
            or Fault(None, "every rank ended before the job did")
        )

    def first_failure(self) -> Fault | None:
        """Return None: the fault is determined before the other ranks are ended."""
        return None

    def _serves(self) -> list[RankState]:
        """Return the living ranks that hold the state."""
        found = (self._ranks.get(rank) for rank in range(SERVING))
        return [each for each in found if each is not None and not each.has_ended]

    def _loss(self) -> Fault | None:
        """Return the loss that ends the attempt; remove a lost server whose peer lives."""
        if self._store_lost:
            lost = next(iter(self._ranks_on(self._workers[0])), None)
            how = self._store_error or (self._describe_exit(lost) if lost is not None else "")
            return Fault(lost, f"{how}; the gang's store lay there")
        serving = self._serves()
        for rank, each in list(self._ranks.items()):
            if not each.has_ended:
                if each.state and self._is_late(each.state):
                    if rank >= SERVING or len(serving) < SERVING:
                        return self._hang_fault(each)
                    log.warning("server is killed: %s", self._hang_fault(each).what)
                    order = {"do": "signal", "rank": rank, "number": int(signal.SIGKILL)}
                    self._send_orders({each.member.worker_id: order})
            elif each.code not in (0, STOPPED_EXIT):
                replaceable = each.code is None or each.code < 0 or each.code == TRY_AGAIN_EXIT
                if rank >= SERVING or not replaceable or not serving:
                    end = "" if serving else "; no rank is left that holds the state"
                    return Fault(each, self._describe_exit(each) + end)
                how = describe_rank(each, self._describe_exit(each))
                log.warning("server is lost, the other one goes on: %s", how)
                del self._ranks[rank]
        return None

    def _start_order(self, mine: list[RankState], text: str) -> dict[str, Any]:
        order = super()._start_order(mine, text)
        for each in order["ranks"]:
            each["env"]["PACELINE_GANG_KEY"] = self._key
        return order | {"loose": True}

    def _done(self) -> bool:
        found = (self._ranks.get(rank) for rank in range(SERVING))
        return any(each is not None and each.has_ended and each.code == 0 for each in found)

    def _linger(self) -> None:
        """After the job is done: wait for the other ranks, then end the remaining ones."""
        until = time.monotonic() + LINGER_S
        while self._running_nodes() and time.monotonic() < until:
            self._receive_messages(TICK_S)
        if self._running_nodes():
            self.end(stacks=False, grace_s=0.0)

    @property
    def _store_lost(self) -> bool:
        return self._workers[0] in self._gangs.lost or bool(self._store_error)
