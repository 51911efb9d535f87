"""A training that passed bad data over is promoted only after a review of its job accepted that."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Profile
from paceline.errors import AccessDenied, GateRefused, NotFound
from paceline.flows import promote as flow, publish as publish_flow, train as train_flow
from paceline.jobs import with_state
from paceline.schemas import JobReport, JobState, PurposeRule, SubmitJob, TrainingJob, TrainResult
from paceline.tasks import prepare
from paceline.tasks._support import approval, sealed_records
from paceline.tasks._support.run import Run
from tests.security.test_a_forged_report_is_refused import Bucket, judged, run_of, trained

S = JobState
BAD = {"quarantined_shards": ("a" * 64, "b" * 64 + "#3")}


class Queue:
    """The coordinator's table of jobs, and of purposes."""

    def __init__(self) -> None:
        self.table: dict[str, TrainingJob] = {}
        self.rules: list[Any] = []

    def add(self, digest: str, *states: JobState, by: str = "ann") -> str:
        """Add a job of the training, which went through ``states``."""
        job_id, now = f"tj-{len(self.table):012x}", time.time()
        job = TrainingJob(
            job_id=job_id, submission_id="0" * 64, run_id="run-20260101-000000-000000",
            spec=SubmitJob(model_id="m", version="1", data_snapshot="s3://b/s", team="nlp"),
            state=S.RUNNING, created_at=now, updated_at=now,
            report=JobReport(at=now, training_digest=digest),
        )  # fmt: skip
        for state in states:
            job = with_state(job, state, time.time(), f"{state} by {by}", by)
        self.table[job_id] = job
        return job_id

    def jobs(self, *, training: str) -> Any:
        found = [
            e for e in self.table.values() if e.report and e.report.training_digest == training
        ]
        return SimpleNamespace(jobs=[each.model_copy(update={"report": None}) for each in found])

    def job(self, job_id: str) -> Any:
        return SimpleNamespace(job=self.table[job_id])

    def data_purposes(self) -> list[Any]:
        return self.rules


@pytest.fixture
def run() -> Run:
    made = run_of(Bucket())
    made.__dict__["coordinator"] = Queue()
    return made


def recorded(run: Run, **more: Any) -> tuple[str, TrainResult]:
    result = trained().model_copy(update=more)
    digest = sealed_records.save(run, result, "training")
    sealed_records.add_references(run, "training", digest, result.job_id)
    return digest, result


def test_a_training_on_good_data_needs_no_review(run: Run) -> None:
    digest, result = recorded(run)
    queue: Any = run.coordinator
    assert approval.require_reviewed(run, digest, result) == ()
    queue.add(digest, S.SUCCEEDED)
    assert approval.require_reviewed(run, digest, result) == ()


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ((), "paceline jobs review tj-000000000000"),  # its flow has just ended
        ((S.NEEDS_REVIEW,), "paceline jobs review tj-000000000000"),
        ((S.SUCCEEDED,), "paceline jobs submit"),  # the leader changed before it read the report
        ((S.NEEDS_REVIEW, S.FAILED), "was rejected"),
        (None, "paceline jobs submit"),  # started before there was a queue
    ],
    ids=["running", "waits", "never reviewed", "rejected", "no job"],
)
@pytest.mark.parametrize("bad", [BAD, {"skipped_batches": (7,)}], ids=["shards", "batches"])
def test_bad_data_passed_over_stop_a_promotion_until_they_are_accepted(
    run: Run, bad: dict[str, Any], states: tuple[JobState, ...] | None, said: str
) -> None:
    digest, result = recorded(run, **bad)
    queue: Any = run.coordinator
    if states is not None:
        queue.add(digest, *states)
    with pytest.raises(GateRefused) as refused:
        approval.require_reviewed(run, digest, result)
    line = refused.value.one_line()
    assert said in line and result.passed_over in line and "\n" not in line
    accepted = queue.add(digest, S.NEEDS_REVIEW, S.SUCCEEDED, by="eve")
    (kept,) = approval.require_reviewed(run, digest, result)
    assert accepted in kept and result.passed_over in kept and "eve" in kept


def test_the_newest_decision_counts(run: Run) -> None:
    digest, result = recorded(run, **BAD)
    queue: Any = run.coordinator
    queue.add(digest, S.NEEDS_REVIEW, S.SUCCEEDED)
    queue.add(digest, S.NEEDS_REVIEW, S.FAILED)
    with pytest.raises(GateRefused, match="was rejected"):
        approval.require_reviewed(run, digest, result)


def test_an_acceptance_is_of_one_result_not_of_the_next_with_its_id(run: Run) -> None:
    queue: Any = run.coordinator
    digest, _ = recorded(run, **BAD)
    queue.add(digest, S.NEEDS_REVIEW, S.SUCCEEDED)
    worse, result = recorded(run, quarantined_shards=("a" * 64, "b" * 64, "c" * 64))
    with pytest.raises(GateRefused, match="no review accepted"):
        approval.require_reviewed(run, worse, result)


