"""The audit history: a row for each change, and for refused attempts within bounds."""

import time

from paceline.api import BATCH, ROWS_AT_ONCE, AuditWriter, RefusedCall
from paceline.coordinator import Call, TokenRegistry
from paceline.coordinator.state import Tick
from paceline.errors import ServiceUnavailable
from paceline.schemas import Scope
from tests.api.conftest import call

DEADLINE_S = 20.0


def make(rest, name, *scopes):
    body = {"name": name, "scopes": [str(scope) for scope in scopes]}
    answer = call(rest, "POST", "/tokens", rest.owner, json=body).json()
    return answer["token"], answer["record"]["token_id"]


def rows(rest, who, count, query="name=change.accepted"):
    """The rows of one caller, as soon as there are so many: events reach the history afterwards."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        events = call(rest, "GET", f"/audit?limit=1000&{query}", rest.owner).json()["events"]
        found = [each for each in events if each["data"].get("who") == who]
        if len(found) >= count:
            return found
        assert time.monotonic() < end_s, f"{len(found)} rows of {who}, wanted {count}"
        time.sleep(0.05)


def test_each_change_is_audited_with_actor_action_object_and_source(rest):
    token, token_id = make(rest, "changer", Scope.DEPLOY, Scope.WORKER, Scope.LEDGER)
    worker = {"worker_id": "node-0", "hostname": "h", "rack": "r", "available_storage": 10**9}
    assert call(rest, "POST", "/workers/register", token, json=worker).status_code == 200
    body = {
        "model_id": "m",
        "version": "v1",
        "source_url": rest.source_url,
        "target_workers": ["node-0"],
    }
    made = call(rest, "POST", "/deployments", token, json=body)
    deployment_id = made.json()["deployment_id"]
    record = {
        "stage": "train",
        "input_digest": "2" * 64,
        "output": {},
        "output_digest": "1" * 64,
        "run_id": "r",
        "seconds": 1.0,
        "finished_at": 2.0,
    }
    path = f"/ledger/train/{'2' * 64}"
    assert call(rest, "PUT", path, token, json=record).status_code == 200
    call(rest, "GET", "/workers", token)  # reading changes nothing and leaves no row
    found = rows(rest, "changer", 3)
    assert [each["data"]["what"] for each in found] == [
        "POST /workers/register",
        "POST /deployments",
        "PUT /ledger/{stage}/{input_digest}",
    ]
    assert found[0]["data"] == {
        "who": "changer",
        "token_id": token_id,
        "what": "POST /workers/register",
        "on": {"worker_id": "node-0"},
        "address": "testclient",
        "outcome": "accepted",
    }
    assert (found[0]["worker_id"], found[1]["deployment_id"]) == ("node-0", deployment_id)
    assert found[2]["data"]["on"] == {"stage": "train", "input_digest": "2" * 64}


def test_making_and_revoking_a_token_is_audited_under_the_caller(rest):
    admin, _ = make(rest, "head", Scope.ADMIN)
    body = {"name": "made", "scopes": ["read"]}
    made = call(rest, "POST", "/tokens", admin, json=body).json()["record"]["token_id"]
    call(rest, "DELETE", f"/tokens/{made}", admin)
    found = rows(rest, "head", 2)
    assert [(each["data"]["what"], each["data"]["on"]) for each in found] == [
        ("POST /tokens", {"token_id": made}),
        ("DELETE /tokens/{token_id}", {"token_id": made}),
    ]


def test_refused_changes_leave_rows_too_and_watchers_see_neither(rest):
    token, token_id = make(rest, "reader", Scope.READ)
    worker = {"worker_id": "seen", "hostname": "h", "rack": "r", "available_storage": 1}
    assert call(rest, "POST", "/workers/register", rest.owner, json=worker).status_code == 200
    call(rest, "POST", "/deployments/dep-x/activate", token)
    call(rest, "POST", "/deployments/dep-x/activate", None)
    call(rest, "POST", "/deployments/dep-x/activate", rest.owner)
    call(rest, "POST", "/deployments", rest.owner, json={"model_id": 1})
    query = "name=change.refused"
    first = rows(rest, "reader", 1, query)[0]
    assert first["data"]["outcome"] == "403 AccessDenied"
    assert first["data"]["token_id"] == token_id
    assert first["data"]["on"] == {"deployment_id": "dep-x"}
    assert first["deployment_id"] == "dep-x"
    assert rows(rest, "", 1, query)[0]["data"]["outcome"] == "401 AccessDenied"
    told = [each["data"]["outcome"] for each in rows(rest, "installation", 2, query)]
    assert told == ["404 NotFound", "422 InvalidInput"]
    watched = call(rest, "GET", "/events", token).json()["events"]
    assert watched
    assert not [each for each in watched if each["name"].startswith("change.")]


def test_a_retry_later_answer_is_not_audited_as_a_refusal(rest, monkeypatch):
    told = []
    coordinator = rest.app.state.coordinator
    monkeypatch.setattr(
        coordinator, "handle", lambda event: told.append(event) or _raise(ServiceUnavailable("x"))
    )
    answer = call(rest, "POST", "/deployments/dep-y/rollback", rest.owner)
    calls = [each for each in told if not isinstance(each, Tick)]  # its clock goes on meanwhile
    assert (answer.status_code, len(calls)) == (503, 1)
    assert int(answer.headers["Retry-After"]) >= 1
    monkeypatch.undo()
    call(rest, "POST", "/deployments/dep-z/rollback", rest.owner)  # a refusal, and written later
    query = "name=change.refused&deployment_id="
    assert rows(rest, "installation", 1, query + "dep-z")
    assert rows(rest, "installation", 0, query + "dep-y") == []


def _raise(error):
    raise error


def test_the_history_can_be_asked_for_a_part(rest):
    for name in ("one-more", "another"):
        make(rest, name, Scope.READ)
    rows(rest, "installation", 2)
    every = call(rest, "GET", "/audit?limit=1000", rest.owner).json()["events"]
    seqs = [each["seq"] for each in every]
    assert seqs == sorted(set(seqs))
    newest = call(rest, "GET", "/audit?limit=2&newest_first=true", rest.owner).json()["events"]
    assert newest[0]["seq"] > newest[1]["seq"]
    before = call(rest, "GET", f"/audit?before={seqs[1]}", rest.owner).json()["events"]
    assert [each["seq"] for each in before] == seqs[:1]
    none = call(rest, "GET", "/audit?since=99999999999", rest.owner).json()
    assert none["events"] == []
    for bad in ("name=nothing", "limit=0", "limit=1001", "after=-1", "since=nan", "worker_id=.."):
        assert call(rest, "GET", f"/audit?{bad}", rest.owner).status_code == 422, bad


class FullBooks:
    """A coordinator that keeps what it is told, or says that it cannot."""

    def __init__(self):
        self.tokens, self.kept, self.away = TokenRegistry(), [], False

    def commit_audit_events(self, observed):
        assert len(observed) <= BATCH
        if self.away:
            raise ServiceUnavailable("away")
        self.kept.extend(observed)

    def handle(self, event):
        raise AssertionError("no token was used")


def attempt():
    return RefusedCall(Call(caller=None, what="POST /x", address="a"), 401, "AccessDenied")


def test_a_flood_of_refusals_fills_nothing_and_is_counted(caplog):
    books = FullBooks()
    clerk = AuditWriter(books, {})
    for _ in range(5000):
        clerk.refused(attempt())
    clerk.start()
    clerk.stop()
    assert len(books.kept) == ROWS_AT_ONCE
    clerk._allowance._held.clear()  # as after some minutes
    clerk.refused(attempt())
    assert clerk._rows[0].data["left_out_before"] == 5000 - ROWS_AT_ONCE


def test_what_cannot_be_committed_is_in_the_log(caplog):
    books = FullBooks()
    books.away = True
    clerk = AuditWriter(books, {})
    clerk.refused(attempt())
    clerk.start()
    clerk.stop()
    assert books.kept == []
    assert "POST /x" in caplog.text
    assert "401 AccessDenied" in caplog.text
