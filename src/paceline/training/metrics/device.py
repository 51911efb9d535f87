"""Resource use of this process: memory, accelerator utilisation, forward time, peak FLOP/s.

Reads NVML where there is a GPU and the package ``nvidia-ml-py`` is installed. On a CPU the
accelerator is the cores that this rank may use: utilisation is CPU time over their wall time.
"""

from __future__ import annotations

import functools
import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

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
    """The share of the time since the last ``take`` in which the accelerator worked."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device, self._threads, self._measured = device, max(1, threads), True
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def take(self) -> float | None:
        """Return the share, 0 to 1; None where it cannot be measured."""
        if self._device.type == "cuda":
            return self._of_gpu()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        used, passed = cpu_s - self._cpu_s, wall_s - self._wall_s
        self._cpu_s, self._wall_s = cpu_s, wall_s
        return min(1.0, used / (passed * self._threads)) if passed > 0 else None

    def _of_gpu(self) -> float | None:
        if not self._measured:
            return None
        try:
            return float(torch.cuda.utilization(self._device)) / 100.0
        except Exception as error:  # noqa: BLE001 - NVML's errors are of a package that may be missing
            log.warning("accelerator utilisation is not measured: %s", error)
            self._measured = False
            return None


class ForwardTimer:
    """Seconds of forward passes in training: a rank's own work before it waits for another.

    Measured by hooks around the modules' forward; on a GPU by CUDA events. Backward passes are left
    out, because gradients are synchronised inside them. Layouts that gather weights or cut matrices
    also wait inside forward: there the values even out, and only a rank that is late with its data
    differs. ``close`` removes the hooks.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._start, self._stop, self._take = _events(device) if device.type == "cuda" else _clock()
        self._handles = []
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._began),
                module.register_forward_hook(self._ended),
            ]

    def take(self) -> float:
        """Return the seconds since the last call; the GPU's work must have finished."""
        return self._take()

    def close(self) -> None:
        """Remove the hooks."""
        for each in self._handles:
            each.remove()

    def _began(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self._start()

    def _ended(self, module: nn.Module, _: Any, __: Any) -> None:
        if module.training:
            self._stop()


_Timer = tuple[Callable[[], None], Callable[[], None], Callable[[], float]]


def _clock() -> _Timer:
    total = since = 0.0

    def start() -> None:
        nonlocal since
        since = time.perf_counter()

    def stop() -> None:
        nonlocal total
        total += time.perf_counter() - since

    def take() -> float:
        nonlocal total
        found, total = total, 0.0
        return found

    return start, stop, take


def _events(device: torch.device) -> _Timer:
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start() -> None:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record(torch.cuda.current_stream(device))
        pairs.append((begun, ended))

    def stop() -> None:
        pairs[-1][1].record(torch.cuda.current_stream(device))

    def take() -> float:
        seconds = sum(float(begun.elapsed_time(ended)) for begun, ended in pairs) / 1000
        pairs.clear()
        return seconds

    return start, stop, take


# The device's measured peak, for MFU (model FLOPs utilisation).

_MATRIX = {"cpu": 768, "cuda": 8192}  # matrix sizes that reach the peak within ``_SECONDS``
_SECONDS = 0.1


@functools.cache
def matmul_peak(device_type: str, dtype: torch.dtype, threads: int) -> float:
    """Return the measured peak of matrix products of ``dtype`` on this device, in FLOP/s.

    Measured once a process for each device, dtype and number of threads, in about 0.1 s: the best
    of repeated products of square matrices.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _best(device_type, dtype)
    finally:
        torch.set_num_threads(before)


def _best(device_type: str, dtype: torch.dtype) -> float:
    device = torch.device(device_type)
    size = _MATRIX.get(device_type, 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    operations = 2.0 * size**3
    best = 0.0
    until = time.perf_counter() + _SECONDS
    rounds = 0
    while rounds < 3 or time.perf_counter() < until:
        _finish(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _finish(device)
        best = max(best, operations / (time.perf_counter() - started))
        rounds += 1
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
