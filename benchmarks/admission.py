"""What a round of the admission costs, and a month of jobs under several admission policies.

    python benchmarks/admission.py --out benchmarks/results

1. A round: 1,000 waiting gangs over 4,000 slots (500 hosts, racks of 8, two kinds), with an empty,
   a half full and a full fleet. The goal is less than 1 s.
2. A synthetic month (``month`` is the generator; the seed is an option), event by event: ours; ours
   without aging, and also without preemption by overtaken gangs; FIFO whose head blocks; first fit
   as with Dask's worker resources; and a policy as Kueue's default (best-effort FIFO in the order
   of priority, quotas, borrowing, reclaim, no reservation for the blocked head, no topology). The
   peers are models of their policies, not their programs. Under every policy gangs that fit on one
   host share it, and larger ones take empty hosts.

A preempted job leaves after a minute and needs a minute to start again. A Paceline job saves an
emergency checkpoint before it leaves; a job of the Kueue-like policy loses what it computed since
its last checkpoint, one every 15 minutes ("saves": the same policy with emergency checkpoints).

Prints a table and one JSON line; ``--tiny`` is the version for tests.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from paceline.jobs import Gang, Host, Quota, Reservation, decide, why_never

DAY_S = 86_400.0
CHECKPOINT_S = 900.0  # without an emergency checkpoint a preemption loses what came after it
LEAVE_S = 60.0  # to save and leave
RESTART_S = 60.0  # to start again after a preemption
TEAMS = {"research": 0.40, "product": 0.30, "vision": 0.20, "interns": 0.10}  # shares of the quota
SIZES = (("1-8", 8), ("9-64", 64), ("65-256", 256))


@dataclass
class Job:
    """A job of the month; ``left_s`` is what it still has to compute."""

    gang: Gang
    length_s: float
    left_s: float = 0.0
    first_start: float = -1.0
    ended: float = 0.0
    lost_s: float = 0.0
    preemptions: int = 0
    racks: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; return 0 where a round stays below the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64, help="of the month, 8 slots each")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.82, help="slots asked for / slots")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    waiting = 1_000
    if given.tiny:
        given.hosts, given.days, waiting = 16, 1.0, 40
    rounds = [measure_round(waiting, busy) for busy in (0.0, 0.5, 1.0)]
    for row in rounds:
        sys.stderr.write(
            f"round: {row['waiting']} gangs, {row['busy']:.0%} busy: {row['wall_s']} s, "
            f"cpu {row['cpu_s']} s, {row['admitted']} admitted, {row['preempted']} preempted\n"
        )
    hosts = fleet(given.hosts)
    jobs = month(hosts, given.days, given.load, given.seed)
    rows = []
    for policy in given.policies:
        rows.append(measure_month(policy, hosts, jobs, given.days * DAY_S))
        sys.stderr.write(line(rows[-1]) + "\n")
    result = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "arguments": {"hosts": given.hosts, "days": given.days, "load": given.load,
                      "seed": given.seed},
        "rounds": rounds,
        "month": rows,
    }  # fmt: skip
    print(json.dumps(result))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "admission.json").write_text(json.dumps(result, indent=1))
    return 0 if given.tiny or max(row["cpu_s"] for row in rounds) < 1.0 else 1


def cpu_model() -> str:
    """Return the CPU's name, as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


# -- a round ------------------------------------------------------------------------------------


def measure_round(waiting: int, busy: float) -> dict[str, Any]:
    """Return what one decision over 500 hosts of 8 slots costs."""
    order = random.Random(1)
    hosts = fleet(500)
    running = [
        Reservation(
            gang=gang(order, f"runs-{number}", 8, "", float(number)),
            hosts={host.name: 8},
            lost_work_s=order.uniform(0, CHECKPOINT_S),
        )
        for number, host in enumerate(hosts[: round(len(hosts) * busy)])
    ]
    queue = [
        gang(order, f"waits-{number}", size(order), order.choice(("", "a100", "h100")),
             order.uniform(0, DAY_S))
        for number in range(waiting)
    ]  # fmt: skip
    quotas = {team: Quota(slots=round(4_000 * share)) for team, share in TEAMS.items()}
    times = []
    for _ in range(3):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        decision = decide(hosts, queue, running, quotas, DAY_S)
        times.append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    return {
        "waiting": waiting,
        "busy": busy,
        "cpu_s": round(statistics.median(cpu_s for cpu_s, _ in times), 3),
        "wall_s": round(statistics.median(wall_s for _, wall_s in times), 3),
        "admitted": len(decision.admitted),
        "preempted": len(decision.preempted),
    }


