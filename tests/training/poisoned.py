"""Tasks of one's own: one whose loss is no number in one batch (fault 23, planted), a slow one."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data import Batch
from paceline.models import config_for
from paceline.training.code_ref import Task
from paceline.training.workload import Inputs, TransformerWorkload

BAD_BATCH = 7


class Poisoned(TransformerWorkload):
    """The transformer's task, with weights that are no numbers in batch 7."""

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return the batch's tensors; batch 7 makes the loss NaN."""
        found = super().inputs(batch, device)
        if batch.step != BAD_BATCH:
            return found
        targets, weights = found.targets
        return dataclasses.replace(found, targets=(targets, weights * float("nan")))

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return the transformer's loss."""
        return super().loss_sum(outputs, *targets)


class Paced(TransformerWorkload):
    """The transformer's task, slow for as long as a file is there."""

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return the batch's tensors, in a while."""
        # Of the variables that user code finds, only such as torch's are of our making.
        if Path(os.environ.get("TORCH_TEST_SLOW_WHILE", "/nothing")).exists():
            time.sleep(0.3)
        return super().inputs(batch, device)


def paced(asked: Task) -> Paced:
    """Return the slow workload (a ``codeRef`` entrypoint)."""
    return Paced(config_for(50_000, asked.context), asked.seed)


def task(asked: Task) -> Poisoned:
    """Return the workload (a ``codeRef`` entrypoint)."""
    return Poisoned(config_for(50_000, asked.context), asked.seed)
