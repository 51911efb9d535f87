"""Decides which waiting training jobs start where, and which running ones are preempted for them.

One call is one round: it gets every host, every waiting gang and every reservation, and returns
what to start and to preempt now, and for the others why they wait. It keeps no state between
rounds, reads no clock and does not depend on the order of its inputs; the leader repeats it.

The rules:

* All or nothing: a gang gets all of its ranks or none (``placement``: where).
* A team is guaranteed its quota, and may borrow what others do not use. Gangs that the guarantee
  covers come before those that borrow: else a borrower of high priority would start on slots that
  the covered gang reclaims in the next round. In each class the order is priority, then the team
  that has least of its quota in use, then the time queued; after a day the wait comes before the
  share of the team.
* A covered gang may preempt borrowers of any priority. Every other preemption is of strictly lower
  priority, and a borrower preempts no other team's gang that is within its quota.
* Smaller gangs start beside a blocked one (backfill). Running times are unknown, so no reservation
  has a date: a gang that has waited for ten minutes keeps the hosts that it could use free until
  it fits. One gang does so at a time on the same hosts, the first of the queue.
* The slots of ending gangs are promised in the order of the queue, so that a gang for which others
  were preempted preempts no more of them while they save and leave.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.jobs.placement import (
    Demand,
    Gang,
    Host,
    Names,
    Placement,
    check,
    describe,
    group,
)
from paceline.jobs.preemption import Candidate, Reservation, choose_victims, cost

HOLD_AFTER_S = 600.0  # a blocked gang that waited so long keeps hosts free
OVERDUE_AFTER_S = 86_400.0  # a gang that waited so long goes before the share of its team
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
    *,
    whole_hosts: bool = True,
) -> Decision:
    """Return which gangs start and which are preempted now, and why the others wait.

    With ``whole_hosts`` a host holds ranks of at most one gang. A quota counts ranks, also where a
    gang leaves slots of its hosts unused. Reservations on hosts that are not in ``hosts`` (lost
    nodes) count in the quota alone. Raises InvalidInput for a host or a job that is there twice.
    """
    fleet = _by_id(hosts, lambda host: host.name, "host")
    jobs = _by_id(waiting, lambda gang: gang.job_id, "waiting job")
    held = _by_id(running, lambda each: each.gang.job_id, "running job")
    return _Round(fleet, held, quotas, now, whole_hosts).run(tuple(jobs.values()))


def _by_id(things: Iterable[_Thing], key: Callable[[_Thing], str], what: str) -> dict[str, _Thing]:
    """Return things by their id, in the order of the ids: nothing depends on the input's order."""
    found: dict[str, _Thing] = {}
    for thing in sorted(things, key=key):
        check(key(thing) not in found, f"a {what} is there twice", key(thing), "one", "admission")
        found[key(thing)] = thing
    return found


def why_never(hosts: Iterable[Host], gang: Gang, quotas: Mapping[str, Quota]) -> str:
    """Return why no state of these hosts could ever hold the gang, or "" where one could."""
    hosts = tuple(hosts)
    return _why_never(hosts, gang, quotas, Demand(hosts, gang))


def _why_never(
    hosts: Sequence[Host], gang: Gang, quotas: Mapping[str, Quota], demand: Demand
) -> str:
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


def _covered(gangs: Iterable[Gang], slots: int) -> set[str]:
    """Return the jobs that ``slots`` of a quota cover: the first of the team's order that fit."""
    covered = set()
    for gang in sorted(gangs, key=_team_order):
        if gang.ranks <= slots:
            slots -= gang.ranks
            covered.add(gang.job_id)
    return covered


def _team_order(gang: Gang) -> tuple[int, float, str]:
    return (-gang.priority, gang.queued_at, gang.job_id)


