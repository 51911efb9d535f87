"""Optimiser (AdamW, SGD, Muon or a user's), learning-rate schedule, mixed precision, and EMA.

Does not depend on ranks or files. The learning rate is a pure function of (step, settings): it is
not saved, and a resumed run continues at the same rate. Schedules: cosine (arXiv 1608.03983),
linear, warmup-stable-decay (2404.06395); loss scaling: 1710.03740.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import EmaSettings, GroupSettings, TrainingSettings
from paceline.errors import CorruptData, InvalidInput, TrainingFailed
from paceline.models import output_layer
from paceline.training.checkpoint import clean, local_of
from paceline.training.loop.muon import MuonWithAdamW

FACTOR = "learning_rate_factor"  # key of a parameter group; missing: 1
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # of parameter groups


def new_optimizer(
    modules: nn.Module | Sequence[nn.Module],
    settings: TrainingSettings,
    make: MakeOptimizer | None = None,
) -> torch.optim.Optimizer:
    """Return the optimiser of ``settings`` over one rank's modules (``Parallel.modules``).

    AdamW applies weight decay to matrices only, not to norms and biases. SGD has no momentum and no
    decay, so that averaging weights after each step equals averaging gradients. Muon updates
    matrices, except embeddings, the output layer and what a group gives to AdamW. Every rank has
    the same list of parameter groups; on a stage of a pipeline some may be empty. ``make`` takes
    their place: its groups have the parameters' names, too (``names``).
    """
    modules = [modules] if isinstance(modules, nn.Module) else modules
    groups = _parameter_groups(modules, settings)
    its = list(groups.values())
    if make is not None:
        names = _trained(modules)
        return make([each | {"names": [names[p][0] for p in each["params"]]} for each in its])
    if settings.optimizer == "sgd":
        return torch.optim.SGD(its, lr=settings.learning_rate, foreach=True)
    if settings.optimizer == "muon":
        hidden = [each for key, each in groups.items() if key.hidden]
        others = [each for key, each in groups.items() if not key.hidden]
        return MuonWithAdamW(hidden, others, settings)
    return torch.optim.AdamW(its, lr=settings.learning_rate, betas=settings.betas, fused=True)


class _Key(NamedTuple):
    """What the parameters of a group have in common."""

    rule: int  # of training.groups, from 1; 0: none of them
    hidden: bool  # Muon updates them
    decays: bool


def _parameter_groups(
    modules: Sequence[nn.Module], settings: TrainingSettings
) -> dict[_Key, dict[str, Any]]:
    """Return the parameter groups in the optimiser's order; a trained parameter is in one."""
    is_muon, is_sgd = (settings.optimizer == each for each in ("muon", "sgd"))
    rules = (GroupSettings(match=("*",)), *settings.groups)
    found: dict[_Key, dict[str, Any]] = {}
    for key in map(_Key._make, product(range(len(rules)), (True, False), (True, False))):
        its = rules[key.rule]
        if (key.hidden and not is_muon) or (key.decays and is_sgd):
            continue
        default = settings.weight_decay if key.decays else 0.0
        decay = default if its.weight_decay is None else its.weight_decay
        found[key] = {"params": [], "weight_decay": decay}
        if its.learning_rate_factor != 1:
            found[key][FACTOR] = its.learning_rate_factor
    ends = {each for module in modules if is_muon for each in _end_weights(module)}
    for parameter, names in _trained(modules).items():
        matching = (n for n, each in enumerate(settings.groups, 1) if _matches(each.match, names))
        rule = next(matching, 0)
        hidden = is_muon and parameter.ndim == 2 and parameter not in ends
        plain = parameter.ndim < 2 or _matches(settings.no_decay, names)
        key = _Key(rule, hidden and not rules[rule].optimizer, not (plain or is_sgd))
        found[key]["params"].append(parameter)
    return found


def _end_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings and of the output layer, which Muon does not update."""
    ends = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    weights = (getattr(each, "weight", None) for each in (*ends, output_layer(model)))
    return {each for each in weights if isinstance(each, nn.Parameter)}


def _trained(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[str]]:
    """Return each trained parameter once, with the names that it has in the plain model."""
    found: dict[nn.Parameter, list[str]] = {}
    for module in modules:
        for name, each in module.named_parameters(remove_duplicate=False):
            if each.requires_grad:
                found.setdefault(each, []).append(clean(name))
    return found


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns for name in names)


def require_groups(model: nn.Module, settings: TrainingSettings) -> None:
    """Raise InvalidInput for a pattern that matches no trained parameter of the whole ``model``,
    and for one without matrices for Muon."""
    names = [name for its in _trained([model]).values() for name in its]
    patterns = [("groups", each) for group in settings.groups for each in group.match]
    for where, each in [*patterns, *(("no_decay", each) for each in settings.no_decay)]:
        if not _matches([each], names):
            raise InvalidInput(
                "no trained parameter has such a name",
                got=each,
                wanted=f"names such as {', '.join(names[:: len(names) // 6 + 1])}; * is any part",
                where=f"training.{where}",
            )
    groups = _parameter_groups([model], settings).items() if settings.optimizer == "muon" else ()
    if groups and not any(key.hidden and each["params"] for key, each in groups):
        raise InvalidInput(
            "muon has no matrix to train",
            got="embeddings, an output layer, vectors, or groups of AdamW",
            wanted="trained parameters of two dimensions in hidden layers",
            where="training.optimizer",
            do="Use training.optimizer adamw.",
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups: ``rate`` times their factors."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(FACTOR, 1.0)


def apply_gradients(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Apply the gradients to the weights with learning rate ``rate``."""
    set_learning_rate(optimizer, rate)
    optimizer.step()


