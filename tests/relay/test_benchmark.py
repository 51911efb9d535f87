"""The CPU benchmark runs tiny as a test, so that it still runs when somebody needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/cpu_bound.py"
OURS = ("floor", "tcp", "grpc", "tls-floor", "tcp+mtls", "grpc+mtls")


def measured(tmp_path: Path, *contenders: str) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            *("--mb", "24", "--rounds", "1", "--receivers", "2", "--piece-kib", "256"),
            *("--only", ",".join(contenders), "--directory", str(tmp_path), "--out", str(tmp_path)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "cpu_bound.json").read_text())
    assert (tmp_path / "cpu_bound.png").stat().st_size > 1000
    assert [run["verified"] for run in report["runs"]] == [2] * len(contenders)
    return report["summary"]


@pytest.mark.nightly
def test_every_transport_and_its_floor_are_measured(tmp_path: Path) -> None:
    summary = measured(tmp_path, *OURS)
    assert set(summary) == set(OURS)
    assert all(summary[name]["of_floor"] > 0 for name in OURS if "floor" not in name)


@pytest.mark.nightly
def test_peers_are_measured_beside_it(tmp_path: Path) -> None:
    # Dask and gloo take ten seconds to start; the benchmark itself runs them.
    assert set(measured(tmp_path, "libtorrent", "tcp")) == {"libtorrent", "tcp"}
