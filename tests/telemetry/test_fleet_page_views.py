"""The views of the fleet page, as a person uses them: filters, actions, one worker, jobs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from paceline.cli.options import call_every
from paceline.client import AccessClient, CoordinatorClient
from paceline.config import Endpoints, PriceSettings
from paceline.errors import AccessDenied, NotFound, TemporaryError
from paceline.schemas import (
    Accelerator,
    AdoptJob,
    CreateToken,
    Inventory,
    JobCheckpoint,
    JobRank,
    JobReport,
    JobState,
    RegisterWorker,
    ReviewJob,
    Scope,
    SubmitJob,
    TrainingJob,
    new_run_id,
)
from tests.api.conftest import FakeAgent, Served, creation, make_model, make_runtime
from tests.support.browser import chromium, click, resize, see
from tests.support.stack import wait_until
from tests.support.web import Call, serving
from tests.telemetry.test_fleet_page import text

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.timeout(240)]

HOSTILE = "<img src=x onerror=document.title='run'>"
FLOW = "0192f0c1-0000-7000-8000-000000000001"
DIGEST = "5f" * 32


class Services:
    """Prefect and MLflow: flow runs with one log, one run."""

    def __init__(self) -> None:
        self.lines = [f"step {n}: loss {4 - n / 160:.3f}" for n in range(300)]
        self.run_id = ""
        self.state = "RUNNING"

    def __call__(self, call: Call) -> tuple[int, bytes]:
        asked = json.loads(call.body or b"{}")
        run = {"id": FLOW, "tags": ["paceline"], "state_type": self.state, "parameters": {}}
        if call.path.endswith("/experiments/search"):
            answer: Any = {"experiments": [{"experiment_id": "7"}]}
        elif call.path.endswith("/runs/search"):
            tags = [{"key": "paceline.run_id", "value": self.run_id}]
            found = {"info": {"experiment_id": "7", "run_id": "abc"}, "data": {"tags": tags}}
            answer = {"runs": [found] if self.run_id else []}
        elif call.path.endswith("/logs/filter"):
            after, most = asked["offset"], asked["limit"]
            answer = [{"message": each} for each in self.lines[after : after + most]]
        elif call.path.endswith("/flow_runs/filter"):
            answer = [
                run | {"id": each} for each in asked["flow_runs"].get("id", {"any_": ()})["any_"]
            ]
        elif call.path.endswith("/create_flow_run"):
            answer = run | {"id": FLOW[:-1] + "2"}
        elif call.path.endswith("/set_state"):
            self.state, answer = "CANCELLING", {}
        else:
            answer = run
        return 200, json.dumps(answer).encode()


@pytest.fixture
def services() -> Services:
    return Services()


@pytest.fixture
def platform(tmp_path: Any, services: Services) -> Iterator[Served]:
    """A coordinator with a Prefect and an MLflow server, and two nodes that beat."""
    with serving(services) as web:
        runtime = make_runtime(tmp_path / "state", beat_s=5)
        known = Endpoints(prefect_api_url=f"{web.url}/api", mlflow_url=web.url)
        priced = runtime.profile.model_copy(
            update={"prices": PriceSettings(per_hour={"H100": 2.0})}
        )
        server = Served(runtime.model_copy(update={"endpoints": known, "profile": priced}))
        server.runtime.state_dir.mkdir()
        server.start()
        try:
            yield server
        finally:
            server.end()


@contextmanager
def beating(
    agents: list[FakeAgent], manifest: Any, every_s: float = 0.2
) -> Iterator[Callable[[], None]]:
    """Have ``agents`` send heartbeats within the ``with``, or until what it yields is called."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every_s):
            for each in agents:
                each.beat(manifest[-1] if isinstance(manifest, list) else manifest)

    def stop() -> None:
        over.set()
        thread.join()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield stop
    finally:
        stop()