def rate_of(optimizer: torch.optim.Optimizer, step: int, settings: TrainingSettings) -> float:
    """Return the learning rate of step ``step`` (from 0): ``learning_rate``, unless the optimiser
    has a schedule of its own, a method ``learning_rate(step, steps)``."""
    own = getattr(optimizer, "learning_rate", None)
    if callable(own):
        return float(own(step, settings.steps))
    return learning_rate(step, settings.steps, settings)


def learning_rate(step: int, steps: int, settings: TrainingSettings) -> float:
    """Return the learning rate of step ``step`` (from 0) of ``steps``.

    Linear warm-up over ``warmup_steps`` (the last one has the full rate), then a non-increasing
    schedule that ends near ``final_share`` of the full rate and stays there beyond ``steps``.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    start = settings.warmup_steps
    if settings.schedule == "wsd":
        start = max(start, steps - math.ceil(settings.decay_share * steps))
    done = min(1.0, max(0, step - start) / max(1, steps - start))
    left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * left)


# Mixed precision: parameters, gradients and optimiser state stay fp32 (fp64 with ``precision =
# float64``); only products are cast. fp16 gradients underflow, so the loss is multiplied by a scale
# that grows while gradients stay finite and halves when they do not. The loop passes the scale to
# ``Parallel.accumulate`` and its inverse to ``Parallel.clip``, whose norm is the same on every
# rank: all ranks change the scale alike, with accumulation and under every layout.

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROWTH_STEPS = 2000  # consecutive steps without overflow before the scale doubles

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(settings: TrainingSettings, device_type: str) -> AbstractContextManager[object]:
    """Return the autocast context of forward passes: products in ``settings.precision``."""
    half = _HALVES.get(settings.precision)
    if half is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=half)


def master_dtype(settings: TrainingSettings) -> torch.dtype:
    """Return the dtype of parameters and optimiser state."""
    return torch.float64 if settings.precision == "float64" else torch.float32


@dataclass
class LossScale:
    """Dynamic loss scale for fp16; each checkpoint contains its ``state``."""

    scale: float = INITIAL_SCALE
    good_steps: int = 0
    growth_steps: int = GROWTH_STEPS

    @classmethod
    def of(cls, settings: TrainingSettings) -> LossScale | None:
        """Return a loss scale for fp16, None for other precisions."""
        return cls() if settings.precision == "float16" else None

    def update(self, finite: bool) -> None:
        """Adjust the scale: halve it after an overflow, double it after ``growth_steps`` without.

        Raises TrainingFailed where gradients overflow at the smallest scale.
        """
        if not finite:
            if self.scale <= 1.0:
                raise TrainingFailed(
                    "gradients are not finite at any loss scale",
                    got=f"scale {self.scale:g}",
                    wanted="a finite gradient norm",
                    do="Use training.precision bfloat16, or lower training.learning_rate.",
                )
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            self.scale, self.good_steps = min(LARGEST_SCALE, self.scale * 2), 0

    @property
    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore ``state``; raises CorruptData where it is malformed or out of range."""
        try:
            scale, good_steps = float(state["scale"]), int(state["good_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData("loss scale of a checkpoint is unusable", got=repr(state)) from error
        if not 0 < scale <= LARGEST_SCALE or good_steps < 0:
            raise CorruptData("loss scale of a checkpoint is out of range", got=repr(state))
        self.scale, self.good_steps = scale, good_steps


class WeightAverage:
    """Moving average over the steps that an optimiser takes; the first step's weights begin it.

    The values are those of torch's AveragedModel. ``values`` is empty without settings and before
    the first step; checkpoints contain it (``TrainState.averages``).
    """

    def __init__(self, optimizer: Optimizer, settings: EmaSettings | None) -> None:
        self.values: dict[nn.Parameter, Tensor] = {}
        if settings is not None:
            self._weight = 1 - settings.decay
            optimizer.register_step_post_hook(self._stepped)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the ``with`` the model has the average as its weights; then its own again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: FSDP and compiled graphs refer to the memory of the weights.
        for parameter, value in self.values.items():
            mine, average = local_of(parameter.detach()), local_of(value)
            own = mine.clone()
            mine.copy_(average)
            average.copy_(own)

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        if not self.values:
            self.values.update({each: each.detach().clone() for each in trained})
            return
        averages = [local_of(self.values[each]) for each in trained]
        torch._foreach_lerp_(averages, [local_of(each.detach()) for each in trained], self._weight)
