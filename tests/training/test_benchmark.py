"""The benchmark of the loop runs, tiny."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest


def test_training_overhead_runs_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "training_overhead.py"
    spec = importlib.util.spec_from_file_location("training_overhead", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = ["--parameters", "20000", "--context", "16", "--batch", "2", "--steps", "2"]
    result = module.main([*sizes, "--pairs", "2"])
    assert json.loads(capsys.readouterr().out) == result
    assert len(result["ratios"]) == 2
    assert result["ours_tokens_per_second"] > 0
