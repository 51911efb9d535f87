"""What a race cost: CPU-seconds and memory of processes, and how busy the machine was meanwhile."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True)
class Usage:
    """Of one race."""

    nodes_cpu_s: float = 0.0  # user and system, of every host's processes
    origin_cpu_s: float = 0.0
    control_cpu_s: float = 0.0  # coordinator, tracker
    nodes_peak_mb: float = 0.0  # the largest node's resident memory that is not file pages
    cpu_busy: float = 0.0  # share of all cores' time, from the start to the last finish
    load_before: float = 0.0
    load_after: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it rounded."""
        return {key: round(value, 3) for key, value in asdict(self).items()}


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of ``pid`` and its ended children; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(each) for each in fields[11:15]) * _TICK_S


def anonymous_mb(pid: int) -> float:
    """Return the memory of ``pid`` and its children, without pages of files and of tmpfs."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    kib = sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return kib * 1024 / 1e6 + sum(anonymous_mb(int(child)) for child in children)


class Machine:
    """How busy all cores are from now on."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self._busy, self._total = _times()
        self._at = time.monotonic()

    def busy(self) -> float:
        """Return the share of CPU time that was used since this was made."""
        busy, total = _times()
        return (busy - self._busy) / max(1, total - self._total)


def _times() -> tuple[int, int]:
    with Path("/proc/stat").open() as file:
        fields = [int(each) for each in file.readline().split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)