def fleet(number: int) -> list[Host]:
    """Return hosts of 8 slots in racks of 8: three fifths a100; a quarter of each rack is spot."""
    return [
        Host(
            name=f"host-{index:04}",
            slots=8,
            kind="a100" if index // 8 < round(number / 8 * 0.6) else "h100",
            memory_bytes=80 * 10**9,
            rack=f"rack-{index // 8:03}",
            zone=f"zone-{index // 256}",
            pool="spot" if index % 8 >= 6 else "on-demand",
        )
        for index in range(number)
    ]


# -- the month ----------------------------------------------------------------------------------


def size(order: random.Random) -> int:
    """Return a heavy-tailed number of slots: half of the jobs need at most 4, 1 % need 256."""
    return 1 << order.choices(range(9), (22, 16, 14, 22, 10, 8, 5, 2, 1))[0]


def gang(order: random.Random, job: str, ranks: int, kind: str, at: float) -> Gang:
    """Return what a job of some team asks for."""
    return Gang(
        job_id=job,
        team=order.choices(tuple(TEAMS), (4, 3, 2, 3))[0],  # interns ask for more than their quota
        priority=order.choices((0, 1, 2), (6, 3, 1))[0],
        queued_at=at,
        ranks=ranks,
        kind=kind,
        pool=order.choices(("", "on-demand", "spot"), (6, 3, 1))[0],
    )


