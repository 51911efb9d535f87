"""Tensor parallelism (DTensor): attention cut by heads, feed-forward by width, and the vocabulary.

The first matrix of a pair is cut by columns, the second by rows, so that a block needs one sum per
pair (arXiv 1909.08053). With sequence parallelism, activations between are cut along T (arXiv
2205.05198). Logits stay cut by vocabulary up to the loss. All parameters become DTensors of one
mesh, norms as copies, so that an optimizer can treat them alike.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from paceline.models import Transformer
from paceline.training.loop import Workload
from paceline.training.parallel.mesh import Mesh


class ReplicatedModule(ParallelStyle):
    """Style of a module that every rank runs with the same parameters.

    The input is the same on every rank, or cut along ``cut``: then gradients are summed.
    """

    def __init__(self, cut: int | None = None) -> None:
        super().__init__()
        self._layout = Replicate() if cut is None else Shard(cut)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(layout: Any, _: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, (layout,), run_check=False) for x in inputs)

        def leave(_: nn.Module, outputs: Any, device_mesh: Any) -> Any:
            del device_mesh
            return outputs.to_local()

        return distribute_module(module, device_mesh, None, partial(enter, self._layout), leave)


def cut_matrices(model: Transformer, mesh: Mesh, *, sequence: bool) -> None:
    """Cut ``model``, a whole model or a stage, in place over ``tp``."""
    device_mesh = mesh.of("tp")
    between = Shard(1) if sequence else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence else ReplicatedModule()
    plan: dict[str, ParallelStyle] = {}
    if hasattr(model.model, "embed_tokens"):
        plan["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if hasattr(model.model, "norm"):
        plan["model.norm"] = norm
    if hasattr(model, "tied_head"):
        plan["tied_head"] = PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        )
    if hasattr(model, "lm_head"):
        plan["lm_head"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    for number in model.model.layers:
        block = f"model.layers.{number}"
        plan |= {
            f"{block}.input_layernorm": norm,
            f"{block}.self_attn": PrepareModuleInput(
                input_layouts=(between, None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            **{f"{block}.self_attn.{each}_proj": ColwiseParallel() for each in "qkv"},
            f"{block}.self_attn.o_proj": RowwiseParallel(output_layouts=between),
            f"{block}.post_attention_layernorm": norm,
            f"{block}.mlp": PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            ),
            f"{block}.mlp.gate_proj": ColwiseParallel(),
            f"{block}.mlp.up_proj": ColwiseParallel(),
            f"{block}.mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
    # All ranks hold the same values, so each takes its part locally and nothing is sent.
    parallelize_module(model, device_mesh, plan, src_data_rank=None)


def loss_context(mesh: Mesh) -> AbstractContextManager[None]:
    """Return the context for computing the loss of cut logits, forward and backward."""
    if mesh.spec.tp == 1:
        return contextlib.nullcontext()
    context: AbstractContextManager[None] = loss_parallel()
    return context


def loss_sum(workload: Workload, mesh: Mesh, outputs: Any, targets: tuple[Tensor, ...]) -> Tensor:
    """Return the workload's loss, the same on every rank of ``tp``; outputs may be cut."""
    if mesh.spec.tp > 1:
        device_mesh = mesh.of("tp")
        copies = (DTensor.from_local(each, device_mesh, run_check=False) for each in targets)
        targets = tuple(copies)
    loss = workload.loss_sum(outputs, *targets)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