def test_a_training_that_goes_on_from_an_unreviewed_one_is_refused(run: Run) -> None:
    queue: Any = run.coordinator
    first, _ = recorded(run, **BAD)
    digest, result = recorded(run, job_id="job-2222", continues="job-1111")
    with pytest.raises(NotFound):
        approval.require_reviewed(run, digest, result)
    sealed_records.add_references(run, "training", first, "job-1111")
    with pytest.raises(GateRefused, match="no review accepted"):
        approval.require_reviewed(run, digest, result)
    queue.add(first, S.NEEDS_REVIEW, S.SUCCEEDED)
    assert len(approval.require_reviewed(run, digest, result)) == 1


def test_the_flow_that_promotes_asks_before_it_does_anything(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, result = recorded(run, **BAD)
    evaluation = judged(digest)
    report = sealed_records.save(run, evaluation, "evaluation")
    monkeypatch.setattr(flow, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(flow.Run, "open", lambda *_: run)
    monkeypatch.setattr(run, "lock", lambda _: nullcontext())
    waiting: Any = run.coordinator
    waiting.add(digest, S.NEEDS_REVIEW)
    with pytest.raises(GateRefused, match="paceline jobs review tj-"):
        flow.promote_model.fn("bytelm", report)

    def refuse(*_: object) -> None:
        raise AccessDenied("the table of purposes does not allow this use of the data")

    waiting.add(digest, S.NEEDS_REVIEW, S.SUCCEEDED)
    waiting.rules = ["one"]
    asked: list[Any] = []
    monkeypatch.setattr(
        approval, "permitted_snapshot", lambda *given: (asked.append(given[1:]), refuse())
    )
    with pytest.raises(AccessDenied, match="table of purposes"):
        flow.promote_model.fn("bytelm", report)
    assert asked == [(result.snapshot_url, "", {("nlp", "")})]


def test_a_rule_revoked_while_a_job_waits_ends_it_before_a_node_is_busy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = SimpleNamespace(url="s3://b/s", purpose="tests", project="demo")
    rule = PurposeRule(
        rule_id="dp-" + "0" * 12, purpose="speech", data=(), teams=(), projects=(),
        approver="root", allowed_at=1.0, revoked_at=2.0,
    )  # fmt: skip
    queue: Any = run.coordinator
    queue.rules = [rule]
    link = SimpleNamespace(hosts=["node-0"], user=("nlp", "asr"))
    monkeypatch.setattr(train_flow, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(train_flow, "linked", lambda *_: nullcontext(link))
    monkeypatch.setattr(train_flow.Run, "open", lambda *_: run)
    monkeypatch.setattr(train_flow, "distribute_model", lambda *_, **__: pytest.fail("too late"))
    monkeypatch.setattr(prepare, "load_snapshot", lambda *_: snapshot)
    with pytest.raises(AccessDenied, match="purpose speech, team nlp, project asr"):
        train_flow.train_model.fn("m", "1", "s3://b/s", purpose="speech")


def test_a_lifecycles_snapshot_is_checked_before_a_base_is_published(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile.model_validate({"data": {"purpose": "speech"}})
    run.runtime = run.runtime.model_copy(update={"profile": profile})
    snapshot = SimpleNamespace(
        url="s3://b/s", purpose="speech", project=profile.data.project, digest="0" * 64
    )
    built = SimpleNamespace(output={"url": snapshot.url})
    monkeypatch.setattr(publish_flow, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(publish_flow.Run, "open", lambda *_: run)
    monkeypatch.setattr(publish_flow, "build_data_snapshot", lambda *_: built)
    monkeypatch.setattr(prepare, "load_snapshot", lambda *_: snapshot)
    monkeypatch.setattr(prepare, "_reference", lambda _: {})
    begun: list[Any] = []

    def publish_base(*given: object) -> None:
        begun.append(given)
        raise NotFound("no node")

    monkeypatch.setattr(publish_flow, "publish_base_model", publish_base)
    queue: Any = run.coordinator
    with pytest.raises(NotFound):
        publish_flow.prepare_inputs.fn()
    assert begun == [(run, built.output)], "no table: the label is the profile's purpose"
    queue.rules = [
        PurposeRule(
            rule_id="dp-" + "0" * 12, purpose="speech", data=(), teams=("nlp",), projects=(),
            approver="root", allowed_at=1.0,
        )
    ]  # fmt: skip
    with pytest.raises(AccessDenied, match="purpose speech, team default"):
        publish_flow.prepare_inputs.fn()
    assert len(begun) == 1
