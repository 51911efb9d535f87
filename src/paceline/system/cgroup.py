"""What this process may use of its machine: the limits of its control group and of those above it.

A container, a step of Slurm and a unit of systemd are control groups, of version 1 or 2. Linux
only; where nothing is limited, the figures are the machine's.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many cores this process can keep busy: its affinity and its CPU quota, rounded
    up."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max": no quota
            quota, period = _words(group / "cpu.max") or (
                *_words(group / "cpu.cfs_quota_us"),
                *_words(group / "cpu.cfs_period_us"),
            )
            if int(quota) > 0:
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def usable_memory_bytes() -> int:
    """Return the machine's memory, or the least that a control group limits it to."""
    return min((limit for _, limit in _memory_limits()), default=_total_bytes())


def free_memory_bytes() -> int | None:
    """Return the allocatable bytes, including swap, within each control group's limit; None:
    unknown."""
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        free.append((kib["MemAvailable"] + kib["SwapFree"]) * 1024)
    for group, limit in _memory_limits():
        with contextlib.suppress(OSError, ValueError, IndexError):
            used, cache = "memory.current", "inactive_file"
            if not (group / used).exists():
                used, cache = "memory.usage_in_bytes", "total_inactive_file"
            stat = _words(group / "memory.stat")
            reclaimable = int(stat[stat.index(cache) + 1])
            free.append(max(0, limit - int(_words(group / used)[0])) + reclaimable)
    return min(free, default=None)


def _memory_limits() -> Iterator[tuple[Path, int]]:
    """Yield each control group that limits memory to less than the machine has, and to how much."""
    total = _total_bytes()
    for group in _groups("memory"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # "max": no limit
            words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
            if (limit := int(words[0])) < total:
                yield group, limit


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and of those above it."""
    with contextlib.suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = GROUPS / controller if controllers else GROUPS
            # a container that does not see its own group has it mounted as the root
            yield root
            for part in Path(path.strip("/")).parts:
                root = root / part
                if part != ".." and root.is_dir():
                    yield root


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
