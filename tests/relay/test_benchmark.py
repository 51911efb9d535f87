"""Benchmarks run tiny as tests, so that they still run when somebody needs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/relay_loopback.py"


def test_the_loopback_benchmark_runs_tiny() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--mb", "2", "--nodes", "2"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    report = json.loads(done.stdout)
    assert report["bytes"] == 2_000_000
    for chain in ("relay", "floor"):
        assert report[chain]["cpu_s_per_gb_hop"] > 0
