"""One module that a rank runs from end to end: alone, as a replica, sharded, or cut by matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.training.mesh import Mesh
from paceline.training.parallel import clipping
from paceline.training.workload import Inputs, LossSums, Workload


class Straight:
    """A ``Parallel`` without stages."""

    bytes_reduced = 0

    def __init__(self, module: nn.Module, run: nn.Module, mesh: Mesh, workload: Workload) -> None:
        self.modules: Sequence[nn.Module] = (module,)
        self.data_rank, self.data_world = mesh.data_rank, mesh.data_world
        self._mesh = mesh
        self._run = run  # ``module``, or what wraps it to make gradients travel
        self._workload = workload
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._warm = not isinstance(run, DistributedDataParallel)

    def accumulate(self, parts: Sequence[Inputs], scale: float) -> LossSums:
        """Run all parts forward and backward; see ``Parallel``."""
        if not self._warm:
            self._warm_up(parts[0])
        self._clear()
        averaged = self.data_world if isinstance(self._run, DistributedDataParallel) else 1
        sums: list[LossSums] = []
        for number, part in enumerate(parts, start=1):
            with self._synchronised(number == len(parts)):
                loss = self._loss(part)
                torch.autograd.backward(loss * (scale * averaged))
            sums.append(LossSums(loss.detach(), part.weight))
        return LossSums.of(sums)

    def clip(self, max_norm: float, unscale: float = 1.0) -> float:
        """Return the norm of all gradients and shorten them; see ``Parallel``."""
        return clipping.clip(self._parameters, self._mesh, max_norm, unscale)

    def evaluate(self, inputs: Inputs) -> LossSums:
        """Return the sums of the loss of this rank's share."""
        module = self.modules[0]
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                outputs = module(*inputs.args, **inputs.kwargs)
                loss = self._workload.loss_sum(outputs, *inputs.targets)
        finally:
            module.train(training)
        return LossSums(loss, inputs.weight)

    def _loss(self, part: Inputs) -> Tensor:
        outputs = self._run(*part.args, **part.kwargs)
        return self._workload.loss_sum(outputs, *part.targets)

    def _clear(self) -> None:
        for each in self._parameters:
            if each.grad is not None:
                each.grad.zero_()

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        if last or not isinstance(self._run, DistributedDataParallel):
            yield
            return
        with self._run.no_sync():
            yield

    def _warm_up(self, part: Inputs) -> None:
        """Run one backward pass that changes nothing.

        DDP lays out its buckets anew after the first backward pass. Doing that before the first
        step makes a resumed run add gradients in the same order as one that never stopped.
        """
        torch.autograd.backward(self._loss(part) * 0.0)
        self._warm = True
