"""Each family of transformers, in each way of training: the losses of a plain loop, and an export
that transformers loads. One launch of ranks for several families."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hugging_face import FAMILIES
from tests.training.parallel.hugging_face_ranks import BF16, EXPORTED, WAYS

ROOT = Path(__file__).parents[3]
EVERY_TIME = ("llama",)  # the others are shown again nightly
NIGHTLY = tuple(each for each in FAMILIES if each not in EVERY_TIME)

pytestmark = pytest.mark.timeout(300)


def answers_of(root: Path, families: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ranks answered, and what another process loads from their exports, without a network."""
    found = []
    for arguments in (["train", str(root), *families], ["load", str(root / "exports")]):
        done = subprocess.run(
            [sys.executable, "-m", "tests.training.parallel.hugging_face_ranks", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found[0], found[1]


@pytest.fixture(
    scope="module", params=[EVERY_TIME, pytest.param(NIGHTLY, marks=pytest.mark.nightly)]
)
def answers(request, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    found = answers_of(tmp_path_factory.mktemp("hugging-face"), request.param)
    names = {each.split(":")[0] for each in found[0]}
    assert names == {*request.param, *([BF16] if "llama" in request.param else [])}
    return found


def furthest(mine: list[float], wanted: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("way", list(WAYS))
def test_a_way_of_training_has_the_losses_and_norms_of_a_plain_loop(answers, way) -> None:
    jobs = {job: each for job, each in answers[0].items() if job.endswith(f": {way}")}
    for job, mine in jobs.items():
        plain = answers[0][f"{job.split(':')[0]}: plain"]
        assert plain["losses"][-1] < plain["losses"][0] - 0.1, "the loop learns"
        assert furthest(mine["losses"], plain["losses"]) < 1e-5, job
        assert furthest(mine["norms"], plain["norms"]) < 1e-5, job
    assert jobs


def test_a_rank_reads_only_its_share_of_the_weights(answers) -> None:
    for job, whole in answers[0].items():
        if job.endswith(": DDP"):
            shares = answers[0][job.replace("DDP", "FSDP2")]
            assert shares["read"] == pytest.approx(whole["read"] / 2, rel=0.01), job
            cut = answers[0][job.replace("DDP", "TP")]  # norms are whole
            assert cut["read"] == pytest.approx(whole["read"] / 2, rel=0.02), job
            if both := answers[0].get(job.replace("DDP", "FSDP2 x TP")):
                assert both["read"] == pytest.approx(whole["read"] / 4, rel=0.02), job


def test_transformers_loads_an_export_bit_for_bit(answers) -> None:
    assert {each.split(": ")[1] for each in answers[1]} == set(EXPORTED)
    for name, loaded in answers[1].items():
        trained = answers[0][name]
        assert loaded["wrong"] == []
        assert loaded["weights"] == trained["weights"]
        if "bfloat16" in name:
            assert loaded["dtype"] == "torch.bfloat16"
        else:
            assert loaded["logits"] == pytest.approx(trained["logits"], abs=1e-5)
