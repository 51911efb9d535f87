"""docs/how-to/evaluate-and-promote.md, typed: a metric of user code judges, and decides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journeys.guide import commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("another home"),
    pytest.mark.timeout(1000),
]
ROOT = Path(__file__).parents[2]
SMALL = "--profile ci --set cluster.nodes=2 --set training.steps=20"
TYPED = commands("how-to/evaluate-and-promote.md")["metric"]


def typed(text: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HOME": str(home)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", text],
        cwd=home, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_metric_of_ones_own_is_scored_and_decides(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/own_metric", tmp_path / "examples/own_metric")
    lines = TYPED.rstrip().replace("paceline up", f"paceline up {SMALL}")
    assert "repeated = 0.1" in lines
    lines = lines.replace("repeated = 0.1", "repeated = 1")  # of a model of 20 steps
    try:
        promoted = json.loads(typed(f"{lines} --json", tmp_path).stdout.splitlines()[-1])
        checks = {each["name"]: each for each in promoted["gate"]["checks"]}
        assert checks["metric repeated no worse than base"]["passed"]
        assert "[" in checks["metric repeated no worse than base"]["got"], "an interval"
        card = tmp_path / ".paceline/nodes/node-0/store/models" / promoted["model"]["model_id"]
        read = (card / "active/README.md").read_text()
        assert "| repeated, lower is better | candidate |" in read
    finally:
        typed("paceline down", tmp_path)
