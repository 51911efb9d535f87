"""A shard is damaged for real: the training passes it over, and no promotion follows without a
review that the coordinator has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.client import AccessClient
from paceline.config import DataSettings
from paceline.data import build_snapshot
from paceline.errors import AccessDenied, GateRefused
from paceline.schemas import CreateToken, JobState, ReviewJob, Scope, SubmitJob, Trained
from paceline.tasks._support import approval, cancelling, job, sealed
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
    digest = sealed.keep(run, result, "training")
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
