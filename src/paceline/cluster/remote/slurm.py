"""Workers on the nodes of one Slurm allocation: `[cluster] kind = "slurm"`.

Slurm decides when and where: one batch job holds all nodes together, and this only attaches a step
for each node's worker to it. A job that Slurm requeues (a node failed, it was preempted) gets its
workers again where it runs next; one whose time is up is followed by another. Needs ``sbatch``,
``squeue``, ``sinfo``, ``scontrol``, ``srun`` and ``scancel`` of this machine, and no file that
nodes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.remote.workers import RemoteHost, keep_worker
from paceline.config import Runtime
from paceline.errors import Cancelled, InvalidInput, MissingTool, ServiceUnavailable
from paceline.text import printable

log = logging.getLogger(__name__)

POLL_S = 2.0
COMMAND_S = 60.0
RETRY_S = 30.0  # between two tries to reach Slurm's controller
HOLD = "exec sleep infinity"  # the batch script: it keeps the nodes until the job is cancelled
OVER = {"BOOT_FAIL", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "GONE"}


@dataclass(frozen=True)
class JobView:
    """What Slurm says of a job: state and reason in its words, and the nodes that it runs on."""

    state: str  # "GONE": Slurm no longer has it
    reason: str = ""
    nodes: tuple[str, ...] = ()


async def serve_allocation(runtime: Runtime, stop: asyncio.Event) -> None:
    """Hold an allocation and run a worker on each of its nodes until ``stop``; then cancel it.

    Raises InvalidInput where Slurm refuses the request, MissingTool where its commands are not
    installed, ServiceUnavailable where it does not answer at the start, and Cancelled where
    a person cancels the job.
    """
    name = job_name(runtime)
    await _call("scancel", "--quiet", f"--name={name}", f"--user={os.getuid()}")  # of a killed one
    job = await _submit(runtime, name)
    workers: dict[str, asyncio.Task[None]] = {}
    try:
        seen = JobView("")
        while not stop.is_set():
            view = await _view(job, seen)
            if view.state == "CANCELLED":
                raise Cancelled(
                    "the Slurm job was cancelled",
                    where=f"job {job}",
                    do="Start `paceline cluster` again when the nodes may be used.",
                )
            if view != seen:
                _report(job, view, "" if view.state == "RUNNING" else await _not_usable())
                _attach(runtime, job, view.nodes, workers)
                seen = view
            if view.state in OVER:
                with contextlib.suppress(ServiceUnavailable):
                    job = await _submit(runtime, name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RETRY_S if view.state in OVER else POLL_S)
    finally:
        for task in workers.values():
            task.cancel()
        await asyncio.gather(*workers.values(), return_exceptions=True)
        await _call("scancel", "--quiet", job)


def job_name(runtime: Runtime) -> str:
    """Return the job's name, which no other state directory's job has."""
    where = hashlib.sha256(str(runtime.state_dir.resolve()).encode()).hexdigest()[:8]
    return f"paceline-{runtime.profile.name}-{where}"


def submission(runtime: Runtime, name: str) -> list[str]:
    """Return the argv that submits the job; it prints the job's id."""
    cluster, slurm = runtime.profile.cluster, runtime.profile.cluster.slurm
    chosen = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_limit,
    }
    return [
        *("sbatch", "--parsable", f"--job-name={name}", f"--nodes={cluster.nodes}"),
        *("--ntasks-per-node=1", "--exclusive", "--requeue", "--output=/dev/null"),
        *("--export=NONE", "--chdir=/"),
        *(f"--{option}={value}" for option, value in chosen.items() if value),
        *slurm.options,
        f"--wrap={HOLD}",
    ]


def shell_on(job: str, node: str) -> tuple[str, ...]:
    """Return the argv that runs a shell's command line as a step on one node of the job.

    The step shares the node's resources with the job's other steps. Of this machine's environment
    only home and path travel, no credentials.
    """
    return (
        *("srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap"),
        *("--mem=0", "--cpu-bind=none", "--mpi=none", "--export=HOME,PATH,LANG", "--chdir=/", "--"),
        *("sh", "-c", 'cd && eval "$0"'),
    )


def _attach(
    runtime: Runtime, job: str, nodes: Sequence[str], workers: dict[str, asyncio.Task[None]]
) -> None:
    """Start workers on new nodes, and end those of nodes that the job no longer has."""
    slurm = runtime.profile.cluster.slurm
    for node in workers.keys() - set(nodes):
        workers.pop(node).cancel()
    for node in nodes:
        if node not in workers:
            host = RemoteHost(
                name=node,
                shell=shell_on(job, node),
                worker_id=node,
                state=slurm.state,
                program=slurm.program,
            )
            workers[node] = asyncio.create_task(keep_worker(runtime, host))


def _report(job: str, view: JobView, not_usable: str) -> None:
    if view.state == "RUNNING":
        log.info("allocation job=%s nodes=%s", job, ",".join(view.nodes))
    elif view.state == "PENDING":
        log.warning(
            "waiting for an allocation job=%s reason=%s%s; see `squeue --start --job=%s`",
            *(job, view.reason, not_usable, job),
        )
    else:
        log.warning(
            "allocation job=%s state=%s reason=%s%s", job, view.state, view.reason, not_usable
        )


async def _not_usable() -> str:
    """Return `` not_usable=NODE: REASON; …`` with the nodes that are down or drained, or ""."""
    _, out, _ = await _call("sinfo", "--noheader", "--states=down,drain,fail", "--format=%N: %E")
    lines = sorted(set(out.strip().splitlines()))
    return f" not_usable={printable('; '.join(lines), 300)}" if lines else ""


async def _submit(runtime: Runtime, name: str) -> str:
    """Submit the job and return its id; raises InvalidInput or ServiceUnavailable."""
    argv = submission(runtime, name)
    code, out, err = await _call(*argv)
    if code == 0:
        return out.strip().partition(";")[0]  # ID;CLUSTER
    why = printable(err.strip().replace("sbatch: error: ", "").replace("\n", "; "), 300)
    if "ontact" in why or "timed out" in why:  # slurmctld is away
        raise ServiceUnavailable("Slurm does not answer", got=why, where="sbatch", do="`sinfo`?")
    raise InvalidInput(
        "Slurm refuses the allocation",
        got=why,
        wanted=" ".join(argv[3:-1]),
        where="[cluster] nodes and [cluster.slurm] of the profile",
        do="Compare them with `sinfo` and `sacctmgr show associations`.",
    )


async def _view(job: str, seen: JobView) -> JobView:
    """Return the job's state; ``seen`` while Slurm does not answer."""
    code, out, err = await _call(
        "squeue", "--noheader", "--states=all", f"--jobs={job}", "-o%T|%r|%N"
    )
    if code:
        return JobView("GONE", printable(err.strip(), 200)) if "Invalid job id" in err else seen
    if not out.strip():
        return JobView("GONE")
    state, reason, nodes = out.strip().splitlines()[0].split("|")
    if state != "RUNNING":
        return JobView(state, reason)
    if seen.state == state and seen.reason == nodes:
        return seen
    code, out, _ = await _call("scontrol", "show", "hostnames", nodes)
    return JobView(state, nodes, tuple(out.split())) if code == 0 else seen


async def _call(*argv: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of one of Slurm's commands; raises MissingTool."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise MissingTool(
            "Slurm's commands are not on this machine",
            got=argv[0],
            wanted="sbatch, squeue, sinfo, scontrol, srun and scancel on the PATH",
            do="Run `paceline cluster` on a login node, or install Slurm's client here.",
        ) from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, "", f"{argv[0]} timed out"
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
