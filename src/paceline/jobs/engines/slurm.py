"""Slurm as the engine of jobs: one Slurm job a gang, and Slurm's queue decides.

The Slurm job only holds whole nodes; `paceline cluster` attaches a step with a worker to each of
them. A Slurm job is found by its name, which has the job's id: what a coordinator submitted before
it died is found by the next one, and is not submitted again. `standing` decides what an answer of
squeue means for a job; it is pure.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.cluster import SlurmJob, batch_argv, run_command, sbatch, slurm_prefix, squeue
from paceline.config import Runtime
from paceline.jobs.engines.contract import (
    ForeignEngine,
    Request,
    Standing,
    nodes_of,
    on_nodes,
)
from paceline.jobs.placement import Host
from paceline.jobs.preemption import Reservation
from paceline.schemas import JobAllocation

log = logging.getLogger(__name__)

IDLE_POLL_S = 60.0  # with nothing requested and nothing held
COMMAND_S = 10.0  # of one of Slurm's commands: the scheduler's thread waits for it
# An agent that is alive right after the start may be of the node's last job, killed meanwhile: the
# coordinator takes it for lost after 15 s.
SETTLE_S = 16.0
UNATTENDED_MINUTES = 10
# The batch script. It holds the nodes while steps run on them, workers of `paceline cluster`; where
# none has run for ten minutes it ends, so that no lost installation keeps nodes. squeue without an
# answer says nothing of steps.
HOLD = (
    f"n=0; while [ $n -lt {UNATTENDED_MINUTES} ]; do sleep 60; "
    's=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i) || continue; '
    "n=$((n+1)); case $s in *.[0-9]*) n=0;; esac; done"
)
AGAIN = {"NODE_FAIL", "PREEMPTED", "TIMEOUT", "BOOT_FAIL"}  # its end is not the job's doing
INSTEAD = {
    "priority": "jobs.priority at most 0 (sbatch's --nice); a qos of the team before others: "
    "cluster.slurm.teams",
    "resources.within": "cluster.slurm.options, such as --switches=1",
    "resources.memory_bytes": "resources.accelerator, or cluster.slurm.options with --constraint",
    "resources.capacity": "resources.queue, the name of a partition",
    "resources.node_labels": "resources.queue, or cluster.slurm.options with --constraint",
}


class SlurmEngine(ForeignEngine):
    """Requests, reads and cancels one Slurm job for each training job."""

    name, instead = "Slurm", INSTEAD

    def __init__(self, runtime: Runtime, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(runtime, monotonic)
        self._prefix = slurm_prefix(runtime)
        self._jobs: dict[str, SlurmJob] = {}  # by training job: the one of its name that counts
        self._second: list[SlurmJob] = []  # others of these names that have not ended
        self._ran_s: dict[str, float] = {}  # Slurm job → since when it runs

    def _test(self, request: Request) -> None:
        sbatch(self._argv(request, is_test=True), "resources", COMMAND_S)

    def submit(self, request: Request) -> None:
        """Submit the Slurm job of a training job that has none."""
        job = request.job
        if not self._may_ask(job.job_id):
            return
        before = self._jobs.get(job.job_id)
        if before is not None and not needs_another(before, job.allocation):
            return
        self._require_supported(request)
        argv = self._argv(request)
        where = "[cluster.slurm] of the profile, and resources"
        slurm_id = self._ask(
            job.job_id, lambda: sbatch(argv, where, COMMAND_S, was_tested=not job.adopted)
        )
        if slurm_id is None:
            return
        log.info("%s requests %s nodes as Slurm job %s", job.job_id, nodes_of(request), slurm_id)
        self._jobs[job.job_id] = SlurmJob(job_id=slurm_id, name=job.job_id, state="PENDING")

    def status(
        self,
        hosts: Sequence[Host],
        waiting: Sequence[Request],
        running: Sequence[Reservation],
        now: float,  # noqa: ARG002
    ) -> Mapping[str, Standing]:
        """Return where each job stands, by Slurm's last answer; {} before the first one."""
        wanted = {each.job.job_id for each in waiting} | {each.gang.job_id for each in running}
        idle = not wanted and all(each.is_over for each in self._jobs.values())
        if not self._end_round(waiting, IDLE_POLL_S if idle else None):
            return {}
        while self._second and self._scancel(self._second[0]):
            del self._second[0]
        alive = {each.name: each for each in hosts}
        found = {
            job_id: Standing(phase="waiting")
            for job_id, job in self._jobs.items()
            if job_id not in wanted and not job.is_over and job.state != "COMPLETING"
        }
        for each in running:
            job_id = each.gang.job_id
            found[job_id] = held_standing(self._jobs.get(job_id), each.hosts)
        for request in waiting:
            job_id = request.job.job_id
            if (job := self._jobs.get(job_id)) is None:
                continue
            if needs_another(job, request.job.allocation):
                continue
            has_settled = self._monotonic() - self._ran_s.get(job.job_id, math.inf) >= SETTLE_S
            stands = standing(job, request, alive, has_settled=has_settled)
            found[job_id] = self._stands(job_id, stands)
        return found

    def cancel(self, job_id: str) -> None:
        """Cancel the Slurm job of a training job."""
        if (job := self._jobs.get(job_id)) is None or job.is_over:
            return
        if self._scancel(job):
            self._jobs[job_id] = SlurmJob(job_id=job.job_id, name=job.name, state="COMPLETING")

    def _scancel(self, job: SlurmJob) -> bool:
        code, _, err = run_command("scancel", "--quiet", job.job_id, timeout_s=COMMAND_S)
        if code:
            log.warning("Slurm job %s is not cancelled yet: %s", job.job_id, err.strip()[:300])
            return False
        log.info("%s releases Slurm job %s", job.name, job.job_id)
        return True

    def _queues(self) -> tuple[str, Mapping[str, str]]:
        slurm = self._runtime.profile.cluster.slurm
        return slurm.partition, {team: each.partition for team, each in slurm.teams.items()}

    def _fetch(self) -> None:
        self._jobs, self._second = chosen(squeue(timeout_s=COMMAND_S), self._prefix)
        runs = {each.job_id for each in self._jobs.values() if each.state == "RUNNING"}
        self._ran_s = {each: self._ran_s.get(each, self._monotonic()) for each in runs}

    def _argv(self, request: Request, *, is_test: bool = False) -> list[str]:
        name = f"{self._prefix}{request.job.job_id}"
        avoid = self._avoid.get(request.job.job_id, ())
        return argv_of(request, name, self._runtime, is_test=is_test, avoid=avoid)


