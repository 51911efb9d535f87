"""What this process takes of its machine: memory, and how busy the accelerator is.

NVML is asked where there is a GPU and the package ``nvidia-ml-py`` is installed. On a CPU the
accelerator is the cores that this rank may use: its utilisation is CPU time over their wall time.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from importlib import import_module
from typing import Any

import torch

log = logging.getLogger(__name__)

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


def memory(device: torch.device) -> dict[str, float]:
    """Return this process's peak memory in bytes, and its GPU's where it has one."""
    found = {
        "rss_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT)
    }
    if device.type == "cuda":
        found["cuda_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
        found["cuda_reserved_bytes"] = float(torch.cuda.memory_reserved(device))
    return found


class Utilisation:
    """The share of the time since the last ``take`` that the accelerator worked."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._threads = max(1, threads)
        self._handle: Any = None
        self._nvml: Any = None
        if device.type == "cuda":
            self._nvml, self._handle = _open_nvml(device)
        self._device = device
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def take(self) -> float | None:
        """Return the share, 0 to 1; None where nobody can tell."""
        if self._device.type == "cuda":
            if self._nvml is None:
                return None
            try:
                return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0
            except self._nvml.NVMLError as error:
                log.warning("NVML does not answer any more: %s", error)
                self._nvml = None
                return None
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        used, passed = cpu_s - self._cpu_s, wall_s - self._wall_s
        self._cpu_s, self._wall_s = cpu_s, wall_s
        return min(1.0, used / (passed * self._threads)) if passed > 0 else None


def _open_nvml(device: torch.device) -> tuple[Any, Any]:
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError:
        log.warning("accelerator utilisation is not measured: nvidia-ml-py is not installed")
        return None, None
    try:
        nvml.nvmlInit()
        identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return nvml, nvml.nvmlDeviceGetHandleByUUID(identity)
    except nvml.NVMLError as error:
        log.warning("accelerator utilisation is not measured: %s", error)
        return None, None
