"""Every route: who may call it, what it refuses, and that no input breaks it."""

import contextlib
import json
import sqlite3
import time
import uuid

import pytest

from paceline.api import ROUTES
from paceline.schemas import Problem
from tests.api.conftest import app_client, bearer, call, make_model, make_runtime

DIGEST = "0" * 64
FILL = {
    "deployment_id": "dep-1",
    "stage": "train",
    "input_digest": DIGEST,
    "token_id": "0" * 16,
}


@pytest.fixture(scope="module")
def rest(rest):
    """The app, and a client that carries the token."""
    rest.headers.update(bearer(rest.owner))
    return rest


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


@pytest.mark.parametrize("path", [path for (_, path), each in ROUTES.items() if each.is_open])
def test_open_paths_hold_no_data(rest, path):
    answer = rest.get(path.format(name="fleet.js"), headers={"Authorization": ""})
    assert answer.status_code == 200
    assert rest.headers["Authorization"].removeprefix("Bearer ") not in answer.text


def test_the_start_page_leads_to_the_fleet_and_page_files_are_these_alone(rest):
    answer = rest.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (307, "/fleet")
    script = rest.get("/pages/fleet.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "script-src 'self'" in script.headers["Content-Security-Policy"]
    for name in ("fleet.html", "page.py", "..%2Fpage.py", "x"):
        assert rest.get(f"/pages/{name}").status_code == 404, name


def test_one_worker_is_returned_with_its_version(rest):
    given = {"worker_id": "w-9", "hostname": "h", "rack": "r", "available_storage": 5}
    rest.post("/workers/register", json=given | {"version": "1.2.3"})
    found = rest.get("/workers/w-9").json()
    assert (found["version"], found["available_storage"]) == ("1.2.3", 5)
    assert rest.get("/workers/w-10").json()["got"] == "w-10"


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
    before = len(rest.get("/deployments").json()["deployments"])
    answer = rest.post("/deployments", json=create_body(rest, **change))
    problem = Problem.model_validate_json(answer.content)
    assert (answer.status_code, problem.code) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(rest.get("/deployments").json()["deployments"]) == before


def test_source_below_the_state_directory_that_is_not_there_is_missing(rest):
    body = create_body(rest, source_url=rest.source_url + "-not")
    answer = rest.post("/deployments", json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "SourceMissing")


def test_a_streamed_body_over_the_limit_is_refused(rest):
    parts = (b" " * (64 * 1024) for _ in range(80))
    streamed = rest.post("/workers/heartbeat", content=parts)
    assert streamed.status_code == 413
    assert Problem.model_validate_json(streamed.content).code == "InvalidInput"


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


def test_deployment_ids_are_uuids_in_order_of_creation(rest):
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
    path = rest.app.state.coordinator._audit._path
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


def test_what_a_creation_leaves_out_is_as_the_profile_says(tmp_path):
    state = tmp_path / "state"
    with app_client(make_runtime(state, max_failed=0.25, topology="chain")) as client:
        url, _ = make_model(state)

        def created(**more):
            body = {"model_id": "m", "version": "v1", "source_url": url, "target_workers": ["w"]}
            made = call(client, "POST", "/deployments", client.owner, json=body | more)
            assert made.status_code == 201, made.text
            path = f"/deployments/{made.json()['deployment_id']}"
            found = call(client, "GET", path, client.owner).json()["deployment"]
            return found["topology"], found["max_failed"]

        assert created() == ("chain", 0.25)
        assert created(max_failed=0.0, topology="mesh") == ("mesh", 0.0)
