"""Chooses which running gangs are preempted so that one waiting gang fits.

It knows no queue and no quotas: ``admission`` passes the running gangs that may be preempted, and a
test whether a set of them is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from paceline.jobs.placement import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A gang that holds slots."""

    gang: Gang
    hosts: Mapping[str, int]  # host → ranks
    lost_work_s: float = 0.0  # what a preemption now would lose: seconds that all ranks do again
    preemptible: bool = True
    ending: bool = False  # it was asked to save and leave; its slots become free soon


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running gang that may be preempted."""

    reservation: Reservation
    borrowing: bool  # its team holds more than its quota without it

    @property
    def lost_slot_s(self) -> float:
        """Return the work that a preemption loses, of all ranks."""
        return self.reservation.lost_work_s * self.reservation.gang.ranks

    @property
    def order(self) -> tuple[int, float, bool, str]:
        """Return the key by which gangs are preempted: the first one first."""
        running = self.reservation
        return (
            running.gang.priority,
            self.lost_slot_s,
            not self.borrowing,
            running.gang.job_id,
        )


Enough = Callable[[Sequence[Candidate]], bool]
Cost = tuple[int, float, int, int, tuple[str, ...]]


def cost(victims: Collection[Candidate]) -> Cost:
    """Return what two sets of victims are compared by; the lower one is preempted.

    The highest priority in it, the work lost, how many are within their quota, how many there are.
    """
    return (
        max(victim.reservation.gang.priority for victim in victims),
        sum(victim.lost_slot_s for victim in victims),
        sum(not victim.borrowing for victim in victims),
        len(victims),
        tuple(sorted(victim.reservation.gang.job_id for victim in victims)),
    )


def choose_victims(
    candidates: Sequence[Candidate], gain: Callable[[Candidate], int], enough: Enough
) -> list[Candidate] | None:
    """Return a set that is ``enough`` and none of whose members can be left out, or None.

    ``enough`` is monotone: what is enough stays so with one more. Two greedy searches are compared
    by ``cost``: in the order of preemption, and the largest ``gain`` first among the priorities
    that the first search needed. The cheapest set of all is a knapsack problem, and is not sought.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.order)
    if not ordered or not enough(ordered):
        return None
    first = _pruned(ordered, enough)
    highest = first[-1].reservation.gang.priority
    lower = takewhile(lambda each: each.reservation.gang.priority <= highest, ordered)
    by_gain = sorted(lower, key=lambda each: -gain(each))  # stable: equal gains keep the order
    return min(first, _pruned(by_gain, enough), key=cost)


def _pruned(ordered: Sequence[Candidate], enough: Enough) -> list[Candidate]:
    """Return the shortest prefix that is enough, without the members that it does not need."""
    size = bisect_left(range(len(ordered) + 1), True, key=lambda size: enough(ordered[:size]))
    taken = sorted(ordered[:size], key=lambda candidate: candidate.order)
    for victim in reversed(taken):
        rest = [each for each in taken if each is not victim]
        if enough(rest):
            taken = rest
    return taken