@contextmanager
def opened(served: Served, view: str = "", token: str = "") -> Iterator[Any]:
    """Yield a browser with the page; no error of the page itself is left unseen."""
    token = token or served.runtime.secrets.coordinator_token
    with chromium() as browser:
        resize(browser, 1280)
        browser.get(f"{served.url}/#{view}&token={token}")  # the start page leads to /fleet
        see(browser, "//*[@id='who' and contains(text(), 'Paceline')]")
        assert "token" not in browser.current_url
        yield browser
        log = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
        assert not [each for each in log if "Failed to load resource" not in each]
        assert browser.title == "Paceline fleet", "no text of others ran as a script"


def fits(browser: Any, name: str) -> None:
    """Require that the page is as wide as the window on a desk and on a phone."""
    for width in (390, 1280):
        resize(browser, width)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width, name


def token_of(served: Served, *scopes: Any, **bound: str) -> str:
    access = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    return access.create_token(CreateToken(name="ann", scopes=scopes, **bound)).token


def fleet_of(served: Served, count: int) -> list[FakeAgent]:
    agents = [FakeAgent(served.client(), f"node-{n}") for n in range(count)]
    for each in agents:
        each.register()
    return agents


def confirm(browser: Any, label: str, **typed: str) -> None:
    """Press the action, with the keyboard alone, fill in fields, and confirm it in the dialog."""
    see(browser, f"//main//button[text()='{label}']").send_keys(Keys.ENTER)
    dialog = see(browser, "//dialog[@open]")
    assert browser.switch_to.active_element.text == "Keep as it is", "a slip of Enter does nothing"
    assert dialog.text.count("\n") >= 2
    for name, value in typed.items():
        see(browser, f"//dialog//input[@id='sure-{name}']").send_keys(value, Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.TAB, Keys.NULL)
    browser.switch_to.active_element.send_keys(Keys.ENTER)


# -- deployments


def test_a_deployment_is_found_drawn_activated_and_rolled_back(platform: Served) -> None:
    url, manifest = make_model(platform.runtime.state_dir, size=2 * 1024 * 1024)
    agents = fleet_of(platform, 5)
    client, names = platform.client(), [each.worker_id for each in agents]
    client.create(creation(url, names, run_id="run-20260101-000000-abcdef"), "key-1")
    with beating(agents, manifest), opened(platform) as browser:
        see(browser, "//*[@id='map']//a[text()='node-4']")
        click(browser, "//button[@value='tree']")
        see(browser, "//canvas[@id='tree' and contains(@aria-label, '5 workers')]")
        fits(browser, "fleet-topology")
        confirm(browser, "Activate")
        see(browser, "//*[@id='deployments']//*[text()='active']", 60)
        assert not browser.find_elements("xpath", "//dialog[@open]")
        assert "m v1" in text(browser, "#events summary"), "events are those of a run"
        confirm(browser, "Roll back")
        see(browser, "//*[@id='sure-error' and contains(text(), 'before')]")
        click(browser, "//button[@id='sure-no']")

        box = see(browser, "//input[@id='deployment-filter']")
        box.send_keys("another")
        see(browser, "//*[@id='deployments' and contains(., 'None matches')]")
        box.clear()
        box.send_keys("v1")
        see(browser, "//*[@id='deployments']//button")


