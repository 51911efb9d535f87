"""Which token opens which route: walked from the app's own routes, with every kind of token."""

import re
from typing import get_args

import pytest

from paceline.api import ROUTES, require_declared, routes, routes_of
from paceline.coordinator import INCLUDES
from paceline.errors import InvalidInput
from paceline.schemas import GrantedScope, Problem, Scope
from tests.api.conftest import BASE, call

GRANTED = [Scope(each) for each in get_args(GrantedScope)]
PAIRS = ((Scope.DEPLOY, Scope.LEDGER), (Scope.APPROVE, Scope.WORKER))
GRANTS = [frozenset(each) for each in (*((one,) for one in GRANTED), *PAIRS)]


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
    fill = {"input_digest": "0" * 64, "stage": "train", "name": "fleet.js"}
    for method, path in routes_of(app):
        filled = re.sub(r"\{(\w+)\}", lambda found: fill.get(found[1], "none-1"), path)
        yield method, path, filled + ("?for_s=0.01" if path == "/events/stream" else "")


def test_the_table_and_the_app_have_the_same_routes(rest):
    served = set(routes_of(rest.app))
    assert served == set(ROUTES)
    assert len(served) >= 30
    assert all(set(route.scopes) <= set(Scope) for route in ROUTES.values())


def test_an_app_with_an_undeclared_route_does_not_start(rest, monkeypatch):
    for missing in ROUTES:
        fewer = {key: route for key, route in ROUTES.items() if key != missing}
        monkeypatch.setattr(routes, "ROUTES", fewer)
        with pytest.raises(InvalidInput) as caught:
            require_declared(rest.app)
        assert f"{missing[0]} {missing[1]}" in str(caught.value.got)


def test_every_route_refuses_missing_wrong_revoked_and_expired_tokens(rest):
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


def test_every_route_refuses_too_small_scopes_and_accepts_sufficient_ones(rest):
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


def test_the_agents_and_a_join_token_open_their_own_routes_only(rest):
    for token, scope in ((make_join(rest)[0], Scope.JOIN), (rest.agents, Scope.WORKER)):
        for method, path, filled in walk(rest.app):
            route = ROUTES[method, path]
            if not route.is_open and scope not in route.scopes:
                assert call(rest, method, filled, token).status_code == 403, (method, path)
    worker = {"worker_id": "own", "hostname": "h", "rack": "r", "available_storage": 1}
    assert call(rest, "POST", "/workers/register", rest.agents, json=worker).status_code == 200


def test_what_no_route_answers_is_refused_before_the_app(rest):
    reader, _ = make(rest, Scope.READ)
    # A newline at the end is what some routers match all the same.
    for path in ("/nowhere", "/tokens%0A", "/tokens/", "/deployments/a%2Fb", f"{BASE}//tokens"):
        answer = call(rest, "GET", path, reader)
        assert answer.status_code == 404, path
        assert Problem.model_validate_json(answer.content).code == "NotFound"
        assert call(rest, "GET", path, None).status_code == 401
    for method in ("PATCH", "TRACE", "OPTIONS", "HEAD"):
        assert call(rest, method, "/tokens", None).status_code == 401, method
        answer = call(rest, method, "/tokens", reader)
        assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST"), method
        if method != "HEAD":
            assert Problem.model_validate_json(answer.content).wanted == "GET, POST"


@pytest.mark.parametrize("header", ["Basic {}", "{}", "Bearer  {}", "Bearer {} {}", "Bearer"])
def test_only_one_plain_bearer_header_is_a_token(rest, header):
    value = header.format(*[rest.owner] * header.count("{}"))
    assert rest.get("/workers", headers={"Authorization": value}).status_code == 401
    pair = [("Authorization", f"Bearer {rest.owner}")] * 2
    assert rest.get("/workers", headers=pair).status_code == 401
    assert rest.get(f"/workers?token={rest.owner}").status_code == 401


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


def test_the_secret_is_shown_once_and_kept_nowhere(rest):
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
