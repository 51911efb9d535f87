"""`paceline jobs` and `Client` against a real coordinator process: lists, progress and changes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import paceline as package
from paceline.cli.options import whole_run_id, whole_training_id
from paceline.config import Endpoints
from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.schemas import AdoptJob, JobReport, JobState, SubmitJob, new_run_id, schema_text
from tests.api.conftest import FakeAgent, Served, creation, make_model, make_runtime
from tests.support.command import paceline
from tests.support.stack import wait_until
from tests.support.web import Call, serving


def mlflow(call: Call) -> tuple[int, bytes]:
    """One experiment, and a run of each run id that is searched."""
    asked = json.loads(call.body)
    if call.path.endswith("/experiments/search"):
        return 200, b'{"experiments": [{"experiment_id": "7"}]}'
    tags = [{"key": "paceline.run_id", "value": asked["filter"].split("'")[1].rstrip("%")}]
    found = {"info": {"experiment_id": "7", "run_id": "abc"}, "data": {"tags": tags}}
    return 200, json.dumps({"runs": [found]}).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    with serving(mlflow) as web:
        runtime = make_runtime(tmp_path_factory.mktemp("jobs") / "state", lost_after_beats=100_000)
        endpoints = Endpoints(mlflow_url=web.url)
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


def adopt(served: Served, **fields: Any) -> str:
    given = {"model_id": "m", "version": "v1", "data_snapshot": "s3://b/d"} | fields
    spec = SubmitJob.model_validate(given)
    return served.client().adopt_job(AdoptJob(spec=spec, run_id=new_run_id())).job_id


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
        assert whole_run_id(known, new) == new, "a run to be made"
    assert whole_run_id(without_mlflow, run_id[:-1]) == run_id
    adopt(served, name="another", resources={"ranks": 1}, seed=9)
    with pytest.raises(InvalidInput, match="several runs begin so"):
        whole_run_id(without_mlflow, "run-")
    with pytest.raises(NotFound, match="no such run"):
        whole_run_id(without_mlflow, "run-1999")
    with pytest.raises(InvalidInput, match="not a run id"):
        whole_run_id(without_mlflow, "../x")

    report = JobReport(at=0, training_id="job-0123456789ab")
    wait_until(
        lambda: bool(client.report_job(job_id, report) and client.job(job_id).job.report),
        30,
        "the job has reported",
    )
    assert whole_training_id(client, "job-01") == "job-0123456789ab"
    assert whole_training_id(client, "job-ffffffffffff") == "job-ffffffffffff", "of no job now"
    with pytest.raises(NotFound, match="no such training"):
        whole_training_id(client, "job-ff")


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
