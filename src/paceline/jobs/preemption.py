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
    """Running gangs that may be preempted together, and what their end gives to the waiting one."""

    running: tuple[Reservation, ...]
    covered: int  # how many of them their teams' quotas cover
    gain: int  # ranks of the waiting gang that they make room for
    release: int  # slots of the waiting gang's team

    @property
    def priority(self) -> int:
        """Return the highest priority among them."""
        return max(each.gang.priority for each in self.running)

    @property
    def lost_slot_s(self) -> float:
        """Return the work that a preemption loses, of all ranks."""
        return sum(each.lost_work_s * each.gang.ranks for each in self.running)

    @property
    def jobs(self) -> list[str]:
        """Return the ids of their jobs."""
        return sorted(each.gang.job_id for each in self.running)


def cost(victims: Sequence[Candidate]) -> tuple[object, ...]:
    """Return a sort key of a set of victims: highest priority, lost work, covered gangs, gangs,
    ids."""
    return (
        max(victim.priority for victim in victims),
        sum(victim.lost_slot_s for victim in victims),
        sum(victim.covered for victim in victims),
        sum(len(victim.running) for victim in victims),
        sorted(job for victim in victims for job in victim.jobs),
    )


def choose_victims(
    candidates: Iterable[Candidate], need: int, release: float
) -> list[Candidate] | None:
    """Return a set that gains ``need`` and releases ``release``, each member needed, or None.

    Taken in this order: the lowest priority, the least work lost, those that borrow, the fewest,
    the tightest. The cheapest set of all is a knapsack problem, and is not sought.
    """

    def order(each: Candidate) -> tuple[object, ...]:
        useful = (-min(each.gain, need), each.gain)
        return (each.priority, each.lost_slot_s, each.covered, *useful, each.jobs)

    chosen = []
    for each in sorted(candidates, key=order):
        if (need > 0 and each.gain) or (release > 0 and each.release):
            chosen.append(each)
            need, release = need - each.gain, release - each.release
    if need > 0 or release > 0:
        return None
    for each in chosen[::-1]:
        if need + each.gain <= 0 and release + each.release <= 0:
            chosen.remove(each)
            need, release = need + each.gain, release + each.release
    return chosen
