"""Every route: who may call it, what it refuses, and that no input breaks it."""

import contextlib
import json
import random
import sqlite3
import time
import uuid
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.api.app import OPEN_PATHS, create_app
from paceline.schemas.calls import Problem
from tests.api.conftest import make_model, make_runtime

with warnings.catch_warnings():
    # Starlette asks for a successor of httpx that the lock does not carry yet.
    warnings.simplefilter("ignore", UserWarning)
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1"
DIGEST = "0" * 64
FILL = {
    "deployment_id": "dep-1",
    "stage": "train",
    "input_digest": DIGEST,
    "token_id": "0" * 16,
}


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    """An app with one worker, one model, and a client that carries the token."""
    state_dir = tmp_path_factory.mktemp("rest") / "state"
    runtime = make_runtime(state_dir)
    app = create_app(runtime)
    token = runtime.secrets.coordinator_token
    with TestClient(app, BASE, raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {token}"
        client.source_url, _ = make_model(state_dir)
        yield client


def calls(app):
    """Every route and method of the app, with its path filled in."""
    found = []
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            filled = path
            for name, value in FILL.items():
                filled = filled.replace("{" + name + "}", value)
            if path == "/events/stream":
                filled += "?for_s=0.02"  # it has no end of its own
            found.append((method.upper(), filled))
    return found


def create_body(rest, **more):
    fields = {
        "model_id": "m",
        "version": "v1",
        "source_url": rest.source_url,
        "target_workers": ["node-0"],
    }
    return fields | more


def test_every_route_and_method_refuses_without_the_token(rest):
    known = calls(rest.app)
    assert len(known) >= 17, "the walk must see the routes"
    paths = {path.partition("?")[0] for _, path in known} | {
        "/openapi.json",
        "/nowhere",
        "/metrics",
    }
    right = rest.headers["Authorization"]
    bare = right.removeprefix("Bearer ")
    wrong = ["", "Bearer ", "Bearer wrong", right + "x", f"Basic {bare}", bare]
    for path in sorted(paths - set(OPEN_PATHS)):
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            for value in wrong:
                answer = rest.request(method, path, headers={"Authorization": value})
                assert answer.status_code == 401, (method, path, value)
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                if method != "HEAD":
                    assert Problem.model_validate_json(answer.content).code == "AccessDenied"


def test_no_authorization_header_at_all_is_refused(rest):
    other = TestClient(rest.app, BASE, raise_server_exceptions=False)
    for method, path in calls(rest.app):
        if path not in OPEN_PATHS:
            assert other.request(method, path).status_code == 401, (method, path)


def test_token_in_the_query_is_no_token(rest):
    token = rest.headers["Authorization"].removeprefix("Bearer ")
    answer = rest.get(f"/workers?token={token}", headers={"Authorization": ""})
    assert answer.status_code == 401


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_open_paths_hold_no_data(rest, path):
    answer = rest.get(path, headers={"Authorization": ""})
    assert answer.status_code == 200
    assert rest.headers["Authorization"].removeprefix("Bearer ") not in answer.text


def test_the_calls_are_those_that_the_wire_documents(rest):
    from paceline.schemas import access
    from paceline.schemas import calls as contract

    documented = {
        (line.split()[0], line.split()[1].split("?")[0])
        for line in (contract.__doc__ + access.__doc__).splitlines()
        if line.startswith(("GET", "POST", "PUT", "DELETE")) and "," not in line.split()[1]
    }
    names = {"{deployment_id}": "{id}"}
    served = {
        (method.upper(), path.replace("{deployment_id}", names["{deployment_id}"]))
        for path, methods in rest.app.openapi()["paths"].items()
        for method in methods
    }
    assert documented <= served
    extra = {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/fleet")}
    assert served - documented <= extra


def test_heartbeat_answers_with_continue_by_its_wire_name(rest):
    beat = {"worker_id": "node-77", "status": "idle", "chunks_received": []}
    answer = rest.post("/workers/heartbeat", json=beat)
    assert answer.status_code == 200
    assert answer.json()["continue"] is False
    assert "go_on" not in answer.json()


def test_missions_own_example_calls_are_accepted(rest):
    worker = {"worker_id": "w-1", "hostname": "h", "rack": "r", "available_storage": 10}
    assert rest.post("/workers/register", json=worker).json()["registered"] is True
    beat = {
        "worker_id": "w-1",
        "status": "idle",
        "chunks_received": [],
        "bandwidth_in": 0,
        "bandwidth_out": 0,
    }
    assert rest.post("/workers/heartbeat", json=beat).json()["continue"] is True
    created = rest.post("/deployments", json=create_body(rest, target_workers=["w-1"]))
    assert created.status_code == 201
    assert set(created.json()) == {"deployment_id", "status", "estimated_time_seconds"}
    view = rest.get(f"/deployments/{created.json()['deployment_id']}").json()
    assert {"status", "progress", "workers_complete", "workers_failed"} <= set(view)


@pytest.mark.parametrize(
    ("change", "code", "status"),
    [
        ({"source_url": "/etc"}, "AccessDenied", 403),
        ({"source_url": "../x"}, "InvalidInput", 422),
        ({"source_url": "http://169.254.169.254/x"}, "InvalidInput", 422),
        ({"source_url": "file:///etc/passwd"}, "InvalidInput", 422),
        ({"source_url": "/nul\0byte"}, "InvalidInput", 422),
        ({"source_url": "s3://"}, "InvalidInput", 422),
        ({"version": "v9"}, "InvalidInput", 422),
        ({"target_workers": []}, "InvalidInput", 422),
        ({"target_workers": ["a", "a"]}, "InvalidInput", 422),
        ({"target_workers": ["../a"]}, "InvalidInput", 422),
        ({"max_failed": 2}, "InvalidInput", 422),
        ({"topology": "ring"}, "InvalidInput", 422),
        ({"surprise": 1}, "InvalidInput", 422),
        ({"seed": "x" * 10_000}, "InvalidInput", 422),
    ],
)
def test_bad_creation_is_a_clear_problem_and_creates_nothing(rest, change, code, status):
    before = rest.get("/deployments").json()
    answer = rest.post("/deployments", json=create_body(rest, **change))
    problem = Problem.model_validate_json(answer.content)
    assert (answer.status_code, problem.code) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert rest.get("/deployments").json() == before


def test_source_below_the_state_directory_that_is_not_there_is_missing(rest):
    body = create_body(rest, source_url=rest.source_url + "-not")
    answer = rest.post("/deployments", json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "SourceMissing")


def test_body_over_the_limit_is_refused_announced_or_streamed(rest):
    body = b"[" + b" " * (4 * 1024 * 1024) + b"]"
    announced = rest.post("/workers/heartbeat", content=body)
    assert announced.status_code == 413

    def parts():
        for _ in range(80):
            yield b" " * (64 * 1024)

    streamed = rest.post("/workers/heartbeat", content=parts())
    assert streamed.status_code == 413
    assert Problem.model_validate_json(streamed.content).code == "InvalidInput"


GARBAGE = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe",
    b'"\\ud800"',
    b'{"worker_id": "\\ud800", "status": "idle"}',
    b'{"worker_id": "a", "hostname": "\\ud800", "rack": "", "available_storage": 1}',
    b'{"worker_id": "a", "hostname": "", "rack": "", "available_storage": 1e999}',
    b'{"worker_id": "a", "hostname": "", "rack": "", "available_storage": ' + b"9" * 5000 + b"}",
    b'{"worker_id": "a", "status": "idle", "bandwidth_in": NaN}',
    b'{"worker_id": "a", "status": "idle", "bandwidth_in": -1}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"model_id": "m", "version": "v1", "source_url": "\\u0000", "target_workers": ["a"]}',
]


def test_garbage_bodies_are_never_a_server_error(rest):
    for method, path in calls(rest.app):
        for body in GARBAGE:
            for kind in ("application/json", "text/plain", ""):
                headers = {"Content-Type": kind} if kind else {}
                answer = rest.request(method, path, content=body, headers=headers)
                assert answer.status_code < 500, (method, path, body[:80], answer.text)


STAGE = {
    "stage": "train",
    "input_digest": DIGEST,
    "output": {"url": "s3://b/x", "n": 1},
    "output_digest": "1" * 64,
    "run_id": "run-1",
    "seconds": 1.5,
    "finished_at": 12.0,
}


def test_ledger_gives_back_what_it_was_given_and_takes_a_newer_record(rest):
    path = f"/ledger/train/{'2' * 64}"
    record = STAGE | {"input_digest": "2" * 64}
    assert rest.get(path).status_code == 404
    assert rest.put(path, json=record).json() == record
    assert rest.get(path).json() == record
    newer = record | {"output": {"url": "s3://b/y"}}
    rest.put(path, json=newer)
    assert rest.get(path).json() == newer


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(STAGE | {"stage": "other"}),
        json.dumps(STAGE | {"input_digest": "3" * 64}),
        json.dumps(STAGE | {"output": {"x": float("nan")}}),
        json.dumps(STAGE | {"output": {"x": "\ud800"}}),
        json.dumps(STAGE).replace('"n": 1', '"n": ' + "9" * 4400),
        json.dumps(STAGE).replace('"n": 1', '"n": ' + "[" * 150 + "]" * 150),
    ],
)
def test_ledger_refuses_what_it_could_not_give_back(rest, body):
    path = f"/ledger/train/{DIGEST}"
    answer = rest.put(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422) or answer.json() == json.loads(body)
    assert rest.get(path).status_code in (200, 404)


