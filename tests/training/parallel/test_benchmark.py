"""The benchmark "Same losses" runs, tiny, and says so where a limit is missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import same_losses
from benchmarks.layouts.layouts import LAYOUTS

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_the_quick_benchmark_meets_its_limits_and_builds_meshes_of_64(tmp_path: Path) -> None:
    command = ["benchmarks/same_losses.py", "--quick", "--precisions", "float64"]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "same_losses.json").read_text())
    assert json.loads(done.stdout) == result
    assert {row["layout"] for row in result["rows"]} == set(same_losses.QUICK)
    assert result["clipped_steps"] > 0  # else clipping would be no part of the comparison
    meshes = result["meshes_of_64"]
    assert len(meshes) == 4
    assert all(each["held"] * 8 < each["whole"] for each in meshes.values())
    assert meshes["fake pp4xdp2xshard4xtp2 rank 63"]["stage"] == 3


def test_a_layout_that_learns_something_else_is_not_met() -> None:
    layout = LAYOUTS[0]
    answers = {"single float64": {"losses": [4.0, 3.0]}, "dp2 float64": {"losses": [4.0, 3.0001]}}
    (row,) = same_losses.compare([layout], "float64", answers, 2)
    assert not row["met"]
    answers["dp2 float64"]["losses"] = [4.0, 3.0 + 1e-12]
    (row,) = same_losses.compare([layout], "float64", answers, 2)
    assert row["met"]
