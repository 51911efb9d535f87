"""Several replicas from the client's side: dead ones, frozen ones, standbys, and old leaders."""

import json
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from paceline.client import SUSPECT_S, CoordinatorClient, Replicas
from paceline.errors import Conflict, InvalidInput, NotFound, ServiceUnavailable
from paceline.schemas import EPOCH_HEADER, LEADER_HEADER, Heartbeat, Problem, WorkerStatus
from paceline.system import Endpoint
from tests.support.web import Call, serving

BEAT = Heartbeat(worker_id="w", status=WorkerStatus.IDLE)
A, B, C = "http://a:1", "http://b:2", "http://c:3"


class Played:
    """One replica that the test plays: what it answers is set by assigning ``answer``."""

    def __init__(self, *, closes: bool = False) -> None:
        self.epoch, self.leader, self.redirect_to = 1, "", ""
        self.problem: Problem | None = None
        self.delay_s: dict[str, float] = {}
        self.serving = serving(self._answer, closes=closes)

    def __enter__(self) -> "Played":
        self.web = self.serving.__enter__()
        self.url = self.web.url
        return self

    def __exit__(self, *_: object) -> None:
        self.serving.__exit__(None, None, None)

    @property
    def beats(self) -> int:
        return sum(call.method == "POST" for call in self.web.calls)

    def _answer(self, call: Call) -> tuple[int, bytes, dict[str, str]]:
        time.sleep(self.delay_s.get(call.method, 0.0))
        headers = {EPOCH_HEADER: str(self.epoch)}
        if self.leader:
            headers[LEADER_HEADER] = self.leader
        if self.redirect_to:
            return 307, b"", headers | {"Location": self.redirect_to + call.path}
        if self.problem is not None:
            return self.problem.status, self.problem.model_dump_json().encode(), headers
        body = {"continue": True, "epoch": self.epoch, "next_beat_s": 0.5, "commands": []}
        return 200, json.dumps(body).encode(), headers


@pytest.fixture
def three():
    with ExitStack() as stack:
        yield [stack.enter_context(Played()) for _ in range(3)]


