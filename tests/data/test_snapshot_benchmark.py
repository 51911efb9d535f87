"""The benchmark of snapshots runs, small, and what it shows is there."""

from __future__ import annotations

import json

import pytest

from benchmarks.snapshots import main


@pytest.mark.nightly
def test_the_benchmark_runs_and_shows_that_fetching_ahead_hides_latency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--quick"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["shards"] >= 40
    assert figures["wait_ms_one_after_the_other"] >= figures["latency_ms"]
    for name in ("build_jsonl_mb_s", "build_tar_mb_s", "read_samples_s", "verify_ms_a_mib"):
        assert figures[name] > 0