def test_a_deployment_is_cancelled_and_the_version_before_comes_back(platform: Served) -> None:
    client, agents = platform.client(), fleet_of(platform, 3)
    names = [each.worker_id for each in agents]
    deployments: list[str] = []
    manifests: list[Any] = [None]
    with beating(agents, manifests):
        for version in ("v1", "v2"):
            url, manifest = make_model(platform.runtime.state_dir, version)
            manifests.append(manifest)
            made = client.create(creation(url, names, version=version), version).deployment_id
            wait_until(lambda: client.deployment(made).status == "complete", 30, version)  # noqa: B023
            client.activate(made)
            client.await_switch(made, 30)
            deployments.append(made)
        for each in agents:
            each.per_beat = 0
        url, manifest = make_model(platform.runtime.state_dir, "v3")
        manifests.append(manifest)
        third = client.create(creation(url, names, version="v3"), "v3").deployment_id
        with opened(platform) as browser:
            see(browser, "//*[@id='map']//a[text()='node-2']")
            confirm(browser, "Cancel")
            see(browser, "//*[@id='deployments']//*[text()='cancelled']", 60)
            assert client.deployment(third).status == "cancelled"
            click(browser, "//*[@id='deployments']//button[.//*[text()='m v2']]")
            confirm(browser, "Roll back")
            see(browser, "//button[.//*[text()='m v1']]//*[text()='active']", 60)
            active = {each.version for each in client.switch(deployments[1]).workers}
            assert active == {"v1"}
            browser.get(f"{platform.url}/fleet#deployment={deployments[0]}")
            browser.refresh()  # as from a link: the fragment alone does not load the page again
            see(browser, "//*[@id='maptitle' and contains(., 'm v1')]")
            see(browser, "//*[@id='pages']/a[text()='MLflow']")
            fits(browser, "fleet-pages")
            click(browser, "//*[@id='deployments']//button[.//*[text()='m v3']]")
            see(browser, "//*[@id='maptitle' and contains(., 'm v3')]")
            assert browser.current_url.endswith(f"#deployment={third}"), "to copy it from"
            browser.execute_script("location.hash = arguments[0]", f"deployment={deployments[1]}")
            see(browser, "//*[@id='maptitle' and contains(., 'm v2')]")


def test_a_change_is_refused_without_its_scope_by_page_and_rest(platform: Served) -> None:
    url, manifest = make_model(platform.runtime.state_dir)
    agents, client = fleet_of(platform, 1), platform.client()
    made = client.create(creation(url, ["node-0"]), "key-1").deployment_id
    with beating(agents, manifest):
        wait_until(lambda: client.deployment(made).status == "complete", 30, "it arrives")
        for bound in ("team", "project"):
            given: dict[str, Any] = {bound: "vision", "resources": {"ranks": 1}}
            job = adopt(client, name="chat-sft", seed=len(bound), **given)
            token = token_of(platform, Scope.TRAIN, **{bound: "nlp"})
            theirs = CoordinatorClient(platform.url, token)
            for change in (
                lambda to: to.cancel(made),
                lambda to: to.activate(made),
                lambda to: to.rollback(made),
                lambda to: to.change_job(job.job_id, "pause"),  # noqa: B023
                lambda to: to.change_job(job.job_id, "resume"),  # noqa: B023
                lambda to: to.change_job(job.job_id, "cancel"),  # noqa: B023
                lambda to: to.review_job(job.job_id, ReviewJob(accepted=True)),  # noqa: B023
            ):
                with pytest.raises(AccessDenied):
                    change(theirs)
            assert {e.by for e in client.job(job.job_id).job.history} <= {"installation", ""}
        assert client.deployment(made).status == "complete"
        with opened(platform, token=token) as browser:
            see(browser, "//*[@id='deployments']//*[text()='complete']", 60)
            assert "ann (read, train, project nlp)" in text(browser, "#who")
            assert not browser.find_elements("css selector", "main button.act")
            browser.get(f"{platform.url}/fleet#job={job.job_id}")
            see(browser, "//*[@id='job-head' and contains(., 'vision')]")
            assert not browser.find_elements("css selector", "main button.act")
            click(browser, "//button[text()='Log out']")
            see(browser, "//input[@id='token']")
            assert browser.execute_script("return sessionStorage.length") == 0


def test_a_token_that_lost_its_scope_is_refused_in_the_dialog(platform: Served) -> None:
    url, manifest = make_model(platform.runtime.state_dir)
    agents, client = fleet_of(platform, 1), platform.client()
    made = client.create(creation(url, ["node-0"]), "key-1").deployment_id
    access = AccessClient(platform.url, platform.runtime.secrets.coordinator_token)
    given = access.create_token(CreateToken(name="ann", scopes=(Scope.DEPLOY,)))
    with beating(agents, manifest), opened(platform, token=given.token) as browser:
        see(browser, "//main//button[text()='Activate']", 60).send_keys(Keys.ENTER)
        access.revoke_token(given.record.token_id)
        click(browser, "//button[@id='sure-yes']")
        see(browser, "//*[@id='sure-error' and contains(., 'token')]")
        with pytest.raises(NotFound):  # nothing was switched
            client.switch(made)


