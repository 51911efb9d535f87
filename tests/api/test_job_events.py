"""Each change of a job's state is an event of Prefect's, for automations; nothing waits for it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.config import Endpoints
from paceline.errors import InvalidInput, ServiceUnavailable
from paceline.schemas import JobState, SubmitJob, TrainingJob, new_run_id
from paceline.telemetry import JobEvents, prefect_events
from tests.api.conftest import app_client, call, make_runtime
from tests.support.prefect_server import eventually, prefect_server  # noqa: F401 - the fixture

GUIDE = Path("docs/how-to/watch-training-jobs.md")
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
def api(prefect_server: None) -> Iterator[httpx.Client]:  # noqa: F811
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
        "paceline.team": "nlp", "paceline.project": "asr",
    }  # fmt: skip
    assert [each["prefect.resource.id"] for each in first["related"]] == [
        f"prefect.flow-run.{flow_run}"
    ]
    assert last["payload"]["reason"] == "cancel requested by installation"
    assert {key: first["payload"][key] for key in ("name", "team", "project")} == {
        "name": "chat", "team": "nlp", "project": "asr",
    }  # fmt: skip


def test_the_guides_automation_is_one_that_fires_for_a_job_that_needs_a_review(
    api: httpx.Client,
) -> None:
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    (text,) = re.findall(r"```json automation\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    asked = json.loads(text)
    asked["actions"] = [{"type": "do-nothing"}]  # the guide's names a block of one's own
    answer = api.post("automations/", json=asked)
    assert answer.status_code == 201, answer.text
    assert api.delete(f"automations/{answer.json()['id']}").status_code == 204
    # The server of the tests runs no triggers: what it would do with them is asked here.
    trigger = EventTrigger.model_validate(asked["trigger"])

    def fires(state: JobState) -> bool:
        event = prefect_events.event_of(job(state=state, reason="1 shard"))
        return bool(trigger.covers(ReceivedEvent.model_validate(event)))

    assert [each for each in JobState if fires(each)] == [JobState.NEEDS_REVIEW]


def test_events_wait_while_prefect_is_away_and_are_counted_when_they_are_dropped(
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
