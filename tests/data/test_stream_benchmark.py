"""The benchmark of the data stream, tiny: it runs, and what it proves holds."""

from __future__ import annotations

import json

import pytest

from benchmarks import data_stream


@pytest.mark.nightly
def test_the_benchmark_runs_and_finds_nothing_twice_and_nothing_missing(capsys, tmp_path) -> None:
    result = data_stream.main(["--quick", "--out", str(tmp_path / "out.json")])
    lines = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    parts = [(each["part"], each.get("kind")) for each in lines[:-1]]
    assert parts[2:] == [
        ("waste", None), ("wait", "packed"), ("resume", "windows"), ("resume", "packed"),
        ("nodes", "packed"),
    ]  # fmt: skip
    assert lines[-1] == json.loads((tmp_path / "out.json").read_text()), "and all of it at the end"
    assert [each["found"] for each in lines if each.get("kind") == "windows"] == [
        result["resume"]["windows"]
    ]
    for kind in ("windows", "packed"):
        for world in (1, 3, 4):
            found = result["resume"][kind][f"2 -> {world}"]
            assert found == {"duplicates": 0, "missing": 0, "batches_identical": True}, kind
        assert result["resume"][kind]["batches"] > 10
    waste = result["waste"]
    assert waste["packed"] < waste["bucketed"] < waste["padding to batch max"]
    assert waste["padding to batch max"] <= waste["padding to cap"]
    wait = result["wait"]["packed"]
    assert wait["requests"] > 0, "through the proxy"
    assert 0 <= wait["wait_share"] <= 1
    found = result["nodes"]["packed"]
    assert found["3 nodes, 1 columns"]["together"] > 2.9, "each node fetches everything"
    assert found["1 nodes, 6 columns"] == {"together": 1.0, "busiest": 1.0}
    # Two edges a node fall inside of shards, elsewhere in the next epoch, which is looked ahead to.
    edges = 3 * 2 * 2 / result["shards"]
    assert found["3 nodes, 6 columns"]["together"] <= 1 + 2 * edges, "in bytes: shards differ"
    assert edges < 0.5, "or nothing is shown"