# -- workers


def test_workers_are_found_in_a_large_fleet_and_have_a_page_each(platform: Served) -> None:
    url, manifest = make_model(platform.runtime.state_dir)
    gpus = Accelerator(kind="NVIDIA H100", count=8, memory_bytes=85 * 10**9, link="nvlink")
    has = Inventory(
        cores=96, memory_bytes=10**12, shared_memory_bytes=10**9, accelerators=(gpus,),
        interface="ens1", interface_mbit=25_000, disk_bytes_s=2e9,
    )  # fmt: skip
    told = RegisterWorker(
        worker_id="node-0", hostname="h1", rack="r1", available_storage=2 * 10**12,
        address="127.0.0.1:20001", link_mbit=25_000, inventory=has, version="1.2.3",
        findings=(f"disk: {DIGEST} 40 MB/s written → Use another disk.",),
    )  # fmt: skip
    agents = fleet_of(platform, 202)[:1]
    platform.client().register(told.model_copy(update={"incarnation": 2}))
    agents[0].incarnation = 2
    platform.client().create(creation(url, ["node-0"]), "key-1")
    with beating(agents, manifest) as stop, opened(platform, "view=workers") as browser:
        see(browser, "//*[@id='worker-list' and contains(., '2 more')]", 60)
        assert len(browser.find_elements("css selector", "#worker-list tbody tr")) == 200
        box = see(browser, "//input[@id='worker-filter']")
        box.send_keys("node-201")
        see(browser, "//*[@id='worker-list'][not(contains(., 'more'))]//a[text()='node-201']")
        box.clear()
        box.send_keys("r1 96 cores")
        see(browser, "//*[@id='worker-list'][not(contains(., 'node-2'))]//a[text()='node-0']")
        fits(browser, "fleet-workers")
        see(browser, "//*[@id='worker-list']//a[text()='node-0']").send_keys(Keys.ENTER)
        see(browser, "//*[@id='worker']//dt[text()='Last heartbeat']")
        see(browser, "//*[@id='worker']//td[text()='m v1']")
        shown = text(browser, "#worker")
        for each in ("25 Gbit/s", "2.0 TB", "Paceline 1.2.3", "8 × NVIDIA H100", "→ Use another"):
            assert each in shown, shown
        assert DIGEST not in shown
        rates = "//canvas[@id='rates' and contains(@aria-label, '1.0 MB/s')]"
        see(browser, rates)
        fits(browser, "fleet-worker")
        stop()
        bad = {"incarnation": 3, "findings": (HOSTILE,), "hostname": HOSTILE, "version": HOSTILE}
        platform.client().register(told.model_copy(update=bad))
        see(browser, "//*[@id='worker']//dd[contains(text(), 'Paceline <img')]")
        assert text(browser, "#worker").count(HOSTILE) == 3
        browser.get(f"{platform.url}/fleet#worker=node-777")
        see(browser, "//*[@id='worker' and contains(., 'no such worker')]")


# -- jobs


def adopt(client: CoordinatorClient, flow: str = "", **fields: Any) -> TrainingJob:
    given = {"model_id": "m", "version": "v1", "data_snapshot": f"s3://b/{DIGEST}"} | fields
    spec = SubmitJob.model_validate(given)
    return client.adopt_job(AdoptJob(spec=spec, run_id=new_run_id(), flow_run_id=flow))


