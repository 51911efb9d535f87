"""The benchmark of beats runs, tiny."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "coordinator_beats.py"


def test_beats_benchmark_runs_and_reports():
    argv = [sys.executable, str(BENCHMARK), "--agents", "3", "--seconds", "1", "--beat-s", "0.1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout)
    assert report["agents"] == 3
    assert report["refused"] == 0
    assert report["beats"] >= 3
    assert 0 < report["p50_ms"] <= report["p99_ms"] <= report["max_ms"]
