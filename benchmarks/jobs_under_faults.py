"""Runs training jobs of several teams while their processes are killed; prints what came of them.

    python benchmarks/jobs_under_faults.py                       # 20 jobs of 4 teams, 37 faults
    python benchmarks/jobs_under_faults.py --no-jobs --kills 40  # workers of two jobs, in turn
    python benchmarks/jobs_under_faults.py --no-jobs --kills 12 --at-once 1 --starting
    python benchmarks/jobs_under_faults.py --tiny                # as the test runs it

Everything is real: an installation of `paceline up` with four nodes, three coordinators on etcd,
Prefect, Dask and MLflow. It is driven by `paceline` and REST alone; ranks, launchers, Dask workers,
agents, flows and the leading coordinator are killed by SIGKILL. Checked at the end: each job's
state and steps, the work that each loss cost (jobs' usage and notes), quotas (usage), the audit,
orphans. Ranks that run get the lowest CPU priority: on real nodes an accelerator makes the steps,
here it would be the CPU on which everything else recovers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import pandas as pd
import psutil

from paceline.client import CoordinatorClient
from paceline.config import Runtime
from paceline.schemas import JobState, SubmitJob, TrainingJob
from tests.support.etcd import etcd_cluster
from tests.support.stack import (
    PACELINE,
    Ended,
    await_registered,
    environment,
    finish,
    installation,
    paceline,
    processes_of,
    start,
    wait_until,
)

S = JobState
NODES = 4  # of one slot each
# team → slots that it is guaranteed, and slots that it may borrow
QUOTAS = {"nlp": (2, 2), "vision": (1, 2), "speech": (1, 1), "ranking": (0, 2)}
LAUNCHER, AGENT = "paceline.training.launcher.forkserver", "paceline.cli.main agent "
RANK_FAULTS = ("rank", "launcher", "worker")  # the gang goes on in the same flow run
MOST_FAULTS = 4  # of one job
LOOK_S = 0.2
NICE_S = 2.0
GOAL_S = 10.0
PATIENCE_S = 1800.0  # without any change of any job: then the run is given up


@dataclass
class Fault:
    """A fault, and when the API showed that what it hit goes on."""

    kind: str
    job_id: str
    at: float  # seconds since the epoch
    before: TrainingJob | None
    seconds: float | None = None
    became: str = ""
    noticed_s: float | None = None  # until the API showed that the gang's attempt had ended
    again_s: float | None = None  # until it showed a rank of the next attempt

    def look(self, job: TrainingJob, now: float) -> None:
        """Note that the job recovers, runs again or has ended."""
        assert self.before is not None
        report, was = job.report, self.before.report
        if report and was and self.again_s is None and report.at > self.at:
            began = report.attempt > was.attempt
            if began or report.failures != was.failures:
                self.noticed_s = self.noticed_s or now - self.at
            self.again_s = now - self.at if began else None
        if job.state.is_final or job.losses > self.before.losses:
            self.became = str(job.state)
        elif report and was and report.attempt > was.attempt and report.workers:
            ranks = [e for e in report.workers if e.last_heartbeat > self.at]
            if len(ranks) < len(was.workers) or {e.state for e in ranks} != {"running"}:
                return
            self.became = "running"
        else:
            return
        self.seconds = now - self.at


@dataclass
class Lab:
    """The installation, its model and data, and what was seen of its jobs."""

    stack: Runtime
    snapshot: str
    steps: int
    every: int
    faults: list[Fault] = field(default_factory=list)
    seen: dict[str, TrainingJob] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    nice_s: float = 0.0  # when ranks are looked for again

    def __post_init__(self) -> None:
        self.client = CoordinatorClient.of(self.stack, patience_s=120.0)

    def cli(self, *words: str) -> Ended:
        done = paceline(*words, state=self.stack.state_dir, timeout_s=PATIENCE_S)
        assert done.code == 0, done.err
        return done

    def submit(self, name: str, team: str, ranks: int, priority: int = 0, steps: int = 0) -> str:
        parameters = {
            "training.steps": steps or self.steps,
            "training.checkpoints.every_steps": self.every,
            "training.checkpoints.keep": 4,
            "training.guard.max_restarts": 1000,
            "training.guard.failures_per_host": 1000,
        }
        spec = SubmitJob.model_validate(
            {
                "model_id": "acme/tiny", "version": "1", "data_snapshot": self.snapshot,
                "name": name, "team": team, "priority": priority, "parameters": parameters,
                "resources": {"ranks": ranks}, "seed": zlib.crc32(name.encode()) >> 1,
            }
        )  # fmt: skip
        return self.client.submit_job(spec, name).job.job_id

    def look(self) -> dict[str, TrainingJob]:
        """Read every open job; note resumed steps, quotas that are exceeded, and recoveries."""
        self.leave_cpu()
        held: Counter[str] = Counter()
        hosts: Counter[str] = Counter()
        listed = self.client.jobs(limit=500).jobs
        for brief in listed:
            known = self.seen.get(brief.job_id)
            if known is not None and known.state.is_final:
                continue
            job = brief if brief.state.waits else self.client.job(brief.job_id).job
            self.seen[job.job_id] = job
            now = time.time()
            for fault in self.faults:
                if fault.seconds is None and fault.job_id == job.job_id and fault.before:
                    fault.look(job, now)
            if brief.placement is not None:  # of one answer, so of one moment
                held[brief.spec.team] += sum(brief.placement.hosts.values())
                hosts.update(brief.placement.hosts)
        for team, slots in held.items():
            if slots > most_of(team):
                self.wrong.append(f"team {team} holds {slots} of {most_of(team):.0f} slots")
        self.wrong += [f"{n} ranks on {host}" for host, n in hosts.items() if n > 1]
        return self.seen

    def may_be_hit(self, job: TrainingJob) -> bool:
        """Return whether the job makes steps, has saved, and goes on for a while."""
        report, mine = job.report, [e for e in self.faults if e.job_id == job.job_id]
        return (
            job.state is S.RUNNING
            and not job.adopted
            and len(mine) < MOST_FAULTS
            and all(each.seconds is not None for each in mine)
            and report is not None
            and bool(report.checkpoints)
            and {each.state for each in report.workers} == {"running"}
            and report.step < report.steps - 2 * self.every
        )

    # -- faults

    def processes(self, text: str, node: str = "") -> list[psutil.Process]:
        """Return the installation's processes whose command line has ``text``, on ``node``."""
        found = []
        for each in processes_of(self.stack.state_dir):
            with contextlib.suppress(psutil.Error):
                here = node in ("", each.environ().get("PACELINE_WORKER_ID"))
                if here and re.search(text, " ".join(each.cmdline()) + " "):
                    found.append(each)
        return found

    def launchers(self, node: str = "") -> list[psutil.Process]:
        """Return the launchers on ``node``, whose forked ranks have the same command line."""
        found = [e for e in self.processes(LAUNCHER, node) if e.cmdline()[1:3] == ["-m", LAUNCHER]]
        ids = {each.pid for each in found}
        return [each for each in found if each.ppid() not in ids]

    def leave_cpu(self) -> None:
        """Give the ranks that there are the lowest CPU priority; at most once in NICE_S."""
        if time.monotonic() < self.nice_s:
            return
        for each in self.launchers():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                for rank in each.children():
                    rank.nice(19)
                    # Linux may share CPU time by session: there nice counts within one alone
                    Path(f"/proc/{rank.pid}/autogroup").write_text("19")
        self.nice_s = time.monotonic() + NICE_S

    def hit(self, kind: str, job: TrainingJob) -> bool:
        """Kill a process of the job's by SIGKILL; return False where it has none just now."""
        assert job.report is not None
        node = job.report.workers[-1].host
        if kind == "flow":
            wanted = str(job.flow_run_id).replace("-", "")
            found = [
                each
                for each in self.processes("")
                if each.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", "") == wanted
            ]
        elif kind == "agent":
            found = self.processes(AGENT, node)
        else:
            found = self.launchers(node)
            if kind == "worker":
                found = [above for each in found for above in each.parents()[1:2]]
            elif kind == "rank":  # of a launcher's children it has computed the most
                children = [child for each in found for child in each.children()]
                found = sorted(children, key=lambda e: sum(e.cpu_times()[:2]))[-1:]
        if not found:
            return False
        self.faults.append(Fault(kind, job.job_id, time.time(), job))
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if kind == "agent":  # the ranks do not need it
            self.faults[-1].seconds, self.faults[-1].became = 0.0, "running"
        return True

    def kill_leader(self) -> None:
        """Kill the leading coordinator, and wait until another one accepts a write."""
        name = self.cli("status", "--json").answer["leader_url"]
        port = name.rpartition(":")[2]
        leading = self.processes(f"paceline.cli.main coordinator .* --port {port} ")
        assert leading, f"{name} does not run"
        fault = Fault("coordinator", name, time.time(), None)
        self.faults.append(fault)
        for each in leading:
            each.kill()
        job_id = self.submit("after a failover", "ranking", 1)
        fault.seconds, fault.became = time.time() - fault.at, "write accepted"
        self.client.change_job(job_id, "cancel")


