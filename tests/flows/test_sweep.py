"""The flow sweep: the command starts it; its study is the installation's, its trials one run's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema

from paceline.client import Client
from paceline.config import PriceSettings, Runtime, save_runtime
from paceline.errors import Cancelled, Conflict, RunElsewhere
from paceline.flows.sweep import sweep
from paceline.jobs import studies_of
from paceline.jobs.sweeps import held, opened
from paceline.registry import TAG_PARENT, TAG_SWEEP, Registry
from paceline.schemas import (
    FLOW_PARAMETERS,
    JobState,
    StageRecord,
    SweepShown,
    new_run_id,
    sweep_key,
)
from paceline.tasks import sweep as tasks
from paceline.tasks._support import cancelling
from paceline.tasks._support.lineage import nest
from paceline.tasks._support.run import Run
from tests.api.conftest import make_runtime
from tests.support.command import paceline
from tests.support.job_queue import SPACE, STEPS, Queue

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.xdist_group("prefect"),  # one server
    pytest.mark.timeout(300),
]


class Installation(Queue):
    """Jobs, and the ledger of a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: dict[tuple[str, str], StageRecord] = {}

    def ledger_put(self, record: StageRecord) -> None:
        self.ledger[record.stage, record.input_digest] = record

    def ledger_get(self, stage: str, key: str) -> StageRecord | None:
        return self.ledger.get((stage, key))


