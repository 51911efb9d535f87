"""Decides which waiting training jobs start where, and which running ones are preempted for them.

One call is one round: it gets every host, every waiting gang and every reservation, and returns
what to start and to preempt now, and for the others why they wait. It keeps no state between
rounds, reads no clock and does not depend on the order of its inputs; the leader repeats it.

The rules:

* All or nothing: a gang gets all of its ranks or none (``placement``: where), on whole hosts.
* A team is guaranteed its quota, and may borrow what others do not use. Gangs that their team's
  quota covers come before those that borrow. Among each of them the higher priority is first, then
  the one that was submitted first.
* Smaller gangs start beside a blocked one (backfill): no host is kept idle.
* A gang preempts those of lower priority, and, once it has waited for an hour, those of its own
  priority that were submitted after it. A team that is below its quota takes hosts back from
  borrowers of any priority. A gang that a quota covers makes way for its own team alone.
* A gang larger than its team's quota would starve on a full fleet: a day after its submission it
  counts as covered, preempts covered gangs that come after it, and is not taken back by a quota.
* The hosts of ending gangs are promised in the order of the queue, so that a gang for which others
  were preempted preempts no more of them while they save and leave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.jobs.placement import Demand, Gang, Host, Placement, check, describe, group
from paceline.jobs.preemption import Candidate, Reservation, choose_victims, cost

OVERTAKEN_AFTER_S = 3_600.0  # a blocked gang that waited so long preempts those that overtook it
AGED_AFTER_S = 86_400.0  # a gang larger than its quota that is so old counts as covered by it
_Thing = TypeVar("_Thing")
_NAMED = 3  # gangs named in a reason; the others are a count


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a team may hold. A team without a quota is guaranteed 0 and borrows without limit."""

    slots: int  # guaranteed to the team
    borrow: int | None = None  # at most so many more while others do not use them; None: no limit

    def __post_init__(self) -> None:
        """Raise InvalidInput for negative numbers."""
        check(self.slots >= 0, "a quota is negative", self.slots, "slots >= 0", "quota")
        check((self.borrow or 0) >= 0, "a quota is negative", self.borrow, "borrow >= 0", "quota")

    @property
    def most(self) -> float:
        """Return the most slots that the team may hold."""
        return math.inf if self.borrow is None else self.slots + self.borrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one round decided; every waiting job is in ``admitted`` or in ``reasons``."""

    admitted: Mapping[str, Placement]  # job → where
    preempted: Mapping[str, str]  # running job → reason text
    reasons: Mapping[str, str]  # waiting job → reason text


def decide(
    hosts: Iterable[Host],
    waiting: Iterable[Gang],
    running: Iterable[Reservation],
    quotas: Mapping[str, Quota],
    now: float,
) -> Decision:
    """Return which gangs start and which are preempted now, and why the others wait.

    A host holds one gang: the slots that it leaves there stay unused, and count in no quota.
    Reservations on hosts that are not in ``hosts`` (lost nodes) count in the quota alone. Raises
    InvalidInput for a host or a job that is there twice.
    """
    fleet = _by_id(hosts, lambda host: host.name, "host")
    jobs = _by_id(waiting, lambda gang: gang.job_id, "waiting job")
    held = _by_id(running, lambda each: each.gang.job_id, "running job")
    return _Round(fleet, held, quotas, now).run(tuple(jobs.values()))


def _by_id(things: Iterable[_Thing], key: Callable[[_Thing], str], what: str) -> dict[str, _Thing]:
    """Return things by their id, in the order of the ids: nothing depends on the input's order."""
    found: dict[str, _Thing] = {}
    for thing in sorted(things, key=key):
        check(key(thing) not in found, f"a {what} is there twice", key(thing), "one", "admission")
        found[key(thing)] = thing
    return found