class _Round:
    """The state of one round: the free slots, the use of quotas, and what is decided so far."""

    def __init__(
        self,
        fleet: Mapping[str, Host],
        running: Mapping[str, Reservation],
        quotas: Mapping[str, Quota],
        now: float,
        whole_hosts: bool,
    ) -> None:
        self.fleet, self.quotas, self.now, self.whole_hosts = fleet, quotas, now, whole_hosts
        self.hosts = tuple(fleet.values())
        self.slots = {name: host.slots for name, host in fleet.items()}
        self.free = dict(self.slots)  # usable now
        self.soon = dict(self.slots)  # usable once the ending gangs have left
        self.stays: dict[str, set[str]] = defaultdict(set)  # host → running jobs that stay there
        self.used: dict[str, int] = defaultdict(int)  # team → slots, and those promised to it
        self.leaving: dict[str, int] = defaultdict(int)  # team → slots that become free soon
        self.running = running
        self.holding: set[str] = set()  # hosts that a gang keeps free until it fits
        self.waiting_for: set[str] = set()  # hosts that such gangs can use
        self.owed: set[str] = set()  # teams with a covered gang that starts soon
        self.demands: dict[tuple[object, ...], Demand] = {}
        self.too_many: dict[tuple[object, ...], int] = {}  # a search → ranks that did not fit
        self.most_free: dict[tuple[object, ...], int] = {}  # a search → ranks that fit now
        self.admitted: dict[str, Placement] = {}
        self.preempted: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.blocked: dict[str, list[tuple[int, str]]] = defaultdict(list)  # kind → earlier gangs
        for each in running.values():
            (self.leaving if each.ending else self.used)[each.gang.team] += each.gang.ranks
            for name, ranks in each.hosts.items():
                if name not in fleet:
                    continue
                self.free[name] = 0 if whole_hosts else max(0, self.free[name] - ranks)
                if not each.ending:
                    self.stays[name].add(each.gang.job_id)
                    self.soon[name] = 0 if whole_hosts else max(0, self.soon[name] - ranks)
        staying = [each.gang for each in running.values() if not each.ending]
        self.within_quota: set[str] = set()
        for team, gangs in group(staying, lambda gang: gang.team).items():
            self.within_quota |= _covered(gangs, _quota_of(team, quotas).slots)

    def run(self, waiting: Sequence[Gang]) -> Decision:
        """Handle every gang once, in the order of the queue."""
        queues: dict[str, list[Gang]] = {}
        covered: set[str] = set()
        possible = [gang for gang in waiting if self._is_possible(gang)]
        for team, gangs in group(possible, lambda gang: gang.team).items():
            covered |= _covered(gangs, _quota_of(team, self.quotas).slots - self.used[team])
            queues[team] = sorted(
                gangs, key=lambda gang: (gang.job_id not in covered, *_team_order(gang))
            )
        heads = [self._head(queue, covered) for queue in queues.values()]
        heapq.heapify(heads)
        number = 0
        while heads:
            _, team = heapq.heappop(heads)
            gang = queues[team].pop(0)
            reason = self._handle(gang, gang.job_id in covered)
            if reason:
                self.reasons[gang.job_id] = reason + self._ahead(gang)
                self.blocked[gang.kind].append((number, gang.job_id))
            number += 1
            if queues[team]:
                heapq.heappush(heads, self._head(queues[team], covered))
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
            never = _why_never(self.hosts, gang, self.quotas, self._demand(gang))
            reason = never and f"it can never start: {never}"
        if reason:
            self.reasons[gang.job_id] = reason
        return not reason

    def _head(self, queue: Sequence[Gang], covered: set[str]) -> tuple[tuple[object, ...], str]:
        """Return the place in the whole queue of the first gang of a team; the lowest is next."""
        gang = queue[0]
        overdue = self.now - gang.queued_at >= OVERDUE_AFTER_S
        quota = _quota_of(gang.team, self.quotas).slots
        share = -1.0 if overdue else self.used[gang.team] / max(1, quota)
        borrows = gang.job_id not in covered
        return (borrows, -gang.priority, share, gang.queued_at, gang.job_id), gang.team

    def _handle(self, gang: Gang, covered: bool) -> str:
        """Admit the gang, promise it slots that become free, or return why it is blocked."""
        demand, quota = self._demand(gang), _quota_of(gang.team, self.quotas)
        over = self.used[gang.team] + gang.ranks - quota.most  # > 0: more than the team may hold
        if not covered and gang.team in self.owed:
            # Started now, it would use up the quota that covers the gang of its team.
            return f"{self._missing(demand, gang)}; the quota is promised to a gang of its team"
        if over <= 0:
            placement = None
            if over + self.leaving[gang.team] <= 0:
                placement = self._place(demand, gang, self.free)
            if placement is not None:
                for name, ranks in placement.hosts.items():
                    self.free[name] -= ranks
                self._take(gang, placement)
                self.admitted[gang.job_id] = placement
                return ""
            placement = self._place(demand, gang, self.soon)
            if placement is not None:
                self._take(gang, placement)
                self.owed |= {gang.team} if covered else set()
                return f"{self._missing(demand, gang)}; it starts when ending jobs have left"
        victims = self._victims(demand, gang, covered, over)
        if victims is not None:
            missing = self._missing(demand, gang)
            self._preempt(gang, victims)
            placement = demand.place(gang.ranks, self.soon)
            assert placement is not None, "the victims are not enough"
            self._take(gang, placement)
            self.owed |= {gang.team} if covered else set()
            names = _named([victim.gang.job_id for victim in victims], len(victims))
            return f"{missing}; it starts when {names} {_have(victims)} saved and left"
        if over > 0:
            held = self.used[gang.team] + self.leaving[gang.team]
            if self.now - gang.queued_at >= HOLD_AFTER_S:
                self.used[gang.team] += gang.ranks  # later gangs of the team leave it its quota
            return (
                f"waiting for {gang.ranks} slots of team {gang.team}'s quota; "
                f"{held} of {quota.most:.0f} are held or promised"
            )
        missing = self._missing(demand, gang)
        return missing + ("; hosts are kept free for it" if self._hold(demand, gang) else "")

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
        """Give the slots to the gang, now or once they are free."""
        self.used[gang.team] += gang.ranks
        self.most_free.clear()
        for name, ranks in placement.hosts.items():
            self.soon[name] = 0 if self.whole_hosts else self.soon[name] - ranks
            self.free[name] = min(self.free[name], self.soon[name])

    def _victims(
        self, demand: Demand, gang: Gang, covered: bool, over: float
    ) -> list[Reservation] | None:
        """Return the running gangs that are preempted for this one, or None where none may be."""
        search = (covered, gang.team, gang.priority, *_shape(gang))
        if gang.ranks >= self.too_many.get(search, gang.ranks + 1):
            return None
        lawful = [
            Candidate(each, each.gang.job_id not in self.within_quota)
            for each in self.running.values()
            if self._may_preempt(gang, covered, each)
        ]
        searches = [(lawful, over)]
        if not covered:
            # A borrower preempts its team's gangs within the quota only if the quota then covers
            # it: else they would come before it again and take the slots back.
            quota = _quota_of(gang.team, self.quotas).slots
            searches = [
                ([each for each in lawful if each.borrowing], over),
                (lawful, max(over, self.used[gang.team] + gang.ranks - quota)),
            ]
        for candidates, release in searches:
            here: dict[str, list[Candidate]] = defaultdict(list)  # host → candidates there
            for candidate in candidates:
                for name in candidate.reservation.hosts:
                    if name in demand.hosts and name not in self.holding:
                        here[name].append(candidate)
            own = [each for each in candidates if each.reservation.gang.team == gang.team]
            found = [
                self._victims_inside(demand, gang, names, here, own if release > 0 else [], release)
                for levels in demand.units.values()
                for names in levels[-1].values()
                if candidates
            ]
            best = min((victims for victims in found if victims), key=cost, default=None)
            if best is not None:
                return [candidate.reservation for candidate in best]
        self.too_many[search] = gang.ranks
        return None

    def _may_preempt(self, gang: Gang, covered: bool, other: Reservation) -> bool:
        if not other.preemptible or other.ending or other.gang.job_id in self.preempted:
            return False
        within = other.gang.job_id in self.within_quota
        if covered and not within and other.gang.team != gang.team:
            return True  # a reclaim
        foreign = other.gang.team != gang.team
        return other.gang.priority < gang.priority and (covered or not within or not foreign)

    def _victims_inside(
        self,
        demand: Demand,
        gang: Gang,
        unit: Names,
        here: Mapping[str, list[Candidate]],
        own: Sequence[Candidate],
        release: float,
    ) -> list[Candidate] | None:
        """Return victims with which the gang fits in ``unit``, and ``release`` own slots leave."""
        names = set(here).intersection(unit)
        candidates = {each.order: each for name in names for each in here[name]}
        candidates |= {each.order: each for each in own}
        free = demand.capacity(unit, gang.ranks, self.soon)

        def gained(victims: Sequence[Candidate]) -> int:
            leaving: dict[str, int] = defaultdict(int)
            counts: dict[str, int] = defaultdict(int)
            for victim in victims:
                for name, ranks in victim.reservation.hosts.items():
                    if name in names:
                        leaving[name] += ranks
                        counts[name] += 1
            gain = 0
            for name, ranks in leaving.items():
                host, soon = self.fleet[name], self.soon[name]
                if not self.whole_hosts:
                    after = min(host.slots, soon + ranks)
                else:
                    after = host.slots if counts[name] == len(self.stays[name]) else soon
                gain += demand.capacity((name,), gang.ranks, {name: after})
                gain -= demand.capacity((name,), gang.ranks, {name: soon})
            return gain

        def enough(victims: Sequence[Candidate]) -> bool:
            released = sum(
                each.reservation.gang.ranks
                for each in victims
                if each.reservation.gang.team == gang.team
            )
            return release <= released and free + gained(victims) >= gang.ranks

        return choose_victims(list(candidates.values()), lambda each: gained([each]), enough)

    def _preempt(self, gang: Gang, victims: Sequence[Reservation]) -> None:
        for victim in victims:
            other = victim.gang
            if other.priority < gang.priority:
                why = f"priority {gang.priority} is above {other.priority}"
            else:
                why = f"team {gang.team} reclaims its quota, team {other.team} borrows"
            self.preempted[other.job_id] = f"preempted for {gang.job_id}: {why}"
            self.used[other.team] -= other.ranks
            self.leaving[other.team] += other.ranks
            for name, ranks in victim.hosts.items():
                if name not in self.fleet:
                    continue
                self.stays[name].discard(other.job_id)
                if not self.whole_hosts:
                    self.soon[name] += ranks
                elif not self.stays[name]:
                    self.soon[name] = self.slots[name]
        self.too_many = {key: most for key, most in self.too_many.items() if key[0] == "free"}

    def _hold(self, demand: Demand, gang: Gang) -> bool:
        """Keep hosts free for a gang that waited long enough; return whether it does so.

        The unit is the one with most of the gang's slots free: that number only grows while
        nothing else starts there. Hosts that are busy now are kept when they become free.
        """
        if self.now - gang.queued_at < HOLD_AFTER_S:
            return False
        best: tuple[int, str, Names] | None = None
        for kind, levels in demand.units.items():
            if not self.waiting_for.isdisjoint(demand.kinds[kind]):
                continue
            for names in levels[-1].values():
                if demand.capacity(names, gang.ranks, self.slots) < gang.ranks:
                    continue
                wanted = _enough_hosts(
                    demand, gang, sorted(names, key=lambda name: (-self.soon[name], name))
                )
                free = sum(self.soon[name] for name in wanted)
                if best is None or free > best[0]:
                    best = (free, kind, wanted)
        if best is None:
            return False
        for name in best[2]:
            self.holding.add(name)
            self.free[name] = self.soon[name] = 0
        self.waiting_for.update(demand.kinds[best[1]])
        self.used[gang.team] += gang.ranks
        self.most_free.clear()
        return True

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


def _shape(gang: Gang) -> tuple[object, ...]:
    return (gang.kind, gang.min_memory_bytes, gang.pool, gang.within, gang.ranks_per_host)


def _enough_hosts(demand: Demand, gang: Gang, ordered: Names) -> Names:
    """Return the first hosts that hold the gang once they are empty."""
    found, ranks = [], gang.ranks
    per_host = demand.per_host(gang.ranks)
    for name in ordered:
        slots = demand.hosts[name].slots
        if ranks > 0 and slots >= per_host:
            found.append(name)
            ranks -= per_host or slots
    return found


def _named(jobs: Sequence[str], total: int) -> str:
    """Return at most three jobs by name and the number of the others."""
    more = f" and {total - _NAMED} more" if total > _NAMED else ""
    return ", ".join(jobs[:_NAMED]) + more


def _have(victims: Sequence[Reservation]) -> str:
    return "has" if len(victims) == 1 else "have"
