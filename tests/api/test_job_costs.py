"""Costs and budgets of jobs as a person with a login sees them: over REST and by `paceline`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from paceline.api import create_app
from paceline.client import AccessClient, Client, CoordinatorClient
from paceline.config import Login, PriceSettings, save_login
from paceline.errors import AccessDenied, Conflict, InvalidInput, ServiceUnavailable
from paceline.jobs import cost_of, cost_row, grouped, with_state
from paceline.models import config_for
from paceline.schemas import (
    AdoptJob,
    CostEstimate,
    CreateToken,
    JobState,
    JobUsage,
    JobView,
    ResumeJob,
    Scope,
    SubmitJob,
    TrainingJob,
    TrainingUsage,
    digest_of,
    new_run_id,
)
from tests.api.conftest import make_runtime
from tests.jobs.test_cost import result
from tests.support.command import paceline
from tests.support.in_process import served

S = JobState
PRICES = PriceSettings(per_hour={"cpu": 3.0})


class Lab:
    """An installation with prices, whose table of jobs the test fills."""

    def __init__(self, app: FastAPI, url: str, token: str) -> None:
        self.app, self.url, self.token = app, url, token
        self.client = CoordinatorClient(url, token)

    def add(self, state: JobState, hours: float, **spec: Any) -> str:
        """A job whose only attempt held two nodes for so long."""
        now, run_id = time.time(), new_run_id()
        submitted = SubmitJob.model_validate(
            {"model_id": "acme/tiny", "version": "1", "data_snapshot": "s3://b/s", **spec}
        )
        usage = JobUsage(
            attempt=1,
            accelerators={"cpu": 2},
            since=now - hours * 3600,
            queued_s=1800.0,
            held_s=None if state.holds_hosts else hours * 3600,
            ended=None if state.holds_hosts else state,
        )
        job = TrainingJob(
            job_id=f"tj-{digest_of(run_id)[:12]}",
            submission_id=digest_of(run_id),
            spec=submitted,
            run_id=run_id,
            state=state,
            created_at=now,
            updated_at=now,
            usage=(usage,),
        )
        return self.app.state.jobs.add(job).job_id


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    yield from lab_with(PRICES, tmp_path_factory)


def lab_with(prices: PriceSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    runtime = make_runtime(tmp_path_factory.mktemp("costs") / "state")
    known = {"prefect_api_url": "http://127.0.0.1:9/api", "mlflow_url": "http://127.0.0.1:9"}
    runtime = runtime.model_copy(
        update={
            "profile": runtime.profile.model_copy(update={"prices": prices}),
            "endpoints": runtime.endpoints.model_copy(update=known),
        }
    )
    app = create_app(runtime)
    with served(app) as url:
        yield Lab(app, url, runtime.secrets.coordinator_token)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> TrainingUsage:
    """MLflow answers with one training, which was on two nodes."""
    usage = TrainingUsage.of(result(accelerators={"cpu": 2}))
    usage = usage.model_copy(update={"run_id": "run-20260101-000000-abcdef", "model_id": "m/two"})
    registry = SimpleNamespace(trainings=lambda: ([usage], ["run-20260101-000000-bbbbbb"]))
    where = "paceline.jobs.recorded_costs.Registry.from_runtime"
    monkeypatch.setattr(where, lambda _runtime: registry)
    return usage


def test_a_paused_job_needs_a_higher_budget_to_go_on(lab: Lab) -> None:
    job_id = lab.add(S.PAUSED, 2.0, budget=10)  # 12 EUR
    assert lab.client.job(job_id).spent == pytest.approx(12.0)
    with pytest.raises(Conflict, match="nothing is left of the job's budget") as refused:
        lab.client.change_job(job_id, "resume")
    assert "12.00 of 10.00 EUR" in str(refused.value.got)
    with pytest.raises(Conflict, match="budget"):
        lab.client.change_job(job_id, "resume", budget=11)
    assert lab.client.job(job_id).job.spec.budget == 10, "nothing half done"
    done = lab.client.change_job(job_id, "resume", budget=20).job
    assert (done.state, done.spec.budget) == (S.QUEUED, 20)
    assert lab.client.change_job(job_id, "resume", budget=0).job.spec.budget is None
    lab.client.change_job(job_id, "cancel")
    with pytest.raises(Conflict, match="not paused"):
        lab.client.change_job(job_id, "resume", budget=30)


def test_the_budget_of_a_running_job_can_be_raised_and_none_be_negative(lab: Lab) -> None:
    job_id = lab.add(S.RUNNING, 1.0, budget=1000)
    assert lab.client.change_job(job_id, "resume", budget=2000).job.spec.budget == 2000
    with pytest.raises(Conflict, match="not paused"):
        lab.client.change_job(job_id, "resume")
    with pytest.raises(InvalidInput, match="budget"):
        wrong = ResumeJob.model_construct(budget=-1.0)
        lab.client._call(JobView, "POST", f"/v1/training-jobs/{job_id}/resume", wrong)
    with pytest.raises(InvalidInput, match="budget"):
        spec = lab.client.job(job_id).job.spec.model_copy(update={"budget": -1.0})
        lab.client.submit_job(spec)
    lab.app.state.jobs.change(job_id, lambda job: with_state(job, S.FAILED, time.time(), "ended"))


def test_costs_have_every_attempt_and_the_finished_trainings(
    lab: Lab, finished: TrainingUsage
) -> None:
    runs = lab.add(S.STARTING, 1.0, team="nlp", project="q3")
    failed = lab.add(S.FAILED, 3.0, team="vision")
    found = lab.client.training_costs()
    assert found.prices == PRICES
    assert found.without_result == 1
    rows = {each.queued_job_id: each for each in found.usages}
    assert rows[""] == finished
    assert (rows[runs].state, rows[runs].team, rows[runs].project) == ("starting", "nlp", "q3")
    assert rows[runs].seconds == pytest.approx(3600, abs=300)
    assert (rows[failed].seconds, rows[failed].queue_s) == (3 * 3600, 1800)
    token = AccessClient(lab.url, lab.token).create_token(
        CreateToken(name="node", scopes=(Scope.WORKER,))
    )
    with pytest.raises(AccessDenied, match="scope"):
        CoordinatorClient(lab.url, token.token).training_costs()


def test_without_mlflow_the_jobs_are_still_there_and_it_is_said(lab: Lab) -> None:
    lab.add(S.FAILED, 1.0)
    found = lab.client.training_costs()
    assert found.usages
    assert "no job is recorded for" in found.notes[0]


def test_an_estimate_comes_with_the_submission(
    lab: Lab, finished: TrainingUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.api.jobs._require_possible", lambda *_: None)
    spec = SubmitJob.model_validate({
        "model_id": "m/two", "version": "1", "data_snapshot": "s3://b/s", "budget": 1,
        "parameters": {"training.steps": 100, "training.ranks": 2},
    })  # fmt: skip
    made = lab.client.submit_job(spec, "key-1")
    assert made.estimate is not None
    assert made.estimate.price is not None
    assert made.estimate.price.value == pytest.approx(6 * made.estimate.hours.value)
    known = lab.client.job(made.job.job_id)
    assert known.estimate == known.job.estimate == made.estimate, "it is kept"
    assert lab.client.submit_job(spec, "key-1").estimate == made.estimate
    assert made.job.state is S.QUEUED, "an estimate above the budget refuses nothing"
    other = lab.client.submit_job(spec.model_copy(update={"model_id": "m/other"}))
    assert other.estimate is None, "no training like it, and no accelerator is known"
    for each in (made, other):
        lab.client.change_job(each.job.job_id, "cancel")
    assert "estimate" not in lab.client.job(other.job.job_id).job.model_dump()


def test_an_adopted_training_has_an_estimate(lab: Lab, finished: TrainingUsage) -> None:
    spec = SubmitJob.model_validate({
        "model_id": "m/two", "version": "1", "data_snapshot": "s3://b/s",
        "parameters": {"training.steps": 100, "training.ranks": 2},
    })  # fmt: skip
    call = AdoptJob(spec=spec, run_id=new_run_id(), flow_run_id="by-hand")
    made = lab.client.adopt_job(call)
    guess = made.estimate
    assert guess is not None and guess.steps == 100
    assert lab.client.adopt_job(call).estimate == guess, "a second call returns the same job"
    lab.client.change_job(made.job_id, "cancel")


def test_submissions_of_one_minute_read_mlflow_once(
    finished: TrainingUsage, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    monkeypatch.setattr("paceline.api.jobs._require_possible", lambda *_: None)
    reads, now_s = [], [0.0]
    registry = SimpleNamespace(trainings=lambda: reads.append(1) or ([finished], []))
    where = "paceline.jobs.recorded_costs.Registry.from_runtime"
    monkeypatch.setattr(where, lambda _runtime: registry)
    monkeypatch.setattr("paceline.jobs.recorded_costs.monotonic", lambda: now_s[0])
    spec = SubmitJob(model_id="m/two", version="1", data_snapshot="s3://b/s",
                     parameters={"training.steps": 100, "training.ranks": 2})  # fmt: skip
    for lab in lab_with(PRICES, tmp_path_factory):
        for now_s[0], wanted in ((0.0, 1), (59.0, 1), (61.0, 2)):
            view = lab.client.submit_job(spec)
            assert (view.estimate is not None, len(reads)) == (True, wanted)
        lab.client.training_costs()
        assert len(reads) == 3, "costs are always those of now"


def test_what_was_estimated_stands_beside_what_a_job_took(
    lab: Lab, finished: TrainingUsage, laptop: Any
) -> None:
    laptop(lab)
    guess = CostEstimate.model_validate(
        {
            "currency": "EUR", "steps": 9, "tokens": 1.0, "accelerators": {"cpu": 2},
            "tokens_per_second": (one := {"value": 1.5, "low": 1.0, "high": 2.0}),
            "hours": one, "accelerator_hours": one | {"value": 3.0}, "energy_kwh": None,
            "price": one | {"value": 9.0}, "based_on": ("speed: as given",),
        }
    )  # fmt: skip
    job_id = lab.add(S.FAILED, 2.0)
    lab.app.state.jobs.change(job_id, lambda job: job.model_copy(update={"estimate": guess}))
    view = lab.client.job(job_id)
    assert (view.estimate, view.hours, view.spent) == (guess, 2.0, 12.0)
    figures = (
        "1.50 (1.00 to 2.00) estimated, 2.00 so far",
        "9.00 (1.00 to 2.00) EUR estimated, 12.00 so far",
    )
    for words in (("jobs", "show", job_id), ("cost", view.job.run_id)):
        shown = paceline(*words).stdout
        assert all(each in shown for each in figures), shown
        assert "kWh estimated" not in shown, "no watts are known"
    (row,) = [each for each in lab.client.training_costs().usages if each.queued_job_id == job_id]
    assert row.estimate == guess
    group = next(e for e in grouped([cost_of(row, PRICES)], "job"))
    assert cost_row(group)["estimated_price"] == 9.0
    assert cost_row(cost_of(row, PRICES))["estimated_hours"] == 1.5
    assert "estimated EUR" in paceline("cost", "--by", "job").stdout


def test_a_first_training_is_estimated_by_the_model_of_a_step(
    lab: Lab, finished: TrainingUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.api.jobs._require_possible", lambda *_: None)
    config = config_for(1_000_000, 128)
    stored = {"new": config.model_dump_json().encode(), "odd": b'{"model_type": "mamba"}'}
    monkeypatch.setattr(
        "paceline.storage.ObjectStore.get_bytes",
        lambda _store, url, *_: stored[url.split("/")[-3]],
    )
    made = {}
    for model, kind in (("new", "h100"), ("new", "X9"), ("odd", "h100")):
        spec = SubmitJob.model_validate({
            "model_id": f"m/{model}", "version": "1", "data_snapshot": "s3://b/s",
            "parameters": {"training.steps": 100, "training.batch_sequences": 8},
            "resources": {"ranks": 2, "accelerator": kind},
        })  # fmt: skip
        view = lab.client.submit_job(spec)
        lab.client.change_job(view.job.job_id, "cancel")
        made[model, kind] = view.estimate
    assert made["new", "X9"] is made["odd", "h100"] is None
    found = made["new", "h100"]
    assert found is not None
    assert (found.tokens, found.accelerators) == (100 * 8 * 128, {"h100": 2})
    assert found.price is None, "the profile has a price of cpu alone"
    assert "by the model of a step on mesh dp2" in found.based_on[0]


def test_a_program_reads_estimate_and_cost_and_raises_a_budget(
    lab: Lab, finished: TrainingUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.api.jobs._require_possible", lambda *_: None)
    spent = lab.add(S.PAUSED, 2.0, budget=10)  # 12 EUR
    with Client(lab.url, lab.token) as client:
        made = client.submit_view(
            "m/two", "1", "s3://b/s", resources={"ranks": 2}, parameters={"training.steps": 9}
        )
        assert made.estimate is not None
        assert (made.estimate.steps, made.job.state) == (9, S.QUEUED)
        client.cancel_job(made.job.job_id)
        view = client.job_view(spent)
        assert (view.spent, view.currency) == (pytest.approx(12.0), "EUR")
        assert "mlflow" in view.pages
        with pytest.raises(Conflict, match="nothing is left of the job's budget"):
            client.resume_job(spent)
        assert client.resume_job(spent, budget=20).spec.budget == 20
        assert client.resume_job(spent, budget=0).spec.budget is None
        client.cancel_job(spent)


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Logs a machine without an installation in to one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_STATE", raising=False)
    return lambda lab: save_login(Login(coordinators=(lab.url,), token=lab.token))


@pytest.mark.parametrize("known", ["nothing", "watts", "watts and prices"])
def test_a_submission_prints_its_estimate_and_known_energy_and_price(
    known: str,
    finished: TrainingUsage,
    laptop: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setattr("paceline.api.jobs._require_possible", lambda *_: None)
    prices = PriceSettings(
        watts={"cpu": 200} if "watts" in known else {},
        per_hour={"cpu": 3.0} if "prices" in known else {},
    )
    for lab in lab_with(prices, tmp_path_factory):
        laptop(lab)
        words = "jobs submit m/two 1 --snapshot s3://b/s --ranks 2 --steps 1000"
        done = paceline(*words.split())
        assert done.returncode == 0, done.stderr
        (line,) = [each for each in done.stderr.splitlines() if each.startswith("estimate: ")]
        expected = "hours" + ", kWh" * ("watts" in known) + ", EUR" * ("prices" in known)
        figure = r"[\d.e-]+ \([\d.e-]+ to [\d.e-]+\) "
        assert re.sub(figure, "", line).startswith(f"estimate: {expected}; speed: as measured")
        assert len(re.findall(figure, line)) == expected.count(",") + 1


def test_a_laptop_sees_costs_and_raises_a_budget(
    lab: Lab, finished: TrainingUsage, laptop: Any
) -> None:
    laptop(lab)
    lab.add(S.FAILED, 10.0, team="laptop", project="p")
    job_id = lab.add(S.PAUSED, 1.0, team="laptop", budget=5)
    rows = json.loads(paceline("cost", "--by", "team", "--json").stdout)["groups"]
    (mine,) = [each for each in rows if each["name"] == "laptop"]
    assert mine["price"] == pytest.approx(66.0)
    assert mine["queue_hours"] == pytest.approx(1.0)
    assert "laptop" in paceline("cost", "--by", "team").stdout
    run_id = lab.client.job(job_id).job.run_id
    one = paceline("cost", run_id).stdout
    assert "attempt 1: paused" in one
    assert "before: queue" in one
    shown = paceline("jobs", "show", job_id).stdout
    assert "6.00 of 5.00 EUR" in shown
    refused = paceline("jobs", "resume", job_id)
    assert refused.returncode != 0
    assert "6.00 of 5.00 EUR" in refused.stderr
    assert "--budget" in refused.stderr
    assert paceline("jobs", "resume", job_id, "--budget", "-1").returncode == 2
    done = paceline("jobs", "resume", job_id, "--budget", "50")
    assert f"{job_id}: queued" in done.stdout, done.stderr
    lab.client.change_job(job_id, "cancel")
    save_login(Login(coordinators=("http://127.0.0.1:9",), token=lab.token))
    assert paceline("cost").returncode == ServiceUnavailable("").exit_code
