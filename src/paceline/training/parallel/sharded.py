"""Fully sharded data parallelism (FSDP2, ZeRO-3): a rank holds a part of every parameter.

Gradients and moments are sharded likewise. A block's parameters are gathered when it runs. With
replicas beside shards, gradients are first reduced within a replica, then summed between replicas
(hybrid). Gradients are SUMS over data ranks: FSDP's own division is switched off.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.config import TrainingSettings
from paceline.training.parallel.base import blocks_of
from paceline.training.parallel.mesh import Mesh

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def shard(model: nn.Module, mesh: Mesh, settings: TrainingSettings) -> None:
    """Shard ``model`` in place over ``shard`` and ``cp``, with replicas over ``dp`` where there are
    several.

    Matrix products use ``settings.precision``; gradients are reduced, and master weights stored, in
    fp32 (fp64).
    """
    spec = mesh.spec
    device_mesh = mesh.of("dp", "shard") if spec.dp > 1 else mesh.of("shard")
    # A pipeline runs each block many times a step, and a single shard is already whole: do not
    # free gathered parameters then.
    free = spec.pp == 1 and spec.weight_shards > 1
    half = _HALVES.get(settings.precision)
    reduce = None if half is None else torch.float32
    # Only the model's inputs are cast: between blocks all but the rotation has their dtype.
    inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce, cast_forward_inputs=False)
    outer = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce)
    for block in blocks_of(model):
        fully_shard(block, mesh=device_mesh, mp_policy=inner, reshard_after_forward=free)
    # Parameters outside the blocks are needed again as soon as the backward pass begins.
    fully_shard(model, mesh=device_mesh, mp_policy=outer, reshard_after_forward=False)
    for each in sharded_parts(model):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)


def sharded_parts(model: nn.Module) -> Iterable[FSDPModule]:
    """Return the modules of ``model`` whose parameters are gathered as one unit."""
    return (each for each in model.modules() if isinstance(each, FSDPModule))


def reshard_all(model: nn.Module) -> None:
    """Free gathered parameters after a forward pass alone, so that ``model`` holds only shards."""
    for each in sharded_parts(model):
        each.reshard()


def reduced_bytes(model: nn.Module, mesh: Mesh, settings: TrainingSettings) -> int:
    """Return the bytes of gradients that this rank hands to reductions each step."""
    size = 8 if settings.precision == "float64" else 4
    held = sum(_numel(each, mesh.spec.tp) for each in model.parameters() if each.requires_grad)
    shards = mesh.spec.weight_shards
    within = held * size if shards > 1 else 0
    between = held // shards * size if mesh.spec.dp > 1 else 0
    return within + between


def _numel(parameter: Tensor, tp: int) -> int:
    """Return the number of elements of the part that the shards of one ``tp`` rank make up."""
    is_cut = (
        tp > 1 and isinstance(parameter, DTensor) and not parameter.placements[-1].is_replicate()
    )
    return parameter.numel() // (tp if is_cut else 1)
