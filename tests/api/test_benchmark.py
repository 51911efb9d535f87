"""The benchmark of beats runs, tiny."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "coordinator_beats.py"


@pytest.mark.nightly
def test_beats_benchmark_runs_and_reports_that_none_was_lost():
    argv = [sys.executable, str(BENCHMARK), "--agents", "5", "--seconds", "2", "--beat-s", "0.2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout)
    assert report["agents"] == report["alive_in_the_end"] == 5
    assert (report["lost"], report["refused"]) == (0, 0)
    assert report["counted_by_coordinator"] == report["answered_since_its_start"]
    assert report["beats"] > 5
    assert 0 < report["p50_ms"] <= report["p99_ms"] <= report["max_ms"]