@pytest.fixture
def runtime(tmp_path: Path, mlflow_url: str, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.chdir(tmp_path)
    made = make_runtime(tmp_path)
    endpoints = made.endpoints.model_copy(update={"mlflow_url": mlflow_url})
    made = made.model_copy(update={"endpoints": endpoints})
    save_runtime(made)
    return made


@pytest.fixture
def installation(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Installation:
    found = Installation()
    monkeypatch.setattr(tasks.Client, "of", lambda _runtime: found)
    monkeypatch.setattr(Run, "coordinator", found)
    monkeypatch.setattr("paceline.jobs.sweeps.sweep.LOOK_S", 0.0)
    return found


@pytest.fixture
def typed(installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `paceline sweep --detach` starts with these words."""
    started: list[tuple[str, dict[str, Any]]] = []

    def start(flow: str, parameters: dict[str, Any], **_: object) -> Any:
        started.append((flow, parameters))
        return SimpleNamespace(run_id=new_run_id(), id="an-id", page="http://page")

    def type_(*words: str) -> dict[str, Any]:
        (tmp_path / "space.toml").write_text(SPACE)
        done = paceline("sweep", "lr", "org/m", "1", "--snapshot", "s3://b/d", "--space",
                        "space.toml", "--steps", str(STEPS), "--detach", *words)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "http://page" in done.stdout and "paceline sweep report lr" in done.stdout
        flow, parameters = started.pop()
        assert flow == "sweep" and parameters.keys() <= FLOW_PARAMETERS["sweep"]
        return parameters

    monkeypatch.setattr(installation, "start", start, raising=False)
    monkeypatch.setattr("paceline.cli.training.sweep.Client", lambda **_: installation)
    return type_


def run(runtime: Runtime, parameters: dict[str, Any], run_id: str) -> SweepShown:
    given = sweep.validate_parameters(parameters)  # as Prefect does with what its API was given
    found = sweep(**given | {"state_dir": str(runtime.state_dir), "run_id": run_id})
    assert isinstance(found, SweepShown)
    return found


def test_a_detached_sweep_is_one_mlflow_run_with_a_child_for_each_trial(
    runtime: Runtime, installation: Installation, typed: Callable[..., dict[str, Any]]
) -> None:
    began, registry = new_run_id(), Registry.from_runtime(runtime)
    chosen = ("--seed", "7", "--ranks", "2", "--team", "nlp", "--purpose", "speech")
    run(runtime, typed("--trials", "2", *chosen), began)
    found = run(runtime, typed("--trials", "3", *chosen), new_run_id())  # it goes on
    assert found.run_id == began and found.best is not None and len(found.trials) == 3
    jobs = list(installation.jobs.values())
    specs = [each.spec for each in jobs]
    assert [(e.sweep, e.team, e.purpose, e.resources.ranks) for e in specs] == [
        (began, "nlp", "speech", 2)
    ] * 3

    parent = registry.find_run(began)
    logged = registry.call("get_run", parent)
    assert logged.info.status == "FINISHED" and logged.info.run_name == "sweep lr"
    assert logged.data.tags[TAG_SWEEP] == "lr"
    best = logged.data.tags.get("now.best.job", logged.data.params["best.job"])
    assert best == found.best.job_id
    assert logged.data.metrics["best/loss"] == pytest.approx(found.best.value)
    assert "best/score" in logged.data.metrics
    assert set(registry.history(parent, "trial/loss")) == set(range(3))
    assert b"Parallel coordinates" in registry.read_artifact(parent, "sweep.html")

    for job in jobs:  # what the flow train-model does of each
        of_job = Run(runtime, job.run_id)
        nest(of_job, job.spec.sweep)
    below = registry.call(
        "search_runs", [logged.info.experiment_id], f"tags.`{TAG_PARENT}` = '{parent}'"
    )
    assert len(below) == 3

    record = installation.ledger_get("sweep", sweep_key("lr"))
    assert record is not None
    assert SweepShown.model_validate(record.output).best == found.best


def test_a_detached_sweep_has_code_and_a_budget_of_its_own(
    runtime: Runtime, installation: Installation, typed: Callable[..., dict[str, Any]]
) -> None:
    installation.prices = PriceSettings(per_hour={"h100": 2.5})
    installation.trial_price, code = 10.0, "git+https://host/r.git@" + "a" * 40 + "#task:make"
    chosen = ("--trials", "5", "--parallel", "1", "--code-ref", code, "--budget", "15")
    found = run(runtime, typed(*chosen), new_run_id())
    assert found.stopped == "the budget is spent: 20.00 of 15.00 EUR"
    assert [each.spec.code_ref for each in installation.jobs.values()] == [code] * 2
    record = installation.ledger_get("sweep", sweep_key("lr"))
    assert record is not None and record.output["stopped"] == found.stopped


def test_a_sweep_that_a_command_runs_here_is_a_run_in_mlflow_too(
    runtime: Runtime, installation: Installation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    monkeypatch.setattr("paceline.cli.training.sweep.Client", lambda **_: installation)
    for module in ("paceline.cli.training.sweep", "paceline.jobs.sweeps.sweep"):
        monkeypatch.setattr(f"{module}.runtime_of", lambda _client: runtime)
    done = paceline("sweep", "here", "org/m", "1", "--snapshot", "s3://b/d", "--space",
                    "space.toml", "--trials", "1", "--json")  # fmt: skip
    found = SweepShown.model_validate_json(done.stdout)
    (job,) = installation.jobs.values()
    assert found.run_id == job.spec.sweep
    logged = Registry.from_runtime(runtime)
    run = logged.call("get_run", logged.find_run(found.run_id))
    assert (run.info.status, run.data.params["best.job"]) == ("FINISHED", job.job_id)


@pytest.mark.nightly
def test_a_laptop_reads_what_a_detached_sweep_has_found(
    runtime: Runtime,
    installation: Installation,
    typed: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(runtime, typed("--trials", "1"), new_run_id())
    login = runtime.model_copy(update={"is_login": True})
    monkeypatch.setattr("paceline.cli.training.sweep.find_installation", lambda _state: login)
    monkeypatch.setattr("paceline.cli.training.sweep.Client", SimpleNamespace(of=Client.of))
    shown = paceline("sweep", "report", "lr", "--json")
    assert SweepShown.model_validate_json(shown.stdout).trials[0].state == "complete"
    missing = paceline("sweep", "report", "rl")
    assert missing.returncode == 1 and "no such sweep" in missing.stderr


def test_a_cancel_in_prefect_cancels_the_jobs_and_the_sweep_goes_on_later(
    runtime: Runtime,
    installation: Installation,
    typed: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancelled, look = threading.Event(), Queue.job

    def job(self: Queue, job_id: str) -> Any:
        cancelled.set()
        return look(self, job_id)

    monkeypatch.setattr(Queue, "job", job)
    monkeypatch.setattr(cancelling, "cancelled_flow_run", lambda: "this one")
    with monkeypatch.context() as during:
        during.setattr(cancelling, "noticed", lambda: nullcontext(cancelled))
        with pytest.raises(Cancelled, match="the sweep was cancelled"):
            run(runtime, typed("--trials", "2"), new_run_id())
    assert [each.state for each in installation.jobs.values()] == [JobState.CANCELLED] * 2
    found = run(runtime, typed("--trials", "2"), new_run_id())
    assert [each.state for each in found.trials] == ["fail"] * 2 + ["complete"] * 2


@pytest.mark.nightly
def test_a_second_start_of_a_running_sweep_leaves_its_record_to_the_first(
    runtime: Runtime, installation: Installation, typed: Callable[..., dict[str, Any]]
) -> None:
    began, registry, over = new_run_id(), Registry.from_runtime(runtime), threading.Event()
    run(runtime, typed("--trials", "1"), began)
    parent = registry.find_run(began)
    with opened(studies_of(runtime), "lr", None) as study, held(study, time.sleep) as renew:
        registry.resume_run(parent)  # the first: its trial runs

        def go_on() -> None:
            while not over.wait(0.1):
                renew()

        first = threading.Thread(target=go_on)
        first.start()
        try:
            with pytest.raises(RunElsewhere, match="another process runs this sweep"):
                run(runtime, typed("--trials", "2"), new_run_id())
        finally:
            over.set()
            first.join()
    logged = registry.call("get_run", parent)
    assert logged.info.status == "RUNNING", "the first one closes it"
    assert "failure.txt" not in [e.path for e in registry.call("list_artifacts", parent)]
    assert len(installation.jobs) == 1, "no job of the second"


def test_a_taken_name_leaves_the_other_sweeps_record_as_it_is(
    runtime: Runtime, installation: Installation, typed: Callable[..., dict[str, Any]]
) -> None:
    began, registry = new_run_id(), Registry.from_runtime(runtime)
    run(runtime, typed("--trials", "1", "--team", "nlp"), began)
    parent = registry.find_run(began)
    before = registry.call("get_run", parent).to_dictionary()
    record = installation.ledger_get("sweep", sweep_key("lr"))
    with pytest.raises(Conflict, match=r"another sweep's.*got team vision, wanted team nlp"):
        run(runtime, typed("--trials", "1", "--team", "vision"), new_run_id())
    assert registry.call("get_run", parent).to_dictionary() == before
    assert "failure.txt" not in [e.path for e in registry.call("list_artifacts", parent)]
    assert installation.ledger_get("sweep", sweep_key("lr")) == record


SEARCH = {"space": {"training.learning_rate": {"kind": "float", "low": 1e-5, "high": 1e-2}}}
GIVEN = {"name": "lr", "model_id": "acme/tiny", "version": "1", "snapshot_url": "s3://b/d"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("search", {"space": {}}),
        ("search", {"space": {"training.seed": {"kind": "log"}}}),
        ("search", SEARCH | {"trials": 0}),
        ("search", SEARCH | {"pruner": "often"}),
        ("search", SEARCH | {"trails": 3}),
        ("resources", {"ranks": -1}),
        ("priority", 1000),
        ("purpose", "a purpose"),
        ("budget", -1),
    ],
)
def test_prefects_page_takes_a_sweep_and_refuses_a_bad_one(field: str, value: object) -> None:
    with get_client(sync_client=True) as client:
        deployment: UUID = client.create_deployment(
            client.create_flow(sweep),
            "form",
            enforce_parameter_schema=True,
            parameter_openapi_schema=parameter_schema(sweep).model_dump_for_openapi(),
        )
        given = GIVEN | {"search": SEARCH}
        assert client.create_flow_run_from_deployment(deployment, parameters=given)
        with pytest.raises(PrefectHTTPStatusError, match="409 Conflict") as refused:
            client.create_flow_run_from_deployment(deployment, parameters=given | {field: value})
    assert field in refused.value.response.text
