"""Cut models of transformers (by matrices, into stages) through `paceline train`: resumed and
continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.hugging_face import write_model
from tests.training.test_continuing import losses, text, train

__all__ = ["text"]  # a fixture

pytestmark = pytest.mark.nightly  # each trains several times
TP = ("--ranks", "2", "--set", "training.mesh.tp=2")
FOUR = ("--ranks", "4", "--set", "training.mesh.tp=2", "--set", "training.mesh.shard=2")
STAGES = ("--ranks", "2", "--set", "training.mesh.pp=2")
OFTEN = ("--set", "training.checkpoints.every_steps=4", "--set", "training.checkpoints.keep=9")
JUDGED = ("--set", "training.evaluate_every_steps=6")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen2", tmp_path_factory.mktemp("base") / "model")


def held_out(output: Path, job: str) -> dict[int, float]:
    path = output / "checkpoints" / job / "metrics.jsonl"
    rows = [json.loads(each) for each in path.read_text().splitlines()]
    return {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}


@pytest.mark.parametrize("cut", [FOUR, STAGES], ids=["matrices", "stages"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(
    text: Path, model: Path, tmp_path: Path, cut: tuple[str, ...]
) -> None:
    asked = ("--model", str(model), *OFTEN, *JUDGED, *cut)
    whole, _ = train(text, tmp_path / "whole", "--steps", "12", *asked)
    at_once = losses(tmp_path / "whole", whole["job_id"])
    job = tmp_path / "whole" / "checkpoints" / whole["job_id"]
    for each in (*job.glob("step-00000012-*"), job / "export"):
        shutil.rmtree(each)
    again, _ = train(text, tmp_path / "whole", "--steps", "12", *asked)
    assert again["job_id"] == whole["job_id"]
    assert again["resumed_from_step"] in (4, 8), "a save is left out while another is under way"
    assert losses(tmp_path / "whole", whole["job_id"]) == at_once
    assert again["weights_digest"] == whole["weights_digest"]

    alone, _ = train(text, tmp_path / "alone", "--steps", "12", "--model", str(model), *JUDGED)
    of_one_rank = losses(tmp_path / "alone", alone["job_id"])
    assert of_one_rank[12] < of_one_rank[1] - 0.1
    assert at_once == pytest.approx(of_one_rank, rel=1e-5)
    judged = held_out(tmp_path / "whole", whole["job_id"])
    assert list(judged) == [6, 12]
    assert judged == pytest.approx(held_out(tmp_path / "alone", alone["job_id"]), rel=1e-5)


def test_a_continuation_has_the_bits_of_one_long_training(
    text: Path, model: Path, tmp_path: Path
) -> None:
    asked: tuple[Any, ...] = ("--model", str(model), *TP, "--set", "training.lora.r=4")
    whole, _ = train(text, tmp_path / "whole", "--steps", "12", *asked)
    short, _ = train(text, tmp_path / "short", "--steps", "8", *asked)
    more = ("--steps", "12", "--continue-from", short["job_id"])
    went_on, _ = train(text, tmp_path / "short", *more, *asked)
    assert went_on["resumed_from_step"] == 8
    assert went_on["weights_digest"] == whole["weights_digest"] != short["weights_digest"]
