"""Whether this machine's memory holds the ranks that are asked for; a lower bound, so never wrong
about a job that fits. Knows no torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.profile import TrainingSettings

MIB = 1024 * 1024
RANK_BYTES = 26 * MIB  # of its own, forked from a launcher that has torch imported
LAUNCHER_BYTES = 200 * MIB
_CGROUP = Path("/sys/fs/cgroup")


def require_room(settings: TrainingSettings, weights_bytes: int, free_bytes: int | None) -> None:
    """Raise InvalidInput where ``settings.ranks`` ranks on one machine need more memory than
    ``free_bytes`` (None: nobody knows); ``weights_bytes`` is the whole model's, 0 if unknown.
    """
    mesh = settings.mesh
    copies = 4 if settings.optimizer == "adamw" else 2  # weights, gradients; two moments
    share = weights_bytes * copies // (mesh.shard * mesh.tp * mesh.pp)
    needed = LAUNCHER_BYTES + settings.ranks * (share + RANK_BYTES)
    if free_bytes is None or needed <= free_bytes:
        return
    raise InvalidInput(
        "more ranks than this machine's memory holds",
        got=f"{settings.ranks} ranks, at least {needed // MIB:,} MiB together",
        wanted=f"at most {free_bytes // MIB:,} MiB, which is free now",
        do="Lower --ranks (training.ranks), or cut the model: training.mesh.shard.",
    )


def free_memory() -> int | None:
    """Return the bytes that processes can still get here, swap and this cgroup's limit included."""
    found = None
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        found = (kib["MemAvailable"] + kib["SwapFree"]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit = int((_CGROUP / "memory.max").read_text())
        left = max(0, limit - int((_CGROUP / "memory.current").read_text()))
        stat = (_CGROUP / "memory.stat").read_text().split()
        left += int(stat[stat.index("inactive_file") + 1])  # given back when it is needed
        found = left if found is None else min(found, left)
    return found
