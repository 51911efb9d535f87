"""``parallelise``: turn a plain model and a mesh into the ``Parallel`` that the loop drives."""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from paceline.config import TrainingSettings
from paceline.models import Transformer
from paceline.training.loop import Workload, autocast, master_dtype
from paceline.training.parallel import tensor
from paceline.training.parallel.base import Parallel, compile_blocks, recompute_blocks
from paceline.training.parallel.checks import require_layout, require_uncut
from paceline.training.parallel.data_parallel import SentBytes, replicate
from paceline.training.parallel.mesh import Mesh
from paceline.training.parallel.pipeline import Pipelined, drop_children, stages
from paceline.training.parallel.sharded import shard
from paceline.training.parallel.straight import SingleStage


def parallelise(
    model: nn.Module, mesh: Mesh, settings: TrainingSettings, workload: Workload
) -> Parallel:
    """Return ``model`` spread over ``mesh`` according to ``settings``; all ranks call it together.

    ``model`` is the whole model, with the same values on every rank, and is consumed. On the meta
    device, the parts get storage without values, to be loaded later. Raises InvalidInput for an
    impossible layout.
    """
    spec = mesh.spec
    if isinstance(model, Transformer):
        require_layout(spec, settings, model.config)
    else:
        require_layout(spec, settings, None)
        require_uncut(spec, type(model).__name__)
    model = model.to(master_dtype(settings))
    if not _is_meta(model):
        model = model.to(mesh.device_type)
    parts = [model]
    if spec.pp > 1:
        assert isinstance(model, Transformer)
        parts = [*stages(model, mesh, settings)]
        drop_children(model)
    spread = spec.shard > 1 or (spec.dp > 1 and spec.tp * spec.pp > 1)
    for part in parts:
        if spec.tp > 1:
            assert isinstance(part, Transformer)
            tensor.cut_matrices(part, mesh, sequence=settings.mesh.sequence_parallel)
        if settings.compile:
            compile_blocks(part)
        if settings.activation_checkpointing:
            recompute_blocks(part)
        if spread:
            shard(part, mesh, settings)
        elif spec.pp > 1:
            _cast_products(part, mesh, settings)
        if _is_meta(part):
            part.to_empty(device=mesh.device_type)
            if isinstance(part, HasTiedWeights):  # now separate, and the optimizer comes next
                part.tie_weights()
    if spec.pp > 1:
        return Pipelined(
            [each for each in parts if isinstance(each, Transformer)], mesh, settings, workload
        )
    sent = SentBytes()
    if spec.dp == 1 or spread:
        return SingleStage(model, model, mesh, settings, workload, sent)
    run, memory = replicate(model, mesh, settings.mesh, sent)
    return SingleStage(model, run, mesh, settings, workload, sent, memory)


@runtime_checkable
class HasTiedWeights(Protocol):
    """A model of transformers, which can share parameters between modules again."""

    def tie_weights(self) -> None: ...


def _is_meta(model: nn.Module) -> bool:
    return any(each.is_meta for each in model.parameters())


def _cast_products(stage: nn.Module, mesh: Mesh, settings: TrainingSettings) -> None:
    """Run ``stage`` under autocast: a pipeline schedule calls it directly, without
    ``SingleStage``.
    """
    forward = stage.forward

    @functools.wraps(forward)
    def within(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        with autocast(settings, mesh.device_type):
            output: torch.Tensor = forward(*args, **kwargs)
            return output

    stage.forward = within
