"""The benchmark of one relay on fast links runs tiny, so that it still runs when it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/one_relay.py"


@pytest.mark.nightly
@pytest.mark.netns
def test_one_relay_is_measured_plain_and_over_mtls() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--mb", "48", "--piece-kib", "1024", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert [run["mode"] for run in report["runs"]] == ["plain", "mtls"]
    for run in report["runs"]:
        assert run["copies_verified"] == 2
        assert run["cores_per_10_gbit"] > 0
