"""A deployment asked for over REST is a flow run in Prefect, and the two are one thing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.client import CoordinatorClient
from paceline.config import Runtime
from paceline.schemas import CreateDeployment, Deployment, DeploymentStatus, EventName, Worker
from tests.support.stack import (
    Ended,
    await_registered,
    finish,
    paceline,
    prefect,
    processes_of,
    start,
    state_of,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(300),
]

# A flow run takes some 10 s to begin; at 8 Mbit/s the large models are not there before.
SIZES = {"1": 44_000_000, "2": 44_000_000, "3": 1_000_000}
NODES = ("node-0", "node-1", "node-2")  # node-3 has a small disk


def flow_runs_of(stack: Runtime, deployment_id: str) -> list[dict[str, Any]]:
    # by its tag: a flow run that runs again is named anew by its parameters
    body = {"flow_runs": {"tags": {"all_": [deployment_id]}}}
    found: list[dict[str, Any]] = prefect(stack, "POST", "/flow_runs/filter", body)
    return found


class Site:
    """The installation as a client of its REST sees it."""

    def __init__(self, stack: Runtime, source_url: str) -> None:
        self.stack = stack
        self.client = CoordinatorClient.of(stack)
        self.source_url = source_url

    def ask(self, version: str, key: str, targets: tuple[str, ...] = NODES) -> str:
        call = CreateDeployment(
            model_id="flowing",
            version=version,
            source_url=f"{self.source_url}/{version}",
            target_workers=targets,
            allow_older=True,  # the tests of this file run in any order
        )
        return self.client.create(call, idempotency_key=key).deployment_id

    def alive(self) -> dict[str, Worker]:
        return {each.worker_id: each for each in self.client.workers() if each.alive}

    def record(self, deployment_id: str) -> Deployment:
        return self.client.deployment(deployment_id).deployment

    def driven(self, deployment_id: str, *, under_way: bool = True) -> str:
        """Return the flow run; with ``under_way`` once it runs, and before the model is there."""
        flow_run_id = wait_until(
            lambda: self.record(deployment_id).flow_run_id, 60, "the record names its flow run"
        )
        if not under_way:
            return str(flow_run_id)
        self.flow_is(flow_run_id, "RUNNING")
        assert not self.record(deployment_id).status.is_final
        return str(flow_run_id)

    def ends(self, deployment_id: str, status: DeploymentStatus) -> None:
        wait_until(lambda: self.record(deployment_id).status == status, 60, f"it is {status}")

    def flow_is(self, flow_run_id: str, state: str) -> None:
        wait_until(lambda: state_of(self.stack, flow_run_id) == state, 90, f"the flow is {state}")


@pytest.fixture(scope="module")
def site(stack: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Three versions that share nothing, published."""
    directory = tmp_path_factory.mktemp("flowing")
    url = f"{stack.models_url}/flowing"
    for version, size in SIZES.items():
        (directory / "model.bin").write_bytes(os.urandom(size))
        ended = paceline(
            "publish", str(directory), f"{url}/{version}", "--model", "flowing",
            "--version", version, "--chunk", "1MB", "--link", "8Mbit", state=stack.state_dir,
        )  # fmt: skip
        assert ended.code == 0, ended.err
    await_registered(stack)
    return Site(stack, url)


def process_of(flow_run_id: str, state: Path) -> psutil.Process:
    """Return the process that Prefect's worker runs the flow run in."""
    for each in processes_of(state):
        try:
            if each.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", "") == (
                flow_run_id.replace("-", "")
            ):
                return each
        except psutil.Error:
            continue
    raise AssertionError(f"no process of {flow_run_id}")


@pytest.fixture(scope="module")
def asked(site: Site, stack: Runtime) -> Iterator[dict[str, str]]:
    """Two deployments at the same time; one of them has a target that Dask does not reach."""
    # Its machine runs the agent, as a unit or a DaemonSet would.
    resident = start(
        "agent", "--worker-id", "spare-0", "--host", "spare-0", "--rack", "rack-9",
        state=stack.state_dir,
    )  # fmt: skip
    try:
        wait_until(lambda: "spare-0" in site.alive(), 30, "the resident agent has registered")
        yield {
            "cancelled": site.ask("1", "cancelled-in-prefect"),
            "resident": site.ask("3", "to-a-resident", ("node-0", "spare-0")),
        }
    finally:
        resident.send_signal(signal.SIGTERM)
        assert finish(resident, 30).code == 0