def month(hosts: Sequence[Host], days: float, load: float, seed: int) -> list[Job]:
    """Return the jobs in the order of arrival; together they ask for ``load`` of the fleet.

    Half of the arrivals are spread over the day, half over its working hours; durations are
    log-normal with a median of 40 minutes (sigma 1.3, at most two days), longer for larger gangs.
    A gang that no pool could hold is halved until one could.
    """
    order, jobs, asked = random.Random(seed), list[Job](), 0.0
    slots = sum(host.slots for host in hosts)
    while asked < load * slots * days * DAY_S:
        hour = order.choice((order.uniform(8, 20), order.uniform(0, 24)))
        at = (order.randrange(math.ceil(days)) + hour / 24) * DAY_S
        kind = order.choices(("", "a100", "h100"), (5, 3, 2))[0]
        wanted = gang(order, f"job-{len(jobs):05}", size(order), kind, at)
        while why_never(hosts, wanted, {}):
            wanted = replace(wanted, ranks=wanted.ranks // 2)
        length_s = min(2 * DAY_S, order.lognormvariate(math.log(2_400), 1.3) * wanted.ranks**0.25)
        jobs.append(Job(wanted, length_s))
        asked += wanted.ranks * length_s
    return sorted(jobs, key=lambda job: job.gang.queued_at)


Hosts = Mapping[str, int]
Policy = Callable[
    [Sequence[Host], Sequence[Gang], Sequence[Reservation], Mapping[str, Quota], float],
    tuple[Mapping[str, Hosts], Iterable[str]],
]


class Month:
    """The events of one month under one policy, in rounds of a minute."""

    def __init__(self, hosts: Sequence[Host], jobs: Iterable[Job], policy: Policy,
                 checkpoint_s: float) -> None:  # fmt: skip
        self.hosts, self.policy, self.checkpoint_s = hosts, policy, checkpoint_s
        slots = sum(host.slots for host in hosts)
        self.quotas = {team: Quota(slots=round(slots * share)) for team, share in TEAMS.items()}
        self.racks = {host.name: host.rack for host in hosts}
        self.jobs = {job.gang.job_id: replace(job, left_s=job.length_s) for job in jobs}
        self.events = [(job.gang.queued_at, "arrives", name) for name, job in self.jobs.items()]
        heapq.heapify(self.events)
        self.waiting: dict[str, Gang] = {}
        self.running: dict[str, Reservation] = {}
        self.started: dict[str, float] = {}
        self.stops: dict[str, float] = {}  # when the job leaves its slots
        self.busy: list[tuple[float, float, int]] = []  # from, to, slots
        self.round_s: list[float] = []
        self.now = 0.0

    def run(self) -> None:
        """Handle every event until the last job has ended."""
        while self.events:
            assert self.now < 400 * DAY_S, "the policy preempts without end"
            self.now = math.ceil(self.events[0][0] / 60) * 60
            while self.events and self.events[0][0] <= self.now:
                self.handle(*heapq.heappop(self.events))
            self.decide()
        assert not self.waiting, f"never started: {sorted(self.waiting)[:3]}"

    def handle(self, at: float, event: str, name: str) -> None:
        """Let a job arrive, or end or leave unless it was preempted since."""
        job = self.jobs[name]
        if event == "arrives":
            self.waiting[name] = job.gang
        elif self.stops.get(name) == at:
            reservation = self.running.pop(name)
            del self.stops[name]
            self.busy.append((self.started[name], at, job.gang.ranks))
            if reservation.ending:
                self.waiting[name] = job.gang
            else:
                job.ended = at

    def decide(self) -> None:
        """Do what the policy decides now."""
        running = [
            replace(each, lost_work_s=self.unsaved_s(name)) for name, each in self.running.items()
        ]
        cpu_s = time.process_time()
        admitted, preempted = self.policy(
            self.hosts, list(self.waiting.values()), running, self.quotas, self.now
        )
        self.round_s.append(time.process_time() - cpu_s)
        for name in preempted:
            job, ran_s = self.jobs[name], self.now - self.started[name]
            unsaved_s = self.unsaved_s(name)
            # An end before the restart was through saves nothing.
            job.left_s = min(job.left_s, job.left_s - ran_s + unsaved_s + RESTART_S)
            job.lost_s += unsaved_s + LEAVE_S + RESTART_S
            job.preemptions += 1
            self.running[name] = replace(self.running[name], ending=True)
            self.stop(name, self.now + LEAVE_S)
        for name, hosts in admitted.items():
            job = self.jobs[name]
            self.running[name] = Reservation(gang=self.waiting.pop(name), hosts=hosts)
            self.started[name] = self.now
            if job.first_start < 0:
                job.first_start = self.now
                job.racks = len({self.racks[host] for host in hosts})
            self.stop(name, self.now + job.left_s)

    def unsaved_s(self, name: str) -> float:
        """Return the work that the job would lose if it left now."""
        ran_s = self.now - self.started[name]
        return ran_s % self.checkpoint_s if self.checkpoint_s else 0.0

    def stop(self, name: str, at: float) -> None:
        """Let the job leave its slots ``at`` a time."""
        self.stops[name] = at
        heapq.heappush(self.events, (at, "stops", name))


def ours(
    hosts: Sequence[Host],
    waiting: Sequence[Gang],
    running: Sequence[Reservation],
    quotas: Mapping[str, Quota],
    now: float,
) -> tuple[Mapping[str, Hosts], Iterable[str]]:
    """Decide as the leader does."""
    decision = decide(hosts, waiting, running, quotas, now)
    return {job: place.hosts for job, place in decision.admitted.items()}, decision.preempted


def without(*constants: str) -> Policy:
    """Return the policy of the leader without what begins after these waits."""

    def policy(*arguments: Any) -> tuple[Mapping[str, Hosts], Iterable[str]]:
        with contextlib.ExitStack() as stack:
            for name in constants:
                stack.enter_context(mock.patch(f"paceline.jobs.admission.{name}", math.inf))
            return ours(*arguments)

    return policy


class Slots:
    """Free slots, taken by first fit: of one host, else of empty hosts of one kind."""

    def __init__(self, hosts: Sequence[Host], running: Iterable[Reservation]) -> None:
        self.hosts = hosts
        self.free = {host.name: host.slots for host in hosts}
        for each in running:
            self.take(each.hosts)

    def find(self, gang: Gang, more: Mapping[str, int] | None = None) -> Hosts | None:
        """Return where the gang fits, were ``more`` slots free."""
        usable = [
            (host, self.free[host.name] + (more or {}).get(host.name, 0))
            for host in self.hosts
            if gang.kind in ("", host.kind) and gang.pool in ("", host.pool)
        ]
        for host, free in usable:
            if free >= gang.ranks:
                return {host.name: gang.ranks}
        for kind in ("a100", "h100"):
            found, left = {}, gang.ranks
            for host, free in usable:
                if free == host.slots and host.kind == kind and left:
                    found[host.name] = min(host.slots, left)
                    left -= found[host.name]
            if not left:
                return found
        return None

    def take(self, hosts: Hosts) -> Hosts:
        """Give the slots away."""
        for name, ranks in hosts.items():
            self.free[name] -= ranks
        return hosts

    def promise(self, hosts: Hosts, soon: dict[str, int]) -> None:
        """Keep slots for a gang, first those that become free ``soon``."""
        for name, ranks in hosts.items():
            late = min(soon.get(name, 0), ranks)
            soon[name] = soon.get(name, 0) - late
            self.free[name] -= ranks - late


def in_order(block: bool) -> Policy:
    """Return a policy without priorities and quotas: in the order of arrival, by first fit.

    With ``block`` a head that does not fit blocks the others (FIFO); without, whatever fits starts
    (Dask's worker resources; all or nothing here, which Dask does not promise).
    """

    def policy(
        hosts: Sequence[Host],
        waiting: Sequence[Gang],
        running: Sequence[Reservation],
        _quotas: Mapping[str, Quota],
        _now: float,
    ) -> tuple[Mapping[str, Hosts], Iterable[str]]:
        slots, admitted = Slots(hosts, running), {}
        for gang in sorted(waiting, key=lambda gang: (gang.queued_at, gang.job_id)):
            found = slots.find(gang)
            if found is not None:
                admitted[gang.job_id] = slots.take(found)
            elif block:
                break
        return admitted, ()

    return policy


def like_kueue(
    hosts: Sequence[Host],
    waiting: Sequence[Gang],
    running: Sequence[Reservation],
    quotas: Mapping[str, Quota],
    _now: float,
) -> tuple[Mapping[str, Hosts], Iterable[str]]:
    """Decide as a Kueue cohort of four queues with BestEffortFIFO.

    ``withinClusterQueue: LowerPriority``, ``reclaimWithinCohort: Any``, borrowing without limit.
    Victims: borrowers first, then lowest priority, then latest start (here: least lost work).
    """
    slots, admitted = Slots(hosts, running), {}
    preempted: dict[str, Reservation] = {}
    used: dict[str, int] = defaultdict(int)
    soon: dict[str, int] = defaultdict(int)  # slots of ending gangs
    for each in running:
        if each.ending:
            add(soon, each.hosts, 1)
        else:
            used[each.gang.team] += each.gang.ranks
    before = dict(used)
    for gang in sorted(
        waiting,
        key=lambda gang: (
            before.get(gang.team, 0) + gang.ranks > quotas[gang.team].slots,  # borrowers last
            -gang.priority,
            gang.queued_at,
            gang.job_id,
        ),
    ):
        found = slots.find(gang)
        if found is not None:
            admitted[gang.job_id] = slots.take(found)
            used[gang.team] += gang.ranks
            continue
        if used[gang.team] + gang.ranks > quotas[gang.team].slots:
            continue  # it would borrow: it waits
        found = slots.find(gang, soon)
        if found is not None:  # victims are leaving already
            slots.promise(found, soon)
            used[gang.team] += gang.ranks
            continue
        held, victims = dict(used), list[Reservation]()
        candidates = sorted(
            (each for each in running if not each.ending and each.gang.job_id not in preempted),
            key=lambda each: (
                each.gang.team == gang.team,
                each.gang.priority,
                each.lost_work_s,
                each.gang.job_id,
            ),
        )
        more = defaultdict(int, soon)
        for each in candidates:
            team = each.gang.team
            borrows = team != gang.team and held[team] > quotas[team].slots
            if not borrows and not (team == gang.team and each.gang.priority < gang.priority):
                continue
            victims.append(each)
            held[team] -= each.gang.ranks
            add(more, each.hosts, 1)
            if slots.find(gang, more):
                break
        else:
            continue
        for each in victims[::-1]:  # those that are not needed stay
            add(more, each.hosts, -1)
            if slots.find(gang, more) is None:
                add(more, each.hosts, 1)
            else:
                victims.remove(each)
        for each in victims:
            preempted[each.gang.job_id] = each
            used[each.gang.team] -= each.gang.ranks
        soon |= more
        found = slots.find(gang, soon)
        assert found is not None
        slots.promise(found, soon)
        used[gang.team] += gang.ranks
    return admitted, preempted


def add(slots: dict[str, int], hosts: Hosts, sign: int) -> None:
    """Add the slots of ``hosts``, or take them away."""
    for name, ranks in hosts.items():
        slots[name] += sign * ranks


POLICIES: dict[str, tuple[Policy, float]] = {  # and the time between its jobs' checkpoints
    "paceline": (ours, 0.0),
    "paceline, no aging": (without("AGED_AFTER_S"), 0.0),
    "paceline, neither": (without("AGED_AFTER_S", "OVERTAKEN_AFTER_S"), 0.0),
    "fifo": (in_order(block=True), 0.0),
    "dask": (in_order(block=False), 0.0),
    "kueue-like": (like_kueue, CHECKPOINT_S),
    "kueue-like, saves": (like_kueue, 0.0),
}


def measure_month(
    name: str, hosts: Sequence[Host], jobs: Sequence[Job], month_s: float
) -> dict[str, Any]:
    """Return what one policy makes of the month."""
    cpu_s = time.process_time()
    run = Month(hosts, jobs, *POLICIES[name])
    run.run()
    done = list(run.jobs.values())
    slots = sum(host.slots for host in hosts)
    busy = sum(
        ranks * (min(until, month_s) - start) for start, until, ranks in run.busy if start < month_s
    )
    lost = sum(job.lost_s * job.gang.ranks for job in done)
    racks = [job.racks == 1 for job in done if 8 < job.gang.ranks <= 64]
    return {
        "policy": name,
        "jobs": len(done),
        "utilisation": round(busy / (slots * month_s), 4),
        "lost_slot_hours": round(lost / 3600, 1),
        "lost_share": round(lost / (slots * month_s), 5),
        "preemptions": sum(job.preemptions for job in done),
        "preempted_jobs": sum(job.preemptions > 0 for job in done),
        "in_one_rack": round(statistics.mean(racks), 3) if racks else None,
        "worst_wait_h": round(max(job.first_start - job.gang.queued_at for job in done) / 3600, 2),
        "worst_delay_h": round(max(map(delay_s, done)) / 3600, 2),
        "all_ended_h_after": round((max(job.ended for job in done) - month_s) / 3600, 1),
        "by_team": {team: waits([job for job in done if job.gang.team == team]) for team in TEAMS},
        "by_size": {
            label: waits([job for job in done if low < job.gang.ranks <= high])
            for (label, high), low in zip(SIZES, (0, 8, 64), strict=True)
        },
        "by_priority": {
            str(level): waits([job for job in done if job.gang.priority == level])
            for level in (2, 1, 0)
        },
        "all": waits(done),
        "rounds": len(run.round_s),
        "round_max_s": round(max(run.round_s), 3),
        "cpu_s": round(time.process_time() - cpu_s, 1),
    }


def delay_s(job: Job) -> float:
    """Return the time from submission to end that was no useful work."""
    return job.ended - job.gang.queued_at - job.length_s


def waits(jobs: Sequence[Job]) -> dict[str, float]:
    """Return minutes until the first start, and of delay over all (with work done again)."""
    wait = sorted(job.first_start - job.gang.queued_at for job in jobs)
    delay = sorted(map(delay_s, jobs))
    return {
        "jobs": len(jobs),
        "wait_p50_min": round(quantile(wait, 0.5) / 60, 1),
        "wait_p95_min": round(quantile(wait, 0.95) / 60, 1),
        "wait_worst_h": round(max(wait, default=0) / 3600, 1),
        "delay_p50_min": round(quantile(delay, 0.5) / 60, 1),
        "delay_p95_min": round(quantile(delay, 0.95) / 60, 1),
        "delay_worst_h": round(max(delay, default=0) / 3600, 1),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie; 0 where there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def line(row: dict[str, Any]) -> str:
    """Return a row of the table: waits as p50/p95/worst|delay p95/worst, minutes and hours."""

    def shown(waited: Mapping[str, float]) -> str:
        return (
            f"{waited['wait_p50_min']:.0f}/{waited['wait_p95_min']:.0f}/"
            f"{waited['wait_worst_h']:.0f}h|{waited['delay_p95_min']:.0f}/"
            f"{waited['delay_worst_h']:.0f}h"
        )

    parts = {**row["by_priority"], **row["by_size"], **row["by_team"]}
    return (
        f"{row['policy']:<22} used {row['utilisation']:.3f}  lost {row['lost_slot_hours']:.0f} h  "
        f"preemptions {row['preemptions']}  one rack {row['in_one_rack']}  "
        f"worst wait {row['worst_wait_h']} h  all {shown(row['all'])}  "
        + "  ".join(f"{label} {shown(waited)}" for label, waited in parts.items())
        + f"  cpu {row['cpu_s']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
