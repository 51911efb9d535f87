"""The table of purposes over REST: an admin's, audited, and enforced where a job is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DataSettings, Endpoints, Secrets
from paceline.data import Snapshot, build_snapshot
from tests.api.conftest import app_client, call, make_runtime
from tests.support.stack import wait_until

PURPOSES, JOBS = "/v1/data-purposes", "/v1/training-jobs"


@pytest.fixture(scope="module")
def at(s3: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The app of an installation with a snapshot, and tokens of two teams."""
    root = tmp_path_factory.mktemp("purposes")
    store = s3.store()
    store.ensure_bucket("paceline")
    texts = root / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}.txt").write_text(f"file {number} says {number**3}\n" * 20)
    settings = DataSettings(shard_bytes=4096, held_out_share=0.2)
    snapshot = build_snapshot(str(texts), "s3://paceline/purposes", settings, store)
    made = make_runtime(root / "state")
    runtime = made.model_copy(
        update={
            "endpoints": Endpoints(
                s3_url=s3.endpoint_url, prefect_api_url="http://127.0.0.1:9/api"
            ),
            "secrets": Secrets(
                coordinator_token=made.secrets.coordinator_token,
                s3_access_key=s3.access_key,
                s3_secret_key=s3.secret_key,
            ),
        }
    )
    with app_client(runtime) as client:
        client.snapshot = snapshot
        bound = {"nlp": "team", "vision": "team", "asr": "project", "tts": "project"}
        for name, kind in bound.items():
            body = {"name": name, "scopes": ["train", "deploy", "ledger"], kind: name}
            made_token = call(client, "POST", "/tokens", client.owner, json=body)
            setattr(client, name, made_token.json()["token"])
        yield client


def submit(at: Any, who: str, purpose: str = "", **more: str) -> str:
    """Submit a job; the refusal, which is the next one where the purpose is allowed."""
    snapshot: Snapshot = at.snapshot
    body = {"model_id": "m", "version": "v1", "dataSnapshot": snapshot.url, "purpose": purpose}
    body |= more
    answer = call(at, "POST", JOBS, getattr(at, who), json=body)
    assert answer.status_code in (403, 404, 422), answer.text
    found = answer.json()
    return f"{found['detail']} wanted {found.get('wanted')}"


def test_the_table_decides_at_submission_and_each_change_is_audited(at: Any) -> None:
    allowed = "no such published model"
    assert call(at, "GET", PURPOSES, at.nlp).json() == {"rules": []}
    assert allowed in submit(at, "nlp"), "no table: the label is the profile's purpose"
    assert allowed in submit(at, "nlp", "language-model-training")
    assert "labelled for another purpose" in submit(at, "nlp", "speech")

    body = {"purpose": "speech", "data": [at.snapshot.url], "teams": ["nlp"], "reason": "agreed"}
    assert call(at, "POST", PURPOSES, at.nlp, json=body).status_code == 403, "an admin's only"
    made = call(at, "POST", PURPOSES, at.owner, json=body).json()
    again = call(at, "POST", PURPOSES, at.owner, json=body).json()
    assert made["rule_id"] == again["rule_id"]
    (shown,) = call(at, "GET", PURPOSES, at.nlp).json()["rules"]
    assert (shown["approver"], shown["reason"]) == (made["approver"], "agreed")
    assert shown["allowed_at"] > 0

    assert allowed in submit(at, "nlp", "speech")
    assert "wanted team nlp" in submit(at, "vision", "speech")
    assert "wanted purpose speech" in submit(at, "nlp"), "the label is enough no more"

    ended = call(at, "DELETE", f"{PURPOSES}/{made['rule_id']}", at.owner).json()
    assert ended["revoked_by"] == made["approver"]
    assert "does not allow" in submit(at, "nlp", "speech")
    assert "does not allow" in submit(at, "nlp"), "a table without rules in force is still one"
    gone = call(at, "DELETE", f"{PURPOSES}/dp-{'0' * 12}", at.owner)
    assert gone.status_code == 404

    def kept(name: str) -> list[dict[str, Any]]:  # rows are written after the answers
        path = f"/audit?name={name}&limit=1000"
        return [each["data"] for each in call(at, "GET", path, at.owner).json()["events"]]

    def changes() -> list[dict[str, Any]]:
        return [each for each in kept("change.accepted") if PURPOSES in each["what"]]

    wait_until(lambda: len(changes()) >= 2, 20, "the changes are in the audit history")
    found = [each for each in changes() if each["what"].endswith(PURPOSES)]
    assert {each["on"]["purpose"] for each in found} == {"speech"}
    assert found[0]["on"] | {"reason": "agreed", "teams": "nlp"} == found[0]["on"]
    wait_until(
        lambda: any(each["who"] == "nlp" for each in kept("change.refused")),
        20,
        "the refusal is in the audit history",
    )


def test_a_token_of_a_project_opens_that_projects_data_only(at: Any) -> None:
    allowed = "no such published model"
    body = {"purpose": "voices", "data": [at.snapshot.url], "projects": ["asr"]}
    rule = call(at, "POST", PURPOSES, at.owner, json=body).json()
    assert allowed in submit(at, "asr", "voices"), "it need not be typed"
    assert allowed in submit(at, "asr", "voices", project="asr", team="any")
    assert "wanted project asr" in submit(at, "tts", "voices")
    assert "another project's wanted project tts" in submit(at, "tts", "voices", project="asr")
    assert "wanted project asr" in submit(at, "asr", "voices", project="tts")
    spec = {"model_id": "m", "version": "v1", "data_snapshot": at.snapshot.url}
    flow = {"run_id": "run-20260101-000000-abcdef", "flow_run_id": "0" * 36}

    def adopt(token: str, project: str) -> Any:
        body = {"spec": spec | {"project": project}, **flow}
        return call(at, "POST", f"{JOBS}/adopt", token, json=body)

    assert adopt(at.tts, "asr").status_code == 403
    job = adopt(at.asr, "").json()["job"]
    assert (job["spec"]["project"], job["spec"]["team"]) == ("asr", "default")
    cancel = f"{JOBS}/{job['job_id']}/cancel"
    assert call(at, "POST", cancel, at.tts).status_code == 403
    assert call(at, "POST", cancel, at.asr).status_code == 200
    call(at, "DELETE", f"{PURPOSES}/{rule['rule_id']}", at.owner)


@pytest.mark.parametrize(
    "body",
    [{}, {"purpose": "a b"}, {"purpose": "x", "data": ["http://x"]}, {"purpose": "x", "more": 1}],
    ids=str,
)
def test_a_bad_rule_is_refused(at: Any, body: dict[str, Any]) -> None:
    assert call(at, "POST", PURPOSES, at.owner, json=body).status_code == 422


def test_the_table_outlives_the_coordinator(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path / "state")
    with app_client(runtime) as client:
        call(client, "POST", PURPOSES, client.owner, json={"purpose": "x", "ttl_seconds": 60})
        before = call(client, "GET", PURPOSES, client.owner).json()
    with app_client(runtime) as client:
        assert call(client, "GET", PURPOSES, client.owner).json() == before
        assert before["rules"][0]["expires_at"] == before["rules"][0]["allowed_at"] + 60
