"""The benchmarks run tiny as tests, so that they still run when they are needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import jobs_under_faults, sweep
from benchmarks.admission import POLICIES, main


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


def test_the_sweep_benchmark_runs_tiny(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sweep.main(["--tiny", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["trials"] == 4 and 0 < row["cost"] <= 1


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.xdist_group("installation")  # one at a time: two cores
@pytest.mark.timeout(1800)
def test_jobs_that_are_killed_and_preempted_while_the_leader_changes_end_as_they_should(
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