def most_of(team: str) -> float:
    slots, borrow = QUOTAS.get(team, (0, math.inf))
    return slots + borrow


@contextlib.contextmanager
def lab(directory: Path, steps: int, every: int) -> Iterator[Lab]:
    """Yield an installation with a published model and a snapshot; at its end nothing is left."""
    quotas = ",".join(f"{t}={{slots={s},borrow={b}}}" for t, (s, b) in QUOTAS.items())
    with etcd_cluster(directory / "etcd", 1) as etcd:
        settings = (
            "cluster.link_mbit=1000",
            "control.flow_starter=prefect",
            "control.coordination=etcd",
            f"control.etcd_endpoints={json.dumps(list(etcd.access.endpoints))}",
            "control.replicas=3",
            f"cluster.nodes={NODES}",
            f"jobs.quotas={{{quotas}}}",
            "data.max_bytes=400000",
        )
        with installation(directory / "state", *settings) as stack:
            await_registered(stack)
            yield Lab(stack, prepare(stack, directory), steps, every)


def prepare(stack: Runtime, directory: Path) -> str:
    """Publish a small model, bring it to every node, and make a snapshot; return its URL."""
    here = [*PACELINE, "train", "--profile", "ci", "--ranks", "1", "--steps", "5"]
    here += ["--output", str(directory / "base"), "--set", "data.max_bytes=300000", "--json"]
    made = subprocess.run(here, env=environment(), check=True, capture_output=True, text=True)
    model = json.loads(made.stdout.splitlines()[-1])["export_url"].removeprefix("file://")

    def cli(*words: str) -> dict[str, Any]:
        done = paceline(*words, "--json", state=stack.state_dir, timeout_s=PATIENCE_S)
        assert done.code == 0, done.err
        return done.answer

    cli("publish", model, "--model", "acme/tiny", "--version", "1")
    cli("distribute", "acme/tiny", "1")
    return str(cli("snapshot")["url"])


