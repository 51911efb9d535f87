"""A shard is damaged for real: the training passes it over, and no promotion follows without a
review that the coordinator has recorded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.client import AccessClient
from paceline.config import DataSettings
from paceline.data import build_snapshot
from paceline.errors import AccessDenied, GateRefused, PacelineError
from paceline.flows import train as train_flow
from paceline.schemas import (
    AllowPurpose,
    CreateToken,
    JobState,
    ReviewJob,
    Scope,
    SubmitJob,
    Trained,
)
from paceline.tasks._support import approval, cancelling, job, sealed_records
from paceline.tasks._support.run import Run
from tests.api.conftest import FakeAgent, Served, make_runtime
from tests.support.prefect_server import eventually
from tests.training.conftest import BUCKET, Camp, run as train

pytestmark = [pytest.mark.xdist_group("gangs"), pytest.mark.timeout(180)]
RUN = "run-20260101-000000-abcdef"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(make_runtime(tmp_path / "state", beat_s=5.0))
    server.runtime.state_dir.mkdir()
    server.start()
    yield server
    server.end()


def damaged(camp: Camp, tmp_path: Path) -> dict[str, Any]:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        body = "".join(f"this {n} of file {number} is {n * number}\n" for n in range(30))
        (texts / f"{number}.txt").write_text(body)
    settings = DataSettings(shard_bytes=4096, purpose="tests", held_out_share=0.2)
    snapshot = build_snapshot(str(texts), f"s3://{BUCKET}/gate-data", settings, camp.store)
    victim = snapshot.of_split("train")[0]
    camp.store.put_bytes(snapshot.shard_url(victim), b"x" * victim.bytes)
    return {"snapshot_url": snapshot.url, "snapshot_digest": snapshot.digest}


def test_a_damaged_shard_stops_the_promotion_until_a_reviewer_accepts_it(
    camp: Camp, launcher: Any, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(camp, launcher, camp.job("gate", ranks=1, **damaged(camp, tmp_path))).result
    assert result is not None
    assert len(result.quarantined_shards) == 1
    assert (result.purpose, result.continues) == ("tests", None)

    monkeypatch.setattr(job.flow_run, "get_id", lambda: "flow-1")
    monkeypatch.setattr(cancelling, "_ids", list)  # there is no Prefect
    owner = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    FakeAgent(owner, "node-0").register()
    run = Run(served.runtime, RUN)
    run.__dict__ |= {"coordinator": owner, "store": camp.store}
    camp.store.ensure_bucket("paceline")  # of this installation's own records
    digest = sealed_records.save(run, result, "training")
    spec = SubmitJob(
        model_id="tiny", version="v1", data_snapshot=str(result.snapshot_url),
        parameters={"training.ranks": 1},
    )  # fmt: skip
    with job.linked(run, spec, None) as link:
        assert list(link.admitted().hosts) == ["node-0"]
        link.finished(Trained(**result.model_dump(), training_digest=digest))
    with pytest.raises(GateRefused, match=f"paceline jobs review {link.job_id}"):
        approval.require_reviewed(run, digest, result)

    job_id = str(link.job_id)
    assert eventually(lambda: owner.job(job_id).job.state is JobState.NEEDS_REVIEW)
    ann, eve = (
        AccessClient(served.url, owner.create_token(CreateToken(name=name, scopes=(scope,))).token)
        for name, scope in (("ann", Scope.TRAIN), ("eve", Scope.APPROVE))
    )
    with pytest.raises(AccessDenied):
        ann.review_job(job_id, ReviewJob(accepted=True))
    with pytest.raises(GateRefused, match="no review accepted"):
        approval.require_reviewed(run, digest, result)
    eve.review_job(job_id, ReviewJob(accepted=True, reason="one shard is fine"))
    (accepted,) = approval.require_reviewed(run, digest, result)
    assert accepted == f"{job_id}: 1 shards or samples, accepted by eve: one shard is fine"


@pytest.mark.parametrize("evaluated", [False, True], ids=["trained on", "judged on"])
def test_a_purpose_revoked_while_a_flow_waits_refuses_it_at_once(
    camp: Camp, served: Served, evaluated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.flow_run, "get_id", lambda: "flow-1")
    monkeypatch.setattr(cancelling, "_ids", list)  # there is no Prefect
    monkeypatch.setattr(job.flow_run, "get_flow_name", lambda: "train-model")
    monkeypatch.setattr(job, "WAIT_S", 0.1)
    owner = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    other = f"s3://{BUCKET}/elsewhere/snapshots/{camp.snapshot.digest}"
    for each in camp.store.list(camp.snapshot.url):
        camp.store.put_bytes(
            each.url.replace(camp.snapshot.url, other), camp.store.get_bytes(each.url)
        )
    rules = {
        url: owner.allow_purpose(AllowPurpose(purpose="speech", data=(url,), teams=("nlp",)))
        for url in (camp.snapshot.url, other)
    }
    run = Run(served.runtime, RUN)
    run.__dict__ |= {"coordinator": owner, "store": camp.store, "manifest": lambda *_: None}
    busy = []
    distribute = SimpleNamespace(
        fetch_model_manifest=lambda *_: None, start_agents=lambda *_: ["node-0"]
    )
    passed = {
        "Run": SimpleNamespace(open=lambda *_: run),
        "recorded": lambda *_: contextlib.nullcontext(),
        "distribute": distribute,
        "train": lambda run, *_, **__: busy.append(run.job.admitted()),
    }
    for name in ("require_own_expectations", "profile_of", "require_judgeable", "require_base",
                 "nest", "validate_data", "published_url", "exporting",
                 "require_one_process"):  # fmt: skip
        passed[name] = lambda *_: None
    for name, given in passed.items():
        monkeypatch.setattr(train_flow, name, given)
    refused: list[PacelineError] = []

    def flow() -> None:
        try:
            train_flow.train_model.fn(
                "tiny", "v1", camp.snapshot.url, settings={"training.ranks": 1},
                purpose="speech", team="nlp", evaluate_on=other if evaluated else "",
            )  # fmt: skip
        except PacelineError as error:
            refused.append(error)

    thread = threading.Thread(target=flow)
    thread.start()
    assert eventually(lambda: refused or [e.state for e in owner.jobs().jobs] == [JobState.QUEUED])
    assert not refused, refused
    owner.revoke_purpose(rules[other if evaluated else camp.snapshot.url].rule_id)
    FakeAgent(owner, "node-0").register()
    thread.join(30)
    (error,) = refused
    assert isinstance(error, AccessDenied), error
    assert not busy and f"speech --data {other if evaluated else camp.snapshot.url}" in error.do
    (shown,) = owner.jobs().jobs
    assert eventually(lambda: owner.job(shown.job_id).job.state is JobState.FAILED)
    assert "the table of purposes does not allow" in owner.job(shown.job_id).job.reason
