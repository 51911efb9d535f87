"""Chooses which running gangs are preempted so that one waiting gang fits.

It knows no queue and no quotas: ``admission`` passes the running gangs that may be preempted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.jobs.placement import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A gang that holds its hosts."""

    gang: Gang
    hosts: Mapping[str, int]  # host → ranks
    lost_work_s: float = 0.0  # what a preemption now would lose: seconds that all ranks do again
    preemptible: bool = True
    ending: bool = False  # it was asked to save and leave; its hosts become free soon


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running gang that may be preempted, and what its end gives to the waiting one."""

    running: Reservation
    covered: bool  # by its team's quota
    gain: int  # ranks of the waiting gang that its hosts hold
    release: int  # slots of the waiting gang's team

    @property
    def lost_slot_s(self) -> float:
        """Return the work that a preemption loses, of all ranks."""
        return self.running.lost_work_s * self.running.gang.ranks


def cost(victims: Sequence[Candidate]) -> tuple[object, ...]:
    """Return what sets of victims are compared by: the highest priority, the work lost, ..."""
    return (
        max(victim.running.gang.priority for victim in victims),
        sum(victim.lost_slot_s for victim in victims),
        sum(victim.covered for victim in victims),
        len(victims),
        sorted(victim.running.gang.job_id for victim in victims),
    )


def choose_victims(
    candidates: Iterable[Candidate], need: int, release: float
) -> list[Candidate] | None:
    """Return a set that gains ``need`` and releases ``release``, each member needed, or None.

    Taken in this order: the lowest priority, the least work lost, those that borrow, the fewest,
    the tightest. The cheapest set of all is a knapsack problem, and is not sought.
    """

    def order(each: Candidate) -> tuple[object, ...]:
        gang = each.running.gang
        useful = (-min(each.gain, need), each.gain)
        return (gang.priority, each.lost_slot_s, each.covered, *useful, gang.job_id)

    taken = []
    for each in sorted(candidates, key=order):
        if (need > 0 and each.gain) or (release > 0 and each.release):
            taken.append(each)
            need, release = need - each.gain, release - each.release
    if need > 0 or release > 0:
        return None
    for each in taken[::-1]:
        if need + each.gain <= 0 and release + each.release <= 0:
            taken.remove(each)
            need, release = need + each.gain, release + each.release
    return taken