# -- the run


@dataclass(frozen=True)
class Plan:
    """How many jobs of how many teams run, and what hits them."""

    jobs: int
    teams: int
    faults: tuple[str, ...]
    preemptions: int
    cancelled: bool
    by_hand: bool  # a training that `paceline train` starts, which is preempted, too


FULL = Plan(
    20, 4, (*("rank", "launcher", "worker") * 10, "flow", "flow", "agent", "agent"), 2, True, True
)  # fmt: skip
TINY = Plan(3, 2, ("rank",), 1, False, False)


def run(made: Lab, plan: Plan, seed: int = 7) -> None:
    """Submit the jobs, hit them while they run, and return once all have ended."""
    chance, teams = random.Random(seed), list(QUOTAS)[: plan.teams]
    jobs = []
    for number in range(plan.jobs):
        team, ranks = teams[number % len(teams)], chance.choice((1, 1, 2))
        jobs.append(made.submit(f"job-{number}", team, ranks, chance.choice((0, 0, 5))))
    by_hand = None
    if plan.by_hand:
        words = (
            *("training", "start", "acme/tiny", "1", "--snapshot", made.snapshot),
            *("--ranks", "1", "--json", "--steps", str(made.steps)),
            *("--set", f"training.checkpoints.every_steps={made.every}"),
        )
        by_hand = start(*words, state=made.stack.state_dir)
    todo = list(plan.faults)
    chance.shuffle(todo)
    preemptions, failovers, cancelled = plan.preemptions, 1, not plan.cancelled
    changed_s, before = time.monotonic(), ""
    while True:
        seen = made.look()
        is_over = all(e.state.is_final for e in seen.values()) and len(seen) >= plan.jobs
        if is_over and (by_hand is None or by_hand.poll() is not None):
            break
        ready = [each for each in seen.values() if made.may_be_hit(each)]
        hit = sum(each.kind in RANK_FAULTS or each.kind == "flow" for each in made.faults)
        if ready and failovers and hit >= len(plan.faults) // 2:
            failovers -= 1
            made.kill_leader()
        elif ready and preemptions and hit >= len(plan.faults) // (preemptions + 1):
            preemptions -= 1
            # within its team's quota: it takes slots from its team's other jobs, or from borrowers
            jobs.append(made.submit(f"urgent-{preemptions}", "nlp", QUOTAS["nlp"][0], 50))
            made.faults.append(Fault("preemption", jobs[-1], time.time(), None, 0.0, "submitted"))
        elif ready and not cancelled and hit >= 2:
            cancelled = True
            made.cli("jobs", "cancel", ready[0].job_id)
        elif ready and todo and made.hit(todo[-1], chance.choice(ready)):
            todo.pop()
        state = str([(e.job_id, e.state, e.report and e.report.step) for e in seen.values()])
        if state != before:
            changed_s, before = time.monotonic(), state
        assert time.monotonic() < changed_s + PATIENCE_S, f"nothing changes any more: {state}"
        time.sleep(LOOK_S)
    made.wrong += [f"no job was there for {kind}" for kind in todo]
    if preemptions or failovers or not cancelled:
        made.wrong.append("a preemption, the failover or the cancel found no job")
    if by_hand is not None:
        ended = finish(by_hand, 60)
        if ended.code:
            made.wrong.append(f"the training that was started by hand: {ended.err[-500:]}")


