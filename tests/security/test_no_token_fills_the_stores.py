"""What a token can make the coordinator keep is bounded: deployments, events, counts of edges,
processes of a worker, and what one body costs to refuse.
"""

from __future__ import annotations

import json
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.api import create_app
from paceline.coordinator.state import CoordinatorSettings, EmitEvent, kept_bytes
from paceline.coordinator.stores import MAX_TEXT_CHARS, to_event
from paceline.errors import ServiceUnavailable
from paceline.schemas import EdgeTally, EventName
from tests.api.conftest import make_runtime
from tests.coordinator.conftest import make_world  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient


def test_closed_deployments_are_forgotten_as_fast_as_they_are_made(make_world: Any) -> None:  # noqa: F811
    world = make_world(settings=CoordinatorSettings(kept_closed=2, kept_at_most=4, open_at_most=4))
    for _ in range(40):  # in twenty seconds: a look a minute forgot eight of them
        world.cancel(world.create("node-0", "node-1"))
        world.wait(0.5)
    assert len(world.state.deployments()) <= 7


def test_no_more_deployments_are_kept_than_can_be_forgotten(make_world: Any) -> None:  # noqa: F811
    world = make_world(settings=CoordinatorSettings(kept_closed=2, kept_at_most=4, open_at_most=4))
    with pytest.raises(ServiceUnavailable, match="too many deployments are kept"):
        for _ in range(20):  # and no time passes
            world.cancel(world.create("node-0", "node-1"))
    assert len(world.state.deployments()) == 8
    world.wait(1)
    world.create("node-0", "node-1")


def test_deployments_take_so_many_bytes_in_all(make_world: Any) -> None:  # noqa: F811
    probe = make_world()
    probe.create("node-0", "node-1")
    one = kept_bytes(list(probe.state._index))
    world = make_world(settings=CoordinatorSettings(kept_bytes_at_most=6 * one))
    for _ in range(5):
        world.cancel(world.create("node-0", "node-1"))
    world.wait(1)
    assert len(world.state.deployments()) == 3, "closed ones take half of it, whatever their age"
    for _ in range(3):
        world.create("node-0", "node-1")
    with pytest.raises(ServiceUnavailable, match="take too much room"):
        world.create("node-0", "node-1")


def test_one_event_is_no_longer_than_a_line(tmp_path: Path) -> None:
    told = EmitEvent(EventName.STAGE_FINISHED, 1.0, None, None, {"run_id": "r" * 4_000_000})
    assert len(to_event(told, 1).model_dump_json()) < MAX_TEXT_CHARS + 200
    short = EmitEvent(EventName.STAGE_FINISHED, 1.0, None, None, {"run_id": "r" * MAX_TEXT_CHARS})
    assert to_event(short, 1).data == short.data


def test_edges_of_others_and_of_no_origin_are_not_counted(make_world: Any) -> None:  # noqa: F811
    world = make_world()
    names = ("node-0", "node-1", "node-2")
    world.register(*names)
    run = world.state.deployment_state(world.create(*names))
    before = run.deployment
    ours = f"origin:{before.source_url}"
    said = [(ours, "node-0"), ("node-0", "node-1"), ("node-2", "node-0")]
    strange = [("node-1", "node-2"), ("node-1", "node-1"), (ours, "node-2")]
    strange += [(f"origin:s3://b/{n}", "node-0") for n in range(100)]
    edges = tuple(EdgeTally(source=s, reader=r, bytes=1, pieces=1) for s, r in (*said, *strange))
    world.beat("node-0")
    report(world, run, "node-0", edges=edges)
    assert set(run.standings._counts) == set(said)


def report(world: Any, run: Any, worker_id: str, **changes: Any) -> None:
    from paceline.schemas import DeploymentBeat, WorkerStatus

    beat = DeploymentBeat(
        deployment_id=run.deployment.deployment_id,
        epoch=0,
        status=WorkerStatus.RECEIVING,
        pieces_held=0,
        bytes_held=0,
        **changes,
    )
    worker = world.state.fleet.find(worker_id)
    run.report(worker, beat, world.now_s, 0.0)


def test_the_processes_of_a_worker_are_kept_as_a_few(make_world: Any) -> None:  # noqa: F811
    world = make_world()
    world.register("node-0", "node-1")
    run = world.state.deployment_state(world.create("node-0", "node-1"))
    worker = world.state.fleet.find("node-0")
    for number in range(500):
        restarted = worker.model_copy(update={"process": f"{number:064d}"})
        run._spend(run.parts["node-0"], f"node-0 {restarted.process}", 3)
    assert len(run.persisted.spent) <= 17
    assert run.origin_bytes == 3 * 500 == sum(run.persisted.spent.values())
    assert run.parts["node-0"].spent_bytes == 3 * 500
    again = type(run)(run.deployment, run.manifest, replace(run.persisted), world.state.settings)
    assert again.parts["node-0"].spent_bytes == again.origin_bytes == 3 * 500
    again._spend(again.parts["node-0"], f"node-0 {499:064d}", 5)
    assert again.origin_bytes == 3 * 500 + 2, "the newest one goes on where it was"


# ── what one body costs ──────────────────────────────────────────────────────────────────────────

START = '{"worker_id":"node-0","status":"idle",'
PART = (
    '"deployments":[{"deployment_id":"d","epoch":1,"status":"idle","pieces_held":0,"bytes_held":0,'
)
BODIES: dict[str, Callable[[int], str]] = {
    "wrong chunks": lambda n: START + '"chunks_received":[' + ",".join(['"a"'] * n) + "]}",
    "too many chunks": lambda n: START + '"chunks_received":[' + ",".join(["1"] * n) + "]}",
    "empty deployments": lambda n: START + '"deployments":[' + ",".join(["{}"] * n) + "]}",
    "empty edges": lambda n: START + PART + '"edges":[' + ",".join(["{}"] * n) + "]}]}",
    "lost sources": lambda n: START + PART + '"lost_sources":[' + ",".join(['""'] * n) + "]}]}",
    "unknown keys": lambda n: START + ",".join(f'"{i:x}":0' for i in range(n)) + "}",
    "one long text": lambda n: '{"worker_id":"' + "a" * 3 * n + '"}',
    "depth": lambda n: '{"worker_id":' + "[" * 3 * n,
}


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    runtime = make_runtime(tmp_path_factory.mktemp("bodies") / "state")
    with TestClient(
        create_app(runtime), "http://127.0.0.1", raise_server_exceptions=False
    ) as client:
        client.headers["Authorization"] = f"Bearer {runtime.secrets.coordinator_token}"
        client.headers["Content-Type"] = "application/json"
        client.post("/workers/heartbeat", content=b"{}")
        yield client


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_is_refused_in_memory_of_its_own_size(kind: str, rest: Any) -> None:
    raw = BODIES[kind](150_000).encode()
    assert len(raw) < 4 * 1024 * 1024
    tracemalloc.start()
    try:
        answer = rest.post("/workers/heartbeat", content=raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code in (400, 413, 422), answer.text
    assert answer.json()["detail"]
    assert len(answer.content) < 2_000
    assert peak < 40 * len(raw)


def test_each_list_of_a_record_stops_at_its_first_wrong_item(rest: Any) -> None:
    body = {"model_id": "m", "version": "v", "source_url": "/x", "target_workers": ["a b"] * 9}
    answer = rest.post("/deployments", content=json.dumps(body))
    assert answer.status_code == 422
    assert "target_workers.0" in answer.json()["got"]
