"""Every route takes any body, path and query without an internal error.

``tests/api/test_openapi.py`` sends what the document describes, and what breaks its schemas;
here is what no schema describes: bytes, nesting, numbers and texts that are no record at all, and
records with one place replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from paceline.api import ROUTES
from tests.api.conftest import app_client, bearer, make_runtime
from tests.security.kit import DIGEST, PEM, RECORDS

TAKES_A_BODY = sorted(key for key in ROUTES if key[0] in ("POST", "PUT"))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=30),
    st.sampled_from(["\ud800", "\0", "..", "a/../b", "-----BEGIN ", "é" * 500, "1e999", PEM * 3]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)
RAW = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"[" * 5000,
            b'{"a":' * 5000,
            b"1" * 5000,
            b'"\\ud800"',
            b"NaN",
            b"\xff\xfe",
            b'{"worker_id":"a","worker_id":"b"}',
            b"1e99999",
        ]
    ),
    st.recursive(ODD, lambda some: st.lists(some, max_size=3), max_leaves=8).map(
        lambda value: json.dumps(value).encode("utf-8", "surrogatepass")
    ),
)
TYPES = st.sampled_from(
    ["application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data"]
)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def bounded(examples: int) -> Any:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=checks
    )


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    runtime = make_runtime(tmp_path_factory.mktemp("bodies") / "state")
    with app_client(runtime) as client:
        client.headers.update(bearer(client.owner))
        client.joining = client.post("/tokens/join", json={"worker_id": "w"}).json()["token"]
        made = {"name": "n", "scopes": ["worker"], "worker_id": "w"}
        client.worker = client.post("/tokens", json=made).json()["token"]
        yield client


def token_for(rest: Any, path: str) -> dict[str, str]:
    """The token that opens the route: joining and renewing take a bound one."""
    tokens = {"/workers/join": rest.joining, "/workers/renew": rest.worker}
    return {"Authorization": f"Bearer {tokens[path]}"} if path in tokens else {}


def replaced(record: Any, path: tuple[int, ...], odd: Any) -> Any:
    """``record`` with one place of it replaced, which the numbers in ``path`` choose."""
    if not path or not isinstance(record, dict | list) or not record:
        return odd
    if isinstance(record, list):
        at = path[0] % len(record)
        return [*record[:at], replaced(record[at], path[1:], odd), *record[at + 1 :]]
    key = list(record)[path[0] % len(record)]
    return record | {key: replaced(record[key], path[1:], odd)}


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"]


def send(rest: Any, method: str, path: str, **more: Any) -> Any:
    path_of = path.replace("{input_digest}", DIGEST).replace("{job_id}", "tj-" + "0" * 12)
    filled = re.sub(r"\{\w+\}", "none", path_of)
    headers = token_for(rest, path) | more.pop("headers", {})
    return rest.request(method, filled, headers=headers, **more)


def test_each_record_of_these_is_accepted_as_it_stands(rest: Any) -> None:
    """Otherwise a place that was replaced would be tried behind an earlier refusal."""
    bare = ("/activate", "/rollback", "/pause", "/cancel")
    assert set(RECORDS) == {path for _, path in TAKES_A_BODY if not path.endswith(bare)}
    for method, path in TAKES_A_BODY:
        if path in RECORDS:
            answer = send(rest, method, path, json=RECORDS[path])
            assert answer.json().get("detail") != "the request is not acceptable", answer.text


@pytest.mark.parametrize("key", TAKES_A_BODY, ids=" ".join)
def test_no_body_breaks_a_route(rest: Any, key: tuple[str, str]) -> None:
    method, path = key

    @bounded(5)
    @given(raw=RAW, kind=TYPES)
    def bytes_of_any_kind(raw: bytes, kind: str) -> None:
        check(send(rest, method, path, content=raw, headers={"Content-Type": kind}))

    @bounded(6)
    @given(place=st.lists(st.integers(0, 20), min_size=1, max_size=4), odd=ODD)
    def nearly_a_record(place: list[int], odd: Any) -> None:
        body = replaced(RECORDS.get(path, {}), tuple(place), odd)
        raw = json.dumps(body).encode("utf-8", "surrogatepass")
        check(send(rest, method, path, content=raw, headers={"Content-Type": "application/json"}))

    bytes_of_any_kind()
    nearly_a_record()


@bounded(40)
@given(
    key=st.sampled_from(sorted(ROUTES)),
    values=st.lists(TEXT, min_size=2, max_size=2),
    query=st.dictionaries(
        st.sampled_from(["newest", "wait_s", "after", "limit", "worker_id", "name", "since"]),
        TEXT,
        max_size=3,
    ),
)
def test_no_path_or_query_breaks_a_route(
    rest: Any, key: tuple[str, str], values: list[str], query: dict[str, str]
) -> None:
    from urllib.parse import quote

    method, path = key
    left = iter(values)
    filled = re.sub(r"\{\w+\}", lambda _: quote(next(left), safe="") or "-", path)
    short = {"wait_s": "0"} if path == "/events" else {}
    short |= {"for_s": "0.01"} if path == "/events/stream" else {}
    if path == "/openapi.json" or filled.endswith(("/.", "/..")):
        return  # one is large and takes no input, the other never leaves the client
    check(rest.request(method, filled, params=query | short, follow_redirects=False))