def run(client: CoordinatorClient, job: TrainingJob, step: int, *notes: str) -> None:
    """Report that ``job`` has made ``step`` of 300 steps, until it runs."""
    now = time.time()
    saved = JobCheckpoint(
        step=40, object_ref=f"s3://b/c/{DIGEST}", metrics={"loss": 2.3456789}, created_at=now
    )

    def runs() -> bool:
        found = client.job(job.job_id).job
        hosts = sorted(found.placement.hosts) if found.placement else ["node-0", "node-1"]
        ranks = [
            JobRank(rank=n, host=hosts[n % len(hosts)], state="running", last_heartbeat=now)
            for n in range(2)
        ]
        report = JobReport(
            flow_run_id=FLOW, at=0, training_id="job-1", step=step, steps=300,
            metrics={"loss": 2.123456789, "tokens_per_second": 12345.678}, checkpoints=(saved,),
            workers=tuple(ranks), notes=notes, failures={"node-1": {"lost": 2, "failed": 26}},
        )  # fmt: skip
        client.report_job(job.job_id, report)
        return found.state is JobState.RUNNING

    wait_until(runs, 30, "the job runs")


def reporting(client: CoordinatorClient, *job_ids: str) -> AbstractContextManager[None]:
    """Repeat the newest report of jobs within the ``with``: a silent flow counts as lost."""

    def report() -> None:
        for job_id in job_ids:
            with suppress(TemporaryError):  # as a flow does, which reports again
                job = client.job(job_id).job
                first = JobReport(flow_run_id=job.flow_run_id or "", at=0)
                client.report_job(job_id, job.report or first)

    return call_every(3, report)


OF_ANOTHER = """
const own = window.fetch, held = {engine: "slurm", id: "12", state: "PENDING",
  reason: "QOSMaxCpuPerUserLimit"};
window.fetch = async (...call) => {
  const answer = await own(...call), body = await answer.clone().json().catch(() => null);
  if (!body?.job) return answer;
  const [first, ...others] = body.job.history, history = [{...first, earlier: 104}, ...others];
  return Response.json({...body, job: {...body.job, allocation: held, history}});
};
"""  # what this installation does not have


