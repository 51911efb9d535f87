"""Run a command of another scheduler (Slurm's, kubectl) and read Slurm's answers.

What is submitted, and what follows from an answer, is decided elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import Runtime
from paceline.errors import InvalidInput, MissingTool, ServiceUnavailable
from paceline.text import printable

COMMAND_S = 60.0
# In sbatch's refusals that pass: the controller is away, or a limit on what may be queued is used.
PASSING = (
    *("ontact", "timed out", "emporar", "submit limit", "authentication error", "Munge", "munge"),
    *("Zero Bytes", "standby mode", "Required partition not available", "Required node not avail"),
)
# In those that do not pass, of a job that Slurm took in a test: its settings have changed since.
REFUSED = (
    *("nvalid partition", "Invalid account", "Invalid qos", "Invalid generic resource"),
    *("Invalid feature", "Invalid node name", "Node count specification invalid"),
    *("time limit is invalid", "node configuration is not available", "not permitted to use"),
    *("ccess/permission denied", "nrecognized option"),
)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What Slurm says of a job: state and reason in its words, and the nodes that it runs on."""

    job_id: str = ""
    name: str = ""
    state: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return whether the job never runs again."""
        return self.state in OVER


OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}


def run_command(
    *argv: str, sent: str = "", timeout_s: float = COMMAND_S, environment: str = "Slurm"
) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command; it reads ``sent``. One that takes longer
    than ``timeout_s`` is killed: exit code 1. Raises MissingTool where it is not installed.
    """
    try:
        done = subprocess.run(
            argv, input=sent.encode(), capture_output=True, check=False, timeout=timeout_s
        )
    except FileNotFoundError as error:
        raise MissingTool(
            f"{environment}'s commands are not on this machine",
            got=argv[0],
            wanted=(
                "sbatch, squeue, sinfo, scontrol, srun and scancel on the PATH"
                if environment == "Slurm"
                else "it on the PATH, and a configuration of it"
            ),
            do="Run this process on a login node, or install the client here.",
        ) from error
    except subprocess.TimeoutExpired:
        return 1, "", f"{argv[0]} timed out"
    out, err = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
    return done.returncode, out, err


def slurm_prefix(runtime: Runtime) -> str:
    """Return how the names of this installation's Slurm jobs begin that run one training job each.

    Coordinators and `paceline cluster` have the scheduler's address in common, no directory.
    """
    where = hashlib.sha256(runtime.endpoints.scheduler_address.encode()).hexdigest()[:8]
    return f"paceline-{runtime.profile.name}-{where}-"


def sbatch(
    argv: Sequence[str], where: str, timeout_s: float = COMMAND_S, *, was_tested: bool = False
) -> str:
    """Submit a job and return its id; with --test-only return "".

    Raises InvalidInput where Slurm refuses it, ServiceUnavailable where it may take it later: by
    the messages that are known to pass, and of a job that ``was_tested`` by all that are not known
    to be refusals.
    """
    code, out, err = run_command(*argv, timeout_s=timeout_s)
    if code == 0:
        return out.strip().partition(";")[0]  # ID;CLUSTER
    why = err.strip().replace("sbatch: error: ", "").replace("allocation failure: ", "")
    why = printable(why.replace("\n", "; "), 300)
    is_refused = any(each in why for each in REFUSED)
    if any(each in why for each in PASSING) or (was_tested and not is_refused):
        raise ServiceUnavailable("Slurm takes no job now", got=why, where="sbatch", do="`sinfo`?")
    raise InvalidInput(
        "Slurm refuses the allocation",
        got=why,
        wanted=" ".join(each for each in argv[3:] if not each.startswith("--wrap")),
        where=where,
        do="Compare them with `sinfo` and `sacctmgr show associations`.",
    )


def squeue(*chosen: str, timeout_s: float = COMMAND_S) -> list[SlurmJob]:
    """Return this user's jobs that Slurm still has, ended ones among them; ``chosen`` are more
    options of squeue. Raises ServiceUnavailable.
    """
    code, out, err = run_command(
        *("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "-o%i|%T|%r|%N|%j"),
        *chosen,
        timeout_s=timeout_s,
    )
    if code:
        if "Invalid job id" in err:
            return []
        raise ServiceUnavailable("Slurm does not answer", got=printable(err.strip(), 200))
    found = []
    for line in out.splitlines():
        job_id, state, reason, nodes, name = line.strip().split("|", 4)
        hosts = node_names(nodes, timeout_s) if state == "RUNNING" else ()
        reason = "" if reason == "None" else reason
        found.append(SlurmJob(job_id=job_id, name=name, state=state, reason=reason, nodes=hosts))
    return found


@functools.lru_cache(1000)
def node_names(nodes: str, timeout_s: float = COMMAND_S) -> tuple[str, ...]:
    """Return the nodes of a list such as ``n[1-3]``; raises ServiceUnavailable."""
    if "[" not in nodes:
        return tuple(each for each in nodes.split(",") if each)
    code, out, err = run_command("scontrol", "show", "hostnames", nodes, timeout_s=timeout_s)
    if code:
        raise ServiceUnavailable("Slurm names no nodes", got=printable(err.strip(), 200))
    return tuple(out.split())
