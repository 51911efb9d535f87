"""A run and its stages: what the ledger knows is not done again, what went wrong can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.errors import Cancelled, Conflict, GateRefused, InvalidInput, ServiceUnavailable
from paceline.registry import MetricPoint
from paceline.schemas import (
    CreatedDeployment,
    CreateDeployment,
    Deployment,
    DeploymentStatus,
    RankEvent,
    StageRecord,
)
from paceline.tasks import train
from paceline.tasks._support import deployment, run
from paceline.tasks._support.figures import Figures
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.package import next_version

RUN_ID = "run-20261120-153600-9f3a1c"
DIGEST = "a" * 64


class FakeCoordinator:
    """Keeps a ledger and deployments in memory, and is away for the next ``away`` calls."""

    def __init__(self) -> None:
        self.ledger: dict[tuple[str, str], StageRecord] = {}
        self.made: dict[str, Deployment] = {}
        self.away = 0

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise ServiceUnavailable("the coordinator does not answer")

    def ledger_get(self, stage: str, input_digest: str) -> StageRecord | None:
        self._answer()
        return self.ledger.get((stage, input_digest))

    def ledger_put(self, record: StageRecord) -> StageRecord:
        self._answer()
        self.ledger[record.stage, record.input_digest] = record
        return record

    def deployments(self) -> list[Deployment]:
        self._answer()
        return list(self.made.values())

    def create(self, call: CreateDeployment, idempotency_key: str) -> CreatedDeployment:
        deployment = self.made.setdefault(
            idempotency_key,
            Deployment(
                deployment_id=f"dep-{len(self.made)}",
                manifest_digest=DIGEST,
                status=DeploymentStatus.DOWNLOADING,
                total_bytes=1,
                total_chunks=1,
                total_pieces=1,
                epoch=1,
                started_at=0.0,
                **call.model_dump(exclude={"seed", "allow_older", "selector"}),
            ),
        )
        self._answer()  # written, but the caller may see a timeout
        return CreatedDeployment(
            deployment_id=deployment.deployment_id,
            status=deployment.status,
            estimated_time_seconds=1.0,
        )

    def turn(self, deployment_id: str, status: DeploymentStatus) -> None:
        for key, each in self.made.items():
            if each.deployment_id == deployment_id:
                self.made[key] = each.model_copy(update={"status": status})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RETRY_S", 0.001)


def installed(state: Path, url: str = "http://127.0.0.1:1") -> Runtime:
    runtime = Runtime(
        profile=Profile(), state_dir=state, endpoints=Endpoints(coordinator_url=url),
        secrets=Secrets(),
    )  # fmt: skip
    save_runtime(runtime)
    return runtime


@pytest.fixture
def opened(tmp_path: Path) -> Run:
    installed(tmp_path)
    found = Run.open(tmp_path, RUN_ID)
    found.__dict__["coordinator"] = FakeCoordinator()
    found.__dict__["registry"] = SimpleNamespace()
    return found


def coordinator_of(opened: Run) -> FakeCoordinator:
    fake = opened.coordinator
    assert isinstance(fake, FakeCoordinator)
    return fake


@pytest.mark.parametrize("run_id", ["../../etc", "run-1", "x' or '1'='1", "run-\u0661"])
def test_an_id_that_is_not_ours_is_refused(tmp_path: Path, run_id: str) -> None:
    installed(tmp_path)
    with pytest.raises(InvalidInput, match="not a run id"):
        Run.open(tmp_path, run_id)


def test_flows_of_one_run_share_it_until_its_end(opened: Run) -> None:
    assert Run.open(opened.state_dir, RUN_ID) is opened
    opened.close()
    assert Run.open(opened.state_dir, RUN_ID) is not opened


def test_an_installation_that_was_started_anew_is_another_run(opened: Run) -> None:
    installed(Path(opened.state_dir), "http://127.0.0.1:2")
    again = Run.open(opened.state_dir, RUN_ID)
    assert again is not opened
    assert again.runtime.endpoints.coordinator_url == "http://127.0.0.1:2"


def test_a_stage_is_done_once_and_again_where_it_is_no_longer_true(opened: Run) -> None:
    done: list[int] = []

    def work() -> dict[str, Any]:
        done.append(1)
        return {"n": len(done)}

    def stage(still_true: bool = True) -> Any:
        return opened.stage("s", {"a": 1}, work, still_true=lambda _: still_true)

    assert not stage().reused
    assert stage().reused
    assert stage().output == {"n": 1}
    assert stage(still_true=False).output == {"n": 2}


def test_work_that_is_done_outlives_a_coordinator_that_restarts(opened: Run) -> None:
    def work() -> dict[str, Any]:
        coordinator_of(opened).away = 3
        return {}

    opened.stage("s", {}, work)
    assert len(coordinator_of(opened).ledger) == 1


def call_of(*targets: str) -> CreateDeployment:
    return CreateDeployment(
        model_id="m", version="1", source_url="s3://b/m/1", target_workers=targets, run_id=RUN_ID
    )


@pytest.fixture
def begin(opened: Run) -> Callable[..., str]:
    return lambda *targets: deployment.begin(opened, call_of(*targets), DIGEST, "relay")


def test_a_relay_under_way_is_followed_not_doubled(begin: Callable[..., str]) -> None:
    assert begin("n-0", "n-1") == begin("n-1", "n-0")
    assert begin("n-0") != begin("n-0", "n-1")


@pytest.mark.parametrize(
    "end", [DeploymentStatus.FAILED, DeploymentStatus.CANCELLED, DeploymentStatus.COMPLETE]
)
def test_a_relay_that_ended_is_begun_anew_in_the_same_run(
    begin: Callable[..., str], opened: Run, end: DeploymentStatus
) -> None:
    first = begin("n-0")
    coordinator_of(opened).turn(first, end)
    second = begin("n-0")
    assert second != first
    coordinator_of(opened).turn(second, end)
    assert begin("n-0") not in (first, second)


def test_a_creation_whose_answer_was_lost_is_one_deployment(
    begin: Callable[..., str], opened: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = coordinator_of(opened)
    create = fake.create

    def losing(call: CreateDeployment, idempotency_key: str) -> CreatedDeployment:
        fake.away = 1 - len(fake.made)
        return create(call, idempotency_key)

    monkeypatch.setattr(fake, "create", losing)
    begin("n-0")
    assert len(fake.made) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GateRefused("no"), "FAILED"),
        (Cancelled("stop"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (None, "FINISHED"),
    ],
    ids=repr,
)
def test_the_end_of_a_run_is_recorded_for_what_it_was(
    opened: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: str
) -> None:
    closed: list[str] = []
    monkeypatch.setattr("paceline.tasks._support.lineage._open", lambda *_: None)
    monkeypatch.setattr(
        "paceline.tasks._support.lineage._close", lambda _run, status, _why: closed.append(status)
    )
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, recorded(opened, "outer"), recorded(opened, "inner"):
        if error is not None:
            raise error
    assert closed == [status]


def test_what_went_wrong_is_told_even_where_mlflow_is_away(
    opened: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ServiceUnavailable("MLflow does not answer")

    monkeypatch.setattr("paceline.tasks._support.lineage._open", lambda *_: None)
    monkeypatch.setattr("paceline.tasks._support.lineage._close", away)
    with pytest.raises(GateRefused), recorded(opened, "outer"):
        raise GateRefused("no")


@pytest.mark.parametrize(
    ("before", "after"), [("1", "2"), ("9", "10"), ("1.2", "1.3"), ("v1", "v1.1")]
)
def test_the_next_version_is_one_higher(before: str, after: str) -> None:
    assert next_version(before) == after


def test_two_flows_do_not_move_one_models_aliases_at_once(opened: Run) -> None:
    with opened.lock("m"):
        with pytest.raises(Conflict, match="another flow"), opened.lock("m", deadline_s=0.0):
            pass
        with opened.lock("another", deadline_s=0.0):
            pass
    with opened.lock("m", deadline_s=0.0):
        pass


def test_training_goes_on_while_mlflow_is_away(opened: Run) -> None:
    sent: list[int] = []
    away = True

    def send(points: Sequence[MetricPoint]) -> None:
        if away:
            raise ServiceUnavailable("MLflow does not answer")
        sent.append(len(points))

    with Figures(send, lambda _fraction: None) as figures:
        follow = train._follow(opened, 500, figures)
        for step in range(1, 501):
            follow(RankEvent(event="step", rank=0, attempt=1, step=step, data={"loss": 1.0}))
        away = False
    assert sum(sent) == 500