@pytest.fixture
def deaf():
    """A process that was frozen: its kernel accepts, nothing ever answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def client_of(urls, **more):
    return CoordinatorClient(urls, "t0ken", 5.0, **more)


def test_standby_redirects_to_the_leader_and_the_next_call_goes_there(three):
    leader, *standbys = three
    for each in standbys:
        each.redirect_to = leader.url
    client = client_of([standbys[0].url, standbys[1].url, leader.url])
    for _ in range(3):
        assert client.heartbeat(BEAT, wait_s=0.25).go_on
    assert leader.beats == 3
    assert [each.beats for each in standbys] == [1, 0]
    paths = [each.web.calls[0].path for each in (standbys[0], leader)]
    assert paths == ["/workers/heartbeat?wait_s=0.25"] * 2
    assert client.base_url == leader.url
    client.close()


def test_standby_read_is_accepted_and_its_named_leader_is_asked_next(three):
    leader, standby, _ = three
    standby.problem = Problem(title="t", status=404, detail="no", code="NotFound")
    client = client_of([standby.url, leader.url])
    with pytest.raises(NotFound):
        client.plan("d")
    standby.problem, standby.leader = None, leader.url
    assert client.heartbeat(BEAT).go_on
    assert client.heartbeat(BEAT).go_on
    assert (standby.beats, leader.beats) == (1, 1)
    client.close()


def test_answer_of_an_older_epoch_is_refused_and_another_replica_asked(three):
    old, new, _ = three
    old.epoch, new.epoch = 4, 5
    client = client_of([new.url, old.url])
    assert client.heartbeat(BEAT).epoch == 5
    new.problem = Problem(title="t", status=503, detail="no", code="ServiceUnavailable")
    for _ in range(2):  # the old leader woke up and still thinks that it leads
        with pytest.raises(ServiceUnavailable) as caught:
            client.heartbeat(BEAT)
        assert "epoch 4" in str(caught.value) or "no" in str(caught.value)
    assert old.beats == 2
    new.problem = None
    assert client.heartbeat(BEAT).epoch == 5
    assert client.epoch == 5
    client.close()


def test_frozen_leader_is_left_long_before_a_long_call_times_out(three, deaf):
    living = three[0]
    client = CoordinatorClient([deaf, living.url], "t0ken", 3600.0)
    assert client.heartbeat(BEAT).go_on  # the test's own limit is 120 s
    assert living.beats == 1
    client.close()


def test_a_slow_leader_that_answers_its_health_check_is_not_left(three, monkeypatch):
    monkeypatch.setattr("paceline.client.failover.LATE_S", 0.1)
    slow, other, _ = three
    slow.delay_s = {"POST": 0.5}
    client = client_of([slow.url, other.url])
    assert client.heartbeat(BEAT).go_on
    assert slow.beats >= 1
    assert other.beats == 0
    client.close()


def test_server_that_closes_after_each_answer_may_still_be_slow(monkeypatch):
    monkeypatch.setattr("paceline.client.failover.CONNECT_S", 0.3)
    with Played(closes=True) as slow, Played() as other:
        slow.delay_s = {"POST": 0.6}
        client = client_of([slow.url, other.url])
        for _ in range(2):
            assert client.heartbeat(BEAT).go_on
        assert (slow.beats, other.beats) == (2, 0)
        client.close()


def test_absent_replicas_raise_after_one_round_or_are_waited_for(three):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    client = client_of([dead, "http://127.0.0.1:9"])
    with pytest.raises(ServiceUnavailable) as caught:
        client.heartbeat(BEAT)
    assert dead in str(caught.value.where)
    standby = three[0]
    standby.problem = Problem(title="t", status=503, detail="nobody leads", code="NotLeading")
    patient = client_of([dead, standby.url], patience_s=60.0)
    healed = threading.Timer(0.5, lambda: setattr(standby, "problem", None))
    healed.start()
    assert patient.heartbeat(BEAT).go_on
    assert standby.beats >= 2
    healed.join()
    patient.close()


def test_refusal_for_good_is_no_reason_to_ask_another(three):
    first, second, _ = three
    first.problem = Problem(title="t", status=409, detail="taken", code="Conflict")
    client = client_of([first.url, second.url], patience_s=60.0)
    with pytest.raises(Conflict):
        client.heartbeat(BEAT)
    assert (first.beats, second.beats) == (1, 0)
    client.close()


def test_token_does_not_follow_a_redirect_to_an_unknown_server(three):
    standby, stranger, _ = three
    standby.redirect_to = stranger.url
    client = client_of([standby.url])
    with pytest.raises(ServiceUnavailable) as caught:
        client.heartbeat(BEAT)
    assert caught.value.got.startswith(stranger.url)
    assert "coordinator_urls" in caught.value.do
    assert stranger.web.calls == []
    client.close()


# --- whom to ask: without sockets ---------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def order(replicas):
    return [each.url for each in replicas.order()]


def test_silent_replica_is_asked_last_for_a_while():
    clock = Clock()
    replicas = Replicas([A, B, C], clock)
    assert order(replicas) == [A, B, C]
    replicas.silent(replicas.endpoints[0])
    assert order(replicas) == [B, C, A]
    replicas.silent(replicas.endpoints[1])
    assert order(replicas) == [C, A, B]
    clock.now_s += SUSPECT_S
    assert order(replicas) == [C, A, B]
    replicas.answered(replicas.endpoints[1], None)
    assert order(replicas) == [B, C, A]


def test_leader_named_by_a_standby_is_not_preferred_while_it_is_silent():
    clock = Clock()
    replicas = Replicas([A, B, C], clock)
    a, b, _ = replicas.endpoints
    replicas.silent(a)
    replicas.answered(b, A)
    assert replicas.first == b
    clock.now_s += SUSPECT_S
    replicas.answered(b, A)
    assert replicas.first == a
    replicas.answered(b, "http://elsewhere:1")
    assert replicas.first == b


def test_epochs_only_rise():
    replicas = Replicas([A])
    assert [replicas.accept_epoch(each) for each in (3, 3, 2, None, 4, 3)] == [
        True, True, False, True, True, False,
    ]  # fmt: skip
    assert replicas.epoch == 4


@pytest.mark.parametrize(
    ("url", "other", "same"),
    [
        ("http://h:1", "http://h:1/deployments?x=1", True),
        ("http://h:1", "http://h:2/deployments", False),
        ("https://h", "https://h:443/x", True),
        ("https://h", "http://h:443/x", False),
        ("http://h:1", "http://h:1@evil/x", False),
        ("http://h:1", "http://evil/http://h:1", False),
        ("http://h:1/control", "http://h:1/control/x", True),
        ("http://h:1/control", "http://h:1/controls/x", False),
        ("http://h:1", "//h:1/x", False),
        ("http://h:1", "/deployments", False),
    ],
)
def test_only_the_same_origin_is_the_same_endpoint(url, other, same):
    assert Endpoint.of(url).serves(other) is same


def test_no_endpoint_at_all_is_refused():
    with pytest.raises(InvalidInput):
        CoordinatorClient([], "t0ken")


def test_beats_of_many_threads_share_what_is_known_of_the_leader(three):
    leader, standby, _ = three
    standby.redirect_to = leader.url
    client = client_of([standby.url, leader.url])
    client.heartbeat(BEAT)

    def beat():
        client.heartbeat(BEAT)
        client.close()

    threads = [threading.Thread(target=beat) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert (leader.beats, standby.beats) == (9, 1)
