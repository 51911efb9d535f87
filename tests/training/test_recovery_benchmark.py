"""The benchmark of recovery runs, tiny: one kill, and nothing learned differs for it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest


@pytest.mark.nightly
def test_training_recovery_runs_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "training_recovery.py"
    spec = importlib.util.spec_from_file_location("training_recovery", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.main(["--quick"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert result["kills"]["kills"] == 1
    assert result["kills"]["losses_identical"]
    assert result["kills"]["weights_identical"]
    assert result["kills"]["accounts_sum_to_wall"]
