"""What stands in examples/ runs as it is written there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data import Batch
from paceline.training.loop import CPU
from paceline.training.user_code import Task, load, tree_digest
from tests.journeys.guide import commands

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own_model"


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


@pytest.mark.nightly
@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("name", "example", "output"),
    [("optimizer", "own_optimizer", "lion"), ("carried", "carried_state", "carried")],
)
def test_the_page_trains_with_code_of_ones_own(
    name: str, example: str, output: str, tmp_path: Path
) -> None:
    train = commands("how-to/train-your-own-model.md")[name]
    shutil.copytree(ROOT / "examples" / example, tmp_path / "examples" / example)
    shutil.copytree(ROOT / "docs/decisions", tmp_path / "docs")
    assert "training.steps=200" in train
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", train.replace("steps=200", "steps=12")],
        cwd=tmp_path, env=os.environ | {"PATH": bin_first}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (metrics,) = (tmp_path / output).glob("checkpoints/*/metrics.jsonl")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0]


@pytest.mark.nightly
def test_the_page_trains_and_judges_it(tmp_path: Path) -> None:
    """docs/how-to/train-your-own-model.md: its first block and its program, as they are there."""
    page = "how-to/train-your-own-model.md"
    train, judge = commands(page)["train"], commands(page, "python")["judge"]
    shutil.copytree(OWN, tmp_path / "examples/own_model")
    shutil.copytree(ROOT / "docs/decisions", tmp_path / "docs")
    assert "training.steps=200" in train
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = ""
    for command in (
        ["bash", "-ec", train.replace("steps=200", "steps=3")],
        [sys.executable, "-c", judge],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PATH": bin_first}, capture_output=True,
            text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = done.stdout
    figures = {line.split()[0]: line.split()[1:] for line in said.splitlines()}
    assert list(figures) == ["candidate", "ngram", "gzip", "xz"]
    assert 0 < float(figures["candidate"][0]) < 10 and 0 < float(figures["candidate"][1]) < 1
