"""Every query of the boards finds data in a real Prometheus that scrapes a small fleet."""

from __future__ import annotations

import contextlib
import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from prometheus_client import start_http_server

from paceline.api import create_app
from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Runtime, Secrets, load_profile
from paceline.jobs import with_state
from paceline.schemas import (
    Accelerator,
    AdoptJob,
    Inventory,
    JobReport,
    JobState,
    LossCause,
    RegisterWorker,
    SubmitJob,
    TrainingJob,
    new_run_id,
)
from tests.api.conftest import FakeAgent, creation, make_model
from tests.deployments.test_monitoring import BOARDS, expressions_of, registry_of_a_rank
from tests.support.in_process import served
from tests.support.servers import Server, answers, free_port, program

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]
WAIT_S = 120.0  # for Prometheus to scrape, on a busy machine


def wait_until(there: Callable[[], Any], what: Callable[[], str]) -> None:
    until = time.monotonic() + WAIT_S
    while not there():
        assert time.monotonic() < until, what()
        time.sleep(0.2)


class Fleet:
    """A coordinator within this process, two nodes, deployments and jobs of two teams."""

    def __init__(self, app: FastAPI, url: str, runtime: Runtime) -> None:
        self.app, self.client = app, CoordinatorClient(url, runtime.secrets.coordinator_token)
        url, self.manifest = make_model(runtime.state_dir)
        self.agent = FakeAgent(self.client, "node-0")
        self.agent.register()
        cards = Accelerator(kind="NVIDIA A100", count=8, memory_bytes=80 << 30)
        inventory = Inventory(cores=8, memory_bytes=1, shared_memory_bytes=1, accelerators=(cards,))
        self.client.register(
            RegisterWorker(
                worker_id="gpu-0", hostname="h", rack="r", available_storage=1, inventory=inventory
            )
        )
        for targets in (["node-0"], ["never-there"]):
            self.client.create(creation(url, targets), targets[0])

    def beat(self) -> None:
        self.agent.beat(self.manifest)

    def job(self, job_id: str) -> TrainingJob:
        return self.client.job(job_id).job

    def adopt(self, team: str, ranks: int = 8) -> tuple[str, str]:
        """A flow asks for admission; return the job and the flow run."""
        spec = SubmitJob(
            model_id="m",
            version="v1",
            data_snapshot="s3://b/s",
            team=team,
            seed=len(self.client.jobs().jobs),
            resources={"ranks": ranks, "accelerator": "A100"},
        )
        run_id = new_run_id()
        made = self.client.adopt_job(AdoptJob(spec=spec, run_id=run_id, flow_run_id=run_id))
        return made.job_id, run_id

    def run_and_lose(self, team: str, cause: LossCause, end: JobState) -> None:
        """A job gets its nodes, makes steps, is lost, and ends."""
        job_id, flow = self.adopt(team)

        def report(step: int) -> JobState:
            seconds = {"useful": step * 0.5}
            failures = {"gpu-0": {"failed": step}} if step else {}
            sent = JobReport(
                flow_run_id=flow, at=0.0, step=step, seconds=seconds, failures=failures
            )
            return self.client.report_job(job_id, sent).state

        wait_until(lambda: report(0) is JobState.STARTING, lambda: str(self.job(job_id)))
        wait_until(lambda: report(1) is JobState.RUNNING, lambda: str(self.job(job_id)))
        report(3)
        table = self.app.state.jobs
        lost = JobState.PREEMPTED if cause == "preempted" else JobState.RECOVERING
        for state, why in ((lost, cause), (end, "")):
            table.change(
                job_id,
                lambda job, state=state, why=why: with_state(job, state, time.time(), cause=why),
            )


@contextlib.contextmanager
def prometheus(directory: Path, coordinator: str, rank: int, token: str) -> Iterator[str]:
    port = free_port()
    config = {
        "global": {"scrape_interval": "500ms"},
        "scrape_configs": [
            {
                "job_name": "paceline-coordinator",
                "authorization": {"credentials": token},
                "static_configs": [{"targets": [urllib.parse.urlsplit(coordinator).netloc]}],
            },
            {
                "job_name": "paceline-training",
                "static_configs": [{"targets": [f"127.0.0.1:{rank}"]}],
            },
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    argv = [program("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    argv += [f"--web.listen-address=127.0.0.1:{port}"]
    server = Server("prometheus", argv, directory, lambda: answers(port))
    try:
        server.start()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()


def values(url: str, query: str) -> list[float]:
    """Return what ``query`` finds now, without NaN."""
    asked = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"{url}/api/v1/query?{asked}", timeout=30) as answer:
        rows = json.load(answer)["data"]["result"]
    return [value for each in rows if math.isfinite(value := float(each["value"][1]))]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, str]]:
    """A fleet whose jobs were waited for and lost before and after a first scrape, and the URL of
    its Prometheus."""
    directory = tmp_path_factory.mktemp("scraped")
    profile = load_profile("embedded", {"relay.beat_s": "20"})
    runtime = Runtime(
        profile=profile,
        state_dir=directory / "state",
        endpoints=Endpoints(),
        secrets=Secrets(coordinator_token="0123456789abcdef" * 2),
    )
    app, rank = create_app(runtime), free_port()
    pages, thread = start_http_server(rank, "127.0.0.1", registry_of_a_rank())
    token = runtime.secrets.coordinator_token
    try:
        with served(app) as url, prometheus(directory, url, rank, token) as found:
            fleet = Fleet(app, url, runtime)
            fleet.run_and_lose("nlp", "node", JobState.FAILED)
            seen = 'paceline_job_losses_total{cause="node"} == 1'
            wait_until(lambda: values(found, seen), lambda: "the first loss is not scraped")
            fleet.run_and_lose("nlp", "preempted", JobState.CANCELLED)
            running, flow = fleet.adopt("nlp")
            fleet.adopt("vision")
            # Its flow run was lost before, and it has met bad data.
            app.state.jobs.change(running, lambda job: job.model_copy(update={"losses": 1}))
            report = JobReport(flow_run_id=flow, at=0.0, step=1, quarantined=2)
            wait_until(
                lambda: fleet.client.report_job(running, report).state is JobState.RUNNING,
                lambda: str(fleet.job(running)),
            )
            yield fleet, found
    finally:
        pages.shutdown()
        pages.server_close()
        thread.join(10)


@pytest.mark.parametrize("path", BOARDS, ids=lambda each: each.name)
def test_every_query_of_a_board_returns_data(scraped: tuple[Fleet, str], path: Path) -> None:
    fleet, url = scraped
    board = json.loads(path.read_text())
    names = [each["name"] for each in board["templating"]["list"]]
    queries = expressions_of(board)
    assert queries
    for name in names:
        queries = [each.replace(f"${name}", ".*") for each in queries]
    empty: list[str] = []

    def all_found() -> bool:
        fleet.beat()
        empty[:] = [each for each in queries if not values(url, each)]
        return not empty

    wait_until(all_found, lambda: "no data: " + "\n".join(empty))
