"""Replicas: each rank has the whole model, and gradients are averaged while they come (DDP).

A hook decides how gradients travel: as they are, as fp16 or bf16 halves, or as PowerSGD's two thin
matrices (arXiv 1905.13727). All of them average; the caller scales the loss accordingly. What
PowerSGD carries from step to step is in checkpoints (``compression``).
"""

# No ``from __future__ import annotations``: DDP reads the hook's annotations as objects.
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.profile import MeshSettings
from paceline.training.mesh import Mesh
from paceline.training.parallel.compression import CompressionMemory

BUCKET_MB = 4  # several buckets even for small models, so that sending overlaps the backward pass
POWERSGD_DENSE_STEPS = 10  # before gradients are compressed; DDP's own warm-up needs two

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Sent:
    """How many bytes of gradients this rank has handed to the replicas' all-reduce."""

    bytes: int = 0


def replicate(
    model: torch.nn.Module, mesh: Mesh, settings: MeshSettings, sent: Sent
) -> tuple[DistributedDataParallel, CompressionMemory | None]:
    """Return ``model`` with its gradients averaged over replicas, and what a hook carries on.

    A hook counts into ``sent``; without one nothing is counted: the caller knows that all gradients
    travel.
    """
    memory: CompressionMemory | None = None
    group = mesh.group("dp")
    replica = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
    )
    if settings.hook in _HALVES:
        halved = Halved(group, _HALVES[settings.hook], sent)
        replica.register_comm_hook(halved, halve)
    elif settings.hook == "powersgd":
        state = PowerSGDState(
            group,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=POWERSGD_DENSE_STEPS,
            orthogonalization_epsilon=1e-8,  # a layer without a gradient yet must not become NaN
        )
        replica.register_comm_hook(Thin(state, sent), thin)
        device = next(model.parameters()).device
        memory = CompressionMemory(state, mesh.data_rank, mesh.data_world, device)
    return replica, memory


@dataclass
class Halved:
    """What ``halve`` knows."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    sent: Sent


def halve(state: Halved, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket in a type of half the size (torch's own for bf16 needs NCCL)."""
    whole = bucket.buffer()
    half = (whole / state.group.size()).to(state.dtype)  # divided first: fp16 overflows at 65504
    state.sent.bytes += half.numel() * half.element_size()
    work = dist.all_reduce(half, group=state.group, async_op=True)
    assert work is not None
    future: Future[torch.Tensor] = work.get_future().then(lambda _: whole.copy_(half))
    return future


@dataclass
class Thin:
    """What ``thin`` knows."""

    state: PowerSGDState
    sent: Sent


def thin(state: Thin, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket as PowerSGD does."""
    before = state.state.total_numel_after_compression
    future: Future[torch.Tensor] = powerSGD_hook(state.state, bucket)
    compressed = state.state.total_numel_after_compression - before
    whole = bucket.buffer()
    state.sent.bytes += (compressed or whole.numel()) * whole.element_size()
    return future
