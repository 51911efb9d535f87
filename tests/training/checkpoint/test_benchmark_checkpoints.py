"""The benchmark of checkpoints runs, tiny: all damage is noticed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "checkpoints.py"


@pytest.mark.nightly
def test_checkpoints_runs_quickly_and_notices_every_damage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("checkpoints_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(["--quick"])
    assert json.loads(capsys.readouterr().out) == found
    damage = found["damage"]
    assert damage["tried"] == {"flip": 6, "truncate": 2, "missing": 2}
    assert damage["noticed_and_resumed_from_the_one_before"] == damage["tried"]
    assert not damage["silent"]
    (stall,) = found["stall"]
    assert stall["ours"]["blocked_s"]["median"] > 0
    assert stall["torch.save"]["blocked_s"]["median"] > 0
