"""`paceline reproduce DIRECTORY`: a training without a server is found by its output directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.training import JOB_FILE, METRICS_FILE, Lines, is_directory, recorded_here
from paceline.cli.training.reproduce import _Teller
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.errors import CorruptData, InvalidInput, NotFound
from paceline.schemas import RankEvent, TrainResult
from paceline.training.launcher import RESULT_FILE
from tests.training.test_recovery_driver import job_in

RESULT = {
    "steps": 3, "resumed_from_step": 0, "first_loss": 5.0, "final_loss": 4.0,
    "tokens_per_second": 1.0, "data_wait_share": 0.0, "checkpoint_stall_share": 0.0,
    "export_url": "file:///x", "weights_digest": "0" * 64, "checkpoints": [], "restarts": [],
    "seconds": 1.0, "config_digest": "0" * 64,
}  # fmt: skip


def finished(output: Path, job_id: str) -> Path:
    """A finished job's directory: its record, its figures and its result."""
    directory = output / "checkpoints" / job_id
    job = job_in(output).model_copy(update={"job_id": job_id})
    lines = Lines(job, directory)
    for step, loss in ((1, 5.0), (2, float("nan")), (2, 4.25), (3, 4.0)):  # step 2 twice
        event = {"event": "step", "rank": 0, "attempt": 1, "step": step, "data": {"loss": loss}}
        lines(RankEvent.model_validate(event))
    result = TrainResult.model_validate(RESULT | {"job_id": job_id})
    (directory / RESULT_FILE).write_text(result.model_dump_json())
    state = output / "state"
    state.mkdir(exist_ok=True)
    save_runtime(
        Runtime(profile=Profile(), state_dir=state, endpoints=Endpoints(), secrets=Secrets())
    )
    return directory


def test_an_output_directory_names_its_training(tmp_path: Path) -> None:
    directory = finished(tmp_path, "job-one")
    with (directory / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')  # its writer was killed
    for place in (tmp_path, directory):
        runtime, recorded = recorded_here(place)
        assert runtime.state_dir == tmp_path / "state"
        assert recorded.job.job_id == "job-one"
        assert recorded.losses == {1: 5.0, 2: 4.25, 3: 4.0}, "as last made"
        assert recorded.result.final_loss == 4.0
    first, second = (directory / METRICS_FILE).read_text().splitlines()[:2]
    assert json.loads(first) == {"step": 1, "attempt": 1, "loss": 5.0}
    assert json.loads(second)["loss"] is None, "what is no number is null"


def test_of_several_trainings_one_must_be_named(tmp_path: Path) -> None:
    finished(tmp_path, "job-one")
    finished(tmp_path, "job-two")
    with pytest.raises(InvalidInput, match="several trainings here: got job-one, job-two"):
        recorded_here(tmp_path)
    assert recorded_here(tmp_path / "checkpoints" / "job-two")[1].job.job_id == "job-two"


def test_an_unfinished_or_damaged_training_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no finished training here"):
        recorded_here(tmp_path / "nowhere")
    directory = finished(tmp_path, "job-one")
    (directory / JOB_FILE).write_text("{}")
    with pytest.raises(CorruptData, match="cannot be read"):
        recorded_here(tmp_path)
    (directory / RESULT_FILE).unlink()
    with pytest.raises(NotFound):
        recorded_here(tmp_path)


def test_a_run_is_told_from_a_directory(tmp_path: Path) -> None:
    assert is_directory(str(tmp_path)) and is_directory("./away")
    assert not is_directory("run-20260101-000000-abcdef")


def test_the_progress_of_a_reproduction_rounds_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "step", "rank": 0, "attempt": 1, "step": 3, "data": {"loss": 2.123456789}}
    _Teller(3)(RankEvent.model_validate(event))
    assert capsys.readouterr().err.endswith("3/3  loss 2.1235\n")
