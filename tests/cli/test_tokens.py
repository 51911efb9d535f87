"""`paceline tokens` and `paceline audit` against a real coordinator process."""

import json
import signal

import jsonschema
import pytest

from paceline.client import CoordinatorClient
from paceline.config import Endpoints, save_runtime
from paceline.errors import AccessDenied
from paceline.schemas import RegisterWorker, schema_text
from tests.api.conftest import Served, make_runtime
from tests.support.command import paceline


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(make_runtime(tmp_path_factory.mktemp("tokens") / "state"))
    server.runtime.state_dir.mkdir()
    server.start()
    save_runtime(
        server.runtime.model_copy(update={"endpoints": Endpoints(coordinator_url=server.url)})
    )
    yield server
    server.end(signal.SIGKILL)


def command(served, *words):
    return paceline(*words, "--state", served.runtime.state_dir)


def said(served, schema, *words):
    """The JSON that a command prints, which its schema describes."""
    done = command(served, *words, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(schema_text(schema)))
    return answer


def test_a_token_is_made_shown_used_listed_and_revoked(served):
    made = said(
        served, "token-made", "tokens", "create", "--name", "ci", "--scope", "read", "--ttl", "1h"
    )
    assert made["record"]["scopes"] == ["read"]
    lived = made["record"]["expires_at"] - made["record"]["created_at"]
    assert lived == pytest.approx(3600)
    client = CoordinatorClient(served.url, made["token"])
    assert client.workers() == []
    call = RegisterWorker(worker_id="w", hostname="h", rack="r", available_storage=1)
    with pytest.raises(AccessDenied):
        client.register(call)
    token_id = made["record"]["token_id"]
    listed = {e["token_id"]: e for e in said(served, "tokens", "tokens", "list")["tokens"]}
    assert listed[token_id]["last_used_at"]
    shown = command(served, "tokens", "list").stdout
    assert token_id in shown, "whole, however narrow the terminal"
    assert made["token"] not in shown
    assert said(served, "token-revoked", "tokens", "revoke", token_id[:9])["token_id"] == token_id
    with pytest.raises(AccessDenied):
        client.workers()


def test_the_token_alone_is_on_standard_output_for_scripts(served):
    done = command(served, "tokens", "create", "--name", "script", "--scope", "deploy")
    token = done.stdout.strip()
    assert CoordinatorClient(served.url, token).deployments() == []
    assert "shown this once" in done.stderr
    assert token not in done.stderr


def test_a_join_token_names_its_worker_and_the_authority(served):
    made = said(served, "token-made", "tokens", "join", "--worker-id", "node-1", "--ttl", "5m")
    assert made["record"]["worker_id"] == "node-1"
    assert made["record"]["kind"] == "join"
    assert made["token"].endswith(made["ca_sha256"])


def test_a_workers_tokens_are_revoked_in_one_object(served):
    words = ("--scope", "worker", "--worker-id", "node-7", "--name")
    made = [
        said(served, "token-made", "tokens", "create", *words, name)["record"]["token_id"]
        for name in ("old", "new")
    ]
    ended = said(served, "token-revoked", "tokens", "revoke", "--worker-id", "node-7")
    assert set(ended["token_ids"]) == set(made)
    assert ended["token_id"] in made


def test_a_group_join_token_is_listed_with_uses_left_expiry_and_networks(served):
    words = ("--nodes", "200", "--ttl", "2h", "--from", "10.1.0.0/16", "--from", "fd00::/8")
    made = said(served, "token-made", "tokens", "join", *words)["record"]
    assert (made["nodes"], made["joined"], made["networks"]) == (
        200,
        0,
        ["10.1.0.0/16", "fd00::/8"],
    )
    assert made["expires_at"] - made["created_at"] == pytest.approx(7200)
    listed = said(served, "tokens", "tokens", "list")["tokens"]
    assert made["token_id"] in {each["token_id"] for each in listed if each.get("nodes")}
    shown = " ".join(command(served, "tokens", "list").stdout.split())
    assert "200 of 200 uses left, from 10.1.0.0/16, fd00::/8" in shown
    assert said(served, "token-revoked", "tokens", "revoke", made["token_id"])


def test_the_audit_command_tells_who_did_what(served):
    import time

    said(served, "token-made", "tokens", "create", "--name", "told", "--scope", "read")
    end_s = time.monotonic() + 20
    while True:
        rows = said(served, "audit", "audit", "--name", "change.accepted")["events"]
        if rows and rows[-1]["data"]["what"] == "POST /tokens":
            break
        assert time.monotonic() < end_s, rows
    assert rows[-1]["data"]["who"] == "installation"
    lines = command(served, "audit", "--since", "1h").stdout.splitlines()
    accepted = [line for line in lines if "change.accepted" in line]
    assert accepted
    assert "who=installation" in accepted[-1]


@pytest.mark.parametrize(
    ("words", "code", "needle"),
    [
        (("tokens", "create", "--name", "x"), 2, "--scope"),
        (("tokens", "create", "--name", "x", "--scope", "root"), 2, "read"),
        (
            ("tokens", "create", "--name", "x", "--scope", "read", "--project", "asr"),
            2,
            "wanted train",
        ),
        (
            ("tokens", "create", "--name", "x", "--scope", "read", "--ttl", "soon"),
            2,
            "s, m, h or d",
        ),
        (("tokens", "create", "--name", "a\nb", "--scope", "read"), 2, "--name"),
        (("tokens", "join", "--worker-id", "../x"), 2, "--worker-id"),
        (("tokens", "join", "--worker-id", "x", "--ttl", "8d"), 2, "--ttl"),
        (("tokens", "join"), 2, "--nodes for many"),
        (("tokens", "join", "--worker-id", "x", "--nodes", "2"), 2, "--nodes for many"),
        (("tokens", "join", "--nodes", "0"), 2, "--nodes 0"),
        (("tokens", "join", "--nodes", "10001"), 2, "--nodes 10001"),
        (("tokens", "join", "--nodes", "2", "--from", "10.0.0.1/8"), 2, "has host bits set"),
        (("tokens", "join", "--nodes", "2", "--from", "lan"), 2, "--from 'lan'"),
        (("tokens", "revoke", "none"), 1, "no such token"),
        (("audit", "--name", "nothing.such"), 2, "not acceptable"),
    ],
)
def test_wrong_words_are_one_line_and_an_exit_code(served, words, code, needle):
    done = command(served, *words)
    assert done.returncode == code, done.stderr
    assert needle in done.stderr
    assert "Traceback" not in done.stderr


def test_join_without_a_coordinator_says_what_belongs_together(tmp_path):
    words = ("--worker-id", "a", "--join", "pl_x")
    done = paceline("agent", "--state", tmp_path, *words)
    assert done.returncode == 2
    assert "--coordinator" in done.stderr
