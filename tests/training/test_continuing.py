"""`paceline train --continue-from JOB`: the very bits of a training that was that long at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from paceline.schemas import TrainAnswer
from paceline.training import config_digest
from paceline.training.loop import new_optimizer
from tests.training.test_recovery_driver import job_in
from tests.training.warm import typed

pytestmark = pytest.mark.xdist_group("warm node")

# At a constant rate, the first steps of a long training are those of a short one.
CONSTANT = ("training.schedule=linear", "training.final_share=1", "training.warmup_steps=2")
SMALL = ("model.parameters=20000", "model.context=32", "training.batch_sequences=4")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    for number in range(12):
        lines = (f"line {n} of file {number} is {n * number}\n" for n in range(40))
        (directory / f"{number}.txt").write_text("".join(lines))
    return directory


def train(text: Path, output: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run the command with its settings; return its answer and what it said."""
    settings = [word for each in (*SMALL, *CONSTANT) for word in ("--set", each)]
    asked = ("--text", str(text), "--output", str(output), *settings, *words)
    done = typed("train", "--json", *asked, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout) if code == 0 else {}, done.stderr


def losses(output: Path, job: str) -> dict[int, float]:
    path = output / "checkpoints" / job / "metrics.jsonl"
    rows = [json.loads(each) for each in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


MISSING = ("job-000000000000", "job-zz")
FSDP = ("--ranks", "2", "--set", "training.mesh.shard=2")
Short = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def eight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Short:
    """A training of eight steps on one rank, and where it is; the tests go on from it."""
    output = tmp_path_factory.mktemp("eight")
    return train(text, output, "--steps", "8")[0], output


@pytest.mark.parametrize(
    "way", [(), pytest.param(FSDP, marks=pytest.mark.nightly)], ids=["one-rank", "fsdp"]
)
def test_a_continuation_has_the_bits_of_one_long_training(
    text: Path, tmp_path: Path, way: tuple[str, ...], eight: Short
) -> None:
    long, _ = train(text, tmp_path / "long", "--steps", "14", *way)
    short, output = eight
    if way:
        output = tmp_path / "short"
        short, _ = train(text, output, "--steps", "8", *way)
    more = ("--steps", "14", "--continue-from", short["job_id"])
    went_on, _ = train(text, output, *more, *way)
    assert went_on["job_id"] != short["job_id"]
    assert (went_on["resumed_from_step"], went_on["steps"]) == (8, 14)
    ours, whole = losses(output, went_on["job_id"]), losses(tmp_path / "long", long["job_id"])
    assert ours == {step: whole[step] for step in range(9, 15)}
    assert went_on["weights_digest"] == long["weights_digest"] != short["weights_digest"]
    again, _ = train(text, output, *more, *way)
    assert again["job_id"] == went_on["job_id"]
    assert losses(output, again["job_id"]) == ours, "nothing is trained again"


@pytest.mark.nightly
def test_a_training_that_ended_early_is_done_and_may_be_continued(
    text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    # No second evaluation is better by so much.
    early = ("training.evaluate_every_steps=3", "training.early_stopping.min_delta=100")
    words = [word for each in early for word in ("--set", each)]
    words += ["--set", "training.early_stopping.patience=1", "--ranks", "2"]
    found, _ = train(text, output, "--steps", "20", *words)
    assert found["steps"] == 6
    assert "has not fallen in 1 evaluations" in found["stopped_early"]
    again, _ = train(text, output, "--steps", "20", *words)
    assert again["weights_digest"] == found["weights_digest"]
    assert len(losses(output, found["job_id"])) == 6, "nothing is trained again"
    more, _ = train(text, output, "--steps", "8", "--continue-from", found["job_id"])
    assert (more["resumed_from_step"], more["steps"]) == (6, 8)
    assert "stopped_early" not in more


RISING = (  # the rate rises until the held-out loss does, too
    "training.learning_rate=3", "training.warmup_steps=60", "training.guard.spike_factor=1e9",
    "training.evaluate_every_steps=2", "training.early_stopping.patience=2",
    "training.checkpoints.every_steps=2", "training.checkpoints.max_stall_share=0.99",
)  # fmt: skip


@pytest.mark.parametrize(
    "ema", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["weights", "average"]
)
def test_early_stopping_exports_the_best_checkpoint(text: Path, tmp_path: Path, ema: bool) -> None:
    output = tmp_path / "out"
    more = ("training.ema.decay=0.5",) if ema else ()
    words = [word for each in (*RISING, *more) for word in ("--set", each)]
    words += ["--steps", "60", "--set", "training.checkpoints.keep=1"]
    last, _ = train(text, output, *words)
    assert last["stopped_early"]
    assert "exported_step" not in last, "its best is not kept"
    found, _ = train(text, output, *words, "--set", "training.checkpoints.keep_best=1")
    best = found["exported_step"]
    assert best == found["steps"] - 4, "before the two evaluations that were no new best"
    assert f"at step {best})" in found["stopped_early"]
    assert found["held_out"]["held_out_loss"] < last["held_out"]["held_out_loss"]
    assert TrainAnswer.model_validate(found).exported == f"step {best}, the best evaluated one"
    assert "the last one: no checkpoint of the best" in TrainAnswer.model_validate(last).exported
    card = Path(urlsplit(found["export_url"]).path, "README.md").read_text()
    assert f"`{found['job_id']}`, {best} steps" in card
    whole, _ = train(text, tmp_path / "short", *words, "--steps", str(best))
    assert whole["weights_digest"] == found["weights_digest"] != last["weights_digest"]


@pytest.mark.nightly
def test_another_rate_and_schedule_may_follow_and_other_data_may_not(
    text: Path, eight: Short
) -> None:
    first, output = eight
    more = ("--steps", "10", "--continue-from", first["job_id"])
    slower = ("--set", "training.learning_rate=1e-5", "--set", "training.schedule=cosine")
    went_on, _ = train(text, output, *more, *slower)
    assert went_on["resumed_from_step"] == 8
    then = ("--steps", "12", "--continue-from", went_on["job_id"][:9])
    twice, _ = train(text, output, *then, *slower)
    assert twice["resumed_from_step"] == 10, "a continuation is continued"

    before = sorted(each.name for each in (output / "checkpoints").iterdir())
    for words, named in (
        (("--steps", "8", "--continue-from", first["job_id"]), "nothing is left to train"),
        ((*more, "--set", "training.batch_sequences=8"), "settings.batch_sequences 8, then 4"),
        ((*more, "--set", "training.optimizer=sgd"), "settings.optimizer 'sgd', then 'adamw'"),
        (("--steps", "9", "--continue-from", "job-000000000000"), "job-000000000000"),
        ((*more[:3], "../elsewhere"), "not a job's id"),
        ((*more[:3], "job-"), "several jobs begin so"),
        ((*more[:3], "job-zz"), "no such job: got job-zz"),
    ):
        _, said = train(text, output, *words, code=1 if words[-1] in MISSING else 2)
        (line,) = [each for each in said.splitlines() if each.startswith("paceline: ")]
        assert named in line, line
    assert sorted(each.name for each in (output / "checkpoints").iterdir()) == before


def test_a_setting_of_a_later_release_changes_no_earlier_job() -> None:
    """The digest is that of the release before ``betas``; other values are another job."""
    job = job_in(Path("/tmp/x"))
    known = "e3a9fdf17d54d079ca2a5a206f482590794932e59aefbc44e93e6dd9704301d7"
    assert config_digest(job) == known
    other = job.settings.model_copy(update={"betas": (0.8, 0.99)})
    assert config_digest(job.model_copy(update={"settings": other})) != known
    groups = new_optimizer(torch.nn.Linear(2, 2), other).param_groups
    assert {each["betas"] for each in groups} == {(0.8, 0.99)}


def test_a_checkpoint_that_is_gone_is_named(text: Path, tmp_path: Path, eight: Short) -> None:
    first, output = eight[0], tmp_path / "out"
    shutil.copytree(eight[1], output)
    for each in (output / "checkpoints" / first["job_id"]).glob("step-*"):
        shutil.rmtree(each)
    _, said = train(text, output, "--steps", "9", "--continue-from", first["job_id"], code=1)
    assert "the job has no checkpoint" in said
