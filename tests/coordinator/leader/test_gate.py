"""The gate before the routes of a replica."""

import asyncio
import json

import pytest

from paceline.api import LeaderGate
from paceline.coordinator.stores import Term
from paceline.schemas import EPOCH_HEADER, LEADER_HEADER

OURS, THEIRS = Term(5, "a", "http://a:1"), Term(7, "b", "https://b:2/control")


class Role:
    """What the gate asks of a coordinator."""

    def __init__(self, term=None, leader=None):
        self.term, self.leader = term, leader or term
        self.leader_epoch = self.leader.epoch if self.leader else 3


def ask(role, method, path, *, query=b"", during=None, status=200):
    """Send one request through the gate; ``during`` happens while the route works."""
    reached, sent = [], []

    async def route(scope, receive, send):
        reached.append(scope["path"])
        if during:
            during()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'"from ', "more_body": True})
        await send({"type": "http.response.body", "body": b'the route"'})

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [],
    }
    asyncio.run(LeaderGate(route, coordinator=role)(scope, receive, send))
    starts = [each for each in sent if each["type"] == "http.response.start"]
    assert len(starts) == 1, "one answer to one request"
    headers = {name.decode().lower(): value.decode() for name, value in starts[0]["headers"]}
    body = b"".join(each.get("body", b"") for each in sent)
    return starts[0]["status"], headers, body, bool(reached)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/deployments"),
        ("DELETE", "/deployments/d"),
        ("PUT", "/ledger/s/0"),
        ("PATCH", "/anything"),
        ("POST", "/workers/heartbeat"),
        ("GET", "/deployments/d/lanes"),
    ],
)
def test_what_decides_something_goes_to_the_leader(method, path):
    status, headers, _, reached = ask(Role(None, THEIRS), method, path, query=b"a=1&b=%2F")
    assert (status, reached) == (307, False)
    assert headers["location"] == f"https://b:2/control{path}?a=1&b=%2F"
    assert headers[EPOCH_HEADER.lower()] == "7"
    assert headers[LEADER_HEADER.lower()] == "https://b:2/control"
    status, headers, body, reached = ask(Role(), method, path)
    assert (status, reached) == (503, False)
    assert int(headers["retry-after"]) >= 1
    assert json.loads(body)["code"] == "NotLeading"
    status, headers, body, reached = ask(Role(OURS), method, path)
    assert (status, reached, body) == (200, True, b'"from the route"')
    assert headers[EPOCH_HEADER.lower()] == "5"
    assert headers[LEADER_HEADER.lower()] == "http://a:1"


@pytest.mark.parametrize("role", [Role(OURS), Role(None, THEIRS), Role()])
def test_reads_are_answered_by_everybody_and_say_who_leads(role):
    status, headers, body, reached = ask(role, "GET", "/deployments")
    assert (status, reached, body) == (200, True, b'"from the route"')
    assert headers[EPOCH_HEADER.lower()] == str(role.leader_epoch)
    assert headers.get(LEADER_HEADER.lower()) == (role.leader.url if role.leader else None)


@pytest.mark.parametrize("status", [200, 201, 404])
def test_answer_of_a_leader_whose_term_ended_meanwhile_is_withheld(status):
    role = Role(OURS)

    def frozen():
        role.term, role.leader = None, None

    got, headers, body, _ = ask(role, "POST", "/workers/heartbeat", during=frozen, status=status)
    assert got == 503
    assert json.loads(body)["code"] == "NotLeading"
    assert b"from the route" not in body
    assert "retry-after" in headers


def test_answer_within_a_later_term_of_the_same_replica_is_withheld_too():
    role = Role(OURS)

    def deposed_and_elected_again():
        role.term = role.leader = Term(6, "a", "http://a:1")

    got, _, body, _ = ask(role, "POST", "/deployments", during=deposed_and_elected_again)
    assert got == 503
    assert b"from the route" not in body


def test_other_protocols_pass():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    async def nothing(*_):
        return {}

    asyncio.run(LeaderGate(app, coordinator=Role())({"type": "lifespan"}, nothing, nothing))
    assert seen == ["lifespan"]
