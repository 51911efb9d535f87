"""How long a rank worked before it had to wait for another one: its forward passes.

Hooks around the modules' forward; backward passes are left out, because gradients are synchronised
inside them. Layouts that gather weights or cut matrices also wait inside forward: there the figure
evens out, and only a rank that is late with its data stands out. On a GPU, events measure it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Busy:
    """Adds up the seconds of forward passes in training; ``close`` takes the hooks away."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._start, self._stop, self._take = _events(device) if device.type == "cuda" else _clock()
        self._handles = []
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._began),
                module.register_forward_hook(self._ended),
            ]

    def take(self) -> float:
        """Return the seconds since the last call; on a GPU its work must be done."""
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
