"""Data parallelism (DDP): replicas of the whole model average gradients in the backward pass.

A communication hook decides what is sent: full gradients, fp16 or bf16 halves, or PowerSGD's two
low-rank matrices (arXiv 1905.13727). All of them average; the caller scales the loss accordingly.
PowerSGD's state between steps is part of checkpoints (``CompressionMemory``).
"""

# No ``from __future__ import annotations``: DDP reads the hook's annotations as objects.
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.config import MeshSettings
from paceline.training.parallel.mesh import Mesh

log = logging.getLogger(__name__)

PREFIX = "powersgd."


@dataclass
class _Memory:
    """PowerSGD's state between two steps, by bucket."""

    iterations: int = 0
    errors: dict[int, Tensor] = field(default_factory=dict)
    ps: dict[int, Tensor] = field(default_factory=dict)
    qs: dict[int, Tensor] = field(default_factory=dict)


class CompressionMemory:
    """The ``Stateful`` of one replica's PowerSGD, as tensors for a checkpoint.

    The error (what compression lost of a rank's gradients so far) differs by rank; the low-rank
    matrices and the count of steps are the same on all. With another number of replicas the errors
    have no owner and are dropped with a warning. DDP lays out its buckets in the warm-up of the
    first step, so restored state is applied after that (``buckets_ready``).
    """

    def __init__(self, state: PowerSGDState, rank: int, world: int, device: torch.device) -> None:
        self._state, self._device = state, device
        self._own = f"{PREFIX}error.{rank}-of-{world}."
        self._settled = _Memory()
        self._restored: _Memory | None = None  # until the buckets are laid out

    def snapshot(self) -> None:
        """Copy the hook's state: the hook replaces errors and overwrites the matrices."""
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

    def buckets_ready(self) -> None:
        """Give the restored state to the hook; called once DDP's buckets are final."""
        if self._restored is None:
            return
        memory, self._restored = self._restored, None
        self._state.iter = memory.iterations
        self._put(memory)

    def roll_back(self) -> None:
        """Restore errors and matrices from before the batch: NaN in them would spoil every later
        gradient. The count of steps stays, the same on all ranks."""
        if self._restored is None:
            self._put(self._settled)

    def _put(self, memory: _Memory) -> None:
        self._state.error_dict = dict(memory.errors)
        self._state.p_memory_dict = {at: each.clone() for at, each in memory.ps.items()}
        self._state.q_memory_dict = {at: each.clone() for at, each in memory.qs.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the last snapshot."""
        memory = self._settled
        found = {PREFIX + "iterations": torch.tensor(memory.iterations, dtype=torch.int64)}
        found |= {f"{self._own}{bucket}": each for bucket, each in memory.errors.items()}
        found |= {f"{PREFIX}p.{bucket}": each for bucket, each in memory.ps.items()}
        found |= {f"{PREFIX}q.{bucket}": each for bucket, each in memory.qs.items()}
        return found

    def wants(self, name: str) -> bool:
        """Return whether ``name`` is this rank's error, or shared by all ranks."""
        shared = (PREFIX + "iterations", PREFIX + "p.", PREFIX + "q.")
        return name.startswith((self._own, *shared))

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Load the saved state; a rank without an error of its own starts with none."""
        if PREFIX + "iterations" not in found:
            return  # saved without compression, or by a version that did not save it
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


BUCKET_MB = 4  # several buckets even for small models, so that sending overlaps the backward pass
POWERSGD_DENSE_STEPS = 10  # before gradients are compressed; DDP's own warm-up needs two

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class SentBytes:
    """The bytes of gradients that this rank has handed to the replicas' all-reduce."""

    bytes: int = 0


def replicate(
    model: torch.nn.Module, mesh: Mesh, settings: MeshSettings, sent: SentBytes
) -> tuple[DistributedDataParallel, CompressionMemory | None]:
    """Return ``model`` with its gradients averaged over replicas, and the state of its hook.

    A hook adds its bytes to ``sent``; without a hook nothing is added, since all gradients are sent
    in full and the caller can compute the size.
    """
    memory: CompressionMemory | None = None
    group = mesh.group("dp")
    replica = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
    )
    if settings.hook in _HALVES:
        halved = HalfPrecisionHook(group, _HALVES[settings.hook], sent)
        replica.register_comm_hook(halved, half_precision_average)
    elif settings.hook == "powersgd":
        state = PowerSGDState(
            group,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=POWERSGD_DENSE_STEPS,
            orthogonalization_epsilon=1e-8,  # else a layer without a gradient yet becomes NaN
        )
        replica.register_comm_hook(PowerSgdHook(state, sent), powersgd_average)
        device = next(model.parameters()).device
        memory = CompressionMemory(state, mesh.data_rank, mesh.data_world, device)
    return replica, memory


@dataclass
class HalfPrecisionHook:
    """The state of ``half_precision_average``."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    sent: SentBytes


def half_precision_average(state: HalfPrecisionHook, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket in a dtype of half the size (torch's own hook for bf16 needs NCCL)."""
    whole = bucket.buffer()
    half = (whole / state.group.size()).to(state.dtype)  # divided first: fp16 overflows at 65504
    state.sent.bytes += half.numel() * half.element_size()
    work = dist.all_reduce(half, group=state.group, async_op=True)
    assert work is not None
    future: Future[torch.Tensor] = work.get_future().then(lambda _: whole.copy_(half))
    return future


@dataclass
class PowerSgdHook:
    """The state of ``powersgd_average``."""

    state: PowerSGDState
    sent: SentBytes


def powersgd_average(state: PowerSgdHook, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket with PowerSGD."""
    before = state.state.total_numel_after_compression
    future: Future[torch.Tensor] = powerSGD_hook(state.state, bucket)
    compressed = state.state.total_numel_after_compression - before
    whole = bucket.buffer()
    state.sent.bytes += (compressed or whole.numel()) * whole.element_size()
    return future
