"""Heartbeats by the short path get the answers of the route, which gets what that path refuses."""

import asyncio
import json

import pytest
from fastapi import FastAPI

from paceline.api import HeartbeatMiddleware, add_problem_handlers, answer_beat
from paceline.coordinator.state import Answer, AwaitCommands, HeartbeatReceived
from paceline.errors import ServiceUnavailable
from paceline.schemas import DeploymentBeat, Heartbeat, WorkerStatus
from tests.coordinator.conftest import World
from tests.coordinator.test_state import started

PATH = "/workers/heartbeat"


class Driver:
    """A coordinator whose state is a test's world; it remembers which way events took."""

    stopping = False

    def __init__(self, world: World) -> None:
        self.world, self.busy, self.away = world, False, False
        self.now_taken: list[object] = []
        self.slowly_taken: list[object] = []

    def now(self) -> float:
        return self.world.now_s

    def try_decide(self, event):
        if self.busy or (
            isinstance(event, HeartbeatReceived)
            and not self.world.state.agents.needs_no_commit(event.beat)
        ):
            return None
        self.now_taken.append(event)
        (effect,) = self.world.state.handle(event, self.world.now_s)
        assert isinstance(effect, Answer)
        return effect.record

    def handle(self, event):
        if self.away:
            raise ServiceUnavailable("the store is away")
        self.slowly_taken.append(event)
        return self.world.give(event)


def app_of(driver: Driver) -> FastAPI:
    app = FastAPI()

    @app.post(PATH)
    async def heartbeat(beat: Heartbeat, wait_s: float = 0.0):
        return {"route": beat.worker_id}

    add_problem_handlers(app)
    app.add_middleware(HeartbeatMiddleware, coordinator=driver)
    return app


def post(app, *parts: bytes, query: bytes = b"", kind: bytes = b"application/json"):
    """Send a body in parts; return the status and what came back."""
    waiting = [
        {"type": "http.request", "body": part, "more_body": place + 1 < len(parts)}
        for place, part in enumerate(parts)
    ]
    said = []

    async def receive():
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message):
        said.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", kind)]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": PATH, "raw_path": PATH.encode(), "query_string": query,
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "server": ("x", 1),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    body = b"".join(each.get("body", b"") for each in said[1:])
    return said[0]["status"], json.loads(body)


def beat(worker_id: str = "node-0", *entries: DeploymentBeat, incarnation: int = 1) -> bytes:
    status = entries[0].status if entries else WorkerStatus.IDLE
    made = Heartbeat(
        worker_id=worker_id, status=status, incarnation=incarnation, deployments=entries
    )
    return made.model_dump_json().encode()


@pytest.fixture
def driver(world) -> Driver:
    return Driver(world)


def test_calm_beat_is_answered_at_once_and_as_the_state_says(driver, world):
    world.register("node-0")
    app = app_of(driver)
    for _ in range(2):
        status, answer = post(app, beat())
        assert (status, answer["continue"], answer["commands"]) == (200, True, [])
        assert answer["next_beat_s"] == world.state.fleet.beat_interval_s()
    assert len(driver.now_taken) == 2
    assert not driver.slowly_taken


def test_commands_and_strangers_are_answered_too(driver, world):
    d = started(world, "node-0", "node-1")
    world.register("node-0")  # its plan is not for it any more
    world.tick()
    status, answer = post(app_of(driver), beat(incarnation=2))
    assert [each["deployment_id"] for each in answer["commands"]] == [d]
    status, answer = post(app_of(driver), beat("nobody"))
    assert (status, answer["continue"]) == (200, False)


def test_what_has_to_be_kept_goes_through_a_thread_and_its_commit(driver, world):
    d = started(world, "node-0")
    receipt = world.receipt(d, "node-0")
    done = world.entry(d, "node-0", 8, status=WorkerStatus.COMPLETE, receipt=receipt)
    app = app_of(driver)
    driver.away = True
    status, problem = post(app, beat("node-0", done))
    assert (status, problem["code"]) == (503, "ServiceUnavailable")
    driver.away = False
    assert post(app, beat("node-0", done))[0] == 200
    assert len(driver.slowly_taken) == 1
    assert world.state.deployment_state(d).parts["node-0"].receipt == receipt
    assert post(app, beat("node-0", done))[0] == 200
    assert len(driver.slowly_taken) == 1, "the same receipt again is nothing to keep"


@pytest.mark.parametrize("more", ["lost_sources", "corrupt_sources", "failure"])
def test_calm_is_said_of_nothing_that_leaves_something_to_keep(world, more):
    d = started(world, "node-0", "node-1")
    fields = {more: ("node-1",)} if more != "failure" else {"status": WorkerStatus.FAILED}
    entry = world.entry(d, "node-0", 3, **fields)
    made = Heartbeat(worker_id="node-0", status=entry.status, deployments=(entry,))
    assert not world.state.agents.needs_no_commit(made)
    assert len(world.state.handle(HeartbeatReceived(beat=made), world.now_s)) > 1


def test_busy_state_is_asked_on_a_thread(driver, world):
    world.register("node-0")
    driver.busy = True
    assert post(app_of(driver), beat())[0] == 200
    assert len(driver.slowly_taken) == 1


def test_body_in_parts_is_one_body(driver, world):
    world.register("node-0")
    whole = beat()
    assert post(app_of(driver), whole[:10], whole[10:])[1]["continue"]


@pytest.mark.parametrize(
    ("body", "more", "status"),
    [
        (b"{", {}, 400),
        (b'{"worker_id": 7}', {}, 422),
        (b"", {}, 422),
        (beat(), {"query": b"wait_s=-1"}, 200),
        (beat(), {"query": b"other=1"}, 200),
        (beat(), {"query": b"wait_s=31"}, 200),
    ],
)
def test_whatever_is_unusual_is_the_routes_to_answer(driver, world, body, more, status):
    world.register("node-0")
    got, answer = post(app_of(driver), body, **more)
    assert got == status
    assert answer.get("route") == ("node-0" if status == 200 else None)
    assert not driver.now_taken


def test_held_beat_is_answered_when_there_is_something_to_do(driver, world):
    from paceline.coordinator import Notifier

    driver.notifier = Notifier()
    world.register("node-0")

    async def hold():
        made = Heartbeat.model_validate_json(beat())
        held = asyncio.ensure_future(answer_beat(driver, made, 25.0))
        while not driver.notifier._waiting:
            await asyncio.sleep(0)
        d = world.create("node-0")
        driver.notifier.notify()
        answer = await held
        assert [each.deployment_id for each in answer.commands] == [d]
        assert isinstance(driver.now_taken[-1], AwaitCommands)
        assert not driver.notifier._waiting

    asyncio.run(hold())
