"""Decides which waiting training jobs start where, and which running ones are preempted for them.

One call is one round: it gets every host, every waiting gang and every reservation, and returns
what to start and to preempt now, and for the others why they wait. It keeps no state between
rounds, reads no clock and does not depend on the order of its inputs; the leader repeats it.

The rules:

* All or nothing: a gang gets all of its ranks or none (``placement``: where). Gangs share a host as
  long as each of them is on that host alone; one over several hosts takes empty ones.
* A team is guaranteed its quota, and may borrow what others do not use. Gangs that their team's
  quota covers come before those that borrow. Among each of them the higher priority is first, then
  the one that was submitted first.
* Smaller gangs start beside a blocked one (backfill): no host is kept idle.
* A gang preempts those of lower priority, and, once it has waited for an hour, those of its own
  priority that were submitted after it. A team that is below its quota takes hosts back from
  borrowers of any priority. A gang that a quota covers makes way for its own team alone.
* A gang larger than its team's quota would starve on a full fleet: a day after its submission it
  counts as covered, preempts covered gangs that come after it, and is not taken back by a quota.
* Of gangs that would train the same the first that fits starts, and the others wait for it: nothing
  is preempted for them then, nor for a second one while another is promised hosts.
* The hosts of ending gangs are promised in the order of the queue, so that a gang for which others
  were preempted preempts no more of them while they save and leave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.jobs.placement import Demand, Gang, Host, Placement, check, describe, group
from paceline.jobs.preemption import Candidate, Reservation, choose_victims, cost

OVERTAKEN_AFTER_S = 3_600.0  # a blocked gang that waited so long preempts those that overtook it
AGED_AFTER_S = 86_400.0  # a gang larger than its quota that is so old counts as covered by it
_Entry = TypeVar("_Entry")
# Ranks that do not fit on a host or unit, and how many more fit where these running gangs leave
Offer = tuple[int, dict[tuple[str, ...], int]]
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

    Reservations on hosts that are not in ``hosts`` (lost nodes) count in the quota alone. Raises
    InvalidInput for a host or a job that is there twice.
    """
    fleet = _by_id(hosts, lambda host: host.name, "host")
    jobs = _by_id(waiting, lambda gang: gang.job_id, "waiting job")
    held = _by_id(running, lambda each: each.gang.job_id, "running job")
    return _Round(fleet, held, quotas, now).run(tuple(jobs.values()))


