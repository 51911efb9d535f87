"""The whole embedded installation: it refuses strangers, stays small and listens on loopback."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.parse

import pytest

from paceline.cluster import Fleet
from paceline.config import Runtime
from paceline.errors import AccessDenied
from paceline.storage import ObjectStore
from tests.support.stack import paceline, processes_of, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),
    pytest.mark.timeout(600),
]

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


def test_every_server_is_ready_and_the_memory_is_bounded(stack: Runtime) -> None:
    ended = paceline("status", "--json", state=stack.state_dir)
    assert ended.code == 0
    states = {each["name"]: each["state"] for each in ended.answer["services"]}
    assert states.pop("prefect-deployments") in {"starting", "done"}
    states.pop("prefect-worker")  # not waited for
    assert states == dict.fromkeys(("s3", "prefect", "mlflow", "dask", "coordinator"), "ready")
    assert 0 < ended.answer["rss_bytes"] < MEMORY_LIMIT_BYTES


def test_prefects_worker_needs_no_directory_of_another_user(stack: Runtime) -> None:
    """Prefect's own place, /tmp/runner_storage, belongs to whoever had a worker first."""
    made = stack.state_dir / "prefect-worker/tmp/runner_storage"
    wait_until(lambda: made.is_dir() and list(made.iterdir()), 120, "the worker has its directory")


def test_prefect_serves_its_page_and_refuses_strangers(stack: Runtime) -> None:
    flows = f"{stack.endpoints.prefect_api_url}/flows/filter"
    assert ask(flows, body="{}")[0] == 401
    assert ask(flows, "paceline:wrong", body="{}")[0] == 401
    assert ask(flows, stack.secrets.prefect_auth, body="{}")[0] == 200
    assert ask(stack.endpoints.prefect_ui_url)[0] == 200
    settings = ask(f"{stack.endpoints.prefect_ui_url}/ui-settings")[1].decode()
    assert stack.endpoints.prefect_api_url in settings


def test_mlflow_keeps_runs_serves_its_page_and_refuses_strangers(stack: Runtime) -> None:
    search = f"{stack.endpoints.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=5"
    create = f"{stack.endpoints.mlflow_url}/api/2.0/mlflow/experiments/create"
    assert ask(search)[0] == 401
    assert ask(search, "paceline:wrong")[0] == 401
    assert ask(create, stack.secrets.mlflow_auth, body='{"name": "kept"}')[0] == 200
    code, answer = ask(search, stack.secrets.mlflow_auth)
    assert code == 200
    assert b"mlflow-artifacts:/" in answer
    status, page = ask(stack.endpoints.mlflow_url, stack.secrets.mlflow_auth)
    assert (status, b"MLflow" in page) == (200, True)
    put = f"{stack.endpoints.mlflow_url}/api/2.0/mlflow-artifacts/artifacts"
    assert ask(f"{put}?path=", "")[0] == 401


def test_s3_has_the_bucket_and_refuses_strangers(stack: Runtime) -> None:
    store = ObjectStore.from_runtime(stack)
    url = f"s3://{stack.profile.storage.bucket}/a/b"
    store.put_bytes(url, b"bytes")
    assert store.get_bytes(url) == b"bytes"
    stranger = ObjectStore(
        endpoint_url=stack.endpoints.s3_url,
        access_key=stack.secrets.s3_access_key,
        secret_key="wrong",
    )
    with pytest.raises(AccessDenied):
        stranger.get_bytes(url)


def test_the_scheduler_refuses_clients_without_a_certificate(stack: Runtime) -> None:
    host, port = stack.endpoints.scheduler_address.split("://")[1].split(":")
    stranger = ssl.create_default_context(cafile=stack.secrets.tls_ca)
    stranger.check_hostname = False
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        with pytest.raises((ssl.SSLError, ConnectionResetError)):  # "certificate required"
            with stranger.wrap_socket(plain) as encrypted:
                encrypted.recv(64)
    with Fleet.connect(stack) as connected:
        assert len(connected.nodes()) == 4


def test_services_listen_on_loopback_and_show_no_secret_in_command_lines(
    stack: Runtime,
) -> None:
    secrets = [
        each
        for name, each in stack.secrets.model_dump().items()
        if each and not name.startswith("tls") and name != "s3_access_key"
    ]
    for process in processes_of(stack.state_dir):
        line = " ".join(process.cmdline())
        assert not [each for each in secrets if each.split(":")[-1] in line]
        for connection in process.net_connections(kind="inet"):
            if connection.status == "LISTEN":
                assert connection.laddr.ip == "127.0.0.1", (line, connection)