def why_never(
    hosts: Iterable[Host],
    gang: Gang,
    quotas: Mapping[str, Quota],
    demand: Demand | None = None,
) -> str:
    """Return why no state of these hosts could ever hold the gang, or "" where one could."""
    hosts = tuple(hosts)
    demand = demand or Demand(hosts, gang)
    quota = _quota_of(gang.team, quotas)
    if gang.ranks > quota.most:
        return (
            f"it needs {gang.ranks} slots; team {gang.team} may hold {quota.most:.0f} "
            f"({quota.slots} of its quota and {quota.borrow} borrowed)"
        )
    if not demand.hosts:
        kinds = ", ".join(sorted({host.kind for host in hosts})) or "none"
        return f"no host can hold a rank of {describe(gang)}; kinds of the fleet: {kinds}"
    most = demand.most_of_all(gang.ranks)
    if most < gang.ranks:
        return f"it needs {describe(gang)}; at most {most} are there"
    return ""


def _quota_of(team: str, quotas: Mapping[str, Quota]) -> Quota:
    return quotas.get(team) or Quota(slots=0)


def _covered(gangs: Iterable[Gang], slots: int, counted: Collection[str] = ()) -> set[str]:
    """Return the jobs that ``slots`` of a quota cover: the first in the queue's order that fit.

    Those ``counted`` take their part whether it is there or not.
    """
    covered = set()
    for gang in sorted(gangs, key=_order):
        if gang.ranks <= slots or gang.job_id in counted:
            slots -= gang.ranks
            covered.add(gang.job_id)
    return covered


def _order(gang: Gang) -> tuple[int, float, str]:
    return (-gang.priority, gang.queued_at, gang.job_id)


def _shape(gang: Gang) -> tuple[object, ...]:
    return (gang.kind, gang.min_memory_bytes, gang.pool, gang.within, gang.ranks_per_host)


