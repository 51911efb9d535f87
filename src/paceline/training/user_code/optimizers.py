"""An optimiser of the user's own: ``training.optimizer_ref`` names a function of pinned code.

It is called with (parameter groups, TrainingSettings) and returns a ``torch.optim.Optimizer`` over
these parameters, however grouped. A checkpoint has the tensors of ``state[parameter]`` and nothing
else of it: trial steps show before any rank starts whether an optimiser goes on from these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.training.checkpoint import NAMES_TAKEN, local_of
from paceline.training.loop import MakeOptimizer, apply_gradients, new_optimizer, rate_of
from paceline.training.user_code.loading import load_function, user_code_error
from paceline.training.user_code.reference import OPTIMIZER, CodeRef, parse

TRIAL_STEPS = 3  # before the checkpoint of the trial, and after it


def load_optimizer(
    settings: TrainingSettings, sources: Sequence[str], cache: Path
) -> MakeOptimizer:
    """Return the function that makes the optimiser of ``settings.optimizer_ref``.

    Raises as ``load``; the function raises TrainingFailed where the code raises, InvalidInput where
    it returns no optimiser of all the parameters.
    """
    ref, entry = load_function(settings.optimizer_ref, sources, cache, OPTIMIZER)

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        wanted = {each for group in groups for each in group["params"]}
        try:
            found = entry(groups, settings)
        except Exception as error:
            raise user_code_error("the code raised as it made its optimiser", ref, error) from error
        if not isinstance(found, Optimizer):
            raise _refused(ref, "the code makes no optimiser", type(found).__name__)
        held = {each for group in found.param_groups for each in group["params"]}
        if held != wanted:
            raise _refused(
                ref,
                "the optimiser has other parameters than the groups",
                f"{len(held)} parameters, {len(held & wanted)} of them of the groups",
                f"all {len(wanted)} of the groups",
            )
        return found

    return make


def require_optimizer(settings: TrainingSettings, sources: Sequence[str], cache: Path) -> None:
    """Take trial steps with the optimiser of ``settings``, in this process.

    Raises as ``load_optimizer``, and InvalidInput where a checkpoint would not have all of its
    state, or where ``settings.mesh`` cuts parameters and its state is not cut as they are.
    """
    ref = parse(settings.optimizer_ref, OPTIMIZER)
    make = load_optimizer(settings, sources, cache)
    _require_state(ref, _steps(ref, settings, make, is_cut=False))
    if settings.mesh.shard * settings.mesh.cp * settings.mesh.tp == 1:
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        _require_cut_state(ref, _steps(ref, settings, make, is_cut=True))
    finally:
        dist.destroy_process_group()


def _steps(
    ref: CodeRef, settings: TrainingSettings, make: MakeOptimizer, *, is_cut: bool
) -> Optimizer:
    """Return an optimiser that has taken steps; raises InvalidInput unless one that was resumed in
    between has taken the same."""
    torch.manual_seed(0)
    models = [_model(is_cut=is_cut) for _ in range(2)]
    whole, resumed = (new_optimizer(each, settings, make) for each in models)
    pairs = list(zip(*(each.parameters() for each in models), strict=True))
    for step in range(2 * TRIAL_STEPS):
        if step == TRIAL_STEPS:
            for mine, other in pairs:
                other.detach().copy_(mine.detach())
                resumed.state[other] = {
                    name: value.detach().clone()
                    for name, value in whole.state.get(mine, {}).items()
                    if isinstance(value, Tensor)
                }
        for mine, other in pairs:
            gradient = torch.zeros_like(mine)
            local_of(gradient).normal_()
            mine.grad, other.grad = gradient, gradient.clone()
        for its in (whole, resumed)[: 1 if step < TRIAL_STEPS else 2]:
            try:
                rate = rate_of(its, step, settings)
                apply_gradients(its, rate)
            except Exception as error:
                on = " on sharded parameters" if is_cut else ""
                after = " resumed from a checkpoint" if its is resumed else ""
                said = f"the optimiser raised at a trial step{on}{after}"
                raise user_code_error(said, ref, error) from error
            if not (math.isfinite(rate) and rate >= 0):
                raise _refused(ref, "not a learning rate", f"{rate}", "a number, 0 or more")
    for mine, other in pairs:
        if not local_of(mine.detach()).equal(local_of(other.detach())):
            raise _refused(
                ref,
                "the optimiser takes other steps after it was resumed from a checkpoint",
                "state beside the tensors of state[parameter], in the object or in its groups",
                "all state as tensors of state[parameter], a count of steps too",
            )
    return whole


def _model(*, is_cut: bool) -> nn.Module:
    """Return matrices and vectors; with ``is_cut``, laid out as shards are, on this one process."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6))
    if is_cut:
        mesh = init_device_mesh("cpu", (1,))
        for module in model:
            for name, each in list(module.named_parameters()):
                cut = nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)]))
                setattr(module, name, cut)
    return model


def _require_state(ref: CodeRef, optimizer: Optimizer) -> None:
    for name in {name for each in optimizer.state.values() for name in each}:
        if not isinstance(name, str) or "." in name or name in NAMES_TAKEN:
            raise _refused(
                ref,
                "a checkpoint cannot name this state of the optimiser",
                repr(name),
                f"a name without dots, none of {', '.join(NAMES_TAKEN)}",
            )


def _require_cut_state(ref: CodeRef, optimizer: Optimizer) -> None:
    for parameter, its in optimizer.state.items():
        assert isinstance(parameter, DTensor)
        tensors = {name: each for name, each in its.items() if isinstance(each, Tensor)}
        for name, value in tensors.items():
            placed = value.placements if isinstance(value, DTensor) else (Replicate(),)
            is_cut_alike = placed == parameter.placements and value.shape == parameter.shape
            is_whole = all(each.is_replicate() for each in placed) and value.numel() == 1
            if not (is_cut_alike or is_whole):
                raise _refused(
                    ref,
                    "this state of the optimiser cannot be sharded",
                    f"{name} {list(value.shape)} of a parameter {list(parameter.shape)}",
                    "the parameter's shape and layout (torch.zeros_like), or one number; or "
                    "training.mesh.shard, cp and tp of 1",
                )


def _refused(
    ref: CodeRef, what: str, got: str, wanted: str = "a torch.optim.Optimizer"
) -> InvalidInput:
    return InvalidInput(what, got=got, wanted=wanted, where=ref.where)
