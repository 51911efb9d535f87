"""A worker's part of the work: the gradient of a share's next batch under the weights it was given.

What is computed anew because it was too stale is computed from the same batch, and from the state
that a recurrent model had before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import nn

from paceline.data import Batch
from paceline.profile import TrainingSettings
from paceline.training.keeping import keeps_of, let_go
from paceline.training.loop import CPU, seed_step
from paceline.training.mesh import Mesh, MeshSpec
from paceline.training.parallel import parallelise
from paceline.training.relaxed.learner import flat_gradients, put
from paceline.training.relaxed.terms import Note
from paceline.training.relaxed.worker import Task
from paceline.training.workload import Inputs, Workload


class Source(Protocol):
    """A share's batches, one after another."""

    @property
    def data_wait_s(self) -> float: ...
    @property
    def quarantined(self) -> Mapping[str, str]: ...
    @property
    def position(self) -> dict[str, Any] | None: ...
    def next(self) -> Batch: ...
    def close(self) -> None: ...


@dataclass
class _Held:
    """The batch at hand."""

    worker: int
    sequence: int
    batch: Batch
    parts: list[Inputs]
    note: dict[str, Any]


class Gradients:
    """Computes what ``Worker.run`` pushes; ``open_share`` gives the data of a share from a task on.

    ``model`` is this rank's own and is overwritten with each task's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        settings: TrainingSettings,
        workers: int,
        open_share: Callable[[Task], Source],
        device: torch.device = CPU,
    ) -> None:
        self._workload, self._settings, self._workers = workload, settings, workers
        self._open_share, self._device = open_share, device
        self._parallel = parallelise(model, Mesh(MeshSpec(), 0, device.type), settings, workload)
        self._parameters = [
            each for part in self._parallel.modules for each in part.parameters()
            if each.requires_grad
        ]  # fmt: skip
        self.count = sum(each.numel() for each in self._parameters)
        self.dtype = str(self._parameters[0].dtype).removeprefix("torch.")
        self._keeps = keeps_of(self._parallel, workload)
        self.note = Note()  # of the last gradient
        self._source: Source | None = None
        self._held: _Held | None = None

    def __call__(self, task: Task, weights: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Note]:
        """Return gradient and note of the task's batch under ``weights``."""
        held = self._take(task)
        put(self._parameters, weights)
        seed_step(self._settings.seed, task.sequence, task.worker, self._device)
        # Workers' gradients are steps of their own: each is the mean over its share.
        share_tokens = max(held.batch.global_tokens / self._workers, 1.0)
        sums = self._parallel.accumulate(held.parts, 1.0 / share_tokens)
        loss = float(sums.loss) / sums.weight if sums.weight else 0.0
        if not math.isfinite(loss):  # the server will not take it
            let_go(self._keeps)
        self.note = Note(loss=loss, tokens=sums.weight, **held.note)
        return flat_gradients(self._parameters), self.note

    def close(self) -> None:
        """Close the share's data."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _take(self, task: Task) -> _Held:
        held = self._held
        if held is not None and (held.worker, held.sequence) == (task.worker, task.sequence):
            return held
        follows = held is not None and (held.worker, held.sequence + 1) == (
            task.worker, task.sequence
        )  # fmt: skip
        if self._source is None or not follows:
            self.close()
            self._source = self._open_share(task)
        waited = self._source.data_wait_s
        batch = self._source.next()
        waited = self._source.data_wait_s - waited
        self._held = _Held(
            task.worker,
            task.sequence,
            batch,
            [
                self._workload.inputs(part, self._device)
                for part in batch.split(self._settings.accumulation)
            ],
            {
                "batch": batch.step,
                "waited_s": waited,
                "position": self._source.position,
                "quarantined": tuple(sorted(self._source.quarantined)),
            },
        )
        return self._held
