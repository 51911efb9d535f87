"""The benchmarks of training run, tiny."""

from __future__ import annotations

import importlib.util
import json
import subprocess
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


@pytest.mark.nightly
def test_judging_runs_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = loaded("judging").main(["--quick", "--same"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert result["tokens_per_second"] > 0
    assert result["apart_from_the_cpu"] < 1e-4


def test_mfu_says_that_it_was_not_run_and_why() -> None:
    module = loaded("mfu")
    if module.torch.cuda.is_available():
        return
    result = module.main([])
    assert not result["run"]
    assert "no GPU here" in result["why"]


@pytest.mark.nightly
def test_mfu_is_compared_with_plain_loops(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = loaded("mfu").main(["--tiny"])
    assert tiny["ours_mfu"] > 0
    for each in ("free", "plain", "fsdp2"):
        assert len(tiny[f"ours_over_{each}"]) == 2
    assert json.loads(capsys.readouterr().out) == tiny


@pytest.mark.nightly
def test_decoding_ways_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    result = loaded("decoding").main(["--tokens", "6", "--prompt", "4", "--repeats", "1"])
    assert set(result) == {"ours", "llama"}
    for row in map(json.loads, capsys.readouterr().out.splitlines()):
        assert row["same_tokens"]
        assert row["tokens_per_s"]["kept"] > 0


@pytest.mark.nightly
def test_checkpoints_runs_quickly_and_notices_every_damage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = loaded("checkpoints").main(["--quick"])
    assert json.loads(capsys.readouterr().out) == found
    damage = found["damage"]
    assert damage["tried"] == {"flip": 6, "truncate": 2, "missing": 2}
    assert damage["noticed_and_resumed_from_the_one_before"] == damage["tried"]
    assert not damage["silent"]
    (stall,) = found["stall"]
    assert stall["ours"]["blocked_s"]["median"] > 0
    assert stall["torch.save"]["blocked_s"]["median"] > 0


@pytest.mark.nightly
def test_training_recovery_runs_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = loaded("training_recovery").main(["--quick"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert result["kills"]["kills"] == 1
    assert result["kills"]["losses_identical"]
    assert result["kills"]["weights_identical"]
    assert result["kills"]["accounts_sum_to_wall"]


@pytest.mark.nightly
def test_ranks_that_share_a_model_read_and_hold_one_between_them() -> None:
    words = ("--ranks", "1", "2", "--width", "512", "--layers", "4", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "base_loading.py"), *words],
        cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    one = found["medians"]["one rank, 1"]
    assert one["read_mib"] == pytest.approx(found["files_mib"], rel=0.01)
    for way in ("FSDP2, 2", "TP, 2"):
        each = found["medians"][way]
        assert each["read_mib"] == pytest.approx(one["read_mib"] / 2, rel=0.02)
        assert each["all_peaks_mib"] < one["all_peaks_mib"] * 1.5, "not two models"


@pytest.mark.nightly
def test_ranks_that_share_a_row_hold_a_part_of_its_activations() -> None:
    words = ("--tokens", "2048", "--width", "128", "--layers", "2", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "long_rows.py"), *words],
        cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    whole, cut = (found[f"{way}, 2048 tokens"]["peak_mib"] for way in ("FSDP2", "CP"))
    assert cut < 0.7 * whole