def kill_workers(made: Lab, kills: int, at_once: int, *, starting: bool = False) -> None:
    """Kill workers of ``at_once`` jobs of two ranks each, in turn, and wait for each recovery.

    With ``starting`` each job is hit once, before its first step; then another one follows it.
    """
    kinds = itertools.cycle(RANK_FAULTS)
    wanted = (S.STARTING, {"starting"}) if starting else (S.RUNNING, {"running"})
    number, mine = 0, list[str]()
    done = len(made.faults)
    while len(made.faults) < done + kills:
        seen = made.look()
        mine = [each for each in mine if not seen[each].state.is_final] if seen else []
        while len(mine) < at_once:
            number += 1
            mine.append(made.submit(f"long-{number}", ("nlp", "vision")[number % 2], 2, 0, 10**6))
            seen = made.look()
        for each in tuple(mine):
            job, report = seen[each], seen[each].report
            last = [fault for fault in made.faults if fault.job_id == each][-1:]
            if any(fault.seconds is None for fault in last):
                continue
            if starting and (last or job.state is S.RUNNING):  # hit already, or it was missed
                made.client.change_job(each, "cancel")
                mine.remove(each)
                continue
            states = {rank.state for rank in report.workers} if report else set()
            if (job.state, states) == wanted and report and (starting or report.checkpoints):
                made.hit(next(kinds), job)
        time.sleep(LOOK_S)
    wait_until(
        lambda: made.look() and all(each.seconds is not None for each in made.faults),
        PATIENCE_S, "the last recovery",
    )  # fmt: skip
    mine = [each for each, job in made.seen.items() if not job.state.is_final]
    for each in mine:
        made.client.change_job(each, "cancel")
    wait_until(
        lambda: all(made.look()[each].state.is_final for each in mine), PATIENCE_S, "jobs end"
    )


