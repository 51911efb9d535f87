"""Who approves a promotion is the owner of the token that the coordinator saw: no text, no record
of the ledger, no form and not the submitter takes that place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Endpoints, Profile
from paceline.schemas import ApprovalRequest, digest_of
from tests.security.kit import Rest
from tests.support.web import Answer, Call, serving

RUN = "run-20261120-153600-9f3a1c"
FLOW_RUN = "0192f0c1-0000-7000-8000-000000000001"
EVIDENCE = "e" * 64
PERSONS = {"ann": ("deploy", "approve"), "bob": ("approve",), "eve": ("deploy", "ledger")}


class Prefect:
    """A Prefect server with one suspended flow run; ``answers`` are those it was resumed with."""

    def __init__(self) -> None:
        self.state, self.away = "PAUSED", False
        self.answers: list[dict[str, Any]] = []

    def __call__(self, call: Call) -> Answer:
        if self.away:
            return None
        if call.path.endswith("/filter"):
            return 200, b"[]"
        if call.path.endswith("/resume"):
            self.answers.append(json.loads(call.body)["run_input"])
            self.state = "SCHEDULED"
            return 200, b'{"status": "ACCEPT"}'
        run = {"id": FLOW_RUN, "tags": ["paceline"], "state_type": self.state}
        return 200, json.dumps(run).encode()


@pytest.fixture
def prefect() -> Prefect:
    return Prefect()


@pytest.fixture
def rest(tmp_path: Path, prefect: Prefect, request: pytest.FixtureRequest) -> Iterator[Rest]:
    approval = getattr(request, "param", "four-eyes")
    own = {"models": {"m": {"approval": approval}}}
    profile = Profile.model_validate({"gate": own, "security": {"failures_per_minute": 1e9}})
    with serving(prefect) as web:
        endpoints = Endpoints(prefect_api_url=f"{web.url}/api")
        made = Rest(tmp_path / "state", profile=profile, endpoints=endpoints)
        yield made
        made.close()


def request_of(**changes: Any) -> ApprovalRequest:
    facts: dict[str, Any] = {
        "run_id": RUN, "model_id": "m", "version": "2", "evidence_digest": EVIDENCE,
        "report_digest": "b" * 64, "policy_digest": "a" * 64, "expires_at": time.time() + 600,
        "flow_run_id": FLOW_RUN, "page": "http://127.0.0.1/page",
    }  # fmt: skip
    return ApprovalRequest(**facts | changes)


def put(rest: Rest, token: str, stage: str, key: str, output: dict[str, Any]) -> Any:
    body = {
        "stage": stage, "input_digest": key, "output": output, "output_digest": digest_of(output),
        "run_id": RUN, "seconds": 0.0, "finished_at": time.time(),
    }  # fmt: skip
    return rest.call("PUT", f"/ledger/{stage}/{key}", token, body)


def waits(rest: Rest, **changes: Any) -> ApprovalRequest:
    """Have ann submit the run; its flow, on the installation's token, requests an approval."""
    made = request_of(**changes)
    output = made.model_dump(mode="json")
    assert put(rest, rest.owner, "approval-request", digest_of(RUN), output).status_code == 200
    return made


def submit(rest: Rest, token: str) -> None:
    """Start a flow over REST; that this Prefect cannot start one changes nothing."""
    body = {"flow": "promote-model", "run_id": RUN, "parameters": {"model_id": "m"}}
    rest.call("POST", "/flows", token, body)


def decide(rest: Rest, token: str, *, approved: bool = True, **changes: Any) -> Any:
    body = {"evidence_digest": EVIDENCE, "approved": approved} | changes
    return rest.call("POST", f"/approvals/{RUN}", token, body)


def test_the_owner_of_a_token_approves_and_the_flow_goes_on(rest: Rest, prefect: Prefect) -> None:
    ann, bob = (rest.person(name, *PERSONS[name]) for name in ("ann", "bob"))
    submit(rest, ann)
    request = waits(rest)
    before = time.time()
    answer = decide(rest, bob, reason="good")
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert shown["status"] == "approved"
    approval = shown["approval"]
    assert (approval["approver"], approval["reason"]) == ("bob", "good")
    assert approval["token_id"] == bob.split("_")[1]
    assert approval["submitters"] == ["ann"], "not the installation, whose token the flow has"
    assert before <= approval["at"] <= time.time()
    assert prefect.answers == [{"decision": "approve", "reason": "good"}]
    stored = rest.call("GET", f"/ledger/approval/{request.key}", bob).json()
    assert stored["output"] == approval
    audit = rest.call("GET", "/audit?newest_first=true", rest.owner).text
    assert "/approvals/" in audit
    assert EVIDENCE in audit


def test_who_submitted_does_not_approve(rest: Rest, prefect: Prefect) -> None:
    ann, second = rest.person("ann", "deploy", "approve"), rest.person("ann", "approve")
    submit(rest, ann)
    waits(rest)
    for token in (ann, second):  # another token of the same name, too
        answer = decide(rest, token)
        assert answer.status_code == 403
        assert "cannot approve it" in answer.json()["detail"]
    assert prefect.answers == []
    assert decide(rest, ann, approved=False).json()["status"] == "rejected", "may take it back"


