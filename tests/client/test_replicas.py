"""Several replicas from the client's side: dead ones, frozen ones, standbys, and old leaders."""

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.client import CoordinatorClient
from paceline.client.connection import Endpoint
from paceline.client.failover import SUSPECT_S, Replicas
from paceline.errors import Conflict, InvalidInput, NotFound, ServiceUnavailable
from paceline.schemas.base import EPOCH_HEADER, LEADER_HEADER
from paceline.schemas.calls import Heartbeat, Problem
from paceline.schemas.records import WorkerStatus

BEAT = Heartbeat(worker_id="w", status=WorkerStatus.IDLE)
A, B, C = "http://a:1", "http://b:2", "http://c:3"


class Played:
    """One replica that the test plays: what it answers is set by assigning ``answer``."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str | None]] = []
        self.epoch, self.leader = 1, ""
        self.redirect_to = ""
        self.problem: Problem | None = None
        self.gate: threading.Event | None = None  # closed: the process is frozen
        self.closes, self.delay_s = False, 0.0
        played = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                if played.gate is not None:
                    played.gate.wait(20)
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                played.seen.append((self.command, self.path, self.headers["Authorization"]))
                time.sleep(played.delay_s)
                self.close_connection = played.closes
                self.answer()

            do_GET = do_POST = do_PUT = do_DELETE = handle_any

            def answer(self):
                body = {"continue": True, "epoch": played.epoch, "next_beat_s": 0.5, "commands": []}
                status, raw = 200, json.dumps(body).encode()
                if played.redirect_to:
                    status, raw = 307, b""
                elif played.problem is not None:
                    status, raw = played.problem.status, played.problem.model_dump_json().encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.send_header(EPOCH_HEADER, str(played.epoch))
                if played.closes:
                    self.send_header("Connection", "close")
                if played.leader:
                    self.send_header(LEADER_HEADER, played.leader)
                if played.redirect_to:
                    self.send_header("Location", played.redirect_to + self.path)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64  # with 5, one of many callers at once waits a second and leaves

            def handle_error(self, *args):
                pass  # clients that give up are what these tests are about

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def beats(self) -> int:
        return sum(method == "POST" for method, _, _ in self.seen)


@contextmanager
def played():
    made = Played()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()
        if made.gate is not None:
            made.gate.set()


@pytest.fixture
def three():
    with ExitStack() as stack:
        yield [stack.enter_context(played()) for _ in range(3)]


@pytest.fixture
def deaf():
    """A process that was frozen: its kernel accepts, nothing ever answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def client_of(urls, **more):
    return CoordinatorClient(urls, "t0ken", 5.0, **more)


def test_standbys_answer_leads_to_the_leader_and_the_next_call_goes_straight_there(three):
    leader, *standbys = three
    for each in standbys:
        each.redirect_to = leader.url
    client = client_of([standbys[0].url, standbys[1].url, leader.url])
    for _ in range(3):
        assert client.heartbeat(BEAT, wait_s=0.25).go_on
    assert leader.beats == 3
    assert [each.beats for each in standbys] == [1, 0]
    assert standbys[0].seen[0][1] == leader.seen[0][1] == "/workers/heartbeat?wait_s=0.25"
    assert client.base_url == leader.url
    client.close()


def test_read_of_a_standby_is_believed_and_the_leader_it_names_is_asked_next(three):
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


def test_frozen_leader_is_left_for_another_long_before_a_long_call_would_time_out(three, deaf):
    living = three[0]
    client = CoordinatorClient([deaf, living.url], "t0ken", 3600.0)
    assert client.heartbeat(BEAT).go_on  # the test's own limit is 120 s
    assert living.beats == 1
    client.close()


def test_slow_answer_of_a_living_server_is_waited_for(three):
    slow, other, _ = three

    first: list[threading.Thread] = []
    asked = threading.Event()

    class Gate(threading.Event):
        def wait(self, timeout=None):
            if not first:
                first.append(threading.current_thread())
                return super().wait(timeout)
            asked.set()  # a probe: the server is alive
            self.set()
            return True

    slow.gate = Gate()
    client = client_of([slow.url, other.url])
    assert client.heartbeat(BEAT).go_on
    assert asked.is_set()
    assert (slow.beats, other.beats) == (1, 0)
    client.close()


def test_server_that_closes_after_each_answer_may_still_be_slow(three, monkeypatch):
    monkeypatch.setattr("paceline.client.connection.CONNECT_S", 0.3)
    slow, other, _ = three
    slow.closes, slow.delay_s = True, 0.6
    client = client_of([slow.url, other.url])
    for _ in range(2):
        assert client.heartbeat(BEAT).go_on
    assert (slow.beats, other.beats) == (2, 0)
    client.close()


def test_all_replicas_away_is_told_after_one_round_and_waited_for_with_patience(three):
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


def test_token_does_not_follow_a_redirect_to_somebody_unknown(three):
    standby, stranger, _ = three
    standby.redirect_to = stranger.url
    client = client_of([standby.url])
    with pytest.raises(ServiceUnavailable) as caught:
        client.heartbeat(BEAT)
    assert caught.value.got.startswith(stranger.url)
    assert "coordinator_urls" in caught.value.do
    assert stranger.seen == []
    client.close()


# --- whom to ask: without sockets ---------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def order(replicas):
    return [each.url for each in replicas.order()]


def test_whoever_did_not_answer_is_asked_last_for_a_while():
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


def test_leader_that_a_standby_names_is_not_believed_in_while_it_is_silent():
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
    assert [replicas.believe(each) for each in (3, 3, 2, None, 4, 3)] == [
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
