"""The state of a training as flat named tensors, whatever the layout.

``model.<name>`` for what the model holds, ``<moment>.<name>`` for what the optimiser keeps of each
parameter, ``extra.<name>`` for what the caller adds, ``kept.<name>`` for what others keep beside
them. A sharded tensor is the DTensor it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.training.checkpoint.records import Groups
from paceline.training.group import Group
from paceline.training.keeping import Kept

MODEL, EXTRA, KEPT = "model.", "extra.", "kept."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and checkpointing


class Parted(Protocol):
    """What is needed of ``parallel.Parallel``: this rank's part of the model."""

    @property
    def modules(self) -> Sequence[nn.Module]: ...


@dataclass(frozen=True)
class WholeModel:
    """A model that this rank holds entirely."""

    model: nn.Module

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Return the one part there is."""
        return (self.model,)


@dataclass
class TrainState:
    """Everything that a checkpoint keeps, on this rank."""

    parallel: Parted
    optimizer: Optimizer
    group: Group
    mesh: Any = None  # its ``spec`` (dp, shard, tp, pp) goes on record
    position: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # tensors, and what JSON can say
    keeps: Sequence[Kept] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor to save, the live ones, by name."""
        found: dict[str, Tensor] = {}
        for module in self.parallel.modules:
            for name, tensor in module.state_dict().items():
                found[MODEL + clean(name)] = tensor.detach()
        for name, parameter in self.parameters():
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{moment}.{name}"] = value.detach()
        for name, value in self.extra.items():
            if isinstance(value, Tensor):
                found[EXTRA + name] = value.detach()
        for each in self.keeps:
            found |= {KEPT + name: tensor.detach() for name, tensor in each.tensors().items()}
        return found

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter under every name it has (tied ones have several)."""
        for module in self.parallel.modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield clean(name), parameter

    def groups(self) -> Groups:
        """Return what the optimiser is told now (rates, decay), as JSON can say it.

        Our recipes tell parameters apart by their dimensions only.
        """
        told: dict[str, dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            values = {
                name: value
                for name, value in group.items()
                if name != "params" and isinstance(value, bool | int | float | str | tuple | None)
            }
            for parameter in group["params"]:
                told.setdefault("matrices" if parameter.ndim >= 2 else "vectors", values)
        return Groups.model_validate(told)

    def layout(self) -> dict[str, int]:
        """Return dp, shard, tp and pp as far as the mesh says them."""
        spec = getattr(self.mesh, "spec", None)
        names = ("dp", "shard", "tp", "pp")
        return {name: int(getattr(spec, name)) for name in names if hasattr(spec, name)}


def clean(name: str) -> str:
    """Return a parameter's name in the plain model, without what wrappers put in."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name
