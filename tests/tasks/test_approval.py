"""What a promotion does with a decision: go on, refuse, or ask for one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Profile
from paceline.errors import AwaitingApproval, GateRefused, InvalidInput
from paceline.registry import claim_digest
from paceline.schemas import APPROVAL, APPROVAL_REQUEST, Approval, Evidence, StageRecord, digest_of
from paceline.tasks._support import approval
from paceline.tasks._support.run import Run
from tests.registry.bundles import make_evidence
from tests.security.test_a_forged_report_is_refused import Bucket, run_of

MODEL = "bytelm"


class Ledger:
    """A coordinator's ledger in memory."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], StageRecord] = {}

    def ledger_get(self, stage: str, key: str) -> StageRecord | None:
        return self.records.get((stage, key))

    def ledger_put(self, record: StageRecord) -> StageRecord:
        return self.records.setdefault((record.stage, record.input_digest), record)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def evidence() -> Evidence:
    made = make_evidence(MODEL, "1").model_copy(update={"report_digest": "b" * 64})
    decision = made.gate.model_copy(update={"policy_digest": "a" * 64})
    return made.model_copy(update={"gate": decision})


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The flow runs that were started to wait; the same parameters are one."""
    found: list[dict[str, Any]] = []

    def run(flow: str, run_id: str, parameters: dict[str, Any]) -> SimpleNamespace:
        if parameters not in found:
            found.append(parameters)
        return SimpleNamespace(flow_run_id="f1", page="http://127.0.0.1/f1")

    starter = SimpleNamespace(of=lambda _runtime: SimpleNamespace(run=run))
    monkeypatch.setattr(approval, "PrefectStarter", starter)
    monkeypatch.setattr(approval, "_outermost", lambda: ("lifecycle", {"data": None}))
    return found


def make_run(ledger: Ledger, champion: Any = None, policy: str = "four-eyes") -> Run:
    run = run_of(Bucket())
    profile = Profile.model_validate({"gate": {"models": {MODEL: {"approval": policy}}}})
    run.runtime = run.runtime.model_copy(update={"profile": profile})
    tags: dict[str, str] = {}
    registry = SimpleNamespace(
        champion=lambda _: champion, log_tags=lambda _, more: tags.update(more), tags=tags
    )
    run.__dict__.update(coordinator=ledger, registry=registry, mlflow_run="1")
    return run


def decide(ledger: Ledger, run: Run, evidence: Evidence, *, approved: bool = True) -> Approval:
    claim = claim_digest(evidence)
    made = Approval(
        run_id=run.run_id, model_id=MODEL, evidence_digest=claim, approved=approved, reason="why",
        approver="bob", token_id="f" * 16, at=time.time(), submitters=("ann",),
    )  # fmt: skip
    output = made.model_dump(mode="json")
    key = digest_of([run.run_id, MODEL, claim])
    ledger.ledger_put(
        StageRecord(
            stage=APPROVAL, input_digest=key, output=output, output_digest=digest_of(output),
            run_id=run.run_id, seconds=0.0, finished_at=1.0,
        )
    )  # fmt: skip
    return made


def test_a_policy_without_approval_asks_nobody(ledger: Ledger, evidence: Evidence) -> None:
    signed = evidence.model_copy(update={"approver": "ann"})
    assert approval.require_approved(make_run(ledger, policy="none"), signed, "2") == signed


def test_it_asks_once_and_goes_on_with_the_approver_of_the_token(
    ledger: Ledger, evidence: Evidence, starts: list[dict[str, Any]]
) -> None:
    run = make_run(ledger)
    for _ in range(2):
        with pytest.raises(AwaitingApproval, match=f"paceline approve {run.run_id}") as waits:
            approval.require_approved(run, evidence, "2")
        assert f"/fleet#approval={run.run_id}" in str(waits.value), "where a token decides"
    (started,) = starts
    assert (started["flow"], started["parameters"]) == ("lifecycle", {"data": None})
    asked = ledger.records[APPROVAL_REQUEST, digest_of(run.run_id)].output
    assert asked["evidence_digest"] == claim_digest(evidence)
    made = decide(ledger, run, evidence)
    found = approval.require_approved(run, evidence, "2")
    assert (found.approver, found.approval) == ("bob", made)
    assert claim_digest(found) == claim_digest(evidence), "the approver saw this one"
    assert run.registry.tags["paceline.approval"] == "approved by bob: why"  # type: ignore[attr-defined]


def test_an_approval_of_other_evidence_is_none(
    ledger: Ledger, evidence: Evidence, starts: list[dict[str, Any]]
) -> None:
    run = make_run(ledger)
    decide(ledger, run, evidence.model_copy(update={"job_id": "another"}))
    with pytest.raises(AwaitingApproval):
        approval.require_approved(run, evidence, "2")
    with pytest.raises(AwaitingApproval):  # and new evidence is asked about anew
        approval.require_approved(run, evidence.model_copy(update={"job_id": "third"}), "2")
    assert len(starts) == 2


def test_a_rejection_and_a_deadline_refuse(
    ledger: Ledger,
    evidence: Evidence,
    starts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(ledger)
    with pytest.raises(AwaitingApproval):
        approval.require_approved(run, evidence, "2")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 73 * 3600)
    with pytest.raises(GateRefused, match="nobody approved the promotion in time"):
        approval.require_approved(run, evidence, "2")
    decide(ledger, run, evidence, approved=False)
    with pytest.raises(GateRefused, match="bob rejected the promotion"):
        approval.require_approved(run, evidence, "2")
    assert len(starts) == 1


def test_a_name_is_no_approver(ledger: Ledger, evidence: Evidence) -> None:
    signed = evidence.model_copy(update={"approver": "bob"})
    with pytest.raises(InvalidInput, match="the owner of a token, not a name"):
        approval.require_approved(make_run(ledger), signed, "2")
    assert not ledger.records


def test_what_is_champion_needs_no_second_approval(ledger: Ledger, evidence: Evidence) -> None:
    before = make_evidence(MODEL, "1", approver="carl")
    champion = SimpleNamespace(manifest_digest=evidence.manifest_digest, evidence=before)
    assert approval.require_approved(make_run(ledger, champion), evidence, "2") == before