def test_a_run_of_the_installation_itself_is_its_own(rest: Rest) -> None:
    waits(rest)
    assert decide(rest, rest.owner).status_code == 403
    assert decide(rest, rest.person("bob", "approve")).status_code == 200


def test_all_who_submitted_a_run_are_kept_out(rest: Rest) -> None:
    ann, carl = rest.person("ann", "deploy"), rest.person("carl", "deploy", "approve")
    submit(rest, ann)
    submit(rest, carl)
    waits(rest)
    assert decide(rest, carl).status_code == 403


@pytest.mark.parametrize("rest", ["anyone"], indirect=True)
def test_the_policy_may_let_the_submitter_approve(rest: Rest) -> None:
    ann = rest.person("ann", "deploy", "approve")
    submit(rest, ann)
    waits(rest)
    assert decide(rest, ann).json()["approval"]["submitters"] == ["ann"]


def test_another_scope_does_not_decide_and_a_body_names_no_approver(rest: Rest) -> None:
    waits(rest)
    for scopes in (("read",), ("deploy",), ("deploy", "ledger")):
        token = rest.person("eve", *scopes)
        for approved in (True, False):
            assert decide(rest, token, approved=approved).status_code == 403
    bob = rest.person("bob", "approve")
    for field in ("approver", "token_id", "at", "submitters"):
        assert decide(rest, bob, **{field: "carl"}).status_code == 422


def test_no_token_writes_these_records_into_the_ledger(rest: Rest) -> None:
    """Not even the installation's own, which flows have."""
    forged = {
        "run_id": RUN, "model_id": "m", "evidence_digest": EVIDENCE, "approved": True,
        "approver": "bob", "token_id": "f" * 16, "at": 1.0, "submitters": [],
    }  # fmt: skip
    tokens = rest.person("eve", *PERSONS["eve"]), rest.owner
    keys = request_of().key, digest_of(RUN)
    for stage, token, key in product(("approval", "submitters", "training-job"), tokens, keys):
        answer = put(rest, token, stage, key, forged)
        assert answer.status_code == 403
        assert rest.call("GET", f"/ledger/{stage}/{key}", rest.owner).status_code == 404


def test_a_request_about_another_model_approves_nothing_of_this_one(rest: Rest) -> None:
    """A ledger token may write requests; the decision on one is about what it names."""
    lax = waits(rest, model_id="without-a-policy")
    assert decide(rest, rest.person("bob", "approve")).status_code == 200
    assert lax.key != request_of().key
    assert rest.call("GET", f"/ledger/approval/{request_of().key}", rest.owner).status_code == 404


def test_a_decision_is_final_and_may_be_sent_again(rest: Rest, prefect: Prefect) -> None:
    waits(rest)
    bob, carl = rest.person("bob", "approve"), rest.person("carl", "approve")
    prefect.away = True
    assert decide(rest, bob).status_code == 503
    prefect.away = False
    rest.restart()  # the decision was recorded; what is repeated resumes the flow run
    first = decide(rest, bob)
    assert first.status_code == 200, first.text
    assert prefect.answers == [{"decision": "approve", "reason": ""}]
    assert decide(rest, bob).json()["approval"] == first.json()["approval"]
    for token, approved in ((carl, True), (carl, False), (bob, False)):
        answer = decide(rest, token, approved=approved)
        assert answer.status_code == 409
        assert "approved by bob" in answer.json()["got"]
    assert len(prefect.answers) == 1, "it was resumed once"


def test_what_is_over_or_other_or_not_there_is_refused(rest: Rest) -> None:
    bob = rest.person("bob", "approve")
    assert decide(rest, bob).status_code == 404
    waits(rest, expires_at=time.time() - 1)
    late = decide(rest, bob)
    assert (late.status_code, late.json()["code"]) == (409, "GateRefused")
    waits(rest)
    other = decide(rest, bob, evidence_digest="d" * 64)
    assert other.status_code == 409
    assert "--show" in other.json()["do"]
    assert rest.call("POST", "/approvals/not-a-run", bob, {}).status_code == 422, "no body"


def test_what_waits_is_listed_until_it_is_decided(rest: Rest) -> None:
    bob = rest.person("bob", *PERSONS["bob"])
    waits(rest, expires_at=time.time() - 1)
    assert rest.call("GET", "/approvals", bob).json() == {"approvals": []}, "it has expired"
    waits(rest)
    (listed,) = rest.call("GET", "/approvals", bob).json()["approvals"]
    assert listed["run_id"] == RUN
    assert rest.call("GET", "/approvals", "pl_none").status_code == 401
    assert decide(rest, bob).status_code == 200
    assert rest.call("GET", "/approvals", bob).json() == {"approvals": []}
