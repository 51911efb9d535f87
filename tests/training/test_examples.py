"""What stands in examples/ runs as it is written there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from paceline.data import Batch
from paceline.training.loop import CPU
from paceline.training.user_code import Task, load, tree_digest

OWN = Path(__file__).parents[2] / "examples" / "own_model"


def test_the_example_of_a_model_of_ones_own_is_one(tmp_path: Path) -> None:
    text = f"file://{OWN}@sha256:{tree_digest(OWN)}#byte_convolution:make"
    task = Task(seed=3, context=24, parameters=30_000)
    workload = load(text, (str(OWN),), tmp_path / "cache", task, scrub_environment=False)
    model = workload.build()
    for name, tensor in workload.build().state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), "every rank builds the same"
    assert 15_000 < sum(each.numel() for each in model.parameters()) < 60_000
    tokens_BT = np.arange(48, dtype=np.uint8).reshape(2, 24)
    batch = Batch(0, tokens_BT, tokens_BT, np.ones((2, 24), np.float32), range(2), 48.0)
    inputs = workload.inputs(batch, CPU)
    loss = workload.loss_sum(model(*inputs.args, **inputs.kwargs), *inputs.targets)
    torch.autograd.backward(loss)
    assert all(each.grad is not None for each in model.parameters())
    seen_BT = torch.arange(24).repeat(2, 1)
    seen_BT[1, 12] = 99
    logits_BTV = model(seen_BT)
    assert torch.equal(logits_BTV[0, :12], logits_BTV[1, :12]), "no position sees what follows it"
    assert not torch.equal(logits_BTV[0, 12:], logits_BTV[1, 12:])
