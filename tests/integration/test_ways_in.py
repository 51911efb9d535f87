"""Other ways to start the lifecycle: Prefect's page, a schedule, Python; and the way back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
from typing import Any

import pytest

from paceline.cli.training import recorded_run
from paceline.client import CoordinatorClient
from paceline.config import Runtime
from paceline.registry import Registry
from paceline.schemas import JobState
from tests.support.browser import chromium, click, keep_each_width, resize, see, send_credentials
from tests.support.stack import (
    Ended,
    await_registered,
    environment,
    in_mlflow,
    paceline,
    prefect,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(400),
]


def deployment_id(stack: Runtime) -> str:
    """Return the id of lifecycle/lifecycle once the installation has registered it."""

    def found() -> str | None:
        try:
            answer = prefect(stack, "GET", "/deployments/name/lifecycle/lifecycle")
        except urllib.error.HTTPError:
            return None
        return str(answer["id"])

    await_registered(stack)  # it replaces schedules: nothing may be added before
    return str(wait_until(found, 30, "the deployment is there"))


def runs_of(stack: Runtime, deployment: str) -> list[dict[str, Any]]:
    body = {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_DESC"}
    runs: list[dict[str, Any]] = prefect(stack, "POST", "/flow_runs/filter", body)
    return runs


def completed(stack: Runtime, flow_run_id: str) -> dict[str, Any]:
    """Wait until the flow run has ended well, and return it."""

    def ended() -> dict[str, Any] | None:
        run: dict[str, Any] = prefect(stack, "GET", f"/flow_runs/{flow_run_id}")
        return run if run["state"]["type"] in {"COMPLETED", "FAILED", "CRASHED"} else None

    run: dict[str, Any] = wait_until(ended, 240, f"flow run {flow_run_id} ended")
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    return run


def mlflow_link_of(stack: Runtime, flow_run_id: str) -> str:
    """Return the MLflow page that the flow run's link artifact names."""
    body = {"artifacts": {"key": {"any_": ["mlflow-run"]}}, "sort": "CREATED_DESC", "limit": 50}
    found = prefect(stack, "POST", "/artifacts/filter", body)
    mine = [each for each in found if each["flow_run_id"] == flow_run_id]
    assert mine, f"no link to MLflow from {flow_run_id}"
    found_url = re.search(r"\((http[^)]+)\)", str(mine[0]["data"]))  # a link is kept as markdown
    assert found_url
    return found_url[1]


def look_at(browser: Any, stack: Runtime, deployment: str, seen: str) -> None:
    """Open a deployment's page in Prefect, with the password where the browser is asked for it."""
    page = f"{stack.endpoints.prefect_ui_url}/deployments/deployment/{deployment}"
    browser.get(page)
    asked = "//input[@type='password']"
    see(browser, f"{asked} | {seen}")
    if found := browser.find_elements("xpath", asked):
        found[0].send_keys(stack.secrets.prefect_auth)
        click(browser, "//button[@type='submit']")
        see(browser, seen)
        browser.get(page)  # without what it said before
        see(browser, seen)


@pytest.mark.nightly
@pytest.mark.browser
def test_a_person_presses_run_in_prefect_and_finds_the_run_in_mlflow(
    stack: Runtime, lifecycle: Ended
) -> None:
    deployment = deployment_id(stack)
    before = {each["id"] for each in runs_of(stack, deployment)}
    with chromium() as browser:
        resize(browser, 1280)
        look_at(browser, stack, deployment, "//button[normalize-space()='Run']")
        click(browser, "//button[normalize-space()='Run']")
        click(browser, "//*[normalize-space(text())='Quick run' or normalize-space()='Quick run']")
        started = wait_until(
            lambda: {each["id"] for each in runs_of(stack, deployment)} - before, 60, "a new run"
        )
        flow_run_id = str(started.pop())
        completed(stack, flow_run_id)
        link = mlflow_link_of(stack, flow_run_id)
        browser.get(f"{stack.endpoints.prefect_ui_url}/runs/flow-run/{flow_run_id}")
        see(browser, "//*[normalize-space(text())='Completed']", 60)
        keep_each_width(browser, "prefect-run")
        send_credentials(browser, stack.secrets.mlflow_auth)
        browser.get(link)
        name = in_mlflow(stack, link)["mlflow.runName"]
        see(browser, f"//*[contains(text(), '{name}')]", 60)
        if (first := str(lifecycle.answer["links"]["mlflow"])) != link:  # its stages were its own
            browser.get(first)
            see(browser, "//*[contains(text(), 'lifecycle')]", 60)
        keep_each_width(browser, "mlflow-run")


