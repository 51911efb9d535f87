"""`paceline approve` from a laptop: what is to be approved reaches a person who has a URL and a
token alone, through the coordinator."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.client import AccessClient
from paceline.config import Endpoints, Profile, Runtime
from paceline.evaluation import decide
from paceline.schemas import (
    APPROVAL_REQUEST,
    ApprovalRequest,
    CreateToken,
    Evidence,
    ModelScore,
    StageRecord,
    digest_of,
    schema_text,
)
from paceline.tasks._support import sealed_records
from paceline.tasks._support.run import Run
from tests.api.conftest import Served, make_runtime
from tests.evaluation.reports import CLEAN, LINEAGE, TRAINING_SNAPSHOT, interval, passing
from tests.registry.bundles import make_evidence
from tests.security.test_only_a_token_approves import FLOW_RUN, Prefect
from tests.support.command import paceline
from tests.support.rclone import rclone_s3
from tests.support.web import serving

RUN, MODEL = "run-20261120-153600-9f3a1c", "m"


def judged(model_id: str = MODEL) -> Evidence:
    """Return evidence of a candidate that passes, and is worse than the champion in one slice."""
    others = {"gzip": 3.3, "xz": 3.1}
    gains = {"base": -0.4, "champion": -0.1, "ngram": 0.3, "gzip": -0.9, "xz": -0.7}
    report = passing(difference_to={name: interval(gain) for name, gain in gains.items()})
    scores = (
        ModelScore(name=name, kind="compressor", bits_per_byte=interval(bits))
        for name, bits in others.items()
    )
    slices = ({"slice": "directory", "name": "legal", "documents": 3, "bytes": 9, "bits_per_byte":
               {"candidate": 2.75, "champion": 2.5}}, *report.slices)  # fmt: skip
    clean = CLEAN.model_copy(update={"overlapping": 0})
    changes = {"slices": slices, "scores": (*report.scores, *scores), "overlaps": (clean,)}
    report = report.model_copy(update=changes)
    policy = Profile().gate.policy(model_id).model_copy(update={"except_baselines": ("ngram",)})
    decision = decide(report, policy, champion="champion", lineage=LINEAGE)
    facts = {
        "evaluation": report, "gate": decision, "report_digest": "b" * 64,
        "training_snapshot_url": "s3://paceline/data/snapshots/7777", "base_version": "1",
        "training_snapshot_digest": TRAINING_SNAPSHOT,
    }  # fmt: skip
    return make_evidence(model_id, "2").model_copy(update=facts)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A coordinator beside its S3 server and a Prefect with one suspended flow run."""
    made = make_runtime(tmp_path_factory.mktemp("approve") / "state")
    made.state_dir.mkdir()
    with rclone_s3() as s3, serving(Prefect()) as prefect:
        keys = {"s3_access_key": s3.access_key, "s3_secret_key": s3.secret_key}
        known = Endpoints(prefect_api_url=f"{prefect.url}/api", s3_url=s3.endpoint_url)
        secrets = made.secrets.model_copy(update=keys)
        s3.store().ensure_bucket(made.profile.storage.bucket)
        server = Served(made.model_copy(update={"endpoints": known, "secrets": secrets}))
        server.start()
        yield server
        server.end(signal.SIGKILL)


@pytest.fixture
def bob(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob's laptop, logged in with a token of scope approve."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_STATE", raising=False)
    admin = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    call = CreateToken.model_validate({"name": "bob", "scopes": ("approve",)})
    done = paceline("login", served.url, PACELINE_TOKEN=admin.create_token(call).token)
    assert done.returncode == 0, done.stderr


def ask(
    served: Served, evidence: Evidence, *, recorded: bool = True, **changes: Any
) -> ApprovalRequest:
    """Request an approval of ``evidence``, as the flow of a promotion does."""
    run_id = changes.setdefault("run_id", RUN)
    run = Run(served.runtime, run_id)
    digest = sealed_records.save(run, evidence, "evidence") if recorded else digest_of(evidence)
    facts = {
        "model_id": MODEL, "version": "2", "evidence_digest": digest, "report_digest": "b" * 64,
        "policy_digest": "a" * 64, "expires_at": time.time() + 600, "flow_run_id": FLOW_RUN,
        "page": "",
    }  # fmt: skip
    request = ApprovalRequest.model_validate(facts | changes)
    output = request.model_dump(mode="json")
    record = StageRecord.of(APPROVAL_REQUEST, digest_of(run_id), output, run_id)
    served.client().ledger_put(record)
    return request


def lines_of(text: str) -> dict[str, str]:
    """Return each line of a table by its first words."""
    return {line.split("  ")[0].strip(): " ".join(line.split()) for line in text.splitlines()}


@pytest.mark.usefixtures("bob")
def test_the_approver_sees_the_figures_and_decides(served: Served) -> None:
    evidence = judged()
    request = ask(served, evidence, page="http://127.0.0.1/prefect")
    text = paceline("approve", RUN, "--show")
    assert text.returncode == 0, text.stderr
    shown = text.stdout
    rows = lines_of(shown)
    assert shown.startswith(f"m 2, {RUN}: waiting\n")
    assert rows["candidate"] == "candidate 2.4000 2.3500 to 2.4500"
    assert rows["base"] == "base 2.8000 2.7500 to 2.8500 -0.4000 -0.4500 to -0.3500 better"
    assert rows["ngram"].endswith("+0.3000 +0.2500 to +0.3500 worse")
    assert evidence.gate.passed
    assert "gate: passed" in shown
    for check in evidence.gate.checks:
        assert check.name in shown
    assert "slices worse than champion: 1\n  directory: legal  2.5000  →  2.7500" in shown
    for digest in (request.evidence_digest, TRAINING_SNAPSHOT, evidence.manifest_digest):
        assert digest[:12] in shown
        assert digest not in shown
    assert "s3://paceline/data/snapshots/7777" in shown
    assert f"  page      {served.url}/fleet#approval={RUN}\n" in shown, "where a token approves"
    assert "asked by" in shown
    assert "expires" in shown
    assert f"next:     paceline approve {RUN} --evidence {request.evidence_digest[:12]}" in shown

    done = paceline("approve", RUN, "--show", "--json")
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(schema_text("approve")))
    assert Evidence.model_validate(answer["evidence"]) == evidence

    for other in ("0" * 64, request.evidence_digest[:4]):
        refused = paceline("approve", RUN, "--evidence", other)
        assert refused.returncode == 1
        assert "other evidence" in refused.stderr
    done = paceline("approve", RUN, "--evidence", request.evidence_digest[:12], "--reason", "good")
    assert done.returncode == 0, done.stderr
    assert "2.4000" in done.stdout
    assert "approved by bob (token " in done.stdout


@pytest.mark.usefixtures("bob")
def test_figures_unlike_the_requests_are_refused_and_missing_ones_named(
    served: Served,
) -> None:
    evidence = judged().model_copy(update={"job_id": "job-3"})
    request = ask(served, evidence, recorded=False)
    done = paceline("approve", RUN, "--show")
    assert "no figures: not recorded: an older version" in done.stdout
    runtime: Runtime = served.runtime
    forged = evidence.model_copy(update={"job_id": "job-4"}).model_dump(mode="json")
    url = f"{runtime.records_url}/evidence/{request.evidence_digest}.json"
    Run(runtime, RUN).store.put_bytes(url, json.dumps({"record": forged}).encode())
    done = paceline("approve", RUN)
    assert done.returncode != 0
    assert "cannot be trusted" in done.stderr
