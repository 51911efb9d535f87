"""Tasks of one's own: one with a NaN in a batch (fault 23), one that hangs or dies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

import torch

from paceline.data import Batch
from paceline.models import config_for
from paceline.training.loop import Inputs, TransformerWorkload
from paceline.training.user_code import Task

BAD_BATCH = 7
# Of the variables that user code finds, only such as torch's are of our making.
TROUBLES = Path(os.environ.get("TORCH_TEST_TROUBLES", "/nothing"))


class Poisoned(TransformerWorkload):
    """The transformer's task, with weights that are no numbers in batch 7."""

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return the batch's tensors; batch 7 makes the loss NaN."""
        found = super().inputs(batch, device)
        if batch.step != BAD_BATCH:
            return found
        targets, weights = found.targets
        return dataclasses.replace(found, targets=(targets, weights * float("nan")))


def _meets(trouble: str) -> bool:
    """Return whether it is rank 1's turn for a trouble; each comes once."""
    if os.environ.get("RANK") != "1":
        return False
    with contextlib.suppress(FileNotFoundError):
        (TROUBLES / trouble).unlink()
        return True
    return False


class Troubled(TransformerWorkload):
    """The transformer's task on a rank that hangs, or dies, while it evaluates."""

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return the batch's tensors, once the troubles are over."""
        if not torch.is_grad_enabled():
            if _meets("hang-evaluating"):
                time.sleep(600)
            if _meets("die-evaluating"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().inputs(batch, device)


def troubled(asked: Task) -> Troubled:
    """Return the troubled workload (a ``codeRef`` entrypoint)."""
    if _meets("hang-loading"):
        time.sleep(600)
    return Troubled(config_for(20_000, asked.context), asked.seed)


def task(asked: Task) -> Poisoned:
    """Return the workload (a ``codeRef`` entrypoint)."""
    return Poisoned(config_for(50_000, asked.context), asked.seed)
