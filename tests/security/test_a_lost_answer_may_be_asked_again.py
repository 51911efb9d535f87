"""A call whose answer was lost may be repeated: it changes nothing more, and is answered."""

from __future__ import annotations

import contextlib
import itertools
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from paceline.api import create_app
from paceline.config import load_runtime
from paceline.errors import AccessDenied, ServiceUnavailable
from paceline.relay import DIRECTORY, JOINING_FILE, join
from paceline.relay.transport import new_request, tls_for
from tests.api.conftest import (
    BASE,
    FakeAgent,
    Served,
    TestClient,
    bearer,
    creation,
    make_model,
    make_runtime,
)
from tests.security.kit import Rest, rest
from tests.support.web import Call, Web, serving

__all__ = ["rest"]


def extra_bytes(client: Any, deployment_id: str) -> int:
    run = client.app.state.coordinator.read(lambda state: state.deployment_state(deployment_id))
    return int(run.persisted.extra_bytes)


def deployments(client: Any, owner: str, tmp_path: Path, count: int) -> list[str]:
    url, _ = make_model(tmp_path / "state")
    made = []
    for number in range(count):
        call = creation(url, [f"w-{number}"], topology="chain")
        body = call.model_dump(mode="json")
        answer = client.post("/deployments", json=body, headers=bearer(owner))
        assert answer.status_code == 201, answer.text
        made.append(answer.json()["deployment_id"])
    return made


def test_a_budget_is_raised_once_for_each_key(rest: Rest, tmp_path: Path) -> None:
    client, owner = rest.client, bearer(rest.owner)
    one, other = deployments(client, rest.owner, tmp_path, 2)

    def raised(deployment_id: str, extra: int, key: str | None) -> Any:
        headers = owner | ({"Idempotency-Key": key} if key else {})
        path = f"/deployments/{deployment_id}/budget"
        return client.post(path, json={"extra_bytes": extra}, headers=headers)

    for _ in range(3):
        assert raised(one, 10, "a").json() == {"success": True}
        assert extra_bytes(client, one) == 10
    # Another request under the same key is refused: of another size, deployment or kind.
    assert raised(one, 11, "a").status_code == 409
    assert raised(other, 10, "a").status_code == 409
    create = client.post(
        "/deployments",
        json=creation(str(tmp_path), ["w-9"]).model_dump(mode="json"),
        headers=owner | {"Idempotency-Key": "a"},
    )
    assert create.status_code == 409
    assert (extra_bytes(client, one), extra_bytes(client, other)) == (10, 0)
    # Another key, or none, is another request.
    assert raised(one, 10, "b").status_code == 200
    assert raised(one, 10, None).status_code == 200
    assert extra_bytes(client, one) == 30
    rows = client.get("/events", headers=owner).json()["events"]
    assert sum(each["name"] == "deployment.budget_raised" for each in rows) == 3


def test_a_repeated_budget_is_answered_after_a_restart_and_the_end(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path / "state")
    owner = {"Authorization": f"Bearer {runtime.secrets.coordinator_token}"}
    raised = {"json": {"extra_bytes": 7}, "headers": owner | {"Idempotency-Key": "k"}}
    one = ""
    for round_ in range(3):
        with TestClient(create_app(runtime), BASE) as client:
            client.headers.update(owner)
            token = runtime.secrets.coordinator_token
            one = one or deployments(client, token, tmp_path, 1)[0]
            if round_ == 2:
                client.delete(f"/deployments/{one}")
            answer = client.post(f"/deployments/{one}/budget", **raised)
            assert answer.status_code == 200, answer.text
            assert extra_bytes(client, one) == 7


def public(pem: bytes) -> Any:
    return load_pem_private_key(pem, None).public_key()


def test_a_join_is_answered_again_for_the_same_key_alone(rest: Rest) -> None:
    token = rest.join_token("node-1")
    first = rest.ask("join", "node-1", token)
    assert first.status_code == 200
    key = first.key
    tokens = [first.json()["token"]]
    for _ in range(3):
        again = rest.ask("join", "node-1", token, key)
        assert again.status_code == 200, again.text
        certificate = x509.load_pem_x509_certificate(again.json()["certificate"].encode())
        assert certificate.public_key() == public(key)
        tokens.append(again.json()["token"])
    assert len(set(tokens)) == 4
    for other in (None, new_request("x")[0]):
        refused = rest.ask("join", "node-1", token, other)
        assert (refused.status_code, refused.json()["code"]) == (403, "AccessDenied")
        assert "used already" in refused.json()["detail"]
    # The answer that arrived is the one that is used; it ends the others.
    assert rest.beat("node-1", tokens[1]) == 200
    assert [rest.beat("node-1", each) for each in tokens] == [401, 200, 401, 401]
    # One that was sent twice and comes late does not end what is used by now.
    assert rest.ask("join", "node-1", token, key).status_code == 200
    assert rest.beat("node-1", tokens[1]) == 200


def test_a_join_is_not_answered_again_once_its_token_has_ended(rest: Rest) -> None:
    token = rest.join_token("node-1", ttl_seconds=3600)
    answer = rest.ask("join", "node-1", token)
    book = rest.client.app.state.coordinator.tokens  # type: ignore[attr-defined]
    record = book.find(token.split("_")[1])
    assert record.expires_at - record.created_at == pytest.approx(3600)
    with pytest.raises(AccessDenied):
        book.authenticate(token, record.expires_at)
    assert rest.revoke(answer.json()["token"]) == 200
    assert rest.ask("join", "node-1", token, answer.key).status_code == 401


def losing_answers(url: str, count: int) -> AbstractContextManager[Web]:
    """A server that passes calls on to a coordinator, and loses the first ``count`` answers."""
    numbers = itertools.count()

    def answer(call: Call) -> tuple[int, bytes] | None:
        headers = {name: call.headers[name] for name in ("Authorization", "Content-Type")}
        given = httpx.post(url + call.path, content=call.body, headers=headers)
        return None if next(numbers) < count else (given.status_code, given.content)

    return serving(answer)


def test_a_node_whose_answer_was_lost_joins_at_its_next_start(tmp_path: Path) -> None:
    server = Served(make_runtime(tmp_path / "state"))
    server.runtime.state_dir.mkdir()
    server.start()
    owner = {"Authorization": f"Bearer {server.runtime.secrets.coordinator_token}"}
    made = httpx.post(f"{server.url}/tokens/join", json={"worker_id": "node-1"}, headers=owner)
    token, node = made.json()["token"], tmp_path / "node"
    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        between = stack.enter_context(losing_answers(server.url, 2))
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
        agent.client.use(runtime.secrets.agents_token, runtime.coordinator_ca)
        agent.register()
        assert json.loads((node / DIRECTORY / "identity.json").read_text())["worker_id"] == "node-1"
