"""The client against a server that misbehaves in each way a server can."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.client import CoordinatorClient
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
    StaleEpoch,
    StorageFull,
)
from paceline.schemas.calls import Heartbeat, Problem
from paceline.schemas.records import WorkerStatus

BEAT = Heartbeat(worker_id="w", status=WorkerStatus.IDLE)
ANSWER = {"continue": True, "epoch": 1, "next_beat_s": 0.5, "commands": []}


@contextmanager
def server(answer):
    """Serve ``answer(handler) -> (status, bytes)`` and count connections."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            http.connections += 1

        def handle_any(self):
            length = int(self.headers.get("Content-Length") or 0)
            self.body = self.rfile.read(length)
            status, raw = answer(self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args):
            pass  # a client that gave up is what some of these tests are about

    http = Server(("127.0.0.1", 0), Handler)
    http.connections = 0
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield http, CoordinatorClient(f"http://127.0.0.1:{http.server_port}", "secret", 5)
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_calls_of_one_thread_share_one_connection_and_carry_the_token():
    seen = []

    def answer(handler):
        seen.append((handler.headers["Authorization"], handler.path, json.loads(handler.body)))
        return 200, json.dumps(ANSWER).encode()

    with server(answer) as (http, client):
        for _ in range(5):
            assert client.heartbeat(BEAT).go_on is True
        assert http.connections == 1
        thread = threading.Thread(target=client.heartbeat, args=(BEAT,))
        thread.start()
        thread.join()
        assert http.connections == 2
        client.close()
    assert seen[0][0] == "Bearer secret"
    assert seen[0][1] == "/workers/heartbeat"
    assert seen[0][2]["worker_id"] == "w"


def test_connection_that_went_stale_is_replaced_without_the_caller_noticing():
    def answer(handler):
        handler.close_connection = True  # as a server does with a connection it finds idle
        return 200, json.dumps(ANSWER).encode()

    with server(answer) as (http, client):
        for _ in range(3):
            assert client.heartbeat(BEAT).epoch == 1
        assert http.connections == 3
        client.close()


def test_nobody_listening_is_service_unavailable_with_where_and_what_to_do():
    client = CoordinatorClient("http://127.0.0.1:9", "secret", 2)
    with pytest.raises(ServiceUnavailable) as caught:
        client.heartbeat(BEAT)
    assert "http://127.0.0.1:9/workers/heartbeat" in str(caught.value.where)
    assert caught.value.do
    assert "secret" not in str(caught.value)


def test_silent_server_is_service_unavailable_after_the_timeout():
    gate = threading.Event()

    def answer(handler):
        gate.wait(10)
        return 200, b"{}"

    with server(answer) as (http, _):
        client = CoordinatorClient(f"http://127.0.0.1:{http.server_port}", "secret", 0.2)
        with pytest.raises(ServiceUnavailable):
            client.heartbeat(BEAT)
        gate.set()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "StaleEpoch", StaleEpoch),
        (409, "Conflict", Conflict),
        (401, "AccessDenied", AccessDenied),
        (422, "InvalidInput", InvalidInput),
        (507, "StorageFull", StorageFull),
        (503, "NoSuchErrorClass", ServiceUnavailable),
        (409, "annotations", Conflict),
    ],
)
def test_problem_becomes_the_error_it_names_with_all_its_fields(status, code, kind):
    problem = Problem(
        title="t", status=status, detail="it broke", code=code, got="a", wanted="b", do="Do c."
    )
    with server(lambda _: (status, problem.model_dump_json().encode())) as (_, client):
        with pytest.raises(PacelineError) as caught:
            client.deployment("d")
        client.close()
    error = caught.value
    assert type(error) is kind
    assert (error.what, error.got, error.wanted, error.do) == ("it broke", "a", "b", "Do c.")
    assert "/deployments/d" in str(error.where)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessDenied), (403, AccessDenied), (404, NotFound), (502, ServiceUnavailable)],
)
def test_foreign_answer_becomes_the_nearest_error(status, kind):
    with server(lambda _: (status, b"<html>no</html>")) as (_, client):
        with pytest.raises(kind):
            client.plan("d")
        client.close()


def test_answer_that_is_no_record_is_service_unavailable():
    with server(lambda _: (200, b'{"hello": 1}')) as (_, client):
        with pytest.raises(ServiceUnavailable) as caught:
            client.workers()
        client.close()
    assert caught.value.wanted == "WorkerList"


def test_ledger_that_has_nothing_is_none_and_not_an_error():
    problem = Problem(title="t", status=404, detail="no", code="NotFound")
    with server(lambda _: (404, problem.model_dump_json().encode())) as (_, client):
        assert client.ledger_get("train", "0" * 64) is None
        client.close()


def test_names_are_quoted_into_paths():
    paths = []

    def answer(handler):
        paths.append(handler.path)
        return 404, b""

    with server(answer) as (_, client):
        for call in (lambda: client.deployment("a/../b?c"), lambda: client.lanes("d", "w&x=1")):
            with pytest.raises(NotFound):
                call()
        client.close()
    assert paths == ["/deployments/a%2F..%2Fb%3Fc", "/deployments/d/lanes?worker_id=w%26x%3D1"]


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:1", "ftp://h", "http://", "http://h:99999", "s3://b"]
)
def test_bad_urls_are_refused(url):
    with pytest.raises(InvalidInput):
        CoordinatorClient(url, "secret")


def test_importing_the_client_brings_no_heavy_library():
    code = (
        "import sys, paceline.client; heavy = {'boto3', 'torch', 'dask', 'fastapi', 'httpx',"
        " 'pandas', 'mlflow', 'prefect', 'uvicorn'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