def test_events_can_be_followed_without_losing_or_repeating_any(rest):
    for index in range(30):
        worker = {"worker_id": f"e-{index}", "hostname": "h", "rack": "r", "available_storage": 1}
        rest.post("/workers/register", json=worker)
    seen, after = [], 0
    while answer := rest.get("/events", params={"after": after}).json():
        if not answer["events"]:
            break
        seen += [each["seq"] for each in answer["events"]]
        after = answer["last"]
    assert seen == sorted(set(seen))
    assert len(seen) >= 30
    ahead = rest.get("/events", params={"after": after + 10**6, "wait_s": 0}).json()
    assert ahead["events"] == []
    # Not equal: on a busy machine the silent ones are lost meanwhile, which is an event too.
    assert after <= ahead["last"] < after + 100, "a watcher of another life can find its place"


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "wait_s=nan", "wait_s=inf", "wait_s=-1", "after=" + "9" * 5000]
)
def test_bad_queries_are_refused(rest, query):
    assert rest.get(f"/events?{query}").status_code == 422


@pytest.mark.parametrize("key", ["", "x" * 201, "with space", "é"])
def test_bad_idempotency_keys_are_refused(rest, key):
    headers = {"Idempotency-Key": key.encode()}
    answer = rest.post("/deployments", json=create_body(rest), headers=headers)
    assert answer.status_code == 422


