"""A run is found whatever experiment it is in; what is not there is not made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.cli.training import recorded_run
from paceline.config import Endpoints, Profile, Runtime, Secrets, TrainingSettings, save_runtime
from paceline.errors import NotFound
from paceline.registry import MetricPoint, Registry, lineage
from paceline.schemas import TrainJob, TrainResult
from tests.support.command import Ended, paceline

pytestmark = pytest.mark.xdist_group("prefect")  # one server
DIGEST = "0" * 64
JOB = TrainJob(
    job_id="job-1", run_id="run-20260101-000000-eeeeee", state_dir="/state", model_id="bytelm",
    version="v1", manifest_digest=DIGEST, snapshot_url="s3://b/data", snapshot_digest=DIGEST,
    purpose="tests", checkpoint_url="s3://b/checkpoints", settings=TrainingSettings(steps=2),
)  # fmt: skip
RESULT = TrainResult(
    job_id="job-1", steps=2, resumed_from_step=0, first_loss=5.5, final_loss=2.75,
    tokens_per_second=1.0, data_wait_share=0.0, checkpoint_stall_share=0.0,
    export_url="s3://b/export", weights_digest=DIGEST, checkpoints=(), restarts=(), seconds=1.0,
    config_digest=DIGEST, environment={"torch": "2.13.0"},
)  # fmt: skip


def test_an_unknown_run_is_not_found_and_not_made(registry: Registry) -> None:
    made = registry.ensure_run("run-20260101-000000-aaaaaa", experiment="finding")
    assert registry.find_run("run-20260101-000000-aaaaaa") == made
    for _ in range(2):
        with pytest.raises(NotFound, match="no such run"):
            registry.find_run("run-20260101-000000-bbbbbb")


def test_a_loss_is_read_back_bit_for_bit_and_the_last_of_a_step_counts(registry: Registry) -> None:
    run = registry.ensure_run("run-20260101-000000-cccccc", experiment="finding")
    losses = {step: 5.545177444479562 / step for step in range(1, 30)}
    registry.log_metrics(run, [MetricPoint("train.loss", 9.9, 3, at_ms=1)])
    registry.log_metrics(run, [MetricPoint("train.loss", v, s) for s, v in losses.items()])
    assert registry.history(run, "train.loss") == losses
    assert registry.losses(run) == losses, "of a run of an older version, too"
    registry.log_metrics(run, [MetricPoint(lineage.LOSS, 1.5, 1)])
    assert registry.losses(run) == {1: 1.5}


def test_a_runs_training_is_found_whole_and_an_unfinished_one_is_refused(
    registry: Registry, tmp_path: Path
) -> None:
    runtime = Runtime(
        profile=Profile(),
        state_dir=tmp_path,
        endpoints=Endpoints(mlflow_url=registry.tracking_uri),
        secrets=Secrets(),
    )
    run_id = "run-20260101-000000-eeeeee"
    run = registry.ensure_run(run_id, experiment="finding")
    registry.log_artifact_text(run, JOB.model_dump_json(), lineage.JOB_FILE)
    with pytest.raises(NotFound, match="no finished training"):
        recorded_run(runtime, run_id)
    registry.log_artifact_text(run, RESULT.model_dump_json(), lineage.RESULT_FILE)
    registry.log_metrics(run, [MetricPoint(lineage.LOSS, 5.5 / s, s) for s in (1, 2)])
    found = recorded_run(runtime, run_id)
    assert (found.job, found.result, found.losses) == (JOB, RESULT, {1: 5.5, 2: 2.75})
    with pytest.raises(NotFound, match="no such run"):
        recorded_run(runtime, "run-20260101-000000-ffffff")


def test_where_finds_a_run_by_its_beginning_without_importing_mlflow(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ("run-20260102-000000-aaaaaa", "run-20260102-000000-aabbbb", "run-20260103-000000-cccccc")
    made = [registry.ensure_run(each, experiment="finding") for each in ids]
    away = "http://127.0.0.1:9"  # no Prefect server answers there
    endpoints = Endpoints(
        mlflow_url=registry.tracking_uri, prefect_api_url=f"{away}/api", prefect_ui_url=away
    )
    save_runtime(Runtime(profile=Profile(), state_dir=tmp_path, endpoints=endpoints,
                         secrets=Secrets()))  # fmt: skip
    for module in ("prefect", "mlflow", "torch"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it fails

    def typed(*words: str) -> Ended:
        return paceline(*words, "--json", "--state", tmp_path)

    done = typed("where", "run-20260103")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["run"]) == ("complete", ids[2])
    assert found["mlflow"].endswith(f"/runs/{made[2]}")
    assert found["prefect"] == away
    done = typed("where", "run-20260102-000000-aa")
    assert done.returncode == 2
    assert ids[0] in done.stderr
    assert ids[1] in done.stderr
    assert "no such run" in typed("where", "run-20260104-000000-dddddd").stderr
    assert "not a run id" in typed("where", "run-'x").stderr
    assert "no version of this model" in typed("model", "rollback", "no/such-model").stderr
    assert "not a model's id" in typed("model", "rollback", "../x").stderr
