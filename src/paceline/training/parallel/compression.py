"""What PowerSGD carries from step to step, as tensors that a checkpoint can keep.

Each rank's error (what compression lost of its own gradients so far) is its own; the thin matrices
and the count of steps are the same on all. On another number of replicas errors have no owner: they
are dropped with a warning, the rest goes on. Buckets are laid out in the warm-up of the first step,
so what was restored is put in place after it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

log = logging.getLogger(__name__)

PREFIX = "powersgd."


@dataclass
class _Memory:
    """What is kept between two steps; by bucket."""

    iterations: int = 0
    errors: dict[int, Tensor] = field(default_factory=dict)
    ps: dict[int, Tensor] = field(default_factory=dict)
    qs: dict[int, Tensor] = field(default_factory=dict)


class CompressionMemory:
    """The ``Kept`` of one replica's PowerSGD."""

    def __init__(self, state: PowerSGDState, rank: int, world: int, device: torch.device) -> None:
        self._state, self._device = state, device
        self._own = f"{PREFIX}error.{rank}-of-{world}."
        self._settled = _Memory()
        self._restored: _Memory | None = None  # until the buckets are laid out

    def settle(self) -> None:
        """Keep what the hook holds now: it replaces errors and writes over the matrices."""
        if self._restored is not None:
            self._settled = self._restored
            return
        state = self._state
        self._settled = _Memory(
            state.iter,
            dict(state.error_dict),
            {bucket: each.clone() for bucket, each in state.p_memory_dict.items()},
            {bucket: each.clone() for bucket, each in state.q_memory_dict.items()},
        )

    def laid_out(self) -> None:
        """Buckets are as they will stay: give the hook what was restored."""
        if self._restored is None:
            return
        memory, self._restored = self._restored, None
        self._state.iter = memory.iterations
        self._put(memory)

    def let_go(self) -> None:
        """Errors and matrices are those of before the batch: once they are no numbers, no gradient
        after them is one. Steps stay counted, on all ranks alike."""
        if self._restored is None:
            self._put(self._settled)

    def _put(self, memory: _Memory) -> None:
        self._state.error_dict = dict(memory.errors)
        self._state.p_memory_dict = {at: each.clone() for at, each in memory.ps.items()}
        self._state.q_memory_dict = {at: each.clone() for at, each in memory.qs.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return what was settled last."""
        memory = self._settled
        found = {PREFIX + "iterations": torch.tensor(memory.iterations, dtype=torch.int64)}
        found |= {f"{self._own}{bucket}": each for bucket, each in memory.errors.items()}
        found |= {f"{PREFIX}p.{bucket}": each for bucket, each in memory.ps.items()}
        found |= {f"{PREFIX}q.{bucket}": each for bucket, each in memory.qs.items()}
        return found

    def wants(self, name: str) -> bool:
        """Return whether it is this rank's error, or what all ranks share."""
        shared = (PREFIX + "iterations", PREFIX + "p.", PREFIX + "q.")
        return name.startswith((self._own, *shared))

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Take over what was saved; without errors of its own a rank starts with none."""
        if PREFIX + "iterations" not in found:
            return  # saved without compression, or by a version that kept nothing of it
        memory = _Memory(int(found[PREFIX + "iterations"]))
        for kind, into in (
            (self._own, memory.errors),
            (PREFIX + "p.", memory.ps),
            (PREFIX + "q.", memory.qs),
        ):
            for name, each in found.items():
                if name.startswith(kind):
                    into[int(name.removeprefix(kind))] = each.to(self._device)
        if memory.qs and not memory.errors:
            log.warning(
                "PowerSGD's errors are dropped: they are of another number of replicas wanted=%s",
                self._own,
            )
        self._restored = memory
