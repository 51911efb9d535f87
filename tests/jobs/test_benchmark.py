"""The benchmarks run tiny as tests, so that they still run when they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import jobs_under_faults, step_times, sweep
from benchmarks.admission import POLICIES, main
from paceline.config import LinkSettings
from paceline.schemas import JobReport, JobState, SubmitJob, TrainingJob, new_run_id

ROOT = Path(__file__).parents[2]


def test_the_admission_benchmark_runs_tiny(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in result["month"]] == list(POLICIES)
    assert all(0 < row["utilisation"] <= 1 for row in result["month"])
    assert {row["preemptions"] for row in result["month"] if row["policy"] in ("fifo", "dask")} == {
        0
    }
    assert json.loads((tmp_path / "admission.json").read_text()) == result


@pytest.mark.nightly
def test_the_sweep_benchmark_runs_tiny(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sweep.main(["--tiny", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["trials"] == 4 and 0 < row["cost"] <= 1


def test_the_fit_finds_an_accelerator_again_by_its_times() -> None:
    link = LinkSettings(latency_us=40.0, gb_s=1.5)
    planted = step_times.cpu_of(link, tflops=0.05, block_us=800.0, overlap=0.3)
    collectives = {
        (kind, size, ranks): step_times.predicted_s(kind, size, ranks, link)
        for kind in step_times.KINDS
        for size in step_times.FITTED_BYTES
        for ranks in (2, 4)
    }
    cases = (*step_times.FITTED, *step_times.TINY)
    steps = {case: step_times.step_of(*case, planted).step_s for case in cases}
    found = step_times.calibrate(collectives, steps)
    assert found.inside.latency_us == pytest.approx(40.0, rel=0.05)
    assert found.inside.gb_s == pytest.approx(1.5, rel=0.05)
    for case, seconds in steps.items():
        assert step_times.step_of(*case, found).step_s == pytest.approx(seconds, rel=0.05)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_model_of_a_step_is_calibrated_on_gloo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/step_times.py", "--tiny", "--out", str(tmp_path)], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=580,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "step_times.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert {(row["model"], row["mesh"]) for row in result["steps"] if not row["fitted"]} == {
        ("small", mesh) for mesh in ("tp2", "pp2", "dp2xtp2")
    }
    rows = [*result["steps"], *result["collectives"]]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    assert "[hardware.cpu]" in done.stdout


def test_a_slow_recovery_shows_where_its_seconds_went() -> None:
    def job(at: float, attempt: int, state: str, failures: int = 0) -> TrainingJob:
        ranks = [{"rank": 0, "host": "a", "state": state, "last_heartbeat": at}]
        report = JobReport.model_validate(
            {"at": at, "attempt": attempt, "workers": ranks, "failures": {"a": {"lost": failures}}}
        )
        spec = SubmitJob(model_id="m", version="1", data_snapshot="s3://b/data/snapshots/0")
        return TrainingJob(
            job_id="tj-0123456789ab", submission_id="0" * 64, spec=spec, run_id=new_run_id(),
            state=JobState.RUNNING, created_at=1.0, updated_at=1.0, report=report,
        )  # fmt: skip

    fault = jobs_under_faults.Fault("worker", "tj-0123456789ab", 100.0, job(99.0, 1, "running"))
    for at, attempt, state, failures in (
        (101.0, 1, "running", 0), (103.0, 1, "ended", 1), (110.0, 2, "starting", 1),
        (114.0, 2, "running", 1),
    ):  # fmt: skip
        fault.look(job(at, attempt, state, failures), at)
    assert (fault.noticed_s, fault.again_s, fault.seconds) == (3.0, 10.0, 14.0)
    row = jobs_under_faults.recoveries([fault]).iloc[0]
    assert (row["in 10 s"], row["slow: noticed s"], row["slow: ranks again s"]) == (0, 3.0, 10.0)


@pytest.mark.chaos  # `make chaos`: an installation of its own, for many minutes
@pytest.mark.slow
@pytest.mark.xdist_group("installation")
@pytest.mark.timeout(1800)
def test_jobs_killed_and_preempted_while_the_leader_changes_end_properly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = jobs_under_faults.main(["--tiny", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads((tmp_path / "jobs_under_faults.json").read_text())
    assert result["wrong"] == []
    assert {each["state"] for each in result["jobs"]} == {"succeeded", "cancelled"}
    assert {"rank", "preemption", "coordinator"} <= {each[0] for each in result["seconds"]}
    assert max(each["preempted"] for each in result["jobs"]) > 0
