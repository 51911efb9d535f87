"""A real coordinator process under real clients: start, kill, resume, stop."""

import signal
import socket
import threading
import time

import pytest

from paceline.api import serve
from paceline.client import Client
from paceline.errors import Conflict, PortInUse, ServiceUnavailable
from paceline.schemas import EventName
from tests.api.conftest import FakeAgent, creation, make_model, make_runtime, running
from tests.support.command import require_schema

DEADLINE_S = 30.0


def until(check, what):
    """Wait for a condition, not for a time."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := check()):
        assert time.monotonic() < end_s, f"timed out waiting until {what}"
        time.sleep(0.03)
    return found


def status(client, deployment_id):
    return client.deployment(deployment_id).status.value


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A coordinator process for all tests here; the last one ends it."""
    with running(make_runtime(tmp_path_factory.mktemp("process") / "state")) as server:
        yield server


def test_cancel_returns_once_every_living_agent_has_stopped(served):
    url, manifest = make_model(served.runtime.state_dir, version="v0")
    client = served.client()
    agent = FakeAgent(client, "node-0", per_beat=0)
    agent.register()
    d = client.create(creation(url, ["node-0"], version="v0"), "cancelled").deployment_id
    until(lambda: agent.beat(manifest) == ["fetch_lanes"], "lanes are fetched")

    done = threading.Event()

    def cancel():
        served.client().cancel(d)
        done.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    until(lambda: status(client, d) == "cancelled", "the cancel is decided")
    assert not done.is_set(), "nobody has confirmed yet"

    def beats():
        agent.beat(manifest)
        return done.is_set()

    until(beats, "the cancel is confirmed")
    thread.join()
    assert agent.cancelled == {d}


def test_a_program_gets_what_distribute_prints_as_a_record(served):
    url, manifest = make_model(served.runtime.state_dir, version="v0-typed")
    agents = [FakeAgent(served.client(), f"node-{index}") for index in (8, 9)]
    for agent in agents:
        agent.register()
    ended = threading.Event()

    def beats():
        while not ended.wait(0.02):
            for agent in agents:
                agent.beat(manifest)

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        with Client(served.url, served.runtime.secrets.coordinator_token) as program:
            answer = program.distribute(url, to="node-8,node-9", digest=manifest.digest)
    finally:
        ended.set()
        thread.join()
    assert (answer.model_id, answer.version, answer.activated) == ("m", "v0-typed", 2)
    assert answer.relay.received_bytes == 2 * manifest.total_size
    assert answer["relay"]["workers"] == answer.verify.vouched == 2, "by name, as a dict had it"
    assert answer.activate.activated == ("node-8", "node-9")
    require_schema("distribute", answer.model_dump_json())
    with pytest.raises(KeyError):
        answer["nothing"]


def test_killed_coordinator_resumes_deployments_and_duplicates_none(served):
    url, manifest = make_model(served.runtime.state_dir, version="v1")
    client = served.client()
    agents = [FakeAgent(client, f"node-{index}") for index in range(10, 14)]
    for agent in agents:
        agent.register()
    call = creation(url, [agent.worker_id for agent in agents])
    d = client.create(call, "killed").deployment_id
    for agent in agents:
        agent.beat(manifest)
        agent.beat(manifest)
    agents[0].held[d] = manifest.piece_count
    agents[0].beat(manifest)
    last = client.events().last
    served.end(signal.SIGKILL)
    with pytest.raises(ServiceUnavailable):
        client.deployments()
    served.start()
    assert client.create(call, "killed").deployment_id == d
    with pytest.raises(Conflict):
        client.create(call.model_copy(update={"seed": 7}), "killed")
    assert [each.deployment_id for each in client.deployments()].count(d) == 1
    assert client.deployment(d).workers_complete == ("node-10",)
    assert client.events(after=last - 1).events[0].seq == last, "event numbers go on"

    def everybody_beats():
        for agent in agents:
            agent.beat(manifest)
        return status(client, d) == "complete"

    until(everybody_beats, "the deployment went on")
    assert client.plan(d).epoch == 1, "a restart of the coordinator is no reason to replan"
    assert all(agent.incarnation == 1 for agent in agents)


def test_agents_complete_and_activate_and_the_process_stops_cleanly(served):
    url, manifest = make_model(served.runtime.state_dir, version="v2")
    client = served.client()
    agents = [FakeAgent(client, f"node-{index}") for index in range(20, 24)]
    for agent in agents:
        agent.register()
    call = creation(url, [agent.worker_id for agent in agents], version="v2")
    created = client.create(call, "complete")
    d = created.deployment_id
    assert created.estimated_time_seconds > 0
    assert client.manifest_bytes(d) == manifest.to_bytes()

    def everybody_beats():
        for agent in agents:
            agent.beat(manifest)
        return status(client, d) == "complete"

    until(everybody_beats, "all agents are complete")
    view = client.deployment(d)
    assert len(view.workers_complete) == 4
    assert view.progress == 1.0
    assert view.deployment.seconds is not None
    assert all(each.receipt for each in client.workers_of(d))
    assert client.plan(d).epoch == 1
    client.activate(d)

    def activated():
        for agent in agents:
            agent.beat(manifest)
        names = [each.name for each in client.events().events if each.deployment_id == d]
        return EventName.DEPLOYMENT_ACTIVATED in names

    until(activated, "the activation is told")
    assert all(agent.active == d for agent in agents)
    code, out = served.end(signal.SIGTERM)
    assert (code, out) == (0, b""), "it prints nothing"
    log = (served.runtime.state_dir / "coordinator.log").read_text()
    assert "listening http://127.0.0.1:" in log
    assert "stopped http://127.0.0.1:" in log
    assert served.runtime.secrets.coordinator_token not in log


def test_port_in_use_names_the_port_and_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse) as caught:
        port = taken.getsockname()[1]
        serve(make_runtime(tmp_path), "127.0.0.1", port)
    error = caught.value
    assert str(port) in str(error.got)
    assert error.wanted
    assert error.where == "127.0.0.1"
    assert error.do