def test_a_job_is_followed_and_paused_in_its_page(platform: Served, services: Services) -> None:
    _, manifest = make_model(platform.runtime.state_dir)
    agents, client = fleet_of(platform, 2), platform.client()
    with beating(agents, manifest, every_s=1.0):
        job = adopt(
            client, FLOW, name="chat-sft", team="nlp", budget=500,
            resources={"ranks": 2, "capacity": "on-demand"},
            parameters={"training.steps": 300, "data.columns": 0},
            checkpoint_policy={"keep": 7, "every_s": 5400}, seed=0,
            purpose="research", continue_from="job-0", evaluate_on=f"s3://b/held/{DIGEST}",
        )  # fmt: skip
        services.run_id = job.run_id
        run(client, job, 142)
        big, twin = (
            adopt(client, name="big", team="vision", resources={"ranks": 2}, seed=1)
            for _ in range(2)
        )
        token = token_of(platform, Scope.TRAIN)
        both = reporting(client, job.job_id, big.job_id)
        with both, opened(platform, "view=jobs", token) as browser:
            see(browser, "//*[@id='job-list']//*[contains(text(), 'step 142 of 300, loss 2.12')]")
            see(browser, "//*[@id='job-list'][contains(., 'ahead') or contains(., 'wait')]")
            fits(browser, "fleet-jobs")
            adopt(client, name=HOSTILE, team="vision", model_id="n", resources={"ranks": 2})
            see(browser, "//input[@name='team']").send_keys("vision", Keys.TAB)
            see(
                browser, "//*[@id='job-list'][contains(., '<img') and not(contains(., 'chat-sft'))]"
            )
            see(browser, "//input[@name='model']").send_keys("n", Keys.TAB)
            see(browser, "//*[@id='job-list'][not(contains(., 'big'))]")

            browser.get(f"{platform.url}/fleet#job={big.job_id}")
            see(browser, "//*[@id='job-head' and contains(., 'team') or contains(., 'vision')]")
            see(browser, f"//*[@id='job-head']//dd[contains(., '{twin.job_id}')]")
            browser.get(f"{platform.url}/fleet#job={job.job_id}")
            see(browser, "//*[@id='job-log'][contains(., 'step 299')]")
            page = f"/runs/flow-run/{FLOW}"
            see(browser, f"//a[contains(@href, '{page}') and text()='Flow run in Prefect']")
            see(browser, "//a[contains(@href, '/#/experiments/7/runs/abc')]")
            shown = text(browser, "section[data-view=job]")
            for each in (
                "score 1.00",
                "not known of 500.00",
                "12,346",
                "2.35",
                "running",
                "5f5f5f5f…",
                "History",
                "Requested\nranks=2, capacity=on-demand\n",
                "Parameters\ntraining.steps=300, data.columns=0\n",
                "Seed\n0\n",
                "every_s=1.5 h, ",
                "keep=7",
                "Purpose\nresearch\n",
                "Continues\njob-0\n",
                "s3://b/held/5f5f5f5f…",
                "failed × 26, lost × 2",
            ):
                assert each in shown, shown
            assert DIGEST not in shown
            assert "2.123456789" not in shown
            fits(browser, "fleet-job")
            browser.execute_script(OF_ANOTHER)
            see(browser, "//*[@id='job-head']//dt[text()='Slurm']")
            assert "Slurm\n12, PENDING, QOSMaxCpuPerUserLimit\n" in text(browser, "#job-head")
            assert "104 earlier changes" in text(browser, "#job-more")
            services.lines.append(HOSTILE)
            run(client, job, 143, HOSTILE)
            see(browser, "//*[@id='job-log'][contains(., '<img')]")
            see(browser, "//*[@id='job-more'][contains(., '<img')]")
            confirm(browser, "Pause")
            see(browser, "//*[@id='job-head']//*[text()='pausing']")
            assert client.job(job.job_id).job.wanted == "pause"
            assert "ann" in client.job(job.job_id).job.history[-1].by
            end(client, job, JobState.PAUSED, outcome="cancelled")
            see(browser, "//*[@id='job-head']//*[text()='paused']")
            see(browser, "//*[@id='job-log'][contains(., '<img')]")
            services.state = "RUNNING"
            for other in client.jobs(team="vision").jobs:  # they would get the nodes first
                client.change_job(other.job_id, "cancel")
                client.report_job(other.job_id, JobReport(at=0, outcome="cancelled"))
            for width in (390, 1280):
                resize(browser, width)
                click(browser, "//main//button[text()='Resume']")
                shown = text(browser, "dialog")
                assert "not known of 500.00" in shown and "New budget" in shown, shown
                wide = "return document.querySelector('dialog').scrollWidth <= innerWidth"
                assert browser.execute_script(wide)
                click(browser, "//button[@id='sure-no']")
            confirm(browser, "Resume", budget="750.5")
            see(browser, "//*[@id='job-head']//*[text()='starting']")
            assert client.job(job.job_id).job.spec.budget == 750.5
            see(browser, "//*[@id='job-head']//dd[contains(., 'of 750.50')]")
            (resumed,) = (e for e in client.job(job.job_id).job.history if e.reason == "resumed")
            assert resumed.by == "ann"
            choice = "//select[@id='job-attempt'][not(@hidden)]/option"
            services.lines = ["only of attempt 1"]
            see(browser, f"{choice}[1][text()='attempt 2']")
            click(browser, f"{choice}[2][text()='attempt 1']")
            see(browser, "//*[@id='job-log'][text()='only of attempt 1']")
            confirm(browser, "Cancel")
            see(browser, "//*[@id='job-head']//*[text()='cancelling']")
            end(client, job, JobState.CANCELLED, flow_run_id=FLOW[:-1] + "2", outcome="cancelled")
            see(browser, "//*[@id='job-head']//*[text()='cancelled']")
            assert client.job(job.job_id).job.state is JobState.CANCELLED


