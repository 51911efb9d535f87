"""Each change of a job's state is an event of Prefect's, for automations; nothing waits for it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.api.flow_starter import PrefectStarter
from paceline.config import Endpoints
from paceline.errors import InvalidInput, ServiceUnavailable
from paceline.schemas import JobState, SubmitJob, TrainingJob, new_run_id
from paceline.telemetry import JobEvents, prefect_events
from tests.api.conftest import app_client, call, make_runtime
from tests.journeys.guide import commands
from tests.support.prefect_server import eventually
from tests.support.web import serving

pytestmark = pytest.mark.xdist_group("prefect")  # one server
S = JobState
GUIDE = "how-to/watch-training-jobs.md"
JOBS = "/v1/training-jobs"


def job(number: int = 0, **more: Any) -> TrainingJob:
    spec = SubmitJob(model_id="m", version="1", data_snapshot="s3://b/data/snapshots/0")
    made: dict[str, Any] = {
        "job_id": f"tj-{number:012x}", "submission_id": "0" * 64, "spec": spec,
        "run_id": new_run_id(), "state": JobState.QUEUED, "created_at": 1.0, "updated_at": 2.0,
    }  # fmt: skip
    return TrainingJob(**made | more)


class Prefect:
    """Takes batches, but for the next ``away`` calls."""

    def __init__(self, away: int) -> None:
        self.taken: list[str] = []
        self.calls, self.away = 0, away

    def __call__(self, events: Sequence[dict[str, Any]]) -> None:
        self.calls += 1
        if self.calls <= self.away:
            raise ServiceUnavailable("Prefect's server does not answer")
        if any(each["payload"]["name"] == "odd" for each in events):
            raise InvalidInput("Prefect refuses what it was sent")
        self.taken += [each["payload"]["job_id"] for each in events]


@pytest.fixture
def api(prefect_server: None) -> Iterator[httpx.Client]:
    from prefect.settings import PREFECT_API_URL

    with httpx.Client(base_url=f"{PREFECT_API_URL.value()}/", timeout=30) as client:
        yield client


def test_prefect_has_each_change_of_a_job_with_its_owner_and_reason(
    api: httpx.Client, tmp_path: Path
) -> None:
    made = make_runtime(tmp_path / "state")
    known = Endpoints(prefect_api_url=str(api.base_url).rstrip("/"))
    spec = {
        "model_id": "m", "version": "v1", "data_snapshot": "s3://b/data/snapshots/0",
        "name": "chat", "team": "nlp", "project": "asr",
    }  # fmt: skip
    flow_run = str(uuid.uuid4())
    with app_client(made.model_copy(update={"endpoints": known})) as client:
        body = {"spec": spec, "run_id": new_run_id(), "flow_run_id": flow_run}
        answer = call(client, "POST", f"{JOBS}/adopt", client.owner, json=body)
        job_id = answer.json()["job"]["job_id"]
        assert call(client, "POST", f"{JOBS}/{job_id}/cancel", client.owner).status_code == 200
    asked = {"filter": {"resource": {"id": [f"paceline.job.{job_id}"]}}, "limit": 50}

    def events() -> list[dict[str, Any]]:
        return list(api.post("events/filter", json=asked).json()["events"])

    eventually(lambda: len(events()) >= 2)
    last, first = sorted(events(), key=lambda each: str(each["event"]))
    assert [first["event"], last["event"]] == ["paceline.job.queued", "paceline.job.cancelled"]
    assert first["resource"] == {
        "prefect.resource.id": f"paceline.job.{job_id}", "prefect.resource.name": "chat",
        "paceline.team": "nlp", "paceline.project": "asr", "paceline.model": "m",
    }  # fmt: skip
    assert [each["prefect.resource.id"] for each in first["related"]] == [
        f"prefect.flow-run.{flow_run}"
    ]
    assert last["payload"]["reason"] == "cancel requested by installation"
    assert {key: first["payload"][key] for key in ("name", "team", "project")} == {
        "name": "chat", "team": "nlp", "project": "asr",
    }  # fmt: skip


def test_the_guides_automation_fires_for_a_job_that_needs_a_person(
    api: httpx.Client, tmp_path: Path
) -> None:
    (tmp_path / "automation.py").write_text(commands(GUIDE, "python")["automation"])
    before = {each["id"] for each in api.post("automations/filter").json()}
    events = JobEvents(PrefectStarter(str(api.base_url).rstrip("/")).emit)
    events.start()
    with serving(lambda _: (200, b"ok")) as hook:
        typed = commands(GUIDE)["automate"]
        for word, here in (
            ("http://127.0.0.1:4200/api", str(api.base_url).rstrip("/")),
            ("https://chat.example/hooks/jobs", f"{hook.url}/hooks/jobs"),
            ("python", shlex.quote(sys.executable)),
        ):
            assert word in typed
            typed = typed.replace(word, here)
        done = subprocess.run(
            ["bash", "-ec", typed], cwd=tmp_path, capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        try:
            quiet = [S.QUEUED, S.RUNNING, S.PREEMPTED, S.SUCCEEDED, S.CANCELLED]
            for number, state in enumerate((*quiet, S.NEEDS_REVIEW, S.FAILED)):
                spec = job().spec.model_copy(update={"team": "nlp"})
                now = time.time()  # Prefect does not act on old events
                made = job(number, state=state, reason="1 shard", spec=spec, updated_at=now)
                events.take(made)
                events.take(made)  # sent twice, it is one event
            assert eventually(lambda: len(hook.calls) >= 2), "it has not fired"
        finally:
            events.stop()
            for each in api.post("automations/filter").json():
                if each["id"] not in before:
                    api.delete(f"automations/{each['id']}")
    assert {each.path for each in hook.calls} == {"/hooks/jobs"}
    assert sorted(json.loads(each.body)["text"] for each in hook.calls) == [
        "tj-000000000005 is needs_review: tj-000000000005 of team nlp: 1 shard",
        "tj-000000000006 is failed: tj-000000000006 of team nlp: 1 shard",
    ]


def test_events_wait_while_prefect_is_away_and_dropped_ones_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefect_events, "MOST_WAITING", 3)
    prefect = Prefect(away=prefect_events.ATTEMPTS + 2)
    events = JobEvents(prefect, retry_s=0.01)
    for number in range(5):  # before it starts: nothing takes them out
        events.take(job(number))
    assert events.dropped == 2
    events.start()
    assert eventually(lambda: events.dropped == 5)
    assert prefect.calls == prefect_events.ATTEMPTS, "a batch is not sent for ever"
    for number in (6, 7):  # away twice more, then back
        events.take(job(number))
        assert eventually(lambda each=number: prefect.taken[-1:] == [job(each).job_id])
    events.stop()
    assert (len(prefect.taken), prefect.calls - prefect.away, events.dropped) == (2, 2, 5)


def test_an_event_that_prefect_refuses_takes_no_other_with_it() -> None:
    prefect = Prefect(away=0)
    events = JobEvents(prefect)
    for number in range(5):
        made = job(number)
        events.take(
            made.model_copy(update={"spec": made.spec.model_copy(update={"name": "odd"})})
            if number == 2
            else made
        )
    events.start()
    assert eventually(lambda: len(prefect.taken) == 4)
    events.stop()
    assert events.dropped == 1
    assert prefect.taken == [job(each).job_id for each in (0, 1, 3, 4)]
