"""Which token opens which route: walked from the app's own routes, with every kind of token."""

import itertools
import re
import warnings

import pytest

from paceline.api import routes
from paceline.api.app import create_app
from paceline.api.routes import ROUTES, require_declared, routes_of
from paceline.coordinator.tokens import INCLUDES
from paceline.errors import InvalidInput
from paceline.schemas.access import Scope
from paceline.schemas.calls import Problem
from tests.api.conftest import make_runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1"
GRANTED = (Scope.READ, Scope.DEPLOY, Scope.ADMIN, Scope.WORKER, Scope.LEDGER)
# Every set of scopes that a token can have, the join token's own included.
GRANTS = [frozenset(each) for size in range(1, 6) for each in itertools.combinations(GRANTED, size)]


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    runtime = make_runtime(tmp_path_factory.mktemp("access") / "state")
    with TestClient(create_app(runtime), BASE, raise_server_exceptions=False) as client:
        client.owner = runtime.secrets.coordinator_token
        client.agents = runtime.secrets.for_agents
        yield client


def call(rest, method, path, token, **more):
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    return rest.request(method, path, headers=headers, **more)


def make(rest, *scopes, **more):
    body = {"name": "test", "scopes": [str(scope) for scope in scopes], **more}
    answer = call(rest, "POST", "/tokens", rest.owner, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["token"], answer.json()["record"]["token_id"]


def make_join(rest, worker_id="node-9", **more):
    body = {"worker_id": worker_id, **more}
    answer = call(rest, "POST", "/tokens/join", rest.owner, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["token"], answer.json()["record"]["token_id"]


def walk(app):
    """Every route and method that the app has, its path filled in; found in the app itself."""
    fill = {"input_digest": "0" * 64, "stage": "train"}
    for method, path in routes_of(app):
        filled = re.sub(r"\{(\w+)\}", lambda found: fill.get(found[1], "none-1"), path)
        yield method, path, filled + ("?for_s=0.01" if path == "/events/stream" else "")


def test_the_table_and_the_app_have_the_same_routes(rest):
    served = set(routes_of(rest.app))
    assert served == set(ROUTES)
    assert len(served) >= 30
    assert all(set(route.scopes) <= set(Scope) for route in ROUTES.values())


def test_what_is_dangerous_needs_the_scope_that_it_should():
    """Said a second time and by hand: a slip in the table must not go unnoticed."""

    def only(scope):
        return {f"{m} {p}" for (m, p), route in ROUTES.items() if route.scopes == (scope,)}

    one = "/deployments/{deployment_id}"
    assert only(Scope.ADMIN) == {
        "GET /audit",
        "GET /tokens",
        "POST /tokens",
        "POST /tokens/join",
        "DELETE /tokens/{token_id}",
        f"POST {one}/budget",
    }
    assert only(Scope.DEPLOY) == {
        "POST /deployments",
        f"DELETE {one}",
        f"POST {one}/activate",
        f"POST {one}/rollback",
    }
    assert only(Scope.LEDGER) == {"PUT /ledger/{stage}/{input_digest}"}
    assert only(Scope.WORKER) == {
        "POST /workers/register",
        "POST /workers/heartbeat",
        "POST /workers/renew",
        f"GET {one}/lanes",
    }
    assert only(Scope.JOIN) == {"POST /workers/join"}
    assert all(each.startswith("GET ") for each in only(Scope.READ))
    shared = {f"{m} {p}" for (m, p), route in ROUTES.items() if len(route.scopes) > 1}
    assert shared == {f"GET {one}/manifest"}
    opened = {f"{m} {p}" for (m, p), route in ROUTES.items() if route.is_open}
    pages = ("healthz", "readyz", "ca.pem", "fleet", "docs")
    assert opened == {f"GET /{each}" for each in pages}
    silent = {"POST /workers/heartbeat"}  # each beat is no change of anybody's doing
    changes = {f"{m} {p}" for (m, p), route in ROUTES.items() if route.is_change}
    assert changes == {f"{m} {p}" for m, p in ROUTES if m != "GET"} - silent


def test_an_app_with_an_undeclared_route_does_not_start(rest, monkeypatch):
    for missing in ROUTES:
        fewer = {key: route for key, route in ROUTES.items() if key != missing}
        monkeypatch.setattr(routes, "ROUTES", fewer)
        with pytest.raises(InvalidInput) as caught:
            require_declared(rest.app)
        assert f"{missing[0]} {missing[1]}" in str(caught.value.got)


def test_every_route_refuses_no_token_a_wrong_a_revoked_and_an_expired_one(rest):
    revoked, token_id = make(rest, Scope.ADMIN)
    assert call(rest, "DELETE", f"/tokens/{token_id}", rest.owner).status_code == 200
    expired, _ = make(rest, Scope.ADMIN, ttl_seconds=0.001)
    spent_form = revoked[:-1] + ("A" if revoked[-1] != "A" else "B")
    bad = {
        None: "no token was given",
        "": "not accepted",
        rest.owner[:-1]: "not accepted",
        rest.owner + "x": "not accepted",
        "pl_0000000000000000_" + "A" * 43: "not accepted",
        spent_form: "not accepted",
        revoked: "was revoked",
        expired: "has expired",
    }
    walked = 0
    for method, path, filled in walk(rest.app):
        if ROUTES[method, path].is_open:
            assert call(rest, method, filled, None).status_code == 200, path
            continue
        for token, reason in bad.items():
            answer = call(rest, method, filled, token)
            assert answer.status_code == 401, (method, path, token)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["content-type"] == "application/problem+json"
            problem = Problem.model_validate_json(answer.content)
            assert (problem.code, problem.status) == ("AccessDenied", 401)
            assert reason in problem.detail
            assert problem.do
        walked += 1
    assert walked >= 25


def test_every_route_refuses_every_insufficient_scope_and_opens_for_the_sufficient(rest):
    tokens = {grant: make(rest, *grant)[0] for grant in GRANTS}
    refused = 0
    for method, path, filled in walk(rest.app):
        route = ROUTES[method, path]
        if route.is_open:
            continue
        for grant, token in tokens.items():
            opens = any(INCLUDES[scope] & set(route.scopes) for scope in grant)
            answer = call(rest, method, filled, token)
            if not opens:
                assert answer.status_code == 403, (method, path, grant)
                problem = Problem.model_validate_json(answer.content)
                assert problem.code == "AccessDenied"
                assert all(scope in problem.wanted for scope in route.scopes)
                assert problem.got
                assert problem.where == f"{method} {path}"
                assert problem.do
                refused += 1
            elif path not in ("/workers/join", "/workers/renew"):
                assert answer.status_code not in (401, 403), (method, path, grant, answer.text)
    assert refused >= 90, "most of the table's lines refuse most sets of scopes"


def test_a_join_token_opens_joining_and_nothing_else(rest):
    token, _ = make_join(rest)
    for method, path, filled in walk(rest.app):
        route = ROUTES[method, path]
        if not route.is_open and Scope.JOIN not in route.scopes:
            assert call(rest, method, filled, token).status_code == 403, (method, path)


def test_the_agents_own_token_opens_a_workers_calls_only(rest):
    for method, path, filled in walk(rest.app):
        route = ROUTES[method, path]
        if not route.is_open and Scope.WORKER not in route.scopes:
            assert call(rest, method, filled, rest.agents).status_code == 403, (method, path)
    worker = {"worker_id": "own", "hostname": "h", "rack": "r", "available_storage": 1}
    assert call(rest, "POST", "/workers/register", rest.agents, json=worker).status_code == 200


def test_what_no_route_answers_is_refused_before_the_app(rest):
    reader, _ = make(rest, Scope.READ)
    # A newline at the end is what some routers match all the same.
    for path in ("/nowhere", "/tokens%0A", "/tokens/", "/deployments/a%2Fb", "//tokens"):
        answer = call(rest, "GET", path, reader)
        assert answer.status_code == 404, path
        assert Problem.model_validate_json(answer.content).code == "NotFound"
        assert call(rest, "GET", path, None).status_code == 401
    for method in ("PATCH", "TRACE", "OPTIONS", "HEAD"):
        answer = call(rest, method, "/tokens", reader)
        assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST"), method
        if method != "HEAD":
            assert Problem.model_validate_json(answer.content).wanted == "GET, POST"


@pytest.mark.parametrize("header", ["Basic {}", "{}", "Bearer  {}", "Bearer {} {}", "Bearer"])
def test_only_one_plain_bearer_header_is_a_token(rest, header):
    value = header.format(*[rest.owner] * header.count("{}"))
    assert rest.get("/workers", headers={"Authorization": value}).status_code == 401


def test_two_authorization_headers_are_no_token(rest):
    pair = [("Authorization", f"Bearer {rest.owner}"), ("Authorization", f"Bearer {rest.owner}")]
    assert rest.get("/workers", headers=pair).status_code == 401


def test_a_bound_token_speaks_for_its_own_worker_only(rest):
    token, _ = make(rest, Scope.WORKER, worker_id="w-7")
    mine = {"worker_id": "w-7", "hostname": "h", "rack": "r", "available_storage": 1}
    other = mine | {"worker_id": "w-8"}
    beat = {"worker_id": "w-7", "status": "idle"}
    assert call(rest, "POST", "/workers/register", token, json=mine).status_code == 200
    assert call(rest, "POST", "/workers/heartbeat", token, json=beat).status_code == 200
    for method, path, body in (
        ("POST", "/workers/register", other),
        ("POST", "/workers/heartbeat", beat | {"worker_id": "w-8"}),
        ("GET", "/deployments/none-1/lanes?worker_id=w-8", None),
    ):
        answer = call(rest, method, path, token, json=body)
        problem = Problem.model_validate_json(answer.content)
        assert (answer.status_code, problem.code) == (403, "AccessDenied"), path
        assert (problem.got, problem.wanted) == ("w-8", "w-7")


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": ["join"]},
        {"name": "", "scopes": ["read"]},
        {"name": "new\nline", "scopes": ["read"]},
        {"name": "x", "scopes": ["read"], "ttl_seconds": 0},
        {"name": "x", "scopes": ["read"], "ttl_seconds": 1e12},
        {"name": "x", "scopes": ["read"], "worker_id": "w"},
        {"name": "x", "scopes": ["worker", "read"], "worker_id": "w"},
        {"name": "x", "scopes": ["worker"], "worker_id": "../w"},
    ],
)
def test_tokens_that_make_no_sense_are_not_made(rest, body):
    before = call(rest, "GET", "/tokens", rest.owner).json()
    answer = call(rest, "POST", "/tokens", rest.owner, json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "InvalidInput")
    assert call(rest, "GET", "/tokens", rest.owner).json() == before


