"""Tensor parallelism of models of transformers, by the plan that each family carries.

A plan names a style for each linear layer; torch's styles carry it out. Beyond the plan, as for our
transformer: embedding and logits are cut by vocabulary, logits stay cut up to the loss, and norms
become DTensors with the same values on every rank, so that FSDP2, an optimizer and a checkpoint can
treat all parameters alike. Activations between blocks are whole on every rank.
"""

from __future__ import annotations

import re
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from paceline.errors import InvalidInput
from paceline.models import Pretrained
from paceline.training.parallel.checks import require_cuttable
from paceline.training.parallel.mesh import Mesh, MeshSpec
from paceline.training.parallel.tensor import ReplicatedModule


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
