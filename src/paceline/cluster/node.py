"""A node's machine, as its Dask worker reports it when it registers.

Dask loads this module in every worker (``dask_setup``). The worker's process decides all paths of
its node (``this_node``); the scheduler and callers know the node's name, address and machine only.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.cluster.addresses import Accelerator, Machine
from paceline.cluster.agents import restore_agent
from paceline.config import this_node
from paceline.schemas import Labels

REPORT = "paceline"  # the worker's entry in the scheduler's information
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
NVIDIA_SMI_S = 30.0
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is read


def dask_setup(worker: Any) -> None:
    """Add the machine to what ``worker`` reports; restart the agent that a dead worker had."""
    found = machine().model_dump(mode="json")

    async def report(_worker: Any) -> dict[str, Any]:
        return found

    worker.startup_information[REPORT] = report
    restore_agent()


def machine() -> Machine:
    """Return this machine, within the limits of this process's cgroup."""
    shared = os.statvfs(_SHARED_MEMORY)
    return Machine(
        version=__version__,
        labels=Labels(**this_node().labels),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=shared.f_frsize * shared.f_blocks,
        accelerators=accelerators(),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """Return the NVIDIA GPUs that ranks of this process may use, by kind; () without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        answer = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = [(name, int(mib) * 2**20) for name, mib in csv.reader(answer.splitlines())]
    if visible is not None:
        named = [each for each in visible.split(",") if each.strip() not in ("", "-1")]
        found = [found[int(each)] if each.strip().isdigit() else found[0] for each in named]
    return tuple(
        Accelerator(kind=name, count=count, memory_bytes=size)
        for (name, size), count in Counter(found).items()
    )


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total