def test_metrics_name_workers_deployments_and_beats(rest):
    text = rest.get("/metrics").text
    for name in (
        'paceline_deployments{status="complete"}',
        "paceline_workers_alive",
        "paceline_worker_bytes_per_second",
        "paceline_coordinator_beats_total",
        "paceline_coordinator_epoch",
    ):
        assert name in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=8,
)


def test_fuzzed_bodies_are_never_a_server_error(rest):
    """Valid bodies with a few fields replaced by anything at all."""
    register = {"worker_id": "f", "hostname": "h", "rack": "r", "available_storage": 1}
    beat = {"worker_id": "f", "status": "idle", "deployments": [], "incarnation": 1}
    valid = [
        ("POST", "/deployments", create_body(rest, flow_run_id=None)),
        ("POST", "/workers/register", register | {"labels": {}, "address": "a", "pid": 1}),
        ("POST", "/workers/heartbeat", beat),
        ("PUT", f"/ledger/train/{DIGEST}", STAGE),
    ]

    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(st.sampled_from(valid), st.integers(0, 2**32), JSON)
    def fuzz(call, seed, value):
        method, path, body = call
        chosen = random.Random(seed).choice([*body, "unknown"])
        text = json.dumps(body | {chosen: value})
        answer = rest.request(
            method, path, content=text, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code < 500, (path, text, answer.text)
        for name in ("/deployments", "/workers", "/metrics"):
            assert rest.get(name).status_code == 200, (path, text)

    fuzz()


EXTREMES = [10**400, 2**63, 2**63 - 1, -1, 1e308, 5e-324, "x" * 3000, [10**18], ["x" * 3000], {}]


def test_no_word_of_a_worker_breaks_what_others_ask_for(rest):
    """Each field of a beat about a deployment under way, at its extremes, is a clear problem or is
    taken; and everybody else is answered as before.
    """
    names = ["loud-0", "loud-1"]
    for name in names:
        worker = {"worker_id": name, "hostname": "h", "rack": "r", "available_storage": 1}
        assert rest.post("/workers/register", json=worker | {"address": "a:1"}).status_code == 200
    created = rest.post("/deployments", json=create_body(rest, target_workers=names)).json()
    d = created["deployment_id"]
    end_s = time.monotonic() + 10
    while (lanes := rest.get(f"/deployments/{d}/lanes?worker_id=loud-0")).status_code != 200:
        assert time.monotonic() < end_s, lanes.text
        time.sleep(0.02)
    held = {"deployment_id": d, "epoch": 1, "status": "receiving", "pieces_held": 0}
    held |= {"bytes_held": 0, "chunks_received": [], "origin_bytes": 0, "failure": None}
    held |= {"edges": [], "lost_sources": [], "corrupt_sources": [], "receipt": None}
    edge = {"source": "loud-1", "reader": "loud-0", "bytes": 1, "busy_s": 1, "pieces": 1}
    beat = {"worker_id": "loud-0", "status": "receiving", "bandwidth_in": 0, "available_storage": 1}
    entries = [held | {field: value} for field in held for value in EXTREMES]
    entries += [held | {"edges": [edge | {f: value}]} for f in edge for value in EXTREMES]
    beats = [beat | {"deployments": [entry]} for entry in entries]
    beats += [beat | {field: value} for field in beat for value in EXTREMES]
    taken = 0
    for said in beats:
        answer = rest.post("/workers/heartbeat", json=said)
        assert answer.status_code in (200, 400, 422), (said, answer.text)
        taken += answer.status_code == 200
        if answer.status_code == 200:  # who is refused has changed nothing
            for path in ("/metrics", "/workers", f"/deployments/{d}/workers", "/readyz"):
                assert rest.get(path).status_code == 200, (said, path)
    assert taken > 5
    assert "event: moment" in rest.get("/events/stream?for_s=0.7").text
    assert rest.delete(f"/deployments/{d}").status_code in (200, 503)


def test_unknown_deployments_are_404_on_every_route(rest):
    for method, path in calls(rest.app):
        if path.startswith("/deployments/dep-1"):
            asked = f"{path}?worker_id=w-1" if path.endswith("/lanes") else path
            body = {"extra_bytes": 1} if path.endswith("/budget") else None
            answer = rest.request(method, asked, json=body)
            assert answer.status_code == 404, (method, path)
            assert Problem.model_validate_json(answer.content).code == "NotFound"


def test_cancelling_twice_is_one_cancel(rest):
    made = rest.post("/deployments", json=create_body(rest, target_workers=["never-there"])).json()
    path = f"/deployments/{made['deployment_id']}"
    for _ in range(2):
        assert rest.delete(path).json() == {"success": True}
    assert rest.get(path).json()["status"] == "cancelled"
    rows = rest.get(f"/audit?deployment_id={made['deployment_id']}").json()["events"]
    changes = [each["data"]["to"] for each in rows if each["name"] == "deployment.status_changed"]
    assert changes in ([], ["cancelled"]), "the second changed nothing, and shipping may be late"
    for verb in ("activate", "rollback"):
        answer = rest.post(f"{path}/{verb}")
        assert (answer.status_code, answer.json()["code"]) == (409, "Conflict"), verb


def test_deployments_are_named_by_uuids_in_the_order_in_which_they_were_made(rest):
    made = []
    for _ in range(3):
        body = create_body(rest, target_workers=["never-there"])
        made.append(rest.post("/deployments", json=body).json()["deployment_id"])
        time.sleep(0.002)
    assert [uuid.UUID(each).version for each in made] == [7, 7, 7]
    assert all(str(uuid.UUID(each)) == each for each in made)
    assert made == sorted(set(made))
    listed = rest.get("/deployments?newest=2").json()["deployments"]
    assert [each["deployment_id"] for each in listed] == made[1:]
    assert rest.get("/deployments?newest=0").status_code == 422


def test_an_audit_store_that_is_away_is_503_and_nothing_else_minds(rest):
    path = rest.app.state.coordinator._audit._file.path
    with contextlib.closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as db:
        db.execute("ALTER TABLE audit RENAME TO away")
        try:
            answer = rest.get("/audit")
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert Problem.model_validate_json(answer.content).code == "ServiceUnavailable"
            assert rest.get("/readyz").status_code == 200
            worker = {"worker_id": "w-1", "hostname": "h", "rack": "r", "available_storage": 10}
            assert rest.post("/workers/register", json=worker).status_code == 200
        finally:
            db.execute("ALTER TABLE away RENAME TO audit")
    assert rest.get("/audit").status_code == 200
