"""Where a rank of a loose gang starts again: what the driver decides about each that falls.

Its own node first, then the one with the fewest ranks; the two that hold the state on two nodes
where there are two. A rank that falls more often than ``guard.max_restarts`` is left out. Knows no
processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from paceline.training.account import Account
from paceline.training.loose import Fell
from paceline.training.ports import GangMember
from paceline.training.relaxed import SERVING
from paceline.training.roster import Roster


class Waiting(Protocol):
    """What is needed of ``Gangs``: which nodes are ready, and the spares there."""

    ready: set[str]
    spares: dict[str, str]


class Replacing:
    """The ``Keeper`` of one attempt of a job."""

    keepers = SERVING

    def __init__(
        self,
        roster: Roster,
        account: Account,
        gangs: Waiting,
        environment: Callable[[str], Mapping[str, str]],
        most: int,
        keep_stacks: Callable[[Fell], object] = lambda _fell: None,
    ) -> None:
        """``most``: times that one rank is started again; ``environment``: its, on a node."""
        self._roster, self._account, self._gangs = roster, account, gangs
        self._environment, self._most, self._keep_stacks = environment, most, keep_stacks
        self._times: Counter[int] = Counter()

    def replace(self, fell: Fell, living: Mapping[int, str]) -> GangMember | None:
        """Note the fall; return where the rank starts again, None to leave it out."""
        now, member = time.monotonic(), fell.member
        self._account.fell(member.rank, member.worker_id, fell.kind, fell.reason, now)
        if fell.kind == "hung":
            self._keep_stacks(fell)
        if fell.kind == "preempted":
            self._roster.taken_away(member.worker_id)
        else:
            self._times[member.rank] += 1
            if member.worker_id not in self._roster.away:  # a node is lost once, with all its ranks
                self._roster.failed(member.worker_id, lost=fell.kind == "lost", now=now)
        if self._times[member.rank] > self._most:
            return None
        ready = [each for each in self._roster.good if each in self._gangs.ready]
        if not ready:
            return None
        worker, spare = place(member, ready, living, self._gangs.spares)
        return GangMember(worker, member.rank, dict(self._environment(worker)), spare)


def place(
    member: GangMember,
    ready: list[str],
    living: Mapping[int, str],
    spares: Mapping[str, str],
) -> tuple[str, str]:
    """Return node and spare for a rank that fell; ``ready`` are the nodes there are, never none."""
    apart = ready
    if member.rank < SERVING:
        others = {living[rank] for rank in range(SERVING) if rank in living}
        apart = [each for each in ready if each not in others] or ready
    waiting = [(name, at) for name, at in sorted(spares.items()) if at in apart]
    if waiting:
        name, at = next((each for each in waiting if each[1] == member.worker_id), waiting[0])
        return at, name
    if member.worker_id in apart:
        return member.worker_id, ""
    load = Counter(living.values())
    return min(apart, key=lambda each: (load[each], ready.index(each))), ""
