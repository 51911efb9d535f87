"""The state of a training as flat named tensors, whatever the layout.

``model.<name>`` for what the model holds, ``<moment>.<name>`` for what the optimiser keeps of each
parameter, ``extra.<name>`` for what the caller adds, ``kept.<name>`` for what others keep beside
them. A sharded tensor is the DTensor it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.training.checkpoint.records import Groups
from paceline.training.loop.group import Group

if TYPE_CHECKING:
    from torch import Tensor


# State that something keeps beside model and optimiser, and that a checkpoint must have too.
#
# A recurrent task's rows (``recurrent.Carried``), what a compressing hook has not sent yet
# (``parallel.compression``). Both change while a batch is computed, and a state is saved in the
# middle of the next batch: the loop calls ``settle`` between two batches, and what is saved is what
# was settled last. Knows no files and no loop.


class Kept(Protocol):
    """One thing that keeps state of its own on each rank; names are unique in a job."""

    def settle(self) -> None:
        """What is held now belongs to the state between two batches."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what was settled, by name; several ranks may hold the same under one name."""

    def wants(self, name: str) -> bool:
        """Return whether this rank, on whatever layout, needs what was saved as ``name``."""

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Take over what was saved of what was wanted; all of it is there, or nothing."""


@runtime_checkable
class Spoilable(Protocol):
    """A ``Kept`` that a bad batch may spoil for all batches after it."""

    def let_go(self) -> None:
        """The batch since the last ``settle`` was not learned from: drop what it spoiled."""


def keeps_of(*owners: object) -> list[Kept]:
    """Return what ``owners`` keep: their ``keeps``, and those of a workload that they wrap."""
    found: list[Kept] = []
    for each in owners:
        its: Sequence[Kept] = getattr(each, "keeps", ())
        found += its
        if not its and (inner := getattr(each, "workload", None)) is not None:
            found += keeps_of(inner)
    return found


def settle(keeps: Sequence[Kept]) -> None:
    """Settle all of them."""
    for each in keeps:
        each.settle()


def let_go(keeps: Sequence[Kept]) -> None:
    """Have those that can drop what the batch since the last ``settle`` spoiled."""
    for each in keeps:
        if isinstance(each, Spoilable):
            each.let_go()


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
