"""The client against a server that misbehaves in each way a server can."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager

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
    TemporaryError,
)
from paceline.schemas import Heartbeat, Problem, WorkerStatus
from tests.support.web import serving

BEAT = Heartbeat(worker_id="w", status=WorkerStatus.IDLE)
ANSWER = {"continue": True, "epoch": 1, "next_beat_s": 0.5, "commands": []}


@contextmanager
def server(answer, **more):
    """Serve ``answer``, and yield the server and a client of it."""
    with serving(answer, **more) as web:
        client = CoordinatorClient(web.url, "secret", 5)
        yield web, client
        client.close()


def beats(_):
    return 200, json.dumps(ANSWER).encode()


def test_calls_share_one_connection_and_carry_the_token():
    with server(beats) as (http, client):
        for _ in range(5):
            assert client.heartbeat(BEAT).go_on is True
        thread = threading.Thread(target=client.heartbeat, args=(BEAT,))
        thread.start()
        thread.join()
        assert http.connections == 1, "threads share idle connections"
    call = http.calls[0]
    assert (call.headers["Authorization"], call.path) == ("Bearer secret", "/workers/heartbeat")
    assert json.loads(call.body)["worker_id"] == "w"


def test_stale_connection_is_replaced_transparently():
    with server(beats, closes=True) as (http, client):
        for _ in range(3):
            assert client.heartbeat(BEAT).epoch == 1
        assert http.connections == 3


def test_closed_port_is_service_unavailable_with_address_and_remedy():
    client = CoordinatorClient("http://127.0.0.1:9", "secret", 2)
    with pytest.raises(ServiceUnavailable) as caught:
        client.heartbeat(BEAT)
    assert "http://127.0.0.1:9/workers/heartbeat" in str(caught.value.where)
    assert caught.value.do
    assert "secret" not in str(caught.value)


def test_silent_server_is_service_unavailable_after_the_timeout():
    gate = threading.Event()
    with serving(lambda _: gate.wait(10) and (200, b"{}")) as web:
        with pytest.raises(ServiceUnavailable):
            CoordinatorClient(web.url, "secret", 0.2).heartbeat(BEAT)
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
    error = caught.value
    assert type(error) is kind
    assert (error.what, error.got, error.wanted, error.do) == ("it broke", "a", "b", "Do c.")
    assert "/deployments/d" in str(error.where)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AccessDenied),
        (403, AccessDenied),
        (404, NotFound),
        (429, TemporaryError),
        (502, ServiceUnavailable),
    ],
)
def test_foreign_answer_becomes_the_nearest_error(status, kind):
    with server(lambda _: (status, b"<html>no</html>")) as (_, client):
        with pytest.raises(kind):
            client.plan("d")


def test_answer_that_is_no_record_is_service_unavailable():
    with server(lambda _: (200, b'{"hello": 1}')) as (_, client):
        with pytest.raises(ServiceUnavailable) as caught:
            client.workers()
    assert caught.value.wanted == "WorkerList"


def test_a_newer_coordinators_fields_are_ignored_in_answers_and_problems():
    answer = ANSWER | {"new": {"a": 1}}
    with server(lambda _: (200, json.dumps(answer).encode())) as (_, client):
        assert client.heartbeat(BEAT).epoch == 1
    problem = Problem(title="t", status=409, detail="no", code="Conflict").model_dump() | {"new": 1}
    with server(lambda _: (409, json.dumps(problem).encode())) as (_, client):
        with pytest.raises(Conflict, match="no"):
            client.workers()


def test_ledger_that_has_nothing_is_none_and_not_an_error():
    problem = Problem(title="t", status=404, detail="no", code="NotFound")
    with server(lambda _: (404, problem.model_dump_json().encode())) as (_, client):
        assert client.ledger_get("train", "0" * 64) is None


def test_names_are_quoted_into_paths():
    with server(lambda _: (404, b"")) as (http, client):
        for call in (lambda: client.deployment("a/../b?c"), lambda: client.lanes("d", "w&x=1")):
            with pytest.raises(NotFound):
                call()
    paths = [each.path for each in http.calls]
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
