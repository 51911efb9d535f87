"""What a token that is bound to a team or project sees and changes of training jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.api import jobs as api_jobs
from paceline.config import Endpoints, Profile
from paceline.jobs import table
from paceline.registry import Registry
from paceline.schemas import JobState, TrainingUsage
from tests.security.kit import JOB, Rest
from tests.support.web import Answer, Call, serving

JOBS = "/v1/training-jobs"
FLOW_RUN = "0192f0c1-0000-7000-8000-00000000000{}"


def prefect(call: Call) -> Answer:
    """A Prefect server whose runs of train-model name no team, as those of the queue."""
    if call.path.endswith("/filter"):
        return 200, b"[]"
    run = call.path.removesuffix("/set_state").rsplit("/", 1)[-1]
    found = {"id": run, "state_type": "RUNNING", "parameters": {"spec": {}}}
    return 200, json.dumps(found | {"tags": ["paceline", "train-model"]}).encode()


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Rest]:
    profile = {
        "name": "teams",
        "jobs": {"quotas": {"nlp": {"slots": 4, "max_priority": 10}}},
        "gate": {"models": {"four": {"approval": "four-eyes"}}},
    }
    with serving(prefect) as web:
        ends = Endpoints(prefect_api_url=f"{web.url}/api")
        made = Rest(tmp_path / "state", endpoints=ends, profile=Profile.model_validate(profile))
        yield made
        made.close()


def adopted(rest: Rest, number: int, who: str | None = None, **spec: Any) -> str:
    """Make a job that has a flow run, as a flow does; return its id."""
    body = {
        "spec": JOB | {"resources": {}} | spec,
        "run_id": f"run-20261120-15360{number}-9f3a1c",
        "flow_run_id": FLOW_RUN.format(number),
    }
    answer = rest.call("POST", f"{JOBS}/adopt", who or rest.owner, body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job"]["job_id"])


@pytest.mark.parametrize("bound", ["team", "project"])
def test_a_bound_token_sees_only_its_own_jobs(rest: Rest, bound: str) -> None:
    own, theirs = (adopted(rest, n, **{bound: name}) for n, name in enumerate(("nlp", "vision")))
    ann = rest.person("ann", "read", "train", **{bound: "nlp"})
    listed = rest.call("GET", JOBS, ann).json()
    assert ([each["job_id"] for each in listed["jobs"]], listed["total"]) == ([own], 1)
    for more in ("", "/logs", "/events"):
        assert rest.call("GET", f"{JOBS}/{own}{more}", ann).status_code == 200
        refused = rest.call("GET", f"{JOBS}/{theirs}{more}", ann)
        assert refused.status_code == 403 and f"another {bound}" in refused.text
    assert rest.call("GET", JOBS, rest.owner).json()["total"] == 2

    of_jobs = {each["data"]["job_id"] for each in events(rest, ann)}
    assert of_jobs == {own} and len(events(rest, rest.owner)) == 2
    runs = [FLOW_RUN.format(number) for number in range(2)]
    status = [rest.call("GET", f"/flows/{each}", ann).status_code for each in runs]
    assert status == [200, 403]


def events(rest: Rest, token: str) -> list[dict[str, Any]]:
    found = rest.call("GET", "/events", token).json()["events"]
    return [each for each in found if each["name"] == "job.state_changed"]


def test_costs_of_another_team_stay_theirs(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that MLflow has of trainings without a job here."""
    rows = [
        TrainingUsage(job_id=f"job-{team}", run_id=f"run-{team}", steps=1, seconds=1.0, team=team)
        for team in ("nlp", "vision", "")
    ]
    monkeypatch.setattr(Registry, "trainings", lambda _: (rows, ["a", "b", "c"]))
    endpoints = rest.runtime.endpoints.model_copy(update={"mlflow_url": "http://127.0.0.1:9"})
    runtime = rest.runtime.model_copy(update={"endpoints": endpoints})
    known = api_jobs.training_costs
    monkeypatch.setattr(
        api_jobs, "training_costs", lambda jobs, _, *more: known(jobs, runtime, *more)
    )
    for token, teams, count in (
        (rest.person("ann", "read", "train", team="nlp"), ["nlp"], 0),
        (rest.owner, ["nlp", "vision", ""], 3),
    ):
        shown = rest.call("GET", "/v1/training-costs", token).json()
        assert [each.get("team", "") for each in shown["usages"]] == teams
        assert shown.get("without_result", 0) == count


