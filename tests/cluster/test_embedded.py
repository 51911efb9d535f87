"""The whole embedded installation, once: it comes up, refuses strangers, stays small, goes away."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cluster as fleet
from paceline.cluster import Fleet
from paceline.config import Runtime
from paceline.errors import AccessDenied
from paceline.storage import ObjectStore
from tests.cluster.conftest import processes_of, small_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MEMORY_LIMIT_BYTES = 2_500_000_000


def ask(url: str, authorization: str = "", body: str | None = None) -> tuple[int, bytes]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    headers = {"Content-Type": "application/json"}
    if authorization:
        headers["Authorization"] = "Basic " + base64.b64encode(authorization.encode()).decode()
    try:
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET" if body is None else "POST", target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def runtime(state: Path) -> Iterator[Runtime]:
    profile = small_profile()
    services = profile.services.model_copy(update={"ready_timeout_s": 240.0})
    yield fleet.start(profile.model_copy(update={"services": services}), state, detach=False)
    assert fleet.stop(state).forced is False
    assert processes_of(state) == []


def test_every_server_is_ready_and_the_memory_is_bounded(runtime: Runtime, state: Path) -> None:
    status = fleet.status(state)
    states = {each.name: each.state for each in status.services}
    assert set(states) == {"s3", "prefect", "mlflow", "dask", "coordinator", "prefect-worker"}
    assert {name for name, each in states.items() if each == "ready"} >= set(states) - {
        "prefect-worker"
    }
    assert 0 < status.rss_bytes < MEMORY_LIMIT_BYTES


def test_prefect_serves_its_page_and_refuses_strangers(runtime: Runtime) -> None:
    flows = f"{runtime.endpoints.prefect_api_url}/flows/filter"
    assert ask(flows, body="{}")[0] == 401
    assert ask(flows, "paceline:wrong", body="{}")[0] == 401
    assert ask(flows, runtime.secrets.prefect_auth, body="{}") == (200, b"[]")
    assert ask(runtime.endpoints.prefect_ui_url)[0] == 200
    settings = ask(f"{runtime.endpoints.prefect_ui_url}/ui-settings")[1].decode()
    assert runtime.endpoints.prefect_api_url in settings


def test_mlflow_keeps_runs_serves_its_page_and_refuses_strangers(runtime: Runtime) -> None:
    search = f"{runtime.endpoints.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=5"
    create = f"{runtime.endpoints.mlflow_url}/api/2.0/mlflow/experiments/create"
    assert ask(search)[0] == 401
    assert ask(search, "paceline:wrong")[0] == 401
    assert ask(create, runtime.secrets.mlflow_auth, body='{"name": "kept"}')[0] == 200
    code, answer = ask(search, runtime.secrets.mlflow_auth)
    assert code == 200
    assert b"mlflow-artifacts:/" in answer
    status, page = ask(runtime.endpoints.mlflow_url, runtime.secrets.mlflow_auth)
    assert (status, b"MLflow" in page) == (200, True)
    put = f"{runtime.endpoints.mlflow_url}/api/2.0/mlflow-artifacts/artifacts"
    assert ask(f"{put}?path=", "")[0] == 401


def test_s3_has_the_bucket_and_refuses_strangers(runtime: Runtime) -> None:
    store = ObjectStore.from_runtime(runtime)
    url = f"s3://{runtime.profile.storage.bucket}/a/b"
    store.put_bytes(url, b"bytes")
    assert store.get_bytes(url) == b"bytes"
    stranger = ObjectStore(
        endpoint_url=runtime.endpoints.s3_url,
        access_key=runtime.secrets.s3_access_key,
        secret_key="wrong",
    )
    with pytest.raises(AccessDenied):
        stranger.get_bytes(url)


def test_the_scheduler_refuses_whoever_has_no_certificate(runtime: Runtime) -> None:
    host, port = runtime.endpoints.scheduler_address.split("://")[1].split(":")
    stranger = ssl.create_default_context(cafile=runtime.secrets.tls_ca)
    stranger.check_hostname = False
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        with pytest.raises((ssl.SSLError, ConnectionResetError)):  # "certificate required"
            with stranger.wrap_socket(plain) as encrypted:
                encrypted.recv(64)
    with Fleet.connect(runtime) as connected:
        assert len(connected.nodes()) == 3


def test_nothing_listens_beyond_loopback_and_no_secret_shows_on_a_command_line(
    runtime: Runtime, state: Path
) -> None:
    secrets = [
        each
        for name, each in runtime.secrets.model_dump().items()
        if each and not name.startswith("tls") and name != "s3_access_key"
    ]
    for process in processes_of(state):
        line = " ".join(process.cmdline())
        assert not [each for each in secrets if each.split(":")[-1] in line]
        for connection in process.net_connections(kind="inet"):
            if connection.status == "LISTEN":
                assert connection.laddr.ip == "127.0.0.1", (line, connection)
