"""The benchmark of loading runs, tiny: shards of a base are read once in all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_ranks_that_share_a_model_read_and_hold_one_between_them() -> None:
    words = ("--ranks", "1", "2", "--width", "512", "--layers", "4", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/base_loading.py"), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    one = found["medians"]["one rank, 1"]
    assert one["read_mib"] == pytest.approx(found["files_mib"], rel=0.01)
    for way in ("FSDP2, 2", "TP, 2"):
        each = found["medians"][way]
        assert each["read_mib"] == pytest.approx(one["read_mib"] / 2, rel=0.02)
        assert each["all_peaks_mib"] < one["all_peaks_mib"] * 1.5, "not two models"
