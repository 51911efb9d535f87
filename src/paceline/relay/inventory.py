"""What a node reads of its machine as it starts, for the coordinator, plans and placement.

The disk's speed is measured at join and kept; everything else is read again. What cannot be read is
reported as not known. NVIDIA's driver is asked through nvidia-smi: the base install has no library.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from paceline.config import Runtime
from paceline.schemas import Accelerator, Inventory
from paceline.system import (
    interface_mbit,
    interface_to,
    is_loopback,
    usable_cores,
    usable_memory_bytes,
    write_bytes_s,
    write_private,
)

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
DISK_FILE = "disk-speed.json"
MOST_BYTES_S = 1e15  # that the coordinator accepts
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is read

log = logging.getLogger(__name__)


def read_inventory(runtime: Runtime, driver_s: float) -> Inventory:
    """Return this machine, within the limits of this process's cgroup.

    ``driver_s``: how long to wait for each answer of the GPUs' driver. The disk's speed is the
    one that `paceline doctor` measured, at join or since.
    """
    known = runtime.endpoints
    host = urlsplit((*known.coordinator_urls, known.coordinator_url)[0]).hostname or ""
    interface = "" if not host or is_loopback(host) else interface_to(host) or ""
    shared = os.statvfs(_SHARED_MEMORY)
    return Inventory(
        cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        shared_memory_bytes=shared.f_frsize * shared.f_blocks,
        accelerators=accelerators(driver_s),
        interface=interface,
        interface_mbit=interface_mbit(interface) if interface else None,
        disk_bytes_s=_disk_bytes_s(runtime.state_dir),
    )


def measure_disk(state_dir: Path) -> float:
    """Measure how fast ``state_dir``'s disk writes, in bytes/s, and keep it; raises OSError."""
    measured = write_bytes_s(state_dir)
    write_private(state_dir / DISK_FILE, json.dumps({"write_bytes_s": measured}).encode())
    return measured


def _disk_bytes_s(state_dir: Path) -> float | None:
    """Return what was measured last; a start does not measure: neighbours wait for its pieces."""
    try:
        kept = json.loads((state_dir / DISK_FILE).read_bytes())["write_bytes_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never measured
    return kept if isinstance(kept, float) and 0 < kept <= MOST_BYTES_S else None


def accelerators(driver_s: float) -> tuple[Accelerator, ...]:
    """Return the NVIDIA GPUs that this process may use, by kind; () without a driver."""
    found = _cards(driver_s)
    link = _link(_output(TOPOLOGY, driver_s)) if len(found) > 1 else ""
    return tuple(
        Accelerator(
            kind=kind,
            count=count,
            memory_bytes=size,
            link=link if count > 1 else "",
        )
        for (kind, size), count in Counter((kind, size) for _, kind, size in found).items()
    )


def shows_like_cards(driver_s: float) -> dict[str, str]:
    """Return the environment in which a process sees only the GPUs that ``Inventory.like_cards``
    has, in the order of nvidia-smi; {} where all are of one kind.
    """
    found = _cards(driver_s)
    counts = Counter(kind for _, kind, _ in found)
    if len(counts) < 2:
        return {}
    most = max(counts, key=counts.__getitem__)
    log.warning("ranks run on %d x %s only, of %s", counts[most], most, dict(counts))
    names = ",".join(name for name, kind, _ in found if kind == most)
    # CUDA's own order has the fastest first, so its numbers are other cards.
    return {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _cards(driver_s: float) -> list[tuple[str, str, int]]:
    """Return each GPU that this process may use: as CUDA_VISIBLE_DEVICES names it, kind, bytes."""
    answer = _output(NVIDIA_SMI, driver_s)
    rows = [row for row in csv.reader(answer.splitlines()) if len(row) == 2]
    found = [
        # "[N/A]": the host's memory
        (str(n), kind.strip()[:100], int(size) * 2**20 if size.strip().isdigit() else 0)
        for n, (kind, size) in enumerate(rows)
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    named = [each.strip() for each in visible.split(",")]
    return [
        (each, *(found[int(each)] if each.isdigit() else found[0])[1:])
        for each in named
        if each not in ("", "-1") and (not each.isdigit() or int(each) < len(found))
    ]


def _link(topology: str) -> Literal["nvlink", "pcie", ""]:
    """Return how the GPUs of ``nvidia-smi topo -m`` are connected: "nvlink" where each pair is."""
    rows = [each.split() for each in topology.splitlines() if re.match(r"GPU\d+\s", each)]
    # The header names columns too: rows of a GPU have "X" where they meet themselves.
    rows = [each[1:] for each in rows if "X" in each]
    cells = [cell for row in rows for cell in row[: len(rows)] if cell != "X"]
    if not cells:
        return ""
    return "nvlink" if all(re.fullmatch(r"NV\d+", cell) for cell in cells) else "pcie"


def _output(argv: tuple[str, ...], timeout_s: float) -> str:
    """Return what ``argv`` prints, "" where it is not there, fails, or takes longer."""
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("no GPUs are reported: %s", error)
        return ""
