from __future__ import annotations

import json

import pytest

from benchmarks import parsers


def test_the_benchmark_of_the_parsers_runs_and_prints_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parsers.main(["--bytes", "2e4", "--only", "token"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("| parser: input | bytes | seconds |")
    assert len(rows) == 2
    assert all("AccessDenied" in row for row in rows)
    assert parsers.main(["--bytes", "2e6", "--only", "manifest: pieces", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["bytes"] > 1_900_000 and row["peak_mb"] > 0