@pytest.mark.nightly
def test_a_cancel_in_prefect_ends_both(site: Site, stack: Runtime, asked: dict[str, str]) -> None:
    d = asked["cancelled"]
    assert site.ask("1", "cancelled-in-prefect") == d, "the same key is the same deployment"
    flow_run_id = site.driven(d)
    cancel = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
    prefect(stack, "POST", f"/flow_runs/{flow_run_id}/set_state", cancel)
    site.ends(d, DeploymentStatus.CANCELLED)
    site.flow_is(flow_run_id, "CANCELLED")


@pytest.mark.nightly
def test_a_delete_ends_both(site: Site) -> None:
    d = site.ask("2", "deleted")
    flow_run_id = site.driven(d)
    site.client.cancel(d)
    assert site.record(d).status is DeploymentStatus.CANCELLED
    site.flow_is(flow_run_id, "CANCELLED")


@pytest.mark.nightly
def test_a_resident_agent_is_a_target_like_any_other(
    site: Site, stack: Runtime, asked: dict[str, str]
) -> None:
    d = asked["resident"]
    flow_run_id = site.driven(d, under_way=False)
    site.flow_is(flow_run_id, "COMPLETED")
    assert set(site.client.deployment(d).workers_complete) == {"node-0", "spare-0"}
    alike = {"alive", "link_mbit"}
    ours, spare = (site.alive()[each].model_dump(include=alike) for each in ("node-0", "spare-0"))
    assert ours == spare
    paceline("activate", d, state=stack.state_dir)
    active = stack.node_dir("spare-0") / "store" / "models" / "flowing" / "active"
    assert active.readlink().name == "3"


@pytest.mark.nightly
def test_a_flow_that_crashed_and_runs_again_resumes_the_same_record(
    site: Site, stack: Runtime
) -> None:
    d, before = site.ask("1", "crashed"), len(site.client.deployments())
    flow_run_id = site.driven(d)
    process_of(flow_run_id, stack.state_dir).send_signal(signal.SIGKILL)
    site.flow_is(flow_run_id, "CRASHED")

    def runs_again() -> bool:
        # "Retry" on Prefect's page; its worker may say once more that the first process is dead.
        state = state_of(stack, flow_run_id)
        if state == "CRASHED":
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            retry = {
                "type": "SCHEDULED",
                "name": "AwaitingRetry",
                "state_details": {"scheduled_time": now},
            }
            body = {"state": retry, "force": True}
            prefect(stack, "POST", f"/flow_runs/{flow_run_id}/set_state", body)
            time.sleep(1)
        return state in {"RUNNING", "COMPLETED"}

    wait_until(runs_again, 60, "the flow run runs again")
    site.ends(d, DeploymentStatus.COMPLETE)
    site.flow_is(flow_run_id, "COMPLETED")
    (run,) = flow_runs_of(stack, d)
    assert run["id"] == flow_run_id
    assert run["parameters"]["deployment_id"] == d
    assert len(site.client.deployments()) == before, "no other record was made"
    assert site.record(d).flow_run_id == flow_run_id


def test_a_flow_that_makes_its_own_record_names_itself_in_it(site: Site, lifecycle: Ended) -> None:
    of_lifecycle = [each for each in site.client.deployments() if each.model_id != "flowing"]
    assert of_lifecycle
    assert all(each.flow_run_id and not each.flow_wanted for each in of_lifecycle)
    told = [each.name for each in site.client.events(0).events]
    started = [each for each in told if each is EventName.FLOW_STARTED]
    wanted = [each for each in site.client.deployments() if each.flow_wanted and each.flow_run_id]
    assert len(started) == len(wanted), "one for each that was asked for without a flow"


@pytest.mark.nightly
def test_ctrl_c_says_what_goes_on_and_how_to_end_it(site: Site, stack: Runtime) -> None:
    process = start(
        "distribute", "flowing", "2", "--to", "node-0", "--stage-only", state=stack.state_dir
    )

    def under_way() -> str | None:
        for each in site.client.deployments():
            if each.version == "2" and not each.status.is_final:
                return each.deployment_id
        return None

    d = wait_until(under_way, 90, "its deployment is under way")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    ended = finish(process, 60)
    assert ended.code == 130
    if f"deployment {d} had ended" in ended.err:  # a busy machine: it did before Prefect answered
        assert site.record(d).status is DeploymentStatus.COMPLETE
        return
    assert f"paceline watch {d}" in ended.err
    assert f"paceline cancel {d}" in ended.err
    time.sleep(6)  # the coordinator looks at the flow run's state meanwhile
    assert site.record(d).status is not DeploymentStatus.CANCELLED, "it goes on"
    cancelled = paceline("cancel", d, "--json", state=stack.state_dir)
    assert cancelled.code == 0
    assert cancelled.answer["status"] == "cancelled"