# -- the checks


def check(made: Lab) -> None:
    """Add to ``wrong`` what did not hold; every job has ended."""
    jobs = [made.client.job(each.job_id).job for each in made.client.jobs(limit=500).jobs]
    made.seen = {each.job_id: each for each in jobs}
    cancelled = {each.job_id for each in jobs if "cancel requested" in each.reason}
    for job in jobs:
        wanted = S.CANCELLED if job.job_id in cancelled else S.SUCCEEDED
        if job.state is not wanted:
            made.wrong.append(f"{job.spec.name} {job.job_id} is {job.state}: {job.reason}")
        report = job.report
        if job.state is S.SUCCEEDED and (report is None or report.step != report.steps):
            made.wrong.append(f"{job.spec.name} succeeded at {report and report.step}")
        for cause, steps in lost(job):
            if steps > made.every:
                made.wrong.append(f"{job.spec.name} lost {steps} steps: {cause}")
    made.wrong += over_quota(jobs)
    made.wrong += not_audited(made, jobs)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not made.launchers(), 30, "launchers end")
    made.wrong += [f"orphan {each.pid}: {each.cmdline()}" for each in made.launchers()]


def lost(job: TrainingJob) -> list[tuple[str, int]]:
    """Return the steps that each restart of a gang, and the losses of flow runs together, lost."""
    report = job.report
    if report is None:
        return []
    notes = re.findall(
        r"gang restarted .*?: (rank .*?); resumed at .*? (\d+) steps lost", str(report.notes)
    )
    found = [(f"gang restarted: {why}", int(steps)) for why, steps in notes]
    flows = sum(each.ended in (S.RECOVERING, S.PREEMPTED) for each in job.usage)
    if flows and job.state is S.SUCCEEDED:  # steps of all flow runs, each counted once in its own
        again = sum(each.steps for each in job.usage) - report.steps
        # below 0: ranks made and saved steps between two flow runs, which none of them counts
        found.append((f"{flows} flow runs", max(0, math.ceil(again / flows))))
    return found


def over_quota(jobs: Sequence[TrainingJob]) -> list[str]:
    """Return where the attempts, by the times of the jobs' usage, exceed a quota or the fleet."""
    wrong = []
    for team in {each.spec.team for each in jobs} | {""}:
        changes = [
            (at, slots)
            for job in jobs
            if team in ("", job.spec.team)
            for each in job.usage
            for at, slots in (
                (each.since, each.slots),
                (each.since + (each.held_s or 0.0), -each.slots),
            )
        ]
        held, most = 0, most_of(team) if team else NODES
        for at, slots in sorted(changes):  # of one moment, those that leave are first
            held += slots
            if held > most:
                wrong.append(f"team {team or 'all'} held {held} of {most} slots at {at:.1f}")
    return wrong


def not_audited(made: Lab, jobs: Sequence[TrainingJob]) -> list[str]:
    """Return the jobs whose changes are not all in the audit."""
    states: dict[str, list[str]] = {}

    def all_there() -> bool:
        states.clear()
        words = ("audit", "--name", "job.state_changed", "--limit", "1000", "--json")
        for row in made.cli(*words).answer["events"]:
            mine = states.setdefault(row["data"]["job_id"], [])
            if mine[-1:] != [row["data"]["state"]]:
                mine.append(row["data"]["state"])
        return all(states.get(each.job_id) == changes[each.job_id] for each in jobs)

    changes = {each.job_id: [str(change.state) for change in each.history] for each in jobs}
    with contextlib.suppress(AssertionError):
        wait_until(all_there, 30, "rows are shipped")
    return [
        f"{each.job_id} is {states.get(each.job_id)} in the audit, not {changes[each.job_id]}"
        for each in jobs
        if states.get(each.job_id) != changes[each.job_id]
    ]


# -- what is printed


