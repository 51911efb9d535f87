"""A token that is bound to a team or project goes on with, reads and ends its own runs alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.api import FlowRunSupervisor, PrefectStarter, jobs as api_jobs
from paceline.config import Endpoints, Profile
from paceline.manifest import build_manifest
from paceline.schemas import JobReport, JobState, digest_of, flow_result_key
from tests.security.kit import JOB, Rest
from tests.support.web import Answer, Call, serving

RUN = "run-20261120-153600-9f3a1c"
FLOW_RUN = "0192f0c1-0000-7000-8000-000000000001"
RATE = {"kind": "float", "low": 1e-5, "high": 1e-2, "log": True}
SWEEP: dict[str, Any] = {
    "name": "lr", "model_id": "four", "version": "1", "snapshot_url": "s3://paceline/data/d",
    "search": {"space": {"training.learning_rate": RATE}},
}  # fmt: skip
TRAINED = {"model_id": "four", "version": "1", "snapshot_url": "s3://paceline/data/d"}


class Prefect:
    """A Prefect server with one flow run; it starts every flow whose name it knows."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {
            "id": FLOW_RUN, "state_type": "RUNNING", "state_name": "Running",
            "tags": ["paceline", "promote-model"], "parameters": {"run_id": RUN, "model_id": "m"},
        }  # fmt: skip
        self.status = 200  # of a flow that is asked for
        self.began: list[dict[str, Any]] = []  # flow runs that their run's tag finds
        self.cancels = 0
        self.started: list[dict[str, Any]] = []

    def __call__(self, call: Call) -> Answer:
        found: Any = self.run
        if call.path.endswith("/set_state"):
            self.cancels += 1
        elif "/deployments/name/" in call.path:
            return self.status, b'{"id": "abc"}'
        elif call.path.endswith("/create_flow_run"):
            self.started.append(json.loads(call.body))
        elif call.path.endswith("/filter"):
            asked = json.loads(call.body).get("flow_runs", {})
            found = [self.run] if "id" in asked else self.began if "tags" in asked else []
        return 200, json.dumps(found).encode()


@pytest.fixture
def prefect() -> Prefect:
    return Prefect()


@pytest.fixture
def rest(tmp_path: Path, prefect: Prefect) -> Iterator[Rest]:
    gate = {"models": {"four": {"approval": "four-eyes"}}}
    profile = Profile.model_validate({"name": "teams", "gate": gate})
    with serving(prefect) as web:
        ends = Endpoints(prefect_api_url=f"{web.url}/api")
        made = Rest(tmp_path / "state", endpoints=ends, profile=profile)
        yield made
        made.close()


