"""Local SGD (arXiv 1805.09767): ranks step alone ``local_steps`` times, then average their state.

Weights and moments are averaged; with one local step and plain SGD the weights are those of
synchronous training. Between two averages ranks hold different weights, but a checkpoint has one
set: the state is averaged when it is due to be saved, and training continues from that very state,
so a resumed run repeats an uninterrupted one.

Only for replicas: a model that is sharded over ranks has no weights of its own to step alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.training.loop import Inputs, LossSums, Workload
from paceline.training.parallel import Mesh, MeshSpec, Parallel, parallelise


class LocalSgd:
    """A ``Parallel`` whose ranks step alone; ``follow`` attaches it to the optimizer.

    ``step`` is the present step: averages fall on multiples of ``local_steps``, whatever was
    resumed in between.
    """

    def __init__(self, inner: Parallel, mesh: Mesh, local_steps: int) -> None:
        self._inner, self._mesh = inner, mesh
        self._local_steps = local_steps
        self._step = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._apart = False  # whether ranks may hold different weights
        self.modules: Sequence[nn.Module] = inner.modules
        self.data_rank, self.data_world = mesh.data_rank, mesh.data_world
        self.bytes_reduced = 0  # weights and moments that this rank gave to averages so far
        self.evaluate = inner.evaluate  # under the weights that this rank holds: see ``together``

    def follow(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Average after each ``local_steps``-th step of ``optimizer``; ``step`` is the present one.

        Call it once, after a checkpoint was restored.
        """
        assert self._optimizer is None, "one optimiser updates the weights"
        self._optimizer, self._step = optimizer, step
        optimizer.register_step_post_hook(self._stepped)

    def accumulate(self, parts: Sequence[Inputs], scale: float) -> LossSums:
        """Run all parts; gradients are of this rank alone, as if its rows were the whole batch."""
        self._step += 1
        return self._inner.accumulate(parts, scale * self.data_world)

    def clip(self, max_norm: float, unscale: float = 1.0) -> float:
        """Clip this rank's gradients; return the root mean square of all ranks' norms.

        If one rank's norm is not finite, neither is the result: every rank judges the step alike.
        """
        norm = self._inner.clip(max_norm, unscale)
        square = torch.tensor(norm * norm, dtype=torch.float64)
        self._sum(square)
        return math.sqrt(float(square) / self.data_world)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within the ``with`` hold the mean of all ranks' weights; then restore this rank's own.

        All ranks enter it at the same step. It costs one copy of the weights, and one average.
        """
        if not self._apart:
            yield
            return
        weights = self._weights()
        own = [each.clone() for each in weights]
        self._average(weights)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, before in zip(weights, own, strict=True):
                    each.copy_(before)

    def average(self) -> None:
        """Replace weights and moments by their mean over ranks; all ranks call it together."""
        if not self._apart:
            return
        self._average(self._tensors())
        self._apart = False

    def _average(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            groups: dict[torch.dtype, list[Tensor]] = {}
            for each in tensors:
                if each.is_floating_point():
                    groups.setdefault(each.dtype, []).append(each)
            for group in groups.values():
                flat = torch.cat([each.reshape(-1) for each in group])
                self._sum(flat)
                flat /= self.data_world
                self.bytes_reduced += flat.numel() * flat.element_size()
                parts = torch.split(flat, [each.numel() for each in group])
                for each, part in zip(group, parts, strict=True):
                    each.copy_(part.view_as(each))

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._apart = True
        if self._step % self._local_steps == 0:
            self.average()

    def _weights(self) -> list[Tensor]:
        weights = {id(each): each for module in self.modules for each in module.parameters()}
        return [each.detach() for each in weights.values()]

    def _tensors(self) -> list[Tensor]:
        moments = [
            value.detach()
            for each, state in (self._optimizer.state if self._optimizer else {}).items()
            for value in state.values()
            if isinstance(value, Tensor) and value.shape == each.shape and each.ndim > 0
        ]
        return [*self._weights(), *moments]

    def _sum(self, tensor: Tensor) -> None:
        if self.data_world > 1:
            dist.all_reduce(tensor, group=self._mesh.group("dp"))


def local_sgd(
    model: nn.Module, mesh: Mesh, settings: TrainingSettings, workload: Workload
) -> LocalSgd:
    """Return ``model`` as a replica that steps alone ``settings.synchrony.local_steps`` times.

    Raises InvalidInput for a mesh that is not of whole replicas only.
    """
    spec = mesh.spec
    if spec.shard * spec.cp * spec.tp * spec.pp > 1:
        raise InvalidInput(
            "local SGD needs whole replicas",
            got=str(spec),
            wanted="shard, cp, tp and pp of 1",
            do="Change training.mesh, or set training.synchrony.kind to every-step.",
        )
    if settings.mesh.hook != "none":
        raise InvalidInput(
            "local SGD sends weights, not gradients",
            got=f"training.mesh.hook {settings.mesh.hook}",
            wanted="none",
        )
    alone = parallelise(model, Mesh(MeshSpec(), 0, mesh.device_type), settings, workload)
    return LocalSgd(alone, mesh, settings.synchrony.local_steps)
