"""`paceline plan`: a table for people, a schema for programs, one line for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from paceline.cli import cli
from paceline.errors import InvalidInput
from paceline.schemas import PlanTable

FLEET = ("plan", "--size", "500GB", "--workers", "1000", "--link", "10Gbps")


def run(*words: str) -> str:
    """Return what `paceline WORDS` prints."""
    done = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
    return done.output


def test_json_is_a_plan_table() -> None:
    table = PlanTable.model_validate_json(run(*FLEET, "--json"))
    assert (table.workers, table.racks, table.size_bytes) == (1000, 32, 500 * 10**9)
    assert (table.piece_bytes, table.chunk_bytes) == (4 * 2**20, 10**9)
    assert table.chosen == "chain"
    assert [row.topology for row in table.rows if row.reference] == [
        "naive",
        "binary-tree",
        "chunk-chain",
    ]


def test_people_see_what_is_chosen_and_what_it_replaces() -> None:
    shown = run(*FLEET)
    for text in (
        "400.0 s",
        "chain ←",
        "403.4",
        "chain takes 407.3",
        "chunk-chain",
        "1,199.2",
        "400,000",
        "16 TB",
    ):
        assert text in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


@pytest.mark.parametrize(("columns", "lacking"), [(60, "depth, limit"), (40, "cross-rack")])
def test_a_narrow_terminal_has_fewer_columns_and_whole_figures(
    monkeypatch: pytest.MonkeyPatch, columns: int, lacking: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run(*FLEET)
    for text in ("tree-of-chains", "403.4", "400,000", "Too narrow for", lacking):
        assert text in shown
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= columns


def test_one_topology_may_be_asked_for() -> None:
    table = PlanTable.model_validate_json(run(*FLEET, "--topology", "direct", "--json"))
    assert table.chosen == "direct"
    direct = next(row for row in table.rows if row.topology == "direct")
    assert (direct.predicted_seconds, direct.limited_by) == (400_000, "origin")


def test_disks_uplinks_and_the_source_s_link_are_known() -> None:
    def limit(*more: str) -> str:
        table = PlanTable.model_validate_json(run(*FLEET, "--json", *more))
        return next(row.limited_by for row in table.rows if row.topology == table.chosen)

    assert limit() == "link"
    assert limit("--disk", "1GB/s") == "disk"
    assert limit("--external", "1Gbps") == "origin"
    assert limit("--racks", "500", "--oversubscription", "4") == "uplink"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--size", "500GG"), "not a size.*500GG.*500GB.*--size"),
        (("--link", "fast"), "not a speed.*fast.*10Gbps.*--link"),
        (("--workers", "0"), "number of workers.*got 0"),
        (("--racks", "-3"), "number of racks.*got -3"),
        (("--oversubscription", "0"), "oversubscription"),
        (("--piece", "1GB"), "piece size"),
        (("--link", "10"), "with its unit"),
        (("--link", "1e-300Mbit"), "bad link speed"),
        (("--external", "1e12Mbit"), "bad external link speed"),
        (("--disk", "1e-5Mbit"), "bad disk speed"),
    ],
)
def test_a_mistake_is_named_with_what_was_wanted(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        run(*FLEET, *words)


def test_a_seed_is_a_number_that_a_report_can_carry() -> None:
    fleet = ("--workers", "2", "--size", "1MB", "--link", "1Gbps")
    with pytest.raises(click.BadParameter, match=f"{2**63} is not in the range"):
        run("simulate", *fleet, "--seed", str(2**63))
    assert f'"seed": {2**63 - 1}' in run("simulate", *fleet, "--json", "--seed", str(2**63 - 1))


def test_small_things_are_shown_as_they_are() -> None:
    def words(*given: str) -> str:
        return " ".join(run(*given).split())

    shown = words("plan", "--size", "10B", "--workers", "4", "--link", "10Gbps")
    assert "before < 0.001 s" in shown
    assert "pieces 64 KiB" in shown
    assert "pieces 4 MiB" in words(*FLEET)


def test_it_needs_no_server_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from paceline.cli.main import cli\n"
        f"cli.main({[*FLEET, '--json']!r}, standalone_mode=False)\n"
        "heavy = {'prefect', 'dask', 'distributed', 'torch', 'mlflow', 'boto3', 'pandas',"
        " 'fastapi', 'numpy', 'rich'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["chosen"] == "chain"
