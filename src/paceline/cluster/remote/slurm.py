"""Workers on the nodes of Slurm allocations: `[cluster] kind = "slurm"`.

Slurm decides when and where: a batch job holds its nodes together, and this only attaches a step
for each node's worker to it. The job is one that this requests for all training jobs, or, with
``per_job``, each of those that the coordinator requests for one training job. A job that Slurm
requeues (a node failed, it was preempted) gets its workers again where it runs next. Needs
``sbatch``, ``squeue``, ``sinfo``, ``scontrol``, ``srun`` and ``scancel`` of this machine, and no
file that nodes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping

from paceline.cluster.remote.commands import (
    SlurmJob,
    run_command,
    sbatch,
    slurm_prefix,
    squeue,
)
from paceline.cluster.remote.workers import RemoteHost, keep_worker
from paceline.config import Runtime, SlurmSettings
from paceline.errors import Cancelled, ServiceUnavailable
from paceline.text import printable

log = logging.getLogger(__name__)

POLL_S = 2.0
RETRY_S = 30.0  # between two tries to reach Slurm's controller
HOLD = "exec sleep infinity"  # the batch script: it keeps the nodes until the job is cancelled
GONE = SlurmJob(state="GONE")  # Slurm no longer has it
_Workers = dict[tuple[str, str], asyncio.Task[None]]  # by Slurm job and node


async def serve_allocation(runtime: Runtime, stop: asyncio.Event) -> None:
    """Hold an allocation and run a worker on each of its nodes until ``stop``; then cancel it.

    Raises InvalidInput where Slurm refuses the request, MissingTool where its commands are not
    installed, ServiceUnavailable where it does not answer at the start, and Cancelled where
    a person cancels the job.
    """
    name, run = job_name(runtime), asyncio.to_thread
    # of a killed one
    await run(run_command, "scancel", "--quiet", f"--name={name}", f"--user={os.getuid()}")
    argv = submission(runtime, name)
    where = "[cluster] nodes and [cluster.slurm] of the profile"
    job = await run(sbatch, argv, where)
    workers: _Workers = {}
    try:
        seen = SlurmJob()
        while not stop.is_set():
            view = seen
            with contextlib.suppress(ServiceUnavailable):
                view = next(iter(await run(squeue, f"--jobs={job}")), GONE)
            if view.state == "CANCELLED":
                raise Cancelled(
                    "the Slurm job was cancelled",
                    where=f"job {job}",
                    do="Start `paceline cluster` again when the nodes may be used.",
                )
            is_over = view.is_over or view is GONE
            if view != seen:
                _report(job, view, "" if view.nodes else await run(_not_usable))
                _attach(runtime, dict.fromkeys(view.nodes, job), workers)
                seen = view
            if is_over:
                with contextlib.suppress(ServiceUnavailable):
                    job = await run(sbatch, argv, where)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RETRY_S if is_over else POLL_S)
    finally:
        await _end(workers)
        await run(run_command, "scancel", "--quiet", job)


async def serve_job_allocations(runtime: Runtime, stop: asyncio.Event) -> None:
    """Run a worker on each node of each allocation that the coordinator has requested for a
    training job, until ``stop``. Allocations are the coordinator's: none is cancelled here.

    Raises MissingTool where Slurm's commands are not installed.
    """
    prefix, workers = slurm_prefix(runtime), _Workers()
    log.info("attaching workers to Slurm jobs named %s*", prefix)
    try:
        while not stop.is_set():
            with contextlib.suppress(ServiceUnavailable):
                jobs = await asyncio.to_thread(squeue)
                wanted = {
                    node: job.job_id
                    for job in jobs
                    if job.name.startswith(prefix)
                    for node in job.nodes
                }
                _attach(runtime, wanted, workers)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_S)
    finally:
        await _end(workers)


def job_name(runtime: Runtime) -> str:
    """Return the job's name, which no other state directory's job has."""
    where = hashlib.sha256(str(runtime.state_dir.resolve()).encode()).hexdigest()[:8]
    return f"paceline-{runtime.profile.name}-{where}"


def submission(runtime: Runtime, name: str) -> list[str]:
    """Return the argv that submits the job; it prints the job's id."""
    slurm = runtime.profile.cluster.slurm
    return batch_argv(name, runtime.profile.cluster.nodes, slurm, script=HOLD)


def batch_argv(
    name: str, nodes: int, slurm: SlurmSettings, *more: str, script: str, is_test: bool = False
) -> list[str]:
    """Return the argv that submits a job which holds ``nodes`` whole nodes while ``script`` runs.

    ``more`` are options that go before those of the profile; with ``is_test`` Slurm only checks.
    """
    chosen = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_limit,
    }
    return [
        *("sbatch", "--parsable", f"--job-name={name}", f"--nodes={nodes}"),
        *("--ntasks-per-node=1", "--exclusive", "--requeue", "--output=/dev/null"),
        *("--export=NONE", "--chdir=/"),
        *(f"--{option}={value}" for option, value in chosen.items() if value),
        *more,
        *slurm.options,
        *(["--test-only"] if is_test else []),
        f"--wrap={script}",
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


def _attach(runtime: Runtime, wanted: Mapping[str, str], workers: _Workers) -> None:
    """Start workers on new nodes, and end those of nodes that a job no longer has.

    ``wanted`` is the Slurm job of each node.
    """
    slurm = runtime.profile.cluster.slurm
    for job, node in list(workers):
        if wanted.get(node) != job:
            workers.pop((job, node)).cancel()
    for node, job in wanted.items():
        if (job, node) not in workers:
            host = RemoteHost(
                name=node,
                shell=shell_on(job, node),
                worker_id=node,
                state=slurm.state,
                program=slurm.program,
            )
            workers[job, node] = asyncio.create_task(keep_worker(runtime, host))


async def _end(workers: _Workers) -> None:
    for task in workers.values():
        task.cancel()
    await asyncio.gather(*workers.values(), return_exceptions=True)


def _report(job: str, view: SlurmJob, not_usable: str) -> None:
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


def _not_usable() -> str:
    """Return `` not_usable=NODE: REASON; …`` with the nodes that are down or drained, or ""."""
    _, out, _ = run_command("sinfo", "--noheader", "--states=down,drain,fail", "--format=%N: %E")
    lines = sorted(set(out.strip().splitlines()))
    return f" not_usable={printable('; '.join(lines), 300)}" if lines else ""
