"""The benchmark of the loop runs, tiny."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"benchmark_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_training_overhead_runs_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = loaded("training_overhead").main(["--quick"])
    assert json.loads(capsys.readouterr().out) == result
    (race,) = result["races"]
    assert len(race["ratios"]) == 2
    assert race["ours_tokens_per_second"] > 0


@pytest.mark.nightly
def test_adapters_are_compared_with_all_weights(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--repeats", "1", "--width", "64", "--layers", "2", "--steps", "2"]
    result = loaded("adapters").main(tiny)
    rows = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert rows[-1] == result
    sizes = {row["way"]: row["checkpoint_mib"] for row in rows[:-1]}
    assert list(sizes) == ["all weights", "LoRA", "DoRA"]
    assert sizes["LoRA"] < sizes["DoRA"] < sizes["all weights"] / 3


def test_mfu_says_that_it_was_not_run_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    module = loaded("mfu")
    tiny = module.main(["--tiny"])
    assert tiny["ours_mfu"] > 0
    assert len(tiny["ratios"]) == 2
    assert json.loads(capsys.readouterr().out) == tiny
    if module.torch.cuda.is_available():
        return
    result = module.main([])
    assert not result["run"]
    assert "no GPU here" in result["why"]


@pytest.mark.nightly
def test_decoding_ways_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    result = loaded("decoding").main(["--tokens", "6", "--prompt", "4", "--repeats", "1"])
    assert set(result) == {"ours", "llama"}
    for row in map(json.loads, capsys.readouterr().out.splitlines()):
        assert row["same_tokens"]
        assert row["tokens_per_s"]["kept"] > 0
