"""What stands in examples/ runs as it is written there."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.training.user_code import Task, first_rows, load, parse, tree_digest, try_batch
from tests.training.conftest import Camp

OWN = Path(__file__).parents[2] / "examples" / "own_model"


def test_the_example_of_a_model_of_ones_own_is_one(camp: Camp, tmp_path: Path) -> None:
    text = f"file://{OWN}@sha256:{tree_digest(OWN)}#byte_convolution:make"
    task = Task(seed=3, context=24, parameters=30_000)
    workload = load(text, (str(OWN),), tmp_path / "cache", task, scrub_environment=False)
    model = workload.build()
    for name, tensor in workload.build().state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), "every rank builds the same"
    assert 15_000 < sum(each.numel() for each in model.parameters()) < 60_000
    batch = first_rows(camp.job("example"), task)
    assert batch is not None
    try_batch(workload, model, batch, parse(text))
    seen_BT = torch.arange(24).repeat(2, 1)
    seen_BT[1, 12] = 99
    logits_BTV = model(seen_BT)
    assert torch.equal(logits_BTV[0, :12], logits_BTV[1, :12]), "no position sees what follows it"
    assert not torch.equal(logits_BTV[0, 12:], logits_BTV[1, 12:])
