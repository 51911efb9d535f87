"""A deployment's flow run: started once, late when Prefect is away, and ended with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest

from paceline.api import RETRY_S, STATES_S, FlowRunSupervisor, PrefectStarter
from paceline.config import load_profile
from paceline.coordinator.state import Cancel, CoordinatorSettings
from paceline.errors import AccessDenied, InvalidProfile, NotFound, ServiceUnavailable
from paceline.schemas import Deployment, EventName
from tests.coordinator.conftest import World
from tests.support.web import Call, Web, serving

RUN = "0192f0c1-0000-7000-8000-000000000001"


class Kept:
    """A coordinator without threads; ``refuse`` makes its next commits fail."""

    def __init__(self) -> None:
        self.world = World(settings=CoordinatorSettings(starts_flows=True))
        self.world.register("node-0")
        self.refuse = 0

    def read(self, question):
        return question(self.world.state)

    def handle(self, event):
        if self.refuse:
            self.refuse -= 1
            raise ServiceUnavailable("the store is away")
        return self.world.give(event)

    def now(self) -> float:
        return 1e9

    def record(self, deployment_id: str) -> Deployment:
        return self.world.state.deployment_state(deployment_id).deployment


class Prefect:
    """An orchestrator in memory that keeps the promise of idempotency keys."""

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}  # flow run → state
        self.asked = 0
        self.away = False
        self.cancels: list[str] = []

    def start(self, deployment: Deployment) -> str:
        self.asked += 1
        if self.away:
            raise ServiceUnavailable("Prefect's server does not answer")
        name = f"flow-of-{deployment.deployment_id}"
        self.runs.setdefault(name, "SCHEDULED")
        return name

    def states(self, flow_run_ids: Collection[str]) -> Mapping[str, str]:
        return {each: self.runs[each] for each in flow_run_ids if each in self.runs}

    def cancel(self, flow_run_id: str) -> None:
        self.cancels.append(flow_run_id)
        self.runs[flow_run_id] = "CANCELLING"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    def __init__(self) -> None:
        self.kept, self.prefect, self.clock = Kept(), Prefect(), Clock()
        self.keeper = self.another()

    def another(self) -> FlowRunSupervisor:
        """Return the keeper of another leader: it remembers nothing."""
        return FlowRunSupervisor(self.kept, self.prefect, monotonic=self.clock)

    def run_once(self, seconds: float = STATES_S) -> None:
        self.clock.now_s += seconds
        self.keeper.run_once()

    def told(self, name: EventName) -> list[dict[str, object]]:
        return [each.data for each in self.kept.world.names(name)]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_it_is_started_once_and_the_record_names_it(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    for _ in range(3):
        stage.run_once()
    assert stage.prefect.asked == 1
    assert stage.kept.record(d).flow_run_id == f"flow-of-{d}"
    assert stage.told(EventName.FLOW_STARTED) == [{"flow_run_id": f"flow-of-{d}"}]


def test_a_caller_that_is_a_flow_run_gets_no_other(stage: Stage) -> None:
    d = stage.kept.world.create("node-0", flow_run_id="mine")
    stage.run_once()
    assert stage.prefect.asked == 0
    assert stage.kept.record(d).flow_run_id == "mine"


def test_where_the_profile_does_not_say_so_nothing_is_started() -> None:
    off = load_profile("ci", {"control.flow_starter": "off"})
    on = load_profile("ci", {"control.flow_starter": "prefect"})
    assert [CoordinatorSettings.of(each).starts_flows for each in (off, on)] == [False, True]
    world = World()
    assert not world.state.deployment_state(world.create("node-0")).deployment.flow_wanted


def test_a_leader_that_dies_between_start_and_record_leaves_one_flow_run(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    stage.kept.refuse = 1
    with pytest.raises(ServiceUnavailable):
        stage.run_once()
    assert stage.kept.record(d).flow_run_id is None
    stage.keeper = stage.another()
    stage.run_once()
    assert stage.kept.record(d).flow_run_id == f"flow-of-{d}"
    assert list(stage.prefect.runs) == [f"flow-of-{d}"]


def test_an_unreachable_prefect_is_retried_and_reported_once(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    stage.prefect.away = True
    for _ in range(120):
        stage.run_once(1.0)
    assert stage.prefect.asked == 120 // RETRY_S
    (delayed,) = stage.told(EventName.FLOW_DELAYED)
    assert "does not answer" in str(delayed["reason"])
    assert stage.kept.world.status(d) != "failed", "the deployment is accepted all the same"
    stage.prefect.away = False
    stage.run_once(RETRY_S)
    assert stage.kept.record(d).flow_run_id == f"flow-of-{d}"
    assert len(stage.told(EventName.FLOW_STARTED)) == 1


def test_what_ended_before_prefect_came_back_is_not_started(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    stage.prefect.away = True
    stage.run_once()
    stage.kept.world.give(Cancel(deployment_id=d))
    stage.prefect.away = False
    stage.run_once(100)
    assert stage.prefect.runs == {}


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_a_cancel_in_prefect_ends_the_deployment(stage: Stage, state: str) -> None:
    d = stage.kept.world.create("node-0")
    stage.run_once()
    stage.prefect.runs[f"flow-of-{d}"] = state
    stage.run_once()
    assert stage.kept.world.status(d) == "cancelled"
    stage.run_once()
    assert stage.prefect.cancels == []


def test_a_deployment_goes_on_after_ctrl_c(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    stage.run_once()
    stage.prefect.runs[f"flow-of-{d}"] = "INTERRUPTED"
    stage.run_once()
    assert stage.kept.world.status(d) not in ("cancelled", "failed")
    stage.kept.world.give(Cancel(deployment_id=d))
    stage.run_once()
    assert stage.prefect.cancels == [], "that flow run has ended"


def test_cancelling_a_deployment_cancels_its_flow_run_exactly_once(stage: Stage) -> None:
    d, mine = stage.kept.world.create("node-0"), "mine"
    other = stage.kept.world.create("node-0", version="v2", flow_run_id=mine)
    stage.run_once()
    stage.prefect.runs |= {f"flow-of-{d}": "RUNNING", mine: "RUNNING"}
    for each in (d, other):
        stage.kept.world.give(Cancel(deployment_id=each))
    for _ in range(3):
        stage.run_once()
    assert sorted(stage.prefect.cancels) == sorted([f"flow-of-{d}", mine])
    stage.prefect.runs = dict.fromkeys(stage.prefect.runs, "CANCELLED")
    for _ in range(3):
        stage.run_once()
    assert len(stage.prefect.cancels) == 2


def test_a_flow_run_that_was_deleted_does_not_hold_up_the_others(stage: Stage) -> None:
    made = [stage.kept.world.create("node-0", version=f"v{n}") for n in range(3)]
    stage.run_once()
    for each in made:
        stage.prefect.runs[f"flow-of-{each}"] = "RUNNING"
        stage.kept.world.give(Cancel(deployment_id=each))
    cancel = stage.prefect.cancel

    def deleted(flow_run_id: str) -> None:
        if flow_run_id == f"flow-of-{made[0]}":
            raise NotFound("Prefect does not know it")
        cancel(flow_run_id)

    stage.prefect.cancel = deleted  # type: ignore[method-assign]
    stage.run_once()
    assert stage.prefect.cancels == [f"flow-of-{each}" for each in made[1:]]


def test_a_crashed_flow_run_is_reported_once_and_the_deployment_goes_on(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    stage.run_once()
    for state in ("RUNNING", "CRASHED", "CRASHED", "RUNNING", "FAILED", "FAILED"):
        stage.prefect.runs[f"flow-of-{d}"] = state
        stage.run_once()
    assert [each["state"] for each in stage.told(EventName.FLOW_ENDED)] == ["crashed", "failed"]
    assert stage.kept.world.status(d) == "init"
    assert stage.prefect.asked == 1, "whoever runs it again decides that"


def test_a_flow_run_that_prefect_has_forgotten_is_no_reason_to_stop(stage: Stage) -> None:
    d = stage.kept.world.create("node-0")
    stage.run_once()
    stage.prefect.runs.clear()
    stage.run_once()
    assert stage.kept.world.status(d) == "init"


# --- Prefect's REST, as it refuses ----------------------------------------------------------------


class Rest:
    """A Prefect server that answers every call alike, or as a test says."""

    def __init__(self) -> None:
        self.status, self.body = 200, b'{"id": "abc"}'
        self.answer: Callable[[Call], bytes] = lambda _: self.body

    def __call__(self, call: Call) -> tuple[int, bytes]:
        return self.status, self.answer(call)


@pytest.fixture
def rest() -> Rest:
    return Rest()


@pytest.fixture
def server(rest: Rest) -> Iterator[Web]:
    with serving(rest) as web:
        yield web


def test_a_start_names_the_deployment_as_its_idempotency_key(server: Web) -> None:
    world = World()
    d = world.create("node-0", run_id="run-20260101-000000-abcdef")
    assert (
        PrefectStarter(f"{server.url}/api", "user:pass").start(
            world.state.deployment_state(d).deployment
        )
        == "abc"
    )
    named, created = server.calls
    assert named.path == "/api/deployments/name/distribute-model/distribute-model"
    assert named.headers["Authorization"] == "Basic dXNlcjpwYXNz"
    assert created.path == "/api/deployments/abc/create_flow_run"
    body = json.loads(created.body)
    assert body["idempotency_key"] == d
    given = body["parameters"]
    assert (given["deployment_id"], given["target_workers"]) == (d, ["node-0"])
    assert given["activate"] is False
    assert given["run_id"] == "run-20260101-000000-abcdef"


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, b"{}", AccessDenied),
        (404, b"{}", NotFound),
        (500, b"{}", ServiceUnavailable),
        (409, b'{"detail": "no schema"}', ServiceUnavailable),
        (200, b"<html>a proxy</html>", ServiceUnavailable),
    ],
)
def test_a_refusal_by_prefect_raises_a_named_error(
    server: Web, rest: Rest, status: int, body: bytes, error: type[Exception]
) -> None:
    rest.status, rest.body = status, body
    with pytest.raises(error):
        PrefectStarter(server.url).states([RUN])


def test_an_invalid_flow_run_id_does_not_spoil_the_request(server: Web, rest: Rest) -> None:
    rest.body = json.dumps([{"id": RUN, "state_type": "RUNNING", "state_name": "RUNNING"}]).encode()
    starter = PrefectStarter(server.url)
    assert starter.states(["mine", "../x", "\0", RUN]) == {RUN: "RUNNING"}
    (call,) = server.calls
    assert json.loads(call.body)["flow_runs"]["id"]["any_"] == [RUN]
    assert starter.states(["mine"]) == {}
    assert len(server.calls) == 1


def test_a_crash_is_recorded_by_force_and_a_cancel_is_not(server: Web, rest: Rest) -> None:
    rest.body = b'{"tags": ["paceline"]}'
    starter = PrefectStarter(server.url)
    starter.cancel(RUN)
    starter.crash(RUN, "its process is gone")
    for call, kind, force in zip(
        server.calls[1:], ("CANCELLING", "CRASHED"), (False, True), strict=True
    ):
        assert call.path == f"/flow_runs/{RUN}/set_state"
        body = json.loads(call.body)
        assert (body["state"]["type"], body["force"]) == (kind, force)


@pytest.mark.parametrize(
    ("tag", "is_ours"),
    [
        ("paceline", True),
        ("run:run-20260101-000000-abcdef", True),
        ("run:nightly", False),
        ("another", False),
    ],
)
def test_only_flow_runs_of_paceline_are_cancelled(
    server: Web, rest: Rest, tag: str, is_ours: bool
) -> None:
    rest.body = json.dumps({"tags": [tag]}).encode()
    starter = PrefectStarter(server.url)
    if is_ours:
        starter.cancel(RUN)
    else:
        for named in (RUN, "../admin"):
            with pytest.raises(NotFound):
                starter.cancel(named)
    assert [each.method for each in server.calls] == ["GET", "POST"][: 1 + is_ours]


def test_the_last_lines_of_a_log_are_read_from_its_end(server: Web, rest: Rest) -> None:
    answers = {
        f"/flow_runs/{RUN}": {"id": RUN, "tags": ["paceline"], "state_type": "RUNNING"},
        "/flow_runs/filter": [],
        "/logs/filter": [{"message": "newest"}, {"message": "before"}],
    }
    rest.answer = lambda call: json.dumps(answers[call.path]).encode()
    assert PrefectStarter(server.url).view(RUN, tail=2).lines == ("before", "newest")
    asked = json.loads(server.calls[-1].body)
    assert (asked["sort"], asked["offset"], asked["limit"]) == ("TIMESTAMP_DESC", 0, 2)


def test_the_page_of_a_run_is_where_people_open_prefect(server: Web, rest: Rest) -> None:
    rest.body = json.dumps([{"id": RUN}]).encode()
    starter = PrefectStarter(f"{server.url}/api", ui_url="https://prefect.example.com/")
    page = starter.page_of_run("run-20260101-000000-abcdef")
    assert page == f"https://prefect.example.com/runs/flow-run/{RUN}"
    rest.body = b"[]"
    assert starter.page_of_run("run-20260101-000000-abcdef") is None


def test_no_server_means_try_again_and_no_url_means_a_wrong_profile() -> None:
    with pytest.raises(ServiceUnavailable):
        PrefectStarter("http://127.0.0.1:9/api").states([RUN])
    with pytest.raises(InvalidProfile):
        PrefectStarter("")
