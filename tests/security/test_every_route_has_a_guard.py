"""The docs' table of every REST route and its guard is the code's own, and the app obeys it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.api import BODY_S, MAX_BODY_BYTES, OPEN_PER_S, ROUTES, Route, routes_of
from paceline.relay.transport import new_request
from paceline.schemas import Scope
from tests.api.conftest import app_client, bearer, make_runtime

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/security.md"
ROW = re.compile(r"\| ([A-Z]+) (/\S*) \| (.+) \|")
ONE_WORKER = ((Scope.WORKER,), (Scope.JOIN,))  # a token that is bound to a worker speaks for it
BUCKETS = {"open": f"{OPEN_PER_S:.0f} calls/s of an address", "calls": "calls_per_s of a token"}
BUCKETS["beats"] = "beats_per_s of a worker"


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    runtime = make_runtime(tmp_path_factory.mktemp("guards") / "state")
    with app_client(runtime) as client:
        client.headers.update(bearer(client.owner))
        yield client


def guard_of(route: Route, *, takes_body: bool) -> str:
    """Return what stands before a route, as the table says it."""
    scopes = " or ".join(f"`{scope}`" for scope in route.scopes)
    parts = [f"token of scope {scopes}" if scopes else "open"]
    if route.scopes in ONE_WORKER:
        group = " (of a group: to new names)" if Scope.JOIN in route.scopes else ""
        parts.append(f"bound to its worker{group}")
    parts.append(BUCKETS[route.bucket])
    if takes_body:
        parts.append(f"body ≤ {MAX_BODY_BYTES // 2**20} MiB in {BODY_S:.0f} s")
    if route.is_change:
        parts.append("audit row")
    return ", ".join(parts)


def test_the_docs_table_names_every_route_with_its_guard(rest: Any) -> None:
    paths = rest.app.openapi()["paths"]
    wanted = {}
    for method, path in routes_of(rest.app):
        operation = paths.get(path, {}).get(method.lower(), {})
        takes_body = "requestBody" in operation
        wanted[f"{method} {path}"] = guard_of(ROUTES[method, path], takes_body=takes_body)
    text = PAGE.read_text()
    begin, end = "<!-- routes:begin -->", "<!-- routes:end -->"
    assert (text.count(begin), text.count(end)) == (1, 1)
    table = text[text.index(begin) + len(begin) : text.index(end)]
    found = [ROW.fullmatch(line) for line in table.strip().splitlines()[2:]]
    rows = {f"{row[1]} {row[2]}": row[3] for row in found if row}
    assert len(rows) == len(found), "every line is a row, and none stands twice"
    lines = "\n".join(f"| {route} | {guard} |" for route, guard in wanted.items())
    assert rows == wanted, f"the table should be:\n{lines}"


def test_a_bound_token_opens_its_routes_for_its_own_worker_alone(rest: Any) -> None:
    made = rest.post("/tokens", json={"name": "n", "scopes": ["worker"], "worker_id": "w-1"})
    worker = made.json()["token"]
    joining = rest.post("/tokens/join", json={"worker_id": "w-1"}).json()["token"]
    csr = new_request("w-2")[1].decode()
    bodies = {
        "/workers/register": {"hostname": "h", "rack": "r", "available_storage": 1},
        "/workers/heartbeat": {"status": "idle"},
        "/workers/signed-reads": {"method": "GET", "url": "s3://b/k"},
        "/workers/join": {"csr": csr},
        "/workers/renew": {"csr": csr},
    }
    walked = 0
    for (method, path), route in ROUTES.items():
        if route.scopes not in ONE_WORKER:
            continue
        token = joining if Scope.JOIN in route.scopes else worker
        body = bodies.get(path)
        answer = rest.request(
            method,
            path.replace("{deployment_id}", "d"),
            headers={"Authorization": f"Bearer {token}"},
            params={} if body else {"worker_id": "w-2"},
            json=body | {"worker_id": "w-2"} if body else None,
        )
        assert (answer.status_code, answer.json()["code"]) == (403, "AccessDenied"), path
        walked += 1
    assert walked == 6


def test_a_longer_body_is_refused_on_every_route(rest: Any) -> None:
    long = b" " * (MAX_BODY_BYTES + 1)
    for method, path in ROUTES:
        filled = re.sub(r"\{\w+\}", "none", path)
        assert rest.request(method, filled, content=long).status_code == 413, (method, path)
