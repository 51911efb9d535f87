"""`paceline jobs` and `Client` against a real coordinator process: lists, progress and changes."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import paceline as package
from paceline.cli import flows
from paceline.cli.options import or_newest_made, resolve_run_id, resolve_training_id
from paceline.client import CoordinatorClient
from paceline.config import Endpoints, PriceSettings
from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.schemas import (
    AdoptJob,
    JobReport,
    JobState,
    JobView,
    SubmitJob,
    new_run_id,
    schema_text,
)
from tests.api.conftest import FakeAgent, Served, creation, make_model, make_runtime
from tests.journeys.guide import commands
from tests.support.command import paceline
from tests.support.stack import wait_until
from tests.support.web import Call, serving

FLOW = "0192f0c1-0000-7000-8000-000000000001"
LOG = [f"line {number}" for number in range(250)]


def servers(call: Call) -> tuple[int, bytes]:
    """MLflow with one experiment, and a run of each run id that is searched; Prefect with one flow
    run that has logged."""
    asked = json.loads(call.body or b"{}")
    if call.path.endswith("/logs/filter"):
        ordered = LOG[::-1] if asked["sort"] == "TIMESTAMP_DESC" else LOG
        lines = ordered[asked["offset"] :][: asked["limit"]]
        return 200, json.dumps([{"message": each} for each in lines]).encode()
    if "/flow_runs/" in call.path:
        flow = {"id": FLOW, "tags": ["paceline"], "state_type": "RUNNING"}
        return 200, json.dumps([] if call.path.endswith("/filter") else flow).encode()
    if "/model-versions/search" in call.path:
        versions = [{"version": "7"}, {"version": "12"}] if "job-5f5f" in call.path else []
        return 200, json.dumps({"model_versions": versions}).encode()
    if call.path.endswith("/experiments/search"):
        return 200, b'{"experiments": [{"experiment_id": "7"}]}'
    tags = [{"key": "paceline.run_id", "value": asked["filter"].split("'")[1].rstrip("%")}]
    found = {"info": {"experiment_id": "7", "run_id": "abc"}, "data": {"tags": tags}}
    return 200, json.dumps({"runs": [found]}).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    with serving(servers) as web:
        runtime = make_runtime(tmp_path_factory.mktemp("jobs") / "state", lost_after_beats=100_000)
        prices = {"prices": PriceSettings(per_hour={"cpu": 3.6})}
        runtime = runtime.model_copy(update={"profile": runtime.profile.model_copy(update=prices)})
        endpoints = Endpoints(mlflow_url=web.url, prefect_api_url=f"{web.url}/api")
        server = Served(runtime.model_copy(update={"endpoints": endpoints}))
        server.runtime.state_dir.mkdir()
        server.start()
        known = endpoints.model_copy(update={"coordinator_url": server.url})
        server.end()
        server.runtime = server.runtime.model_copy(update={"endpoints": known})
        server.start()  # now it has its own address
        FakeAgent(server.client(), "node-0").register()
        yield server
        server.end(signal.SIGKILL)


def said(served: Served, schema: str, *words: str) -> Any:
    """The JSON that a command prints, which its schema describes."""
    done = paceline("jobs", *words, "--json", "--state", served.runtime.state_dir)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(schema_text(schema)))
    return answer


def adopt(served: Served, flow: str = "", **fields: Any) -> str:
    given = {"model_id": "m", "version": "v1", "data_snapshot": "s3://b/d"} | fields
    spec = SubmitJob.model_validate(given)
    return (
        served.client().adopt_job(AdoptJob(spec=spec, run_id=new_run_id(), flow_run_id=flow)).job_id
    )


def test_lists_show_progress_and_are_filtered(served: Served) -> None:
    client = served.client()
    running = adopt(served, name="Chat SFT", resources={"ranks": 1})
    waiting = adopt(served, name="other", model_id="org/n", resources={"ranks": 1}, seed=5)
    metrics = {"loss": 2.34567, "tokens_per_second": 10.0}
    report = JobReport(at=0, step=42, steps=100, metrics=metrics, notes=("a note",))

    def runs() -> bool:
        client.report_job(running, report)
        return client.job(running).job.state is JobState.RUNNING

    wait_until(runs, 30, "the job runs")
    done = paceline("jobs", "list", "--state", served.runtime.state_dir)
    (line,) = [each for each in done.stdout.splitlines() if running in each]
    assert "42/100, loss 2.346" in line
    assert "Chat SFT" in line

    def found(*words: str) -> set[str]:
        return {each["job_id"] for each in said(served, "jobs", "list", *words)["jobs"]}

    assert found("--name", "chat") == found("--name", running) == {running}
    assert found("--model", "org/n") == {waiting}
    assert found("--submitter", "installation") == {running, waiting}
    assert found("--submitter", "ann") == found("--model", "n") == set()
    (brief,) = client.jobs(["running"]).jobs
    assert brief.report is not None
    assert (brief.report.metrics, brief.report.notes) == ({"loss": 2.34567}, ())

    shown = said(served, "job", "show", running)
    assert shown["pages"]["mlflow"].endswith("/#/experiments/7/runs/abc")
    assert shown["pages"]["fleet"].endswith(f"/fleet#job={running}")
    assert shown["job"]["report"]["notes"] == ["a note"]
    assert (shown["status"], shown["state"]) == ("complete", "running"), "the command's, the job's"
    waits = said(served, "job", "show", waiting)
    assert "/runs/" not in waits["pages"]["mlflow"], "it has no run yet: the server's page"


def test_what_a_job_has_and_costs_and_its_twin_are_shown(served: Served) -> None:
    client, state = served.client(), served.runtime.state_dir
    end_all(client)
    first, twin = (
        adopt(served, name="twins", resources={"ranks": 1}, seed=12, budget=1e9) for _ in range(2)
    )

    def has_a_node() -> bool:
        failures = {"node-0": {"lost": 1, "failed": 26}}
        client.report_job(first, JobReport(at=0, failures=failures, notes=("old", *"abcde")))
        return client.job(first).job.placement is not None

    wait_until(has_a_node, 30, "the job has its node")
    lines = paceline("jobs", "show", first, "--state", state).stdout.splitlines()
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.strip()}
    assert found["nodes"] == "node-0 (1), in one host, score 1.00"
    assert re.fullmatch(r"\S+ of 1,?000,?000,?000.00 EUR", found["cost"]), found["cost"]
    assert found["early"] == "ends node-0: 26 failed, 1 lost"
    assert [line.split()[1] for line in lines if line.startswith("  note ")] == [*"abcde"]
    assert found["same"] == f"as {twin}: they share one training"
    newest, older = (
        said(served, "jobs", "list", "--name", "twins", "--limit", "1", "--offset", offset)
        for offset in ("0", "1")
    )
    assert [each["job_id"] for each in (*newest["jobs"], *older["jobs"])] == [twin, first]
    done = paceline("jobs", "list", "--name", "twins", "--limit", "1", "--state", state)
    assert "1 more: --limit, --offset" in done.stderr
    for what in ("pause", "resume") * 51:
        client.change_job(twin, what)
    assert "\n  3 earlier changes: " in paceline("jobs", "show", twin, "--state", state).stdout
    end_all(client)


def test_what_was_submitted_is_shown(served: Served) -> None:
    end_all(served.client())
    job_id = adopt(
        served, resources={"ranks": 1, "within": "rack"}, checkpoint_policy={"every_s": 5400.0},
        seed=0, purpose="research", project="q3", code_ref="git+https://example.org/a@" + "0" * 40,
        optimizer_ref="lion:make@sha256:" + "0" * 64, continue_from="job-0",
        evaluate_on="s3://b/held", parameters={"training.steps": 7, "data.columns": 0},
    )  # fmt: skip
    plain = adopt(served)
    shown, other = (
        paceline("jobs", "show", each, "--state", served.runtime.state_dir).stdout
        for each in (job_id, plain)
    )
    for name, value in {
        "project": "q3",
        "purpose": "research",
        "code ref": "git+https://example.org/a@" + "0" * 40,
        "optimizer ref": "lion:make@sha256:" + "0" * 64,
        "seed": "0",
        "continue from": "job-0",
        "evaluate on": "s3://b/held",
        "resources": "ranks=1, within=rack",
        "checkpoint policy": "every_s=1:30 h",
        "parameters": "training.steps=7, data.columns=0",
    }.items():
        assert f"\n  {name:<11} {value}\n" in shown, shown
        assert f"\n  {name}" not in other, "what was not given has no line"
    end_all(served.client())


@pytest.mark.parametrize("option", ["--code-ref", "--optimizer-ref"])
def test_a_jobs_own_code_is_pinned_and_of_an_allowed_source(served: Served, option: str) -> None:
    asked = ("jobs", "submit", "m", "1", "--snapshot", "s3://b/x", "--state")
    for text, code, words in (
        ("os:system", 2, "not pinned"),
        (f"a:b@sha256:{'0' * 64}", 77, "not allowed"),
    ):
        done = paceline(*asked, served.runtime.state_dir, option, text)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert f"training.{option[2:].replace('-', '_')} {text}" in done.stderr


def end_all(client: CoordinatorClient) -> None:
    """End every job: one of another test may hold the only node."""
    for each in client.jobs().jobs:
        if not each.state.is_final:
            client.change_job(each.job_id, "cancel")
            client.report_job(each.job_id, JobReport(at=0, outcome="cancelled"))


def test_a_job_leads_to_the_version_that_was_registered_of_it(served: Served) -> None:
    client = served.client()
    end_all(client)
    job_id = adopt(served, model_id="acme/m", resources={"ranks": 1}, seed=21)
    report = JobReport(at=0, step=1, steps=1, training_id="job-5f5f5f5f5f5f")

    def ended() -> bool:
        client.report_job(job_id, report)
        client.report_job(job_id, report.model_copy(update={"outcome": "succeeded"}))
        return client.job(job_id).job.state is JobState.SUCCEEDED

    wait_until(ended, 30, "the job ends")

    def version() -> str:  # MLflow is asked again after a while where it was slow
        return str(said(served, "job", "show", job_id)["pages"].get("version", ""))

    wait_until(version, 30, "the version is found")
    assert version().endswith("/#/models/acme--m/versions/12"), "the newest one"


def test_where_leads_to_the_runs_own_pages(served: Served) -> None:
    job_id = adopt(served, name="found", resources={"ranks": 1}, seed=9)
    job = served.client().job(job_id).job
    found = paceline("where", job.run_id, "--json", "--state", served.runtime.state_dir)
    links = json.loads(found.stdout)
    assert links["mlflow"].endswith("/#/experiments/7/runs/abc")
    assert links["fleet"] == f"{served.url}/fleet#job={job_id}"
    url, _ = make_model(served.runtime.state_dir)
    call = creation(url, ["node-0"], run_id=job.run_id)
    made = served.client().create(call, "where").deployment_id
    shown = paceline("where", job.run_id, "--state", served.runtime.state_dir).stdout
    assert f"{served.url}/fleet#deployment={made}\n" in shown


def test_a_program_pauses_resumes_and_cancels(served: Served) -> None:
    job_id = adopt(served, name="mine", resources={"ranks": 1}, seed=6)
    with package.Client(served.url, served.runtime.secrets.coordinator_token) as client:
        assert client.pause_job(job_id).state is JobState.PAUSED
        assert client.resume_job(job_id).state is JobState.QUEUED
        assert [each.job_id for each in client.jobs("queued", name="mine")] == [job_id]
        assert list(client.job_log(job_id)) == [], "no flow run has logged"
        with pytest.raises(Conflict, match="review"):
            client.review_job(job_id, accepted=True)
        assert client.cancel_job(job_id).state is JobState.CANCELLED
        with pytest.raises(Conflict, match="ended"):
            client.pause_job(job_id)
        with pytest.raises(NotFound, match="no such training job"):
            client.cancel_job("tj-" + "0" * 12)
    assert said(served, "job", "cancel", job_id)["job"]["state"] == "cancelled", "a repeat"


def test_runs_and_trainings_are_found_by_the_beginning_of_their_ids(served: Served) -> None:
    client, runtime = served.client(), served.runtime
    job_id = adopt(served, name="found", resources={"ranks": 1}, seed=8)
    run_id, new = client.job(job_id).job.run_id, new_run_id()
    without_mlflow = runtime.model_copy(
        update={"endpoints": runtime.endpoints.model_copy(update={"mlflow_url": ""})}
    )
    for known in (runtime, without_mlflow):
        assert resolve_run_id(known, new) == new, "a run to be made"
    assert resolve_run_id(without_mlflow, run_id[:-1]) == run_id
    adopt(served, name="another", resources={"ranks": 1}, seed=9)
    with pytest.raises(InvalidInput, match="several runs begin so"):
        resolve_run_id(without_mlflow, "run-")
    with pytest.raises(NotFound, match="no such run"):
        resolve_run_id(without_mlflow, "run-1999")
    with pytest.raises(InvalidInput, match="not a run id"):
        resolve_run_id(without_mlflow, "../x")

    report = JobReport(at=0, training_id="job-0123456789ab")
    wait_until(
        lambda: bool(client.report_job(job_id, report) and client.job(job_id).job.report),
        30,
        "the job has reported",
    )
    assert resolve_training_id(client, "job-01") == "job-0123456789ab"
    assert resolve_training_id(client, "job-ffffffffffff") == "job-ffffffffffff", "of no job now"
    with pytest.raises(NotFound, match="no such training"):
        resolve_training_id(client, "job-ff")


def test_the_log_of_an_attempt_is_read_while_the_job_is_paused(served: Served) -> None:
    client, state = served.client(), served.runtime.state_dir
    end_all(client)
    job_id = adopt(served, FLOW, name="paused", resources={"ranks": 1}, seed=11)

    def is_in(state: JobState, **report: Any) -> bool:
        client.report_job(job_id, JobReport(flow_run_id=FLOW, at=0, step=1, **report))
        return client.job(job_id).job.state is state

    wait_until(lambda: is_in(JobState.RUNNING), 30, "the job runs")
    client.change_job(job_id, "pause")
    wait_until(lambda: is_in(JobState.PAUSED, outcome="cancelled"), 30, "the job is paused")
    assert client.job(job_id).job.flow_run_id is None
    for words in ([], ["--attempt", "1"]):
        assert said(served, "job-log", "logs", job_id, *words)["lines"] == LOG
    assert said(served, "job-log", "logs", job_id, "--tail", "2")["lines"] == LOG[-2:]
    with package.Client(served.url, served.runtime.secrets.coordinator_token) as python:
        assert list(python.job_log(job_id, attempt=1)) == LOG
        assert list(python.job_log(job_id, tail=3)) == LOG[-3:]
    done = paceline("jobs", "logs", job_id, "--attempt", "2", "--state", state)
    assert done.returncode != 0
    assert "no such attempt: got 2, wanted 1 to 1" in done.stderr
    done = paceline("jobs", "logs", job_id, "--follow", "--tail", "2", "--state", state)
    assert done.returncode == 2
    assert "leave out --attempt and --tail" in done.stderr
    client.change_job(job_id, "cancel")


def test_a_log_is_json_for_a_program(served: Served) -> None:
    job_id = adopt(served, name="logged", resources={"ranks": 1}, seed=7)
    said(served, "job", "cancel", job_id)
    shown = said(served, "job-log", "logs", job_id[:-3])
    assert shown == {"status": "complete", "job_id": job_id, "lines": []}
    done = paceline(
        "jobs", "logs", job_id, "--follow", "--json", "--state", served.runtime.state_dir
    )
    items = [json.loads(line) for line in done.stdout.splitlines()]
    for item in items:
        jsonschema.validate(item, json.loads(schema_text("job-log-line")))
    assert [(each["kind"], each["state"]) for each in items] == [
        ("state", "cancelled"),
        ("outcome", "cancelled"),
    ]
    assert done.returncode == items[-1]["exit_code"] == 130


def test_the_page_allows_lists_and_revokes_a_purpose(served: Served) -> None:
    allow, listed, revoke = commands("how-to/run-training-jobs.md")["purposes"].splitlines()

    def typed(line: str) -> str:
        done = paceline(*shlex.split(line)[1:], "--state", served.runtime.state_dir)
        assert done.returncode == 0, done.stderr
        return done.stdout

    typed(allow)
    (rule,) = re.findall(r"dp-[0-9a-f]+", typed(listed))
    typed(revoke.replace("dp-4f1c", rule[:7]))
    assert "revoked" in typed(listed)


def test_the_report_of_a_job_is_last_and_found_by_the_jobs_id(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, state = served.client(), served.runtime.state_dir

    def submit(client: CoordinatorClient, spec: SubmitJob, _: str | None) -> JobView:
        return client.job(adopt(served, evaluate_on=spec.evaluate_on, seed=spec.seed))

    monkeypatch.setattr(CoordinatorClient, "submit_job", submit)  # there is no S3 server here
    asked = ("submit", "m", "v1", "--snapshot", "s3://paceline/d", "--seed")
    job_id = said(served, "job", *asked, "21", "--evaluate")["job"]["job_id"]
    unjudged = said(served, "job", *asked, "23", "--no-evaluate")["job"]["spec"]
    assert unjudged["evaluate_on"] == "", "also where the profile has every training judged"
    newest = said(served, "job", *asked, "22")["job"]["job_id"]  # these have no report
    run_id = client.job(job_id).job.run_id
    for given in ("last", job_id, job_id[:8]):
        assert flows._digest_of(given, "report_digest", "evaluate", state) == run_id
    newest_run = client.job(newest).job.run_id
    assert flows._digest_of("last", "training_digest", "train", state) == newest_run
    assert or_newest_made("last", "job_id", state) == newest
    again = ("submit", "m", "v1", "--snapshot", "s3://paceline/d", "--continue-from", "last")
    refused = paceline("jobs", *again, "--json", "--state", state)
    assert refused.returncode == 1, refused.stdout
    assert f"has not trained yet: got {newest}, " in refused.stdout
    report = JobReport(at=0, training_id="job-aa23456789ab", outcome="succeeded")
    wait_until(
        lambda: bool(client.report_job(newest, report) and client.job(newest).job.report),
        30,
        "the job has reported",
    )
    assert resolve_training_id(client, newest[:9]) == "job-aa23456789ab"
    end_all(client)