def table(jobs: Sequence[TrainingJob]) -> pd.DataFrame:
    """Return a row a job: state, attempts, waits in seconds, and steps that were made again."""
    rows = []
    for each in sorted(jobs, key=lambda job: job.created_at):
        found = lost(each)
        rows.append(
            {
                "job": each.spec.name or "by hand",
                "team": each.spec.team,
                "ranks": each.usage[-1].slots if each.usage else 0,
                "priority": each.spec.priority,
                "state": str(each.state),
                "flow runs": each.attempt,
                "losses": each.losses,
                "preempted": each.preemptions,
                "gang restarts": sum(cause.startswith("gang") for cause, _ in found),
                "waited s": round(sum(usage.queued_s for usage in each.usage), 1),
                "held s": round(sum(usage.held_s or 0.0 for usage in each.usage), 1),
                "steps": each.report.step if each.report else 0,
                "lost steps, worst": max((steps for _, steps in found), default=0),
            }
        )
    return pd.DataFrame(rows)


def recoveries(faults: Sequence[Fault]) -> pd.DataFrame:
    """Return a row a kind of fault: seconds until the API showed a recovered or ended job, and,
    of those above GOAL_S, the medians until it showed the failure and the next attempt's ranks.
    """
    rows = []
    kinds = dict.fromkeys(each.kind for each in faults)
    for kind in [*kinds, "rank, launcher, worker"]:
        mine = [each for each in faults if each.kind in kind.split(", ")]
        slow = [each for each in mine if (each.seconds or 0.0) > GOAL_S]
        times = sorted(each.seconds for each in mine if each.seconds is not None)
        if times:
            rows.append(
                {
                    "killed": kind,
                    "times": len(mine),
                    "median s": round(statistics.median(times), 1),
                    "p95 s": round(times[min(len(times) - 1, int(len(times) * 0.95))], 1),
                    "worst s": round(times[-1], 1),
                    "in 10 s": sum(each <= GOAL_S for each in times),
                    "slow: noticed s": median_of(each.noticed_s for each in slow),
                    "slow: ranks again s": median_of(each.again_s for each in slow),
                    "became": str(dict(Counter(each.became for each in mine))),
                }
            )
    return pd.DataFrame(rows)


def median_of(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return round(statistics.median(known), 1) if known else None


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="as the test runs it")
    parser.add_argument("--kills", type=int, default=0, help="of workers, after the jobs")
    parser.add_argument("--no-jobs", action="store_true", help="only --kills")
    parser.add_argument("--at-once", type=int, default=2, help="jobs whose workers are killed")
    parser.add_argument("--starting", action="store_true", help="kill them before the first step")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args(words)
    plan, load = TINY if chosen.tiny else FULL, [os.getloadavg()[0]]
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as temporary,
        lab(Path(temporary), chosen.steps, chosen.every) as made,
    ):
        report(made, plan, chosen, load, began_s)
    return 1 if made.wrong else 0


def report(
    made: Lab, plan: Plan, chosen: argparse.Namespace, load: list[float], began_s: float
) -> None:
    """Run what was chosen, check it, print it, and write it below ``--out``."""
    if not chosen.no_jobs:
        run(made, plan)
    if chosen.kills:
        kill_workers(made, chosen.kills, chosen.at_once, starting=chosen.starting)
    load.append(os.getloadavg()[0])
    check(made)
    jobs, faults = table(list(made.seen.values())), recoveries(made.faults)
    print(f"{cpu_model()}, {os.cpu_count()} cores; load {load[0]:.1f} to {load[1]:.1f}")
    print(f"{len(jobs)} jobs in {time.monotonic() - began_s:.0f} s, start included\n")
    print(jobs.to_markdown(index=False), faults.to_markdown(index=False), sep="\n\n")
    print("\nwrong:", *(made.wrong or ["nothing"]), sep="\n  ")
    chosen.out.mkdir(parents=True, exist_ok=True)
    result = {
        "jobs": jobs.to_dict("records"),
        "recoveries": faults.to_dict("records"),
        "seconds": [
            [each.kind, each.became, each.seconds, each.noticed_s, each.again_s]
            for each in made.faults
        ],
        "wrong": made.wrong,
        "load": load,
        "cpu": cpu_model(),
    }
    (chosen.out / "jobs_under_faults.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
