"""The link-bound benchmark runs tiny, so that it still runs when somebody needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.race.faults import kills, slow
from benchmarks.race.report import plot, summary, table
from benchmarks.race.rows import ROWS

SCRIPT = Path(__file__).parents[2] / "benchmarks/link_bound.py"


@pytest.mark.nightly
@pytest.mark.netns
def test_the_link_bound_benchmark_runs_tiny(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    argv = [sys.executable, str(SCRIPT), "--quick", "--rows", "auto-killed", "auto-racks"]
    done = subprocess.run(
        [*argv, "--out", str(out)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    runs = {run["row"]: run for run in result["runs"]}
    for run in runs.values():
        assert run["verified"] == "sha256"
        assert run["ratio"] > 0.95  # faster than the link would mean that the clock is wrong
        assert run["origin_bytes"] < 2 * run["size"]
    assert [each["kind"] for each in runs["auto-killed"]["faults"]] == ["kill"]
    assert len(runs["auto-killed"]["finished_s"]) == 2
    assert len(runs["auto-racks"]["finished_s"]) == 3
    plot(result, tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 1000


def test_faults_of_a_seed_are_the_same_again() -> None:
    assert kills(16, 1, 60.0, 7) == kills(16, 1, 60.0, 7)
    assert slow(16, 10.0, 60.0, 7) == slow(16, 10.0, 60.0, 7)
    moments = {fault.at_s for seed in range(50) for fault in kills(32, 2, 60.0, seed)}
    assert len(moments) > 90
    assert all(6.0 <= moment <= 51.0 for moment in moments)


def test_racks_have_at_least_four_hosts() -> None:
    row = ROWS["auto-racks"]
    assert [row.racks(hosts) for hosts in (8, 16, 32)] == [2, 4, 4]


def test_the_summary_names_median_worst_and_failures() -> None:
    usage = {"nodes_cpu_s": 3.0, "cpu_busy": 0.95, "nodes_peak_mb": 50.0, "load_before": 0.5}
    run = {"hosts": 8, "row": "auto", "goal": 1.03, "size": 10**9, "usage": usage}
    run |= {"origin_bytes": 10**9, "cross_rack_bytes": 0, "predicted_s": 60.0}
    good = [
        {**run, "repeat": number, "ratio": ratio, "seconds": ratio * 60.0}
        for number, ratio in enumerate((1.01, 1.05, 1.02))
    ]
    chain = {**run, "repeat": 1, "row": "bare-chain", "ratio": 1.0, "seconds": 60.0}
    chain |= {"usage": {**usage, "nodes_cpu_s": 2.0}}
    runs = [*good, {"hosts": 8, "row": "auto", "repeat": 0, "error": "x"}, chain]
    line = summary(runs)[0]
    assert (line["ratio_median"], line["ratio_worst"]) == (1.02, 1.05)
    assert (line["runs"], line["failed"]) == (3, 1)
    assert line["cpu_of_chain"] == 1.5, "beside the bare chain of the same repetition"
    assert "0.95!" in table(runs)  # the CPU was the bound
