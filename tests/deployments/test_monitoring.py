"""Rules and dashboards: they parse, fire for what they say, and name only what we export."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline.jobs.service_levels import READ, JobTotals
from paceline.schemas import DeploymentStatus
from paceline.telemetry import FleetMetrics
from paceline.training.loop import StepReport
from paceline.training.metrics import AlertChange, Alerts, RankMetrics, Straggler
from paceline.training.metrics.exporter import _GAUGES
from tests.telemetry.test_observe import snapshot

ROOT = Path(__file__).resolve().parents[2] / "deployments"
RULES = sorted((ROOT / "prometheus").glob("*.rules.yml"))
BOARDS = sorted((ROOT / "grafana").glob("*.json"))
CASES = Path(__file__).parent / "rules"
# What Prometheus itself and its targets give: never in a page of ours.
GIVEN = {"up": {"job", "instance", "job_id", "rank"}}
EVERYWHERE = {"job", "instance"}

NAME = re.compile(r"\b(?:paceline_\w+|up|ALERTS)\b")
SELECTOR = re.compile(r"\b(paceline_\w+|up)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def labels_of(*pages: bytes) -> dict[str, set[str]]:
    """Return the series of metrics pages, each with its labels."""
    found: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def registry_of_a_rank() -> CollectorRegistry:
    """Return a registry with every figure that a rank may show."""
    metrics = RankMetrics({"job_id": "job-1", "rank": "0"}, step_deadline_s=60.0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    metrics.take(
        StepReport(
            step=1, loss=1.0, grad_norm=1.0, learning_rate=1.0,
            figures=dict.fromkeys(_GAUGES, 1.0), slow=(Straggler(1, 0.3, 0.1),),
            alerts=(AlertChange("slow-checkpoints", True, 0.5, "slow"),),
        ),
        interval_s=30.0,
    )  # fmt: skip
    return registry


def page_of_a_rank() -> bytes:
    """Return a page with every figure that a rank may show."""
    return generate_latest(registry_of_a_rank())


def page_of_a_coordinator() -> bytes:
    """Return a page with every figure that a coordinator may show."""
    shot = snapshot()
    ended = shot.deployments[0].model_copy(
        update={"deployment_id": "dep-0", "status": DeploymentStatus.COMPLETE, "seconds": 9.0}
    )
    deployments = [ended, *shot.deployments]
    return FleetMetrics(lambda: replace(shot, deployments=deployments, jobs=of_jobs())).text()


def of_jobs() -> list[Metric]:
    """Return each metric of jobs with a value."""
    totals = JobTotals(0.0)
    for counter in list(totals._registry._collector_to_names):
        counter.labels(*counter._labelnames)  # type: ignore[attr-defined]
    found = totals.metrics([], [], 0.0)
    for each in found[: len(READ)]:
        each.add_metric(each._labelnames, 1.0)  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    return labels_of(page_of_a_rank(), page_of_a_coordinator()) | GIVEN


def rules_of(path: Path) -> list[dict[str, Any]]:
    return [each for group in yaml.safe_load(path.read_text())["groups"] for each in group["rules"]]


def expressions_of(board: Mapping[str, Any]) -> list[str]:
    return [each["expr"] for panel in board["panels"] for each in panel.get("targets", ())]


def unknown(expressions: Iterable[str], exported: Mapping[str, set[str]]) -> list[str]:
    """Return what of the expressions is exported nowhere: names, and labels of names."""
    found = []
    for expression in expressions:
        bare = re.sub(r'"[^"]*"', '""', expression)
        names = NAME.findall(bare)
        found += [each for each in names if each not in exported]
        assert names, f"{expression} asks for nothing of ours"
        for name, matchers in SELECTOR.findall(bare):
            labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
            known = exported.get(name, set()) | EVERYWHERE
            found += [f"{name}{{{each}}}" for each in labels if each not in known]
        near = set().union(EVERYWHERE, *(exported.get(each, set()) for each in names))
        for words in GROUPING.findall(bare):
            found += [f"by {each}" for each in re.findall(r"\w+", words) if each not in near]
    return found


def test_the_material_is_there() -> None:
    names = ["jobs", "relay", "training"]
    assert [each.name for each in RULES] == [f"{each}.rules.yml" for each in names]
    assert [each.name for each in BOARDS] == [f"{each}.json" for each in names]
    config = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())
    assert sorted(config["rule_files"]) == [each.name for each in RULES]
    jobs = {each["job_name"] for each in config["scrape_configs"]}
    asked = set(re.findall(r'job="([^"]+)"', "".join(each.read_text() for each in RULES)))
    assert asked <= jobs


def test_what_is_not_exported_is_found(exported: Mapping[str, set[str]]) -> None:
    assert unknown(["sum by (rack) (paceline_workers_gone)"], exported) == [
        "paceline_workers_gone", "by rack",
    ]  # fmt: skip
    assert unknown(['paceline_training_step{worker="paceline_none"}'], exported) == [
        "paceline_training_step{worker}"
    ]
    assert unknown(["rate(paceline_training_tokens[1m])"], exported), "a counter ends in _total"


@pytest.mark.parametrize("path", RULES, ids=lambda each: each.name)
def test_rules_name_only_what_is_exported(path: Path, exported: Mapping[str, set[str]]) -> None:
    rules = rules_of(path)
    assert unknown([each["expr"] for each in rules], exported) == []
    assert len({each["alert"] for each in rules}) == len(rules)
    for each in rules:
        assert each["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= set(each["annotations"]), each["alert"]
        if (
            ours := re.search(r'paceline_training_alert\{name="([^"]+)"', each["expr"])
        ) is not None:
            assert ours[1] in Alerts()._states


@pytest.mark.parametrize("path", BOARDS, ids=lambda each: each.name)
def test_dashboards_name_only_what_is_exported(
    path: Path, exported: Mapping[str, set[str]]
) -> None:
    board = json.loads(path.read_text())
    asked = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert unknown([*expressions_of(board), *asked], exported) == []
    ids = [each["id"] for each in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["targets"]
    known = {each["name"] for each in board["templating"]["list"]}
    text = json.dumps(board["panels"])
    assert set(re.findall(r"\$\{?(\w+)", text)) <= known


def used() -> str:
    """Return every expression of the rules and the boards."""
    return "\n".join(
        [*(each["expr"] for path in RULES for each in rules_of(path))]
        + [each for path in BOARDS for each in expressions_of(json.loads(path.read_text()))]
    )


def test_everything_that_is_exported_of_jobs_is_shown_or_watched() -> None:
    assert {each.name for each in of_jobs() if each.name not in used()} == set()


def test_everything_a_rank_exports_is_shown_or_watched() -> None:
    """A figure that nobody looks at costs a series a rank for nothing."""
    unused = {each for each in labels_of(page_of_a_rank()) if not re.search(rf"\b{each}\b", used())}
    # Kept for rates and for comparing devices by hand.
    by_hand = {"steps_total", "matmul_peak_operations_per_second", "all_reduce_probe_seconds",
               "gradient_bytes", "held_out_bits_per_byte", "tokens_per_second"}  # fmt: skip
    assert unused == {f"paceline_training_{each}" for each in by_hand}


# ------------------------------------------------------------------------------ with Prometheus


@pytest.fixture(scope="module")
def promtool() -> str:
    tool = shutil.which("promtool")
    if tool is None:
        reason = "needs promtool (Debian's prometheus; make setup-services)"
        if "prometheus" in os.environ.get("PACELINE_REQUIRE", ""):
            pytest.fail(reason)
        pytest.skip(reason)
    return tool


def run(promtool: str, *words: str, cwd: Path) -> None:
    done = subprocess.run(
        [promtool, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.services
def test_prometheus_reads_the_rules_and_its_configuration(promtool: str) -> None:
    run(promtool, "check", "rules", *(each.name for each in RULES), cwd=ROOT / "prometheus")
    run(promtool, "check", "config", "--syntax-only", "prometheus.yml", cwd=ROOT / "prometheus")


@pytest.mark.services
@pytest.mark.parametrize("path", RULES, ids=lambda each: each.name)
def test_each_alert_fires_for_what_it_says_and_for_nothing_else(
    promtool: str, path: Path, tmp_path: Path
) -> None:
    case = CASES / path.name.replace(".rules", "")
    fired = set(re.findall(r'alertname="(\w+)"', case.read_text()))
    assert fired == {each["alert"] for each in rules_of(path)}, "each has its case"
    for each in (path, case):
        shutil.copy(each, tmp_path)
    run(promtool, "test", "rules", case.name, cwd=tmp_path)


@pytest.mark.services
@pytest.mark.parametrize("path", BOARDS, ids=lambda each: each.name)
def test_prometheus_reads_every_panel(promtool: str, path: Path, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": each}
        for number, each in enumerate(expressions_of(json.loads(path.read_text())))
    ]
    groups = {"groups": [{"name": "panels", "rules": rules}]}
    (tmp_path / "panels.yml").write_text(yaml.safe_dump(groups))
    run(promtool, "check", "rules", "panels.yml", cwd=tmp_path)


@pytest.mark.services
def test_prometheus_finds_no_fault_with_our_pages(promtool: str) -> None:
    for page in (page_of_a_rank(), page_of_a_coordinator()):
        done = subprocess.run(
            [promtool, "check", "metrics"], input=page, capture_output=True, timeout=60, check=False
        )
        told = (done.stdout + done.stderr).decode().splitlines()
        # Bits a byte is the field's own figure; no size in bits.
        faults = [each for each in told if "held_out_bits_per_byte" not in each]
        assert faults == []
        assert done.returncode in (0, 3)