def argv_of(
    request: Request,
    name: str,
    runtime: Runtime,
    *,
    is_test: bool = False,
    avoid: Sequence[str] = (),
) -> list[str]:
    """Return the argv of sbatch for a job: the job's own words, else its team's, else the
    profile's. The nodes of ``avoid`` are excluded."""
    slurm, spec = runtime.profile.cluster.slurm, request.job.spec
    asked, more = spec.resources, []
    chosen: dict[str, str] = {}
    if (team := slurm.teams.get(spec.team)) is not None:
        chosen |= {key: value for key, value in team.model_dump().items() if value}
    if asked.queue:
        chosen["partition"] = asked.queue
    if asked.time_limit_s:
        chosen["time_limit"] = str(math.ceil(asked.time_limit_s / 60))
    if asked.accelerator:
        more.append(f"--gres=gpu:{asked.accelerator}:{request.ranks_per_node or 1}")
    if avoid:
        more.append(f"--exclude={','.join(avoid)}")
    if spec.priority < 0:
        more.append(f"--nice={-spec.priority}")
    own = slurm.model_copy(update=chosen)
    nodes = nodes_of(request)
    return batch_argv(name, nodes, own, *more, script=HOLD, is_test=is_test)


def chosen(jobs: Sequence[SlurmJob], prefix: str) -> tuple[dict[str, SlurmJob], list[SlurmJob]]:
    """Return the Slurm job of each training job, and others of the same name that wait or run: of
    an sbatch that Slurm took though the command failed.

    One that runs, else the first that waits, else one that is ending, else the last that ended.
    """
    own = [each for each in jobs if each.name.startswith(prefix)]

    def rank(job: SlurmJob) -> tuple[int, int]:
        number = int(re.split(r"\D", job.job_id, maxsplit=1)[0])  # 12_3 and 12+0 are parts of 12
        if job.is_over or job.state == "COMPLETING":
            return not job.is_over, number
        return 2 + (job.state == "RUNNING"), -number

    found = {each.name.removeprefix(prefix): each for each in sorted(own, key=rank)}
    second = [
        each
        for each in own
        if rank(each)[0] >= 2 and each is not found[each.name.removeprefix(prefix)]
    ]
    return found, second


