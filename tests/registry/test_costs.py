"""`paceline cost` and docs/how-to/see-what-training-costs.md: what MLflow recorded, with prices."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Endpoints, PriceSettings, Runtime, Secrets, load_profile, save_runtime
from paceline.registry import Registry, lineage
from paceline.schemas import TrainingUsage
from paceline.tasks._support.figures import record_result
from tests.jobs.test_cost import result
from tests.registry.test_finding import JOB
from tests.support.command import Ended, paceline

pytestmark = pytest.mark.xdist_group("prefect")  # one server
PAGE = (Path(__file__).parents[2] / "docs/how-to/see-what-training-costs.md").read_text()
PAID = 8 * 2.5 + 8 * 0.3 + 2 * 0.09 + 0.06 / 730.5  # machines, energy, 2 GB read, 3 GB for 1 h
NEW, OLD, RUNS = (f"run-20260301-000000-{each * 6}" for each in "abc")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language} \S+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> PriceSettings:
    """The prices of the page."""
    path = tmp_path_factory.mktemp("profile") / "mine.toml"
    path.write_text(blocks("toml")[0])
    return load_profile(str(path)).prices


@pytest.fixture(scope="module")
def state(priced: PriceSettings, mlflow_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation with a training, one of an older version, one that runs, and another run."""
    directory = tmp_path_factory.mktemp("installation")
    registry = Registry(mlflow_url)
    for run_id in (NEW, OLD, RUNS):
        job = JOB.model_copy(update={"job_id": f"job-{run_id[-1]}", "run_id": run_id})
        run = registry.ensure_run(run_id, experiment="costs")
        registry.log_params(run, lineage.training_params(job))
        registry.log_tags(run, {lineage.TAG_JOB: job.job_id})
        if run_id == NEW:
            record_result(registry, run, result(job_id=job.job_id, read_bytes=10**9), priced)
            registry.log_metrics(run, [lineage.MetricPoint("relay/origin_bytes", 1e9)])
        elif run_id == OLD:
            record_result(registry, run, result(
                job_id=job.job_id, accelerators={}, tokens_per_step=None, epoch_tokens=None,
                checkpoints=(), restarts=(), ledger=None,
            ), priced)  # fmt: skip
    registry.ensure_run("run-20260301-000000-dddddd", experiment="costs")
    again = registry.ensure_run("run-20260302-000000-eeeeee", experiment="costs")
    registry.log_tags(again, {lineage.TAG_JOB: "job-a"})  # found the same result in the store
    record_result(registry, again, result(job_id="job-a"), priced)
    profile = load_profile("embedded").model_copy(update={"prices": priced})
    known = Endpoints(mlflow_url=mlflow_url)
    save_runtime(Runtime(profile=profile, state_dir=directory, endpoints=known, secrets=Secrets()))
    return directory


def asked(state: Path, *words: str | Path) -> dict[str, Any]:
    done = paceline("cost", *words, "--json", "--state", state)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["status"] == "complete"
    return dict(answer)


def test_the_metrics_of_a_run_hold_what_its_result_says(state: Path) -> None:
    registry = Registry(json.loads((state / "runtime.json").read_text())["endpoints"]["mlflow_url"])
    found, without = registry.trainings()
    assert without == [RUNS], "it runs"
    (mine,) = [each for each in found if each.run_id == NEW]
    wanted = TrainingUsage.of(result(job_id="job-a"))
    own = {"run_id", "model_id", "started_at", "egress_bytes"}
    assert mine.model_dump(exclude=own) == wanted.model_dump(exclude=own)
    assert (mine.model_id, mine.egress_bytes) == ("bytelm", 2 * 10**9), "of its relay and ranks"
    total = registry.history(registry.find_run(NEW), "cost/total")
    assert total == {100: pytest.approx(PAID - 0.09)}, "its relay's bytes are not in the result"
    assert not registry.history(registry.find_run(OLD), "cost/total")