def adopted(rest: Rest, run_id: str = RUN, flow_run_id: str = FLOW_RUN, **spec: Any) -> str:
    """Have a flow, on the installation's token, ask for its training; return the job's id."""
    spec = JOB | {"resources": {}, **spec}
    body = {"spec": spec, "run_id": run_id, "flow_run_id": flow_run_id}
    answer = rest.call("POST", "/v1/training-jobs/adopt", rest.owner, body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job"]["job_id"])


def start(rest: Rest, token: str, flow: str = "sweep", run_id: str = RUN, **given: Any) -> Any:
    parameters = given or (SWEEP if flow == "sweep" else TRAINED)
    body = {"flow": flow, "run_id": run_id, "parameters": parameters}
    return rest.call("POST", "/flows", token, body)


def submitters(rest: Rest) -> set[str]:
    answer = rest.call("GET", f"/ledger/submitters/{digest_of(RUN)}", rest.owner)
    return set(answer.json()["output"]["tokens"].values()) if answer.status_code == 200 else set()


def recorded(rest: Rest, stage: str, key: str, given: dict[str, Any] | None = None) -> str:
    """Have a flow of the run record a stage; return the record's path."""
    output = given or {"notes": ["ours"]}
    body = {
        "stage": stage, "input_digest": key, "output": output, "output_digest": digest_of(output),
        "run_id": RUN, "seconds": 0.0, "finished_at": time.time(),
    }  # fmt: skip
    assert rest.call("PUT", f"/ledger/{stage}/{key}", rest.owner, body).status_code == 200
    return f"/ledger/{stage}/{key}"


def request_approval(rest: Rest) -> None:
    request = {
        "model_id": "m", "evidence_digest": "a" * 64, "report_digest": "b" * 64,
        "policy_digest": "c" * 64, "run_id": RUN, "expires_at": time.time() + 900,
        "version": "2", "flow_run_id": FLOW_RUN, "page": "",
    }  # fmt: skip
    recorded(rest, "approval-request", digest_of(RUN), request)


# --- a run id


@pytest.mark.parametrize("bound", ["team", "project"])
def test_a_run_of_others_is_not_gone_on_with(rest: Rest, prefect: Prefect, bound: str) -> None:
    boss = rest.person("boss", "deploy")
    assert start(rest, boss, "promote-model", model_id="m").status_code == 201
    ann = rest.person("ann", "train", "deploy", **{bound: "nlp"})
    for flow in ("sweep", "train-model"):
        refused = start(rest, ann, flow)
        assert refused.status_code == 403 and "the run is another's" in refused.text
    for method in ("GET", "DELETE"):
        assert rest.call(method, f"/flows/{FLOW_RUN}", ann).status_code == 403
    assert submitters(rest) == {"boss"}
    assert (len(prefect.started), prefect.cancels) == (1, 0)


def test_a_run_that_only_its_job_or_prefect_knows_is_not_free(rest: Rest, prefect: Prefect) -> None:
    """It was started in Prefect's page, or is a job's of the queue."""
    ann = rest.person("ann", "train", team="nlp")
    prefect.began = [prefect.run]
    assert start(rest, ann).status_code == 403
    prefect.began = []
    adopted(rest, team="vision")
    assert start(rest, ann).status_code == 403
    assert submitters(rest) == set()
    assert start(rest, rest.person("cai", "train", team="vision")).status_code == 201


def test_a_team_and_an_unbound_token_go_on_with_a_run(rest: Rest) -> None:
    ann, bob = (rest.person(name, "train", "deploy", team="nlp") for name in ("ann", "bob"))
    assert start(rest, ann, "train-model").status_code == 201
    assert start(rest, ann, "promote-model", model_id="m").status_code == 201
    assert start(rest, bob, "evaluate-model", model_id="m").status_code == 201
    assert start(rest, rest.person("boss", "deploy"), "train-model").status_code == 201
    assert submitters(rest) == {"ann", "bob", "boss"}
    assert rest.call("GET", f"/flows/{FLOW_RUN}", bob).status_code == 200


def test_a_flow_that_is_not_started_has_no_submitter(rest: Rest, prefect: Prefect) -> None:
    """One that may have started has."""
    ann = rest.person("ann", "train", team="nlp")
    prefect.status = 404
    assert start(rest, ann).status_code == 404
    assert submitters(rest) == set()
    prefect.status = 500
    assert start(rest, ann).status_code == 503
    assert submitters(rest) == {"ann"}
    prefect.status = 404
    assert start(rest, ann).status_code == 404
    assert submitters(rest) == {"ann"}, "by the earlier call"


# --- a deployment's flow run


def test_a_deployment_names_no_flow_run_of_another_team(
    rest: Rest, prefect: Prefect, tmp_path: Path
) -> None:
    adopted(rest, team="vision")
    source = tmp_path / "state" / "m"
    source.mkdir()
    (source / "w.bin").write_bytes(b"x" * 10)
    manifest = build_manifest(source, model_id="m", version="1", link_mbit=1000.0)
    (source / "manifest.json").write_bytes(manifest.to_bytes())
    worker = {"worker_id": "w", "hostname": "h", "rack": "r", "available_storage": 10**12}
    assert rest.call("POST", "/workers/register", rest.owner, worker).status_code == 200
    named = {"source_url": str(source), "target_workers": ["w"], "flow_run_id": FLOW_RUN}
    ann = rest.person("ann", "train", "deploy", team="nlp")
    assert rest.call("POST", "/deployments", ann, named).status_code == 403
    other = named | {"flow_run_id": "not a flow run"}
    assert rest.call("POST", "/deployments", ann, other).status_code == 404

    cai = rest.person("cai", "train", "deploy", team="vision")
    made = rest.call("POST", "/deployments", cai, named)
    assert made.status_code == 201, made.text
    coordinator = rest.client.app.state.coordinator  # type: ignore[attr-defined]
    coordinator.cancel(made.json()["deployment_id"])
    starter = PrefectStarter(rest.runtime.endpoints.prefect_api_url)
    # One that a command runs has its run's tag alone.
    for tag, cancels in (("another system's", 0), (f"run:{RUN}", 1), ("paceline", 2)):
        prefect.run["tags"] = [tag]
        FlowRunSupervisor(coordinator, starter).run_once()
        assert prefect.cancels == cancels, tag


def test_a_bound_flow_adopts_no_run_of_another_team(rest: Rest, prefect: Prefect) -> None:
    """A job's team is whose its flow run is: who adopts one takes it over."""
    vision = rest.person("cai", "train", "deploy", team="vision")
    assert start(rest, vision, "promote-model", model_id="m").status_code == 201
    flow = rest.person("flow", "train", "deploy", "ledger", team="nlp")
    other = {"run_id": RUN.replace("153600", "153601"), "flow_run_id": FLOW_RUN[:-1] + "2"}
    mine = {"run_id": RUN, "flow_run_id": FLOW_RUN}
    for asked in (mine, mine | {"run_id": other["run_id"]}, other | {"run_id": RUN}):
        prefect.run["id"] = asked["flow_run_id"]
        body = {"spec": JOB | {"resources": {}}, **asked}
        assert rest.call("POST", "/v1/training-jobs/adopt", flow, body).status_code == 403, asked
    prefect.run["id"] = FLOW_RUN
    assert rest.call("GET", f"/flows/{FLOW_RUN}", vision).status_code == 200


# --- approvals


def test_a_promotion_of_another_team_is_not_shown(rest: Rest) -> None:
    cai = rest.person("cai", "train", "deploy", "approve", team="vision")
    assert start(rest, cai, "promote-model", model_id="m").status_code == 201
    request_approval(rest)
    ann, bob = rest.person("ann", "train", "approve", team="nlp"), rest.person("bob", "read")
    listed = {
        name: len(rest.call("GET", "/approvals", token).json()["approvals"])
        for name, token in (("ann", ann), ("bob", bob), ("cai", cai))
    }
    assert listed == {"ann": 0, "bob": 1, "cai": 1}
    decision = {"evidence_digest": "a" * 64, "approved": True}
    for refused in (
        rest.call("GET", f"/approvals/{RUN}", ann),
        rest.call("POST", f"/approvals/{RUN}", ann, decision),
    ):
        assert refused.status_code == 403 and "another team" in refused.text


def test_a_promotion_that_an_unbound_token_started_is_its_jobs_teams(rest: Rest) -> None:
    """Without a job it is everybody's."""
    assert (
        start(rest, rest.person("boss", "deploy"), "promote-model", model_id="m").status_code == 201
    )
    request_approval(rest)
    tokens = [rest.person("p", "train", "approve", team=team) for team in ("nlp", "vision")]

    def listed() -> list[int]:
        return [len(rest.call("GET", "/approvals", t).json()["approvals"]) for t in tokens]

    assert listed() == [1, 1]
    adopted(rest, team="vision")
    assert listed() == [0, 1]


# --- four eyes


@pytest.mark.parametrize("flow", ["train-model", "sweep"])
def test_who_started_the_flow_does_not_accept_its_job(rest: Rest, flow: str) -> None:
    eve, bob = (rest.person(name, "deploy", "approve") for name in ("eve", "bob"))
    second = rest.person("eve", "approve")
    assert start(rest, eve, flow).status_code == 201
    own = {"sweep": RUN} if flow == "sweep" else {}
    run_id = RUN if flow == "train-model" else RUN.replace("153600", "153601")
    job_id = adopted(rest, run_id, model_id="four", **own)
    jobs = rest.client.app.state.jobs  # type: ignore[attr-defined]
    jobs._save(jobs.job(job_id).model_copy(update={"state": JobState.NEEDS_REVIEW}))
    path = f"/v1/training-jobs/{job_id}/review"
    for token in (eve, second):
        refused = rest.call("POST", path, token, {"accepted": True})
        assert refused.status_code == 403, refused.text
        assert "may not accept it" in refused.text
    assert rest.call("POST", path, bob, {"accepted": True}).json()["job"]["state"] == "succeeded"


# --- what a run recorded, and what it trained


def test_the_ledger_shows_a_team_its_own_runs(rest: Rest) -> None:
    adopted(rest, team="vision")
    result = recorded(rest, "flow-result", flow_result_key(FLOW_RUN))
    sweep = recorded(rest, "sweep", digest_of("lr"))
    ann, cai = (rest.person("ann", "train", team=team) for team in ("nlp", "vision"))
    unbound = rest.person("bob", "read")
    for path in (result, sweep):
        refused = rest.call("GET", path, ann)
        assert refused.status_code == 403 and "ours" not in refused.text
        for token in (cai, unbound, rest.owner):
            assert rest.call("GET", path, token).json()["output"] == {"notes": ["ours"]}
    assert rest.call("GET", f"/ledger/sweep/{'0' * 64}", ann).status_code == 404

    assert start(rest, cai).status_code == 201
    path = f"/ledger/submitters/{digest_of(RUN)}"
    assert [rest.call("GET", path, each).status_code for each in (ann, cai)] == [403, 200]


def test_a_bound_flow_goes_on_with_what_others_recorded(rest: Rest) -> None:
    """A flow's token has scope ledger: it uses what another run has done, and reads who is who."""
    assert start(rest, rest.person("boss", "deploy"), "train-model").status_code == 201
    flow = rest.person("flow", "train", "deploy", "ledger", team="nlp")
    path = recorded(rest, "train", "0" * 64)
    for each in (path, f"/ledger/submitters/{digest_of(RUN)}"):
        assert rest.call("GET", each, flow).status_code == 200


def test_a_training_of_another_team_is_not_continued(
    rest: Rest, prefect: Prefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_jobs, "_require_possible", lambda *_: None)
    monkeypatch.setattr(api_jobs, "_estimate", lambda *_: None)
    jobs = rest.client.app.state.jobs  # type: ignore[attr-defined]
    trained = {"vision": "job-aaaaaaaaaaaa", "nlp": "job-bbbbbbbbbbbb"}
    for number, (team, training_id) in enumerate(trained.items()):
        flow_run = FLOW_RUN[:-1] + str(number)
        job_id = adopted(rest, f"{RUN[:-1]}{number}", flow_run, team=team)
        jobs.report(job_id, JobReport(at=1.0, flow_run_id=flow_run, training_id=training_id))

    ann = rest.person("ann", "train", "deploy", team="nlp")

    def submit(token: str, training: str) -> Any:
        body = JOB | {"resources": {}, "continue_from": training}
        return rest.call("POST", "/v1/training-jobs", token, body)

    for given in (trained["vision"], "job-a", "job-cccccccccccc"):
        refused = (
            submit(ann, given),
            start(rest, ann, "train-model", **TRAINED, continue_from=given),
        )
        assert [each.status_code for each in refused] == [403, 403], given
        assert all("no training of this token's" in each.text for each in refused)
    for given in (trained["nlp"], "job-bb"):
        found = submit(ann, given).json()["job"]["spec"]["continue_from"]
        assert found == trained["nlp"]
        assert start(rest, ann, "train-model", **TRAINED, continue_from=given).status_code == 201
        assert prefect.started[-1]["parameters"]["continue_from"] == trained["nlp"]
    assert submit(rest.owner, trained["vision"]).status_code == 201