def test_a_flow_reports_for_jobs_of_its_team_alone(rest: Rest) -> None:
    theirs = adopted(rest, 1, team="vision")
    report = {"at": 1.0, "flow_run_id": FLOW_RUN.format(1), "outcome": "failed"}
    ann = rest.person("ann", "train", "ledger", team="nlp")
    refused = rest.call("POST", f"{JOBS}/{theirs}/report", ann, report)
    assert refused.status_code == 403 and "another team" in refused.text
    refused = rest.call("POST", f"{JOBS}/{theirs}/resume", ann, {})
    assert refused.status_code == 403 and "another team" in refused.text


def test_a_review_is_of_ones_team_and_under_four_eyes_not_of_ones_job(rest: Rest) -> None:
    scopes = ("read", "train", "approve", "ledger")
    ann = rest.person("ann", *scopes, team="nlp")
    bob = rest.person("bob", *scopes, team="nlp")
    vision = rest.person("cai", *scopes, team="vision")
    mine = adopted(rest, 1, ann, model_id="four")
    jobs = rest.client.app.state.jobs  # type: ignore[attr-defined]
    job = jobs.job(mine)
    jobs._save(job.model_copy(update={"state": JobState.NEEDS_REVIEW}))

    def review(token: str, accepted: bool = True) -> Any:
        return rest.call("POST", f"{JOBS}/{mine}/review", token, {"accepted": accepted})

    assert "another team" in review(vision).text
    assert "who submitted a job may not accept it" in review(ann).text
    assert jobs.job(mine).state is JobState.NEEDS_REVIEW
    assert review(bob).json()["job"]["state"] == "succeeded"


def test_a_flow_run_of_the_queue_is_cancelled_by_its_team_alone(rest: Rest) -> None:
    adopted(rest, 1, team="nlp")
    for team, status in (("default", 403), ("vision", 403), ("nlp", 200)):
        token = rest.person("ann", "train", "deploy", team=team)
        answer = rest.call("DELETE", f"/flows/{FLOW_RUN.format(1)}", token)
        assert answer.status_code == status, (team, answer.text)


def test_a_team_without_a_quota_has_no_higher_priority(rest: Rest) -> None:
    for team, priority, status in (("nlp", 10, 201), ("new", 0, 201), ("new", 1, 403)):
        spec = JOB | {"resources": {}, "team": team, "priority": priority}
        body = {"spec": spec, "run_id": f"run-20261120-153600-{priority:06x}"}
        answer = rest.call("POST", f"{JOBS}/adopt", rest.owner, body)
        assert answer.status_code == status, (team, priority, answer.text)


def test_one_team_does_not_fill_the_queue(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_OPEN_OF_TEAM", 1)
    adopted(rest, 1, team="nlp")
    body = {"spec": JOB | {"resources": {}, "team": "nlp"}, "run_id": "run-20261120-153602-9f3a1c"}
    refused = rest.call("POST", f"{JOBS}/adopt", rest.owner, body)
    assert refused.status_code == 409 and "1 of team nlp" in refused.text
    adopted(rest, 3, team="vision")


def test_a_flow_run_without_a_team_is_its_submitters(rest: Rest) -> None:
    """Of flows that take no team a bound token sees and cancels those that it started."""
    deploy = rest.person("ann", "train", "deploy", team="nlp")
    path = f"/flows/{FLOW_RUN.format(7)}"
    for method in ("GET", "DELETE"):
        refused = rest.call(method, path, deploy)
        assert refused.status_code == 403 and "not this token's" in refused.text
        assert rest.call(method, path, rest.owner).status_code == 200
