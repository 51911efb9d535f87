"""The benchmark and the command run tiny as tests, so that they still run when they are needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.scale import main
from paceline.cli import simulating
from paceline.schemas import SimulationReport


def test_the_scale_benchmark_runs_tiny(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--tiny", "--faults", "--topology", "chain", "auto", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["workers"] for row in result["rows"]] == [4] * 4 + [8] * 4
    assert all(row["survivors_complete"] for row in result["rows"])
    assert (tmp_path / "scale.png").stat().st_size > 1000
    assert json.loads((tmp_path / "scale.json").read_text())["rows"] == result["rows"]


SMALL = ["--workers", "6", "--size", "12MB", "--link", "30Mbps", "--seed", "7"]


def test_the_command_prints_a_report_that_matches_its_schema() -> None:
    said = CliRunner().invoke(
        simulating, [*SMALL, "--fail", "0.2", "--json"], standalone_mode=False
    )
    report = SimulationReport.model_validate_json(said.output)
    assert (report.workers, report.survivors, report.seed) == (6, 5, 7)
    assert report.violations == ()
    assert said.return_value == 0


def test_the_command_says_it_on_one_screen() -> None:
    said = CliRunner().invoke(simulating, SMALL, standalone_mode=False)
    assert "x the bound" in said.output
    assert len(said.output.splitlines()) < 24


def test_a_testbed_runs_faults_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps([{"at_s": 1.0, "worker": "node-3", "kind": "kill"}]))
    arguments = [*SMALL, "--faults", str(path), "--json"]
    said = CliRunner().invoke(simulating, arguments, standalone_mode=False)
    report = SimulationReport.model_validate_json(said.output)
    assert report.killed == ("node-3",)
