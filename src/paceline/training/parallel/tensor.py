"""Tensor parallelism (DTensor): attention cut by heads, feed-forward by width, and the vocabulary.

The first matrix of a pair is cut by columns, the second by rows, so that a block needs one sum per
pair (arXiv 1909.08053). With sequence parallelism, activations between are cut along T (arXiv
2205.05198). Logits stay cut by vocabulary up to the loss. All parameters become DTensors of one
mesh, norms as copies, so that an optimizer can treat them alike.

Models of transformers are cut by the plan that each family carries, which names a style for each
linear layer. Beyond the plan they are as ours, so that FSDP2, an optimizer and a checkpoint can
treat all parameters alike; activations between blocks are whole on every rank.
"""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, runtime_checkable

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

from paceline.errors import InvalidInput
from paceline.models import Pretrained, Transformer
from paceline.training.loop import Workload
from paceline.training.parallel.checks import require_cuttable
from paceline.training.parallel.mesh import Mesh, MeshSpec


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


@runtime_checkable
class HasPlan(Protocol):
    """A model of transformers: module names (``*`` for the number of a layer) → styles."""

    @property
    def tp_plan(self) -> dict[str, str]: ...

    def tie_weights(self) -> None:
        """Share parameters between modules again."""


_WHOLE = ReplicatedModule()
_EMBEDDING = RowwiseParallel(input_layouts=Replicate())
_LOGITS = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
STYLES: dict[str, ParallelStyle] = {  # by transformers' names
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "embedding_rowwise": _EMBEDDING,
    # Norms of heads. Rows do not depend on each other: any dimension but the last will do.
    "replicated_with_grad_allreduce": ReplicatedModule(cut=0),
}
# of peft's layers: the sums over ranks are those of the layer that is adapted
_ADAPTERS: dict[str, ParallelStyle] = {
    "colwise A": _WHOLE,
    "colwise B": STYLES["colwise"],
    "rowwise A": STYLES["rowwise"],
    "rowwise B": _WHOLE,
}


def require_planned(pretrained: Pretrained, spec: MeshSpec) -> None:
    """Raise InvalidInput unless ``spec`` can cut ``pretrained``; call it before ranks start."""
    require_cuttable(spec, pretrained.config.to_dict())
    if spec.pp > 1 and "layers" not in (pretrained.config.base_model_pp_plan or {}):
        raise InvalidInput(
            "the model's family cannot be cut into stages",
            got=f"{type(pretrained.empty).__name__} has no plan of its layers",
            wanted="a family with a pipeline plan",
            where="training.mesh",
            do="Use training.mesh.shard instead of training.mesh.pp.",
        )
    if spec.tp > 1:
        styles_of(pretrained.empty)


def styles_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the style of each module of ``model`` that has parameters of its own, by name.

    Raises InvalidInput where the family has no plan, or one that cannot be carried out.
    """
    plan = model.tp_plan if isinstance(model, HasPlan) else {}
    if not any("*" in name for name in plan):  # at most its output layer
        raise _refused(
            f"{type(model).__name__} has no plan", "a family with a tensor-parallel plan"
        )
    styles = {
        name: _style(name, module, plan)
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for pair in tied.items():
        if {styles[each.rpartition(".")[0]] for each in pair} != {_EMBEDDING, _LOGITS}:
            raise _refused(f"{' and '.join(pair)} are tied", "both cut by vocabulary")
    return styles


def cut_planned(model: nn.Module, mesh: Mesh) -> None:
    """Cut ``model``, of transformers, in place over ``tp``; tied weights stay tied."""
    assert isinstance(model, HasPlan)
    styles = styles_of(model)
    buffers = {name: dict(model.get_submodule(name)._buffers) for name in styles}
    # All ranks hold the same values, so each takes its part locally and nothing is sent.
    parallelize_module(model, mesh.of("tp"), styles, src_data_rank=None)
    for name, whole in buffers.items():  # transformers computes their values on plain tensors
        model.get_submodule(name)._buffers.update(whole)
    model.tie_weights()


def _style(name: str, module: nn.Module, plan: dict[str, str]) -> ParallelStyle:
    layer, _, adapter = name.partition(".lora_")
    layer = layer.removesuffix(".base_layer")
    planned = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", layer))
    if adapter and (style := _ADAPTERS.get(f"{planned} {adapter[0]}")) is not None:
        return style
    if name == "lm_head" and planned in ("colwise_gather_output", "colwise_rep"):
        return _LOGITS  # not gathered: the loss takes them as they are
    if planned in STYLES:
        return STYLES[planned]
    if planned is None and isinstance(module, nn.Embedding):
        return _EMBEDDING
    if planned is None and all(each.ndim == 1 for each in module.parameters(recurse=False)):
        return _WHOLE
    raise _refused(f"style {planned} of {name}", f"one of {', '.join(STYLES)}")


def _refused(got: str, wanted: str) -> InvalidInput:
    return InvalidInput(
        "the model's family cannot be cut by matrices",
        got=got,
        wanted=wanted,
        where="training.mesh",
        do="Use training.mesh.shard instead of training.mesh.tp.",
    )
