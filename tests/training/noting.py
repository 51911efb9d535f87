"""A task of one's own that notes which samples each rank learns from, and goes slowly if asked to.

TORCH_TEST_TROUBLES=DIRECTORY  one file a process: a line of JSON for each share of a batch
DIRECTORY/slow, DIRECTORY/stay while these files are there: steps take a while; none past STAY_AT
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from paceline.data import Batch
from paceline.models import config_for
from paceline.training.loop import Inputs, TransformerWorkload
from paceline.training.user_code import Task

SLOWLY_S, STAY_AT, STAY_S = 0.04, 34, 60.0
SEPARATOR = b"\xff"


class Noting(TransformerWorkload):
    """The transformer's task."""

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return the batch's tensors, noted."""
        if "RANK" not in os.environ:  # it is being tried, and trains nothing
            return super().inputs(batch, device)
        # Of the variables that user code finds, only such as torch's are of our making.
        notes = Path(os.environ["TORCH_TEST_TROUBLES"])
        if (notes / "slow").exists():
            time.sleep(SLOWLY_S)
        until = time.monotonic() + STAY_S
        while batch.step >= STAY_AT and (notes / "stay").exists() and time.monotonic() < until:
            time.sleep(0.01)
        with (notes / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(note(batch)) + "\n")
        return super().inputs(batch, device)


def note(batch: Batch) -> dict[str, object]:
    """Return where a share stands, and its samples by their text, in order."""
    masked = batch.documents_BT is not None
    samples: list[str] = []
    for row in range(len(batch.rows)):
        counted = batch.weights_BT[row] > 0
        text = batch.targets_BT[row][counted].astype(np.uint8).tobytes()
        assert text == b"" or text.endswith(SEPARATOR), "samples here are shorter than a row"
        samples += [each.decode() for each in text.split(SEPARATOR)[:-1]]
        if batch.documents_BT is not None:
            assert len(np.unique(batch.documents_BT[row][counted])) == text.count(SEPARATOR)
    return {
        "step": batch.step,
        "rows": [batch.rows.start, batch.rows.stop],
        "masked": masked,
        "weight": float(batch.weights_BT.sum()),
        "samples": samples,
    }


def task(asked: Task) -> Noting:
    """Return the workload (a ``codeRef`` entrypoint)."""
    return Noting(config_for(20_000, asked.context), asked.seed)