def test_the_secret_is_told_once_and_kept_nowhere(rest):
    token, token_id = make(rest, Scope.READ)
    listed = call(rest, "GET", "/tokens", rest.owner)
    assert token_id in listed.text
    assert token not in listed.text
    assert "sha256" not in listed.text
    database = rest.app.state.coordinator
    assert call(rest, "GET", "/workers", token).status_code == 200
    record = database.tokens.find(token_id)
    assert token not in record.model_dump_json()
    secret = token.split("_", 2)[2]
    assert secret not in call(rest, "GET", "/audit?limit=1000", rest.owner).text


def test_a_revoked_token_is_dead_at_the_next_call_and_stays_listed(rest):
    token, token_id = make(rest, Scope.READ, ttl_seconds=3600)
    assert call(rest, "GET", "/workers", token).status_code == 200
    assert call(rest, "DELETE", f"/tokens/{token_id}", rest.owner).json() == {"success": True}
    assert call(rest, "GET", "/workers", token).status_code == 401
    again = call(rest, "DELETE", f"/tokens/{token_id}", rest.owner)
    assert again.json() == {"success": True}, "revoking twice is no error"
    listed = {e["token_id"]: e for e in call(rest, "GET", "/tokens", rest.owner).json()["tokens"]}
    assert listed[token_id]["revoked_at"]
    assert listed[token_id]["last_used_at"], "it was used once"
    assert call(rest, "DELETE", "/tokens/0000", rest.owner).status_code == 404
