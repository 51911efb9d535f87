"""A call whose answer was lost may be repeated: it changes nothing more, and is answered."""

from __future__ import annotations

import itertools
import json
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from paceline.api.app import create_app
from paceline.config import load_runtime
from paceline.errors import AccessDenied, ServiceUnavailable
from paceline.relay.joining import DIRECTORY, JOINING_FILE, join
from paceline.relay.transport.identity import new_request
from paceline.relay.transport.transports import tls_for
from tests.api.conftest import FakeAgent, Served, creation, make_model, make_runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1"


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Any]:
    runtime = make_runtime(tmp_path / "state")
    with TestClient(create_app(runtime), BASE, raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {runtime.secrets.coordinator_token}"
        yield client


def extra_bytes(rest: Any, deployment_id: str) -> int:
    run = rest.app.state.coordinator.read(lambda state: state.run(deployment_id))
    return int(run.memo.extra_bytes)


def deployments(rest: Any, tmp_path: Path, count: int) -> list[str]:
    url, _ = make_model(tmp_path / "state")
    made = []
    for number in range(count):
        call = creation(url, [f"w-{number}"], topology="chain")
        answer = rest.post("/deployments", json=call.model_dump(mode="json"))
        assert answer.status_code == 201, answer.text
        made.append(answer.json()["deployment_id"])
    return made


def test_a_budget_is_raised_once_for_each_key(rest: Any, tmp_path: Path) -> None:
    one, other = deployments(rest, tmp_path, 2)

    def raised(deployment_id: str, extra: int, key: str | None) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        path = f"/deployments/{deployment_id}/budget"
        return rest.post(path, json={"extra_bytes": extra}, headers=headers)

    for _ in range(3):
        assert raised(one, 10, "a").json() == {"success": True}
        assert extra_bytes(rest, one) == 10
    # Another request under the same key is refused: of another size, deployment or kind.
    assert raised(one, 11, "a").status_code == 409
    assert raised(other, 10, "a").status_code == 409
    create = rest.post(
        "/deployments",
        json=creation(str(tmp_path), ["w-9"]).model_dump(mode="json"),
        headers={"Idempotency-Key": "a"},
    )
    assert create.status_code == 409
    assert (extra_bytes(rest, one), extra_bytes(rest, other)) == (10, 0)
    # Another key, or none, is another request.
    assert raised(one, 10, "b").status_code == 200
    assert raised(one, 10, None).status_code == 200
    assert extra_bytes(rest, one) == 30
    rows = rest.get("/events").json()["events"]
    assert sum(each["name"] == "deployment.budget_raised" for each in rows) == 3


def test_a_repeated_budget_is_answered_after_a_restart_and_the_end(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path / "state")
    owner = {"Authorization": f"Bearer {runtime.secrets.coordinator_token}"}
    raised = {"json": {"extra_bytes": 7}, "headers": owner | {"Idempotency-Key": "k"}}
    one = ""
    for round_ in range(3):
        with TestClient(create_app(runtime), BASE) as client:
            client.headers.update(owner)
            one = one or deployments(client, tmp_path, 1)[0]
            if round_ == 2:
                client.delete(f"/deployments/{one}")
            answer = client.post(f"/deployments/{one}/budget", **raised)
            assert answer.status_code == 200, answer.text
            assert extra_bytes(client, one) == 7


def ask(rest: Any, token: str, key: bytes | None, worker_id: str = "node-1") -> tuple[Any, bytes]:
    made, csr = new_request(worker_id, key)
    body = {"worker_id": worker_id, "csr": csr.decode()}
    headers = {"Authorization": f"Bearer {token}"}
    return rest.post("/workers/join", json=body, headers=headers), made


def join_token(rest: Any, **more: object) -> str:
    answer = rest.post("/tokens/join", json={"worker_id": "node-1", **more})
    return str(answer.json()["token"])


def beat(rest: Any, token: str) -> int:
    body = {"worker_id": "node-1", "status": "idle"}
    headers = {"Authorization": f"Bearer {token}"}
    return int(rest.post("/workers/heartbeat", json=body, headers=headers).status_code)


def public(pem: bytes) -> Any:
    return load_pem_private_key(pem, None).public_key()


def test_a_join_is_answered_again_for_the_same_key_alone(rest: Any) -> None:
    token = join_token(rest)
    first, key = ask(rest, token, None)
    assert first.status_code == 200
    tokens = [first.json()["token"]]
    for _ in range(3):
        again, _ = ask(rest, token, key)
        assert again.status_code == 200, again.text
        certificate = x509.load_pem_x509_certificate(again.json()["certificate"].encode())
        assert certificate.public_key() == public(key)
        tokens.append(again.json()["token"])
    assert len(set(tokens)) == 4
    for other in (None, new_request("x")[0]):
        refused, _ = ask(rest, token, other)
        assert (refused.status_code, refused.json()["code"]) == (403, "AccessDenied")
        assert "used already" in refused.json()["detail"]
    # The answer that arrived is the one that is used; it ends the others.
    assert beat(rest, tokens[1]) == 200
    assert [beat(rest, each) for each in tokens] == [401, 200, 401, 401]
    # One that was sent twice and comes late does not end what is used by now.
    assert ask(rest, token, key)[0].status_code == 200
    assert beat(rest, tokens[1]) == 200


@pytest.mark.parametrize("why", ["expired", "revoked"])
def test_a_join_is_not_answered_again_once_its_token_has_ended(rest: Any, why: str) -> None:
    token = join_token(rest, ttl_seconds=3600)
    answer, key = ask(rest, token, None)
    if why == "expired":
        book = rest.app.state.coordinator.tokens
        record = book.find(token.split("_")[1])
        assert record.expires_at - record.created_at == pytest.approx(3600)
        with pytest.raises(AccessDenied):
            book.recognise(token, record.expires_at)
        return
    assert rest.delete(f"/tokens/{answer.json()['token'].split('_')[1]}").status_code == 200
    assert ask(rest, token, key)[0].status_code == 401


class LosesAnswers:
    """A port that hands calls on to a coordinator, and loses the first ``count`` answers."""

    def __init__(self, url: str, count: int) -> None:
        numbers = itertools.count()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                names = ("Authorization", "Content-Type")
                headers = {name: self.headers[name] for name in names}
                answer = httpx.post(url + self.path, content=body, headers=headers)
                if next(numbers) < count:
                    self.close_connection = True
                    return
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_node_whose_answer_was_lost_joins_at_its_next_start(tmp_path: Path) -> None:
    server = Served(make_runtime(tmp_path / "state"))
    server.runtime.state_dir.mkdir()
    server.start()
    owner = {"Authorization": f"Bearer {server.runtime.secrets.coordinator_token}"}
    made = httpx.post(f"{server.url}/tokens/join", json={"worker_id": "node-1"}, headers=owner)
    token, node = made.json()["token"], tmp_path / "node"
    between = LosesAnswers(server.url, 2)
    try:
        for _ in range(2):
            with pytest.raises(ServiceUnavailable):
                join(node, "node-1", between.url, token)
            assert (node / DIRECTORY / JOINING_FILE).stat().st_mode & 0o777 == 0o600
            assert not (node / "runtime.json").exists()
        # Nobody else gets in with the token meanwhile.
        with pytest.raises(AccessDenied):
            join(tmp_path / "other", "node-1", server.url, token)
        assert not (tmp_path / "other").exists()
        assert join(node, "node-1", between.url, token)
        assert not (node / DIRECTORY / JOINING_FILE).exists()
        runtime = load_runtime(node)
        tls = tls_for(runtime, "node-1")
        assert tls is not None
        tls.context(server=True)  # the certificate is of the key that is kept
        agent = FakeAgent(server.client(), "node-1")
        agent.client.use_token(runtime.secrets.for_agents)
        agent.register()
        assert json.loads((node / DIRECTORY / "identity.json").read_text())["worker_id"] == "node-1"
    finally:
        between.close()
        server.end()
