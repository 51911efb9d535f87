"""Every page that a coordinator serves, in Chromium at the width of a desk and of a phone: nothing
wider than the window, no error of the page. `make screenshots` keeps the pictures for the docs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.manifest import build_manifest, write_manifest
from paceline.schemas import JobState
from tests.api.conftest import PATIENT, Served
from tests.cli.test_approve import judged
from tests.support.browser import WIDTHS, chromium, click, keep, resize, see
from tests.support.rclone import rclone_s3
from tests.support.stack import environment, wait_until
from tests.support.web import serving
from tests.telemetry.test_fleet_page_approvals import wait_for_approval
from tests.telemetry.test_fleet_page_views import (
    FLOW,
    Services,
    adopt,
    creation,
    end,
    reporting,
    run,
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

MODEL, NODES, LINK_MBIT = "acme-7b", 6, 4.0
SIZES = {"1": 2_000_000, "2": 60_000_000}  # of version 2 two minutes are under way
EVENTS = "//h2[text()='What happened']"
# picture → address of the view, what is pressed there, what is to be seen before the picture
VIEWS = {
    "overview": (
        "/fleet#view=overview",
        "",
        "//*[@id='map']//td[@class='rate'][contains(., '/s')]",
    ),
    "topology": ("/fleet#view=overview", "//button[@value='tree']", "//canvas[@id='tree']"),
    "events": ("/fleet#view=overview", EVENTS, "//*[@id='events']//li"),
    "workers": ("/fleet#view=workers", "", "//*[@id='worker-list']//a[text()='node-5']"),
    "worker": ("/fleet#worker=node-3", "", "//*[@id='worker']//td[text()='acme-7b 2']"),
    "jobs": ("/fleet#view=jobs", "", "//*[@id='job-list']//*[contains(text(), 'step 299')]"),
    "job": ("/fleet#job={job}", "", "//*[@id='job-log'][contains(., 'step 299')]"),
    "approvals": ("/fleet#view=approvals", "", "//*[@id='approval-list']//td[text()='ann']"),
    "approval": ("/fleet#approval={run}", "", "//*[@id='approval']//h3[contains(., 'Gate')]"),
    "calls": ("/docs", "(//summary)[1]", "//details[@open]//pre"),
}


@contextmanager
def agents_of(runtime: Runtime) -> Iterator[None]:
    """Run agent processes in two racks, each with a slow link."""
    with ExitStack() as stack:
        for number in range(NODES):
            log = stack.enter_context((runtime.state_dir / f"node-{number}.log").open("wb"))
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "paceline.cli.main", "agent",
                    "--state", str(runtime.state_dir), "--worker-id", f"node-{number}",
                    "--rack", f"r{number % 2 + 1}", "--link-mbit", str(LINK_MBIT),
                    "--limit-mbit", str(LINK_MBIT),
                ],
                stdout=log, stderr=log, env=environment(),
            )  # fmt: skip
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
        yield


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    """A coordinator and agents: one version is active, one is under way; jobs run, wait and need
    a review, and a promotion waits. Returns the coordinator, the id of the job that runs, and the
    run of that promotion."""
    services, state = Services(), tmp_path / "state"
    with serving(services) as web, ExitStack() as stack:
        profile = Profile.model_validate(
            {"security": {**PATIENT, "source_roots": (str(tmp_path),)}}
        )
        s3 = stack.enter_context(rclone_s3())
        s3.store().ensure_bucket(profile.storage.bucket)
        secrets = Secrets(
            coordinator_token="token-of-the-pictures", worker_token="of-workers",
            s3_access_key=s3.access_key, s3_secret_key=s3.secret_key,
        )  # fmt: skip
        known = Endpoints(
            prefect_api_url=f"{web.url}/api", mlflow_url=web.url, s3_url=s3.endpoint_url
        )
        state.mkdir()
        server = Served(Runtime(profile=profile, state_dir=state, endpoints=known, secrets=secrets))
        server.start()
        stack.callback(server.end)
        known = known.model_copy(update={"coordinator_url": server.url})
        server.runtime = server.runtime.model_copy(update={"endpoints": known})
        save_runtime(server.runtime)
        stack.enter_context(agents_of(server.runtime))
        client = server.client()
        wait_until(lambda: len(client.workers()) == NODES, 120, "the agents register")
        first = deploy(client, tmp_path, "1")
        wait_until(lambda: client.deployment(first).status == "complete", 120, "version 1 arrives")
        client.activate(first)
        of = {"model_id": MODEL, "version": "1"}
        bad = adopt(client, FLOW, name="dialogues", team="nlp", resources={"ranks": 1}, **of)
        run(client, bad, 300)
        passed_over = "2 of 40 shards were passed over"
        end(client, bad, JobState.NEEDS_REVIEW, outcome="succeeded", review=passed_over, step=300)
        job = adopt(client, FLOW, name="chat-sft", team="nlp", resources={"ranks": 2}, seed=2, **of)
        services.run_id = job.run_id
        run(client, job, 299)
        late = adopt(client, name="long-context", resources={"ranks": 6}, seed=1, **of)
        stack.enter_context(reporting(client, late.job_id, job.job_id))
        deploy(client, tmp_path, "2")
        ask = {"model_id": MODEL, "version": "3", "page": f"{web.url}/runs/flow-run/{FLOW}"}
        promotion = wait_for_approval(server, judged(MODEL), **ask)
        yield server, {"job": job.job_id, "run": promotion}


def deploy(client: CoordinatorClient, below: Path, version: str) -> str:
    """Deploy a version to every node; return the deployment's id."""
    directory = below / "models" / version
    directory.mkdir(parents=True)
    (directory / "model.bin").write_bytes(version.encode() * SIZES[version])
    manifest = build_manifest(directory, model_id=MODEL, version=version, link_mbit=LINK_MBIT)
    write_manifest(directory, manifest)
    names = [each.worker_id for each in client.workers()]
    call = creation(str(directory), names, model_id=MODEL, version=version)
    return client.create(call, f"key-{version}").deployment_id


def look(browser: Any, name: str, at: str = "") -> None:
    """Require that the page is as wide as the window on a desk and on a phone; keep pictures."""
    for suffix, width in WIDTHS.items():
        resize(browser, width)
        browser.execute_script("window.scrollTo(0, 0)")
        if at:
            browser.execute_script("arguments[0].scrollIntoView()", see(browser, at))
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width, f"{name} at {width}"
        keep(browser, f"fleet-{name}{suffix}")


@pytest.mark.nightly
def test_every_page_fits_a_desk_and_a_phone(site: tuple[Served, dict[str, str]]) -> None:
    server, ids = site
    with chromium() as browser:
        resize(browser, 1280)
        browser.get(f"{server.url}/fleet")
        see(browser, "//input[@id='token']")
        look(browser, "login")
        browser.get(f"{server.url}/#token={server.runtime.secrets.coordinator_token}")
        see(browser, "//*[@id='who' and contains(text(), 'Paceline')]")
        for name, (address, press, seen) in VIEWS.items():
            resize(browser, 1280)
            browser.get(server.url + address.format(**ids))
            if press:
                click(browser, press)
            see(browser, seen, 120)
            look(browser, name, press if name == "events" else "")
        log = [each["message"] for each in browser.get_log("browser")]
        assert log == [], "no error or warning of the pages"
