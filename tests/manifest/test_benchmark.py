from __future__ import annotations

import json

import pytest

from benchmarks.manifest_build import main


def test_the_benchmark_runs_and_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bytes", "3e6", "--files", "2", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == 3_000_000
    assert result["chunks"] >= 16
    assert result["build_manifest_gb_s"] > 0
    assert result["plain_sha256_gb_s"] > 0