class _Round:
    """The state of one round: the free hosts, the use of quotas, and what is decided so far."""

    def __init__(
        self,
        fleet: Mapping[str, Host],
        running: Mapping[str, Reservation],
        quotas: Mapping[str, Quota],
        now: float,
    ) -> None:
        self.hosts, self.quotas, self.now = tuple(fleet.values()), quotas, now
        self.slots = {name: host.slots for name, host in fleet.items()}
        self.free = dict(self.slots)  # usable now; 0 where a gang is
        self.soon = dict(self.slots)  # usable once the ending gangs have left
        self.used: dict[str, int] = defaultdict(int)  # team → slots, and those promised to it
        self.leaving: dict[str, int] = defaultdict(int)  # team → slots that become free soon
        self.running = running
        self.demands: dict[tuple[object, ...], Demand] = {}
        self.too_many: dict[tuple[object, ...], int] = {}  # a search → ranks that did not fit
        self.most_free: dict[tuple[object, ...], int] = {}  # a search → ranks that fit now
        self.admitted: dict[str, Placement] = {}
        self.preempted: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.blocked: dict[str, list[tuple[int, str]]] = defaultdict(list)  # kind → earlier gangs
        for each in running.values():
            (self.leaving if each.ending else self.used)[each.gang.team] += each.gang.ranks
            for name in fleet.keys() & each.hosts.keys():
                self.free[name] = 0
                self.soon[name] *= each.ending
        self.staying = group(
            (each.gang for each in running.values() if not each.ending), lambda gang: gang.team
        )
        self.covered: set[str] = set()  # running and waiting jobs that a quota covers
        for team, gangs in self.staying.items():
            self.covered |= _covered(gangs, _quota_of(team, quotas).slots)

    def run(self, waiting: Sequence[Gang]) -> Decision:
        """Handle every gang once, in the order of the queue."""
        possible = [gang for gang in waiting if self._is_possible(gang)]
        for team, gangs in group(possible, lambda gang: gang.team).items():
            held = self.staying.get(team, [])
            counted = {gang.job_id for gang in held}
            slots = _quota_of(team, self.quotas).slots
            self.covered |= _covered([*held, *gangs], slots, counted) - counted
        possible.sort(key=lambda gang: (not self._is_first(gang), *_order(gang)))
        for number, gang in enumerate(possible):
            reason = self._handle(gang)
            if reason:
                self.reasons[gang.job_id] = reason + self._ahead(gang)
                self.blocked[gang.kind].append((number, gang.job_id))
        return Decision(
            admitted=dict(sorted(self.admitted.items())),
            preempted=dict(sorted(self.preempted.items())),
            reasons=dict(sorted(self.reasons.items())),
        )

    def _is_possible(self, gang: Gang) -> bool:
        """Return whether the gang takes part in this round; where not, note why."""
        if gang.job_id in self.running:
            reason = "its earlier run still holds slots"
        else:
            never = why_never(self.hosts, gang, self.quotas, self._demand(gang))
            reason = never and f"it can never start: {never}"
        if reason:
            self.reasons[gang.job_id] = reason
        return not reason

    def _handle(self, gang: Gang) -> str:
        """Admit the gang, promise it hosts that become free, or return why it is blocked."""
        demand, quota = self._demand(gang), _quota_of(gang.team, self.quotas)
        over = self.used[gang.team] + gang.ranks - quota.most  # > 0: more than the team may hold
        if over + self.leaving[gang.team] <= 0:
            placement = self._place(demand, gang, self.free)
            if placement is not None:
                self._take(gang, placement)
                self.admitted[gang.job_id] = placement
                return ""
        missing = self._missing(demand, gang)
        if over <= 0:
            placement = self._place(demand, gang, self.soon)
            if placement is not None:
                self._take(gang, placement)
                return f"{missing}; it starts when ending jobs have left"
        victims = self._victims(demand, gang, over)
        if victims is not None:
            self._preempt(gang, victims)
            placement = demand.place(gang.ranks, self.soon)
            assert placement is not None, "the victims are not enough"
            self._take(gang, placement)
            names = _named([victim.gang.job_id for victim in victims], len(victims))
            have = "has" if len(victims) == 1 else "have"
            return f"{missing}; it starts when {names} {have} saved and left"
        if over > 0:
            held = self.used[gang.team] + self.leaving[gang.team]
            return (
                f"waiting for {gang.ranks} slots of team {gang.team}'s quota; "
                f"{held} of {quota.most:.0f} are held or promised"
            )
        return missing

    def _demand(self, gang: Gang) -> Demand:
        shape = _shape(gang)
        if shape not in self.demands:
            self.demands[shape] = Demand(self.hosts, gang)
        return self.demands[shape]

    def _place(self, demand: Demand, gang: Gang, slots: dict[str, int]) -> Placement | None:
        """Return where the gang fits; what did not fit once is not tried with more ranks."""
        search = ("free" if slots is self.free else "soon", *_shape(gang))
        if gang.ranks >= self.too_many.get(search, gang.ranks + 1):
            return None
        found = demand.place(gang.ranks, slots)
        if found is None:
            self.too_many[search] = gang.ranks
        return found

    def _take(self, gang: Gang, placement: Placement) -> None:
        """Give the hosts to the gang, now or once they are free."""
        self.used[gang.team] += gang.ranks
        self.most_free.clear()
        for name in placement.hosts:
            self.soon[name] = self.free[name] = 0

    def _victims(self, demand: Demand, gang: Gang, over: float) -> list[Reservation] | None:
        """Return the running gangs that are preempted for this one, or None where none may be."""
        quota = _quota_of(gang.team, self.quotas).slots
        reclaims = self.used[gang.team] + gang.ranks <= quota
        kind = (gang.job_id in self.covered, self._is_aged(gang), reclaims)
        search = (kind, gang.team, gang.priority, *_shape(gang))
        if gang.ranks >= self.too_many.get(search, gang.ranks + 1):
            return None
        lawful = [each for each in self.running.values() if self._yields(each, gang, reclaims)]
        here = {name: each for each in lawful for name in each.hosts if name in demand.hosts}
        own = {
            each.gang.job_id: each.gang.ranks
            for each in lawful
            if over > 0 and each.gang.team == gang.team
        }
        found = []
        for unit in demand.widest():
            gain = dict.fromkeys(own, 0)
            for name in here.keys() & unit:
                job = here[name].gang.job_id
                more = demand.capacity((name,), gang.ranks, self.slots)
                gain[job] = gain.get(job, 0) + more
            candidates = [
                Candidate(self.running[job], job in self.covered, gained, own.get(job, 0))
                for job, gained in gain.items()
            ]
            need = gang.ranks - demand.capacity(unit, gang.ranks, self.soon)
            victims = choose_victims(candidates, need, over)
            if victims:
                found.append(victims)
        if found:
            return [victim.running for victim in min(found, key=cost)]
        self.too_many[search] = gang.ranks
        return None

    def _yields(self, running: Reservation, gang: Gang, reclaims: bool) -> bool:
        """Return whether a running gang may be preempted for the waiting one."""
        other, same_team = running.gang, running.gang.team == gang.team
        if not running.preemptible or running.ending or other.job_id in self.preempted:
            return False
        lower = other.priority < gang.priority or self._is_overtaken(gang, other)
        if other.job_id in self.covered and not self._is_aged(gang):
            return lower and same_team and gang.job_id in self.covered
        # One that comes before the waiting gang in the queue would take the hosts back.
        if self._is_first(other):
            return lower and self._is_first(gang)
        return lower or (reclaims and not same_team)

    def _is_aged(self, gang: Gang) -> bool:
        """Return whether the gang, too large for its team's quota, has its turn before quotas."""
        old = self.now - gang.queued_at >= AGED_AFTER_S
        return old and gang.ranks > _quota_of(gang.team, self.quotas).slots

    def _is_first(self, gang: Gang) -> bool:
        """Return whether the gang comes before those that borrow."""
        return gang.job_id in self.covered or self._is_aged(gang)

    def _is_overtaken(self, gang: Gang, other: Gang) -> bool:
        """Return whether the gang has waited for long and the other one started before its turn."""
        return self.now - gang.queued_at >= OVERTAKEN_AFTER_S and _order(gang) < _order(other)

    def _preempt(self, gang: Gang, victims: Sequence[Reservation]) -> None:
        for victim in victims:
            other = victim.gang
            if other.priority < gang.priority:
                why = f"priority {gang.priority} is above {other.priority}"
            elif self._is_overtaken(gang, other):
                hours = (self.now - gang.queued_at) / 3600
                why = f"it was submitted earlier and has waited for {hours:.1f} h"
            else:
                why = f"team {gang.team} reclaims its quota, team {other.team} borrows"
            self.preempted[other.job_id] = f"preempted for {gang.job_id}: {why}"
            self.used[other.team] -= other.ranks
            self.leaving[other.team] += other.ranks
            for name in self.slots.keys() & victim.hosts.keys():
                self.soon[name] = self.slots[name]
        self.too_many = {key: most for key, most in self.too_many.items() if key[0] == "free"}

    def _missing(self, demand: Demand, gang: Gang) -> str:
        search = (demand.per_host(gang.ranks), *_shape(gang))
        if search not in self.most_free:
            self.most_free[search] = demand.most(gang.ranks, self.free)
        return f"waiting for {describe(gang)}; {self.most_free[search]} free"

    def _ahead(self, gang: Gang) -> str:
        """Return the text that names earlier blocked gangs which may want the same hosts."""
        lists = [
            each for kind, each in self.blocked.items() if not gang.kind or kind in ("", gang.kind)
        ]
        first = sorted(each for blocked in lists for each in blocked[:_NAMED])[:_NAMED]
        if not first:
            return ""
        return "; ahead of you: " + _named([job for _, job in first], sum(map(len, lists)))


def _named(jobs: Sequence[str], total: int) -> str:
    """Return at most three jobs by name and the number of the others."""
    more = f" and {total - _NAMED} more" if total > _NAMED else ""
    return ", ".join(jobs[:_NAMED]) + more
