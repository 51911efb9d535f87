"""The state of a training as flat named tensors, whatever the layout.

``model.<name>`` for the model, ``<moment>.<name>`` for the optimizer's state of each parameter,
``extra.<name>`` for what the caller adds, ``kept.<name>`` for further state (``Kept``). A sharded
tensor stays a DTensor. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.training.checkpoint.records import Groups
from paceline.training.loop.group import Group


class Stateful(Protocol):
    """State beside model and optimizer that a checkpoint must contain; names are unique in a job.

    For example the rows of a recurrent task (``recurrent.Carried``), or gradients that a
    compression hook has not sent yet (``parallel.data``). Both change while a batch is computed,
    and a checkpoint is saved in the middle of the next batch: the loop takes a snapshot with
    ``settle`` between two batches, and the last snapshot is what is saved.
    """

    def settle(self) -> None:
        """Take a snapshot: the present state is the one between two batches."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the snapshot, by name; several ranks may hold the same under one name."""

    def wants(self, name: str) -> bool:
        """Return whether this rank, on any layout, needs the saved tensor ``name``."""

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Load the saved tensors that were wanted; ``found`` may be empty."""


@runtime_checkable
class Discardable(Protocol):
    """A ``Kept`` whose state a bad batch could spoil for all later batches."""

    def let_go(self) -> None:
        """Discard the state of the batch since the last ``settle``: its update was not taken."""


def keeps_of(*owners: object) -> list[Stateful]:
    """Return the ``Kept`` objects of ``owners`` and of the workloads that they wrap."""
    found: list[Stateful] = []
    for each in owners:
        its: Sequence[Stateful] = getattr(each, "keeps", ())
        found += its
        if not its and (inner := getattr(each, "workload", None)) is not None:
            found += keeps_of(inner)
    return found


def settle(keeps: Sequence[Stateful]) -> None:
    """Take a snapshot of each."""
    for each in keeps:
        each.settle()


def let_go(keeps: Sequence[Stateful]) -> None:
    """Discard the state of the last batch, in each that supports it."""
    for each in keeps:
        if isinstance(each, Discardable):
            each.let_go()


MODEL, EXTRA, KEPT = "model.", "extra.", "kept."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, recompute


class HasModules(Protocol):
    """The part of ``parallel.Parallel`` that is needed here: this rank's modules."""

    @property
    def modules(self) -> Sequence[nn.Module]: ...


@dataclass(frozen=True)
class WholeModel:
    """A model that this rank holds whole."""

    model: nn.Module

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Return the model as the only part."""
        return (self.model,)


@dataclass
class TrainState:
    """All state on this rank that a checkpoint contains."""

    parallel: HasModules
    optimizer: Optimizer
    group: Group
    mesh: Any = None  # its ``spec`` (dp, shard, tp, pp) is recorded
    position: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # tensors and JSON values
    keeps: Sequence[Stateful] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor to save by name: the live tensors, not copies."""
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
        """Return the optimizer's present settings (rates, decay), as JSON values.

        Our recipes group parameters by their number of dimensions only.
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
        """Return dp, shard, tp and pp, as far as the mesh has them."""
        spec = getattr(self.mesh, "spec", None)
        names = ("dp", "shard", "tp", "pp")
        return {name: int(getattr(spec, name)) for name in names if hasattr(spec, name)}


def clean(name: str) -> str:
    """Return a parameter's name in the plain model, without the prefixes of wrappers."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name