def needs_another(job: SlurmJob, known: JobAllocation | None) -> bool:
    """Return whether a waiting job needs another Slurm job than this one: it is over, and either
    by no fault of the job's, or it is of an earlier time of waiting (not the ``known`` one)."""
    return job.is_over and (job.state in AGAIN or known is None or known.id != job.job_id)


def standing(
    job: SlurmJob, request: Request, alive: Mapping[str, Host], *, has_settled: bool
) -> Standing:
    """Return where a waiting job stands."""
    said = text_of(job)
    allocation = _allocation(job)
    if job.state == "CANCELLED":
        return Standing(phase="cancelled", reason=said, allocation=allocation)
    if job.is_over:
        unattended = job.state == "COMPLETED"
        hint = "; no worker ran in it: is `paceline cluster` running?" if unattended else ""
        return Standing(phase="failed", reason=f"{said}{hint}", allocation=allocation)
    if job.state == "COMPLETING":  # perhaps of the time before a pause: it is not the job's
        return Standing(phase="waiting", reason=said)
    if job.state != "RUNNING":
        return Standing(phase="waiting", reason=said, allocation=allocation)
    away = [each for each in job.nodes if each not in alive]
    if away or not has_settled or not job.nodes:
        what = f"the workers of {', '.join(away[:5])}" if away else "its nodes to settle"
        why = f"{said} on {', '.join(job.nodes[:5])}; waiting for {what}"
        return Standing(phase="waiting", reason=why, allocation=allocation)
    found = on_nodes(job.nodes, said, request, alive, allocation)
    if not found.avoid:
        return found
    # without an id: that Slurm job, cancelled then, is not the job's
    why = found.reason[:500]
    given_back = JobAllocation(engine="slurm", id="", state="released", reason=why)
    return replace(found, allocation=given_back)


def held_standing(job: SlurmJob | None, hosts: Mapping[str, int]) -> Standing:
    """Return where a job stands that was granted ``hosts``."""
    if job is None:
        return Standing(phase="revoked", reason="Slurm no longer has its job")
    allocation = _allocation(job)
    if job.state == "CANCELLED":
        return Standing(phase="cancelled", reason=text_of(job), allocation=allocation)
    # COMPLETING: what it becomes is not said yet
    if job.state == "COMPLETING" or (job.state == "RUNNING" and hosts.keys() <= {*job.nodes}):
        return Standing(phase="granted", allocation=allocation)
    why = f"Slurm has taken its nodes back: {text_of(job)}"
    return Standing(phase="revoked", reason=why, allocation=allocation)


def text_of(job: SlurmJob) -> str:
    """Return a Slurm job's state and reason for people."""
    return f"Slurm job {job.job_id} is {job.state}" + (f": {job.reason}" if job.reason else "")


def _allocation(job: SlurmJob) -> JobAllocation:
    return JobAllocation(engine="slurm", id=job.job_id, state=job.state, reason=job.reason)