def _by_id(entries: Iterable[_Entry], key: Callable[[_Entry], str], what: str) -> dict[str, _Entry]:
    """Return things by their id, in the order of the ids: nothing depends on the input's order."""
    found: dict[str, _Entry] = {}
    for entry in sorted(entries, key=key):
        check(key(entry) not in found, f"a {what} is there twice", key(entry), "one", "admission")
        found[key(entry)] = entry
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
        kinds = ", ".join(sorted({f"{each.kind} ({each.pool})" for each in hosts})) or "none"
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
    asked = (gang.kind, gang.min_memory_bytes, gang.pool, gang.labels)
    return (*asked, gang.within, gang.ranks_per_host)


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
        self.free = dict(self.slots)  # usable now
        self.free_soon = dict(self.slots)  # usable once the ending gangs have left
        self.used: dict[str, int] = defaultdict(int)  # team → slots, and those promised to it
        self.leaving: dict[str, int] = defaultdict(int)  # team → slots that become free soon
        self.running = running
        self.demands: dict[tuple[object, ...], Demand] = {}
        self.too_many: dict[tuple[object, ...], int] = {}  # a search → ranks that did not fit
        self.most_free: dict[tuple[object, ...], int] = {}  # a search → ranks that fit now
        self.admitted: dict[str, Placement] = {}
        self.preempted: dict[str, str] = {}
        self.preempted_for: dict[str, Gang] = {}  # preempted job → the gang that it makes way for
        self.admitted_trainings: dict[str, str] = {}  # training → the job that was admitted for it
        self.promised_trainings: dict[
            str, str
        ] = {}  # training → the job that was promised hosts for it
        self.reasons: dict[str, str] = {}
        self.blocked: dict[str, list[tuple[int, str]]] = defaultdict(list)  # kind → earlier gangs
        for each in running.values():
            (self.leaving if each.ending else self.used)[each.gang.team] += each.gang.ranks
            for name in fleet.keys() & each.hosts.keys():  # a node may report fewer slots now
                self.free[name] = max(0, self.free[name] - each.hosts[name])
                if not each.ending:
                    self.free_soon[name] = max(0, self.free_soon[name] - each.hosts[name])
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
        possible.sort(key=lambda gang: (not self._precedes_borrowers(gang), *_order(gang)))
        for number, gang in enumerate(possible):
            if gang.training not in self.admitted_trainings and (reason := self._handle(gang)):
                self.reasons[gang.job_id] = reason + self._blocked_before(gang)
                self.blocked[gang.kind].append((number, gang.job_id))
        for gang in possible:
            other = self.admitted_trainings.get(gang.training, gang.job_id)
            if other != gang.job_id:
                self.reasons[gang.job_id] = f"waiting for {other}, which trains the same"
        preempted = {
            job: why
            for job, why in sorted(self.preempted.items())
            if self.preempted_for[job].training not in self.admitted_trainings
        }
        return Decision(
            admitted=dict(sorted(self.admitted.items())),
            preempted=preempted,
            reasons=dict(sorted(self.reasons.items())),
        )

    def _is_possible(self, gang: Gang) -> bool:
        """Return whether the gang takes part in this round; where not, note why."""
        if gang.job_id in self.running:
            reason = "its earlier run still holds slots"
        else:
            never = why_never(self.hosts, gang, self.quotas, self._demand(gang))
            reason = never and f"it cannot start on these nodes: {never}"
        if reason:
            self.reasons[gang.job_id] = reason
        return not reason

    def _handle(self, gang: Gang) -> str:
        """Admit the gang, promise it hosts that become free, or return why it is blocked."""
        demand, quota = self._demand(gang), _quota_of(gang.team, self.quotas)
        excess_slots = (
            self.used[gang.team] + gang.ranks - quota.most
        )  # > 0: more than the team may hold
        if excess_slots + self.leaving[gang.team] <= 0:
            placement = self._place(demand, gang, self.free)
            if placement is not None:
                self.admitted[gang.job_id] = placement
                self._reserve(gang, placement)
                return ""
        missing = self._missing(demand, gang)
        if other := self.promised_trainings.get(gang.training):
            return f"{missing}; or for {other}, which trains the same"
        if excess_slots <= 0:
            placement = self._place(demand, gang, self.free_soon)
            if placement is not None:
                self._reserve(gang, placement)
                return f"{missing}; it starts when ending jobs have left"
        victims = self._victims(demand, gang, excess_slots)
        if victims is not None:
            self._preempt(gang, victims)
            placement = demand.place(gang.ranks, self.free_soon)
            assert placement is not None, "the victims are not enough"
            self._reserve(gang, placement)
            names = _named(sorted(victim.gang.job_id for victim in victims), len(victims))
            have = "has" if len(victims) == 1 else "have"
            return f"{missing}; it starts when {names} {have} saved and left"
        if excess_slots > 0:
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

    def _reserve(self, gang: Gang, placement: Placement) -> None:
        """Give the slots to the gang, now or once they are free: no other gang gets them."""
        self.used[gang.team] += gang.ranks
        self.most_free.clear()
        now = gang.job_id in self.admitted
        if gang.training:
            (self.admitted_trainings if now else self.promised_trainings)[gang.training] = (
                gang.job_id
            )
        for name, ranks in placement.hosts.items():
            # Of several hosts that were promised each must be empty when the gang comes.
            self.free_soon[name] -= (
                ranks if now or len(placement.hosts) == 1 else self.free_soon[name]
            )
            self.free[name] = min(self.free[name] - ranks * now, self.free_soon[name])

    def _victims(self, demand: Demand, gang: Gang, excess_slots: float) -> list[Reservation] | None:
        """Return the running gangs that are preempted for this one, or None where none may be."""
        quota, covered = _quota_of(gang.team, self.quotas).slots, gang.job_id in self.covered
        # One that is not covered stands behind the borrowers before it, who would return.
        reclaims = covered and self.used[gang.team] + gang.ranks <= quota
        kind = (covered, self._is_aged(gang), reclaims)
        search = (kind, gang.team, gang.priority, *_shape(gang))
        if gang.ranks >= self.too_many.get(search, gang.ranks + 1):
            return None
        preemptible_jobs = {
            job: each
            for job, each in self.running.items()
            if self._may_preempt(each, gang, reclaims)
        }
        own = {
            job
            for job, each in preemptible_jobs.items()
            if excess_slots > 0 and each.gang.team == gang.team
        }
        for offers in (self._on_one_host, self._on_empty_hosts):
            found = []
            for need, gains in offers(demand, gang, preemptible_jobs):
                alone = own - {job for jobs in gains for job in jobs}
                gains |= {(job,): 0 for job in alone}
                candidates = [
                    Candidate(
                        tuple(self.running[job] for job in jobs),
                        covered=len(self.covered.intersection(jobs)),
                        gain=gain,
                        release=sum(self.running[job].gang.ranks for job in own.intersection(jobs)),
                    )
                    for jobs, gain in gains.items()
                ]
                if victims := choose_victims(candidates, need, excess_slots):
                    found.append(victims)
            if found:
                chosen = [each for victim in min(found, key=cost) for each in victim.running]
                return self._needed(demand, gang, excess_slots, chosen)
        self.too_many[search] = gang.ranks
        return None

    def _on_one_host(
        self, demand: Demand, gang: Gang, preemptible_jobs: Mapping[str, Reservation]
    ) -> Iterator[Offer]:
        """Yield each host that can hold the gang beside others."""
        here: dict[str, dict[tuple[str, ...], int]] = defaultdict(dict)
        for job, each in preemptible_jobs.items():
            for name in each.hosts.keys() & demand.hosts.keys():
                here[name][(job,)] = each.hosts[name]
        for name in demand.hosts:
            if demand.on_host(name, gang.ranks, self.slots) >= gang.ranks:
                yield gang.ranks - self.free_soon[name], here[name]

    def _on_empty_hosts(
        self, demand: Demand, gang: Gang, preemptible_jobs: Mapping[str, Reservation]
    ) -> Iterator[Offer]:
        """Yield each unit that the gang must fit inside. Gangs that share a host leave together."""
        here: dict[str, set[str]] = defaultdict(set)
        after = dict(self.free_soon)  # if every gang left that may be preempted
        for job, each in preemptible_jobs.items():
            for name in each.hosts.keys() & demand.hosts.keys():
                here[name].add(job)
                after[name] += each.hosts[name]
        empty = demand.empty(self.free_soon)
        for unit in demand.widest():
            together: dict[str, set[str]] = {}  # job → those that leave with it
            opened: list[tuple[str, int]] = []
            for name in unit:
                if here[name] and after[name] >= self.slots[name]:
                    joined = set().union(here[name], *(together.get(e, ()) for e in here[name]))
                    together |= dict.fromkeys(joined, joined)
                    gain = demand.capacity((name,), gang.ranks, self.slots)
                    opened.append((next(iter(here[name])), gain))
            gains: dict[tuple[str, ...], int] = defaultdict(int)
            for job, gain in opened:
                gains[tuple(sorted(together[job]))] += gain
            yield gang.ranks - demand.capacity(unit, gang.ranks, empty), gains

    def _needed(
        self, demand: Demand, gang: Gang, excess_slots: float, victims: list[Reservation]
    ) -> list[Reservation]:
        """Return ``victims`` without those that the gang does not need to leave."""
        for each in victims[::-1]:
            rest = [other for other in victims if other is not each]
            released = sum(e.gang.ranks for e in rest if e.gang.team == gang.team)
            if released >= excess_slots and demand.place(gang.ranks, self._without(rest)):
                victims = rest
        return victims

    def _without(self, victims: Iterable[Reservation]) -> dict[str, int]:
        """Return the slots that are free once ``victims`` and the ending gangs have left."""
        soon = dict(self.free_soon)
        for victim in victims:
            for name in soon.keys() & victim.hosts.keys():
                soon[name] = min(self.slots[name], soon[name] + victim.hosts[name])
        return soon

    def _may_preempt(self, running: Reservation, gang: Gang, reclaims: bool) -> bool:
        """Return whether a running gang may be preempted for the waiting one."""
        other, same_team = running.gang, running.gang.team == gang.team
        if not running.preemptible or running.ending or other.job_id in self.preempted:
            return False
        lower = other.priority < gang.priority or self._is_overtaken(gang, other)
        if other.job_id in self.covered and not self._is_aged(gang):
            return lower and same_team and gang.job_id in self.covered
        # One that comes before the waiting gang in the queue would take the hosts back.
        if self._precedes_borrowers(other):
            return lower and self._precedes_borrowers(gang)
        return lower or (reclaims and not same_team)

    def _is_aged(self, gang: Gang) -> bool:
        """Return whether the gang, too large for its team's quota, has its turn before quotas."""
        old = self.now - gang.queued_at >= AGED_AFTER_S
        return old and gang.ranks > _quota_of(gang.team, self.quotas).slots

    def _precedes_borrowers(self, gang: Gang) -> bool:
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
            self.preempted_for[other.job_id] = gang
            self.used[other.team] -= other.ranks
            self.leaving[other.team] += other.ranks
        self.free_soon.update(self._without(victims))
        self.too_many = {key: most for key, most in self.too_many.items() if key[0] == "free"}

    def _missing(self, demand: Demand, gang: Gang) -> str:
        search = (demand.per_host(gang.ranks), *_shape(gang))
        if search not in self.most_free:
            self.most_free[search] = demand.most(gang.ranks, self.free)
        return f"waiting for {describe(gang)}; {self.most_free[search]} free"

    def _blocked_before(self, gang: Gang) -> str:
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