def test_older_jobs_are_on_the_next_page_and_a_project_is_found(platform: Served) -> None:
    client = platform.client()
    for number in range(101):
        adopt(client, name=f"job {number}", project="voices" if number < 100 else "")
    rows = "//*[@id='job-list']//tbody/tr"
    with opened(platform, "view=jobs") as browser:
        see(browser, f"{rows}[100][contains(., 'job 1')]")
        fits(browser, "fleet-jobs-pages")
        click(browser, "//*[@id='job-list']//button[text()='Older']")
        see(browser, "//*[@id='job-list'][contains(., '101 to 101 of 101')]")
        assert len(browser.find_elements("xpath", rows)) == 1
        assert "job 0" in text(browser, "#job-list")
        click(browser, "//*[@id='job-list']//button[text()='Newer']")
        see(browser, f"{rows}[1][contains(., 'job 100')]")
        hold_while_drawn(browser, "//*[@id='job-list']//button[text()='Older']", client)
        see(browser, "//*[@id='job-list'][contains(., '101 to 102 of 102')]")
        see(browser, "//input[@name='project']").send_keys("voices", Keys.TAB)
        see(browser, f"{rows}[100][contains(., 'job 0')]")
        assert not browser.find_elements("xpath", "//*[@id='job-list']//button"), "one page"


def hold_while_drawn(browser: Any, xpath: str, client: CoordinatorClient) -> None:
    """Press the mouse at ``xpath``; release it when the page has heard of another job."""

    def answers() -> int:
        mine = "each => each.name.includes('/v1/training-jobs')"
        every = "performance.getEntriesByType('resource')"
        return int(browser.execute_script(f"return {every}.filter({mine}).length"))

    def one_more() -> None:
        before = answers()
        wait_until(lambda: answers() > before, 30, "the page asked")

    one_more()  # the next one is asked after the press
    ActionChains(browser).click_and_hold(see(browser, xpath)).perform()
    adopt(client, name="meanwhile")
    one_more()
    ActionChains(browser).release().perform()


def end(client: CoordinatorClient, job: TrainingJob, state: JobState, **fields: Any) -> None:
    """Report that the flow of ``job`` has ended, until the job is in ``state``."""
    told = {"flow_run_id": FLOW, "at": 0, "training_id": "job-1", "step": 1, "steps": 300} | fields
    report = JobReport.model_validate(told)

    def ended() -> bool:
        client.report_job(job.job_id, report)
        return client.job(job.job_id).job.state is state

    wait_until(ended, 30, f"the job is {state}")


@pytest.mark.parametrize(
    ("label", "state"),
    [("Accept", "succeeded"), pytest.param("Reject", "failed", marks=pytest.mark.nightly)],
)
def test_a_job_that_passed_bad_data_over_is_reviewed_in_its_page(
    platform: Served, label: str, state: str
) -> None:
    _, manifest = make_model(platform.runtime.state_dir)
    agents, client = fleet_of(platform, 1), platform.client()
    with beating(agents, manifest, every_s=1.0):
        job = adopt(client, FLOW, name="dialogues", resources={"ranks": 1})
        run(client, job, 300)
        end(client, job, JobState.NEEDS_REVIEW, outcome="succeeded", review=f"2 shards of {DIGEST}")
        with opened(platform, f"job={job.job_id}", token_of(platform, Scope.TRAIN)) as browser:
            see(browser, "//*[@id='job-head' and contains(., '2 shards')]")
            assert not browser.find_elements("css selector", "main button.act"), "no approver"
            approver = token_of(platform, Scope.APPROVE)
            browser.execute_script("sessionStorage['paceline-token'] = arguments[0]", approver)
            browser.refresh()
            see(browser, "//*[@id='who' and contains(., 'approve')]")
            see(browser, "//*[@id='job-head' and contains(., '2 shards')]")
            assert DIGEST not in text(browser, "section[data-view=job]")
            confirm(browser, label)
            see(browser, f"//*[@id='job-head']//*[text()='{state}']")
            assert client.job(job.job_id).job.state == state
            assert client.job(job.job_id).job.history[-1].by == "ann"