def test_a_training_is_reproduced_by_the_id_in_its_models_card(state: Path) -> None:
    found = paceline("reproduce", "job-a", "--check", "--state", state)
    assert "run has no finished training of its own: got" in found.stderr, found.stderr
    assert f"at {NEW}" in found.stderr, "the first run with its result, of which no files are here"
    lacking = paceline("reproduce", "job-zz", "--check", "--state", state)
    assert "no run recorded a result of this training: got job-zz" in lacking.stderr
    assert (found.returncode, lacking.returncode) == (1, 1)


def test_the_list_counts_a_result_once_and_names_what_has_no_price(state: Path) -> None:
    answer = asked(state)
    prices = {each["run_id"]: each["total"] for each in answer["trainings"]}
    assert prices == {NEW: pytest.approx(PAID), OLD: None}
    assert (answer["without_result"], answer["currency"]) == (1, "EUR")
    done = paceline("cost", "--state", state)
    assert "no price" in done.stdout
    assert "22.58" in done.stdout
    assert "1 trainings without a result" in done.stderr


def test_a_run_is_split_by_class_and_what_is_not_recorded_is_said(state: Path) -> None:
    shown = paceline("cost", NEW[:-2], "--state", state).stdout
    for each in ("restarts, lost steps", "500.0", "14%", "egress         2.0 GB, 0.18",
                 "per 1k tokens  0.00627", "checkpoints    3.0 GB, 0.06 a month"):  # fmt: skip
        assert each in shown, shown
    old = paceline("cost", OLD, "--state", state)
    assert "not recorded" in old.stdout
    assert "accelerators: not recorded" in old.stderr
    absent = paceline("cost", "run-20250101", "--json", "--state", state)
    assert absent.returncode == 1
    assert "no such run with a recorded training" in absent.stderr


def test_sums_and_a_file_of_rows(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "costs.csv"
    (group,) = asked(state, "--by", "model", "--csv", file)["groups"]
    assert (group["name"], group["trainings"], group["without_price"]) == ("bytelm", 2, 1)
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert float(row["price"]) == pytest.approx(PAID)
    asked(state, "--csv", file)
    rows = {each["run_id"]: each for each in csv.DictReader(file.read_text().splitlines())}
    assert rows[NEW]["recovery_s"] == "500.0"
    assert rows[OLD]["total"] == ""


def test_an_estimate_is_like_the_run_or_of_what_was_given(state: Path, tmp_path: Path) -> None:
    guess = asked(state, NEW, "--steps", "1000")["estimate"]
    assert guess["price"]["low"] < guess["price"]["value"]
    assert guess["based_on"][0].endswith("one training shows no variation of it")
    given = ("--steps", "10", "--tokens-per-step", "3600", "--tokens-per-second", "10")
    nowhere = ("--profile", "embedded", "--state", tmp_path)
    done = paceline("cost", *given, "--on", "H100", "8", *nowhere)
    assert "8 × H100" in done.stdout, done.stderr
    assert "price          not known\n" in done.stdout
    assert paceline("cost", "--on", "H100", "none", *nowhere).returncode == 2
    assert "--steps N" in paceline("cost", "--on", "H100", "8", *nowhere).stderr
    assert "nothing to base" in paceline("cost", "--steps", "10", *nowhere).stderr


def test_what_the_page_shows_runs(
    state: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("sh"):
        for line in block.replace("RUN", NEW).splitlines():
            done: Ended = paceline(*line.split()[1:], "--state", state)
            assert done.returncode == 0, done.stderr
            assert done.stdout
    assert (tmp_path / "costs.csv").exists()
    (program,) = blocks("python")
    monkeypatch.setenv("PACELINE_STATE", str(state))
    exec(program, {})
    shown = capsys.readouterr().out
    assert "bytelm" in shown
    assert "22.58" in shown


def test_the_base_install_shows_costs_and_names_the_extra_of_the_table(state: Path) -> None:
    program = (
        "import json, sys, paceline; from tests.support.base_install import command;"
        "print(json.dumps(command(['cost', '--json', '--state', sys.argv[3]])), flush=True);"
        "paceline.cost(sys.argv[3])"
    )
    argv = [sys.executable, "-m", "tests.support.base_install", "-c", program, str(state)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    code, out, err = json.loads(done.stdout)
    assert code == 0, err
    assert len(json.loads(out)["trainings"]) == 2
    assert "paceline-*.whl)[flows]" in done.stderr, "for the table"