@pytest.mark.nightly
@pytest.mark.browser
def test_a_researcher_fills_prefects_form_and_finds_the_job(
    stack: Runtime, lifecycle: Ended
) -> None:
    await_registered(stack)
    trained = recorded_run(stack, str(lifecycle.answer["run_id"])).job
    made = prefect(stack, "GET", "/deployments/name/train-model/train-model")["id"]
    given = {
        "Model": trained.model_id, "Version": trained.version, "Name": "typed in the form",
        "Data snapshot": trained.snapshot_url, "Priority": "7", "Steps": "3",
    }  # fmt: skip
    client = CoordinatorClient.of(stack)
    with chromium() as browser:
        resize(browser, 1280)
        look_at(browser, stack, f"{made}/run", "//label[normalize-space()='Data snapshot']")
        for title, value in given.items():
            label = f"//label[starts-with(normalize-space(), '{title}')]"
            if title == "Steps":
                click(browser, f"({label}/following::button[normalize-space()='int'])[1]")
            field = f"({label}/following::*[self::input or self::textarea])[1]"
            see(browser, field).clear()
            see(browser, field).send_keys(value)
        keep_each_width(browser, "prefect-form")
        click(browser, "//button[normalize-space()='Submit']")
        wait_until(lambda: client.jobs(name=given["Name"]).jobs, 120, "it is a job")
        (job,) = client.jobs(name=given["Name"]).jobs
        assert (job.spec.priority, job.adopted) == (7, True)
        browser.get(f"{stack.endpoints.prefect_ui_url}/runs/flow-run/{job.flow_run_id}")
        see(browser, "//*[normalize-space(text())='Completed']", 120)
        keep_each_width(browser, "prefect-job")
    wait_until(lambda: client.job(job.job_id).job.state.is_final, 60, "the job ends")
    assert client.job(job.job_id).job.state is JobState.SUCCEEDED


@pytest.mark.nightly
def test_a_schedule_starts_it(stack: Runtime, lifecycle: Ended) -> None:
    deployment = deployment_id(stack)
    before = {each["id"] for each in runs_of(stack, deployment)}
    # A short interval: Prefect's scheduler plans what lies ahead of its own next look.
    schedule = {"schedule": {"interval": 30, "anchor_date": _now()}, "active": True}
    created = prefect(stack, "POST", f"/deployments/{deployment}/schedules", [schedule])
    try:

        def started() -> str | None:
            fresh = [
                each
                for each in runs_of(stack, deployment)
                if each["id"] not in before
                and each["auto_scheduled"]
                and each["state"]["type"] != "SCHEDULED"
            ]
            return str(fresh[0]["id"]) if fresh else None

        flow_run_id = wait_until(started, 180, "the schedule started a run")
        completed(stack, flow_run_id)
        assert in_mlflow(stack, mlflow_link_of(stack, flow_run_id))["paceline.run_id"]
    finally:
        for each in created:
            prefect(stack, "DELETE", f"/deployments/{deployment}/schedules/{each['id']}")


@pytest.mark.nightly
def test_python_starts_it(stack: Runtime, lifecycle: Ended) -> None:
    program = (
        "import sys\n"
        "from paceline.flows.lifecycle import run_lifecycle\n"
        "print(run_lifecycle(state_dir=sys.argv[1]).model_dump_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(stack.state_dir)],
        capture_output=True, text=True, timeout=300, check=False,
        env=environment() | stack.prefect_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["already_done"]
    assert in_mlflow(stack, summary["links"]["mlflow"])["paceline.run_id"] == summary["run_id"]


@pytest.fixture(scope="module")
def rolled_back(stack: Runtime, lifecycle: Ended) -> Ended:
    """How the rollback of the demo's champion ended."""
    model = lifecycle.answer["model"]["model_id"]
    ended = paceline("model", "rollback", model, "--json", state=stack.state_dir)
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.nightly
def test_rollback_brings_the_previous_champion_back_without_a_transfer(
    stack: Runtime, lifecycle: Ended, rolled_back: Ended
) -> None:
    model, ended = lifecycle.answer["model"]["model_id"], rolled_back
    # The first champion has none before it: the nodes go back to the base, nobody is champion.
    assert ended.answer["registry"]["version"] == "1"
    assert Registry.from_runtime(stack).champion(model) is None
    moved = ended.answer["distribution"]["relay"]
    assert moved["origin_bytes"] == moved["received_bytes"] == 0 or moved["reused_result"]
    for index in range(stack.profile.cluster.nodes):
        active = stack.node_dir(f"node-{index}") / "store" / "models" / model / "active"
        assert active.readlink().name == "1"


@pytest.mark.nightly
def test_a_schedule_does_not_undo_an_operator(stack: Runtime, rolled_back: Ended) -> None:
    scheduled = paceline("lifecycle", "--json", state=stack.state_dir)
    assert scheduled.code == 3
    assert "rolled back" in scheduled.problem


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
