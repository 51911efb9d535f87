"""A training that is judged ends with the digest of its report; bad data hold no nodes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import DataRejected, GateRefused
from paceline.flows import train as train_flow
from paceline.schemas import Trained
from tests.evaluation.test_card import trained

REPORT = "b" * 64
EVALUATION = SimpleNamespace(after_training=False)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the flow warns of; nothing is trained, and no server is there."""
    found: list[str] = []
    link = SimpleNamespace(hosts=(), user="", sweep=None, judged=lambda _: None)
    profile = SimpleNamespace(cluster=SimpleNamespace(per_job=False), evaluation=EVALUATION)
    runtime = SimpleNamespace(profile=profile)
    run = SimpleNamespace(runtime=runtime, warn=found.append, manifest=lambda *_: None)
    made = Trained(**trained().model_dump(), training_digest="a" * 64)
    passed: dict[str, Any] = {
        "Run": SimpleNamespace(open=lambda *_: run),
        "recorded": lambda *_: contextlib.nullcontext(),
        "linked": lambda *_: contextlib.nullcontext(link),
        "distribute": SimpleNamespace(
            fetch_model_manifest=lambda *_: None, start_agents=lambda *_: []
        ),
        "sealed_records": SimpleNamespace(add_references=lambda *_: None),
        "train": lambda *_, **__: made,
    }
    absent = ("permitted_snapshot", "require_own_expectations", "profile_of", "exporting",
              "published_url", "require_judgeable", "require_one_process", "require_base", "nest",
              "validate_data", "with_job_settings")  # fmt: skip
    for name, given in (dict.fromkeys(absent, lambda *_: None) | passed).items():
        monkeypatch.setattr(train_flow, name, given)
    return found


def test_its_answer_names_the_report(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: Any) -> Any:
        return SimpleNamespace(report_digest=REPORT)

    monkeypatch.setattr(train_flow, "judge", judge)
    asked = ("m", "1", "s3://b/d")
    answer = train_flow.train_model.fn(*asked, evaluate_on="s3://b/d")
    assert (answer.training_digest, answer.report_digest) == ("a" * 64, REPORT)
    assert train_flow.train_model.fn(*asked).report_digest is None
    assert notes == []


def test_the_profile_may_have_every_training_judged(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_on: list[str] = []

    def judge(*given: Any) -> Any:
        judged_on.append(given[4])
        return SimpleNamespace(report_digest=REPORT)

    monkeypatch.setattr(train_flow, "judge", judge)
    monkeypatch.setattr(EVALUATION, "after_training", True)
    train = train_flow.train_model.fn
    assert train("m", "1", "s3://b/d").report_digest == REPORT
    assert train("m", "1", "s3://b/d", evaluate_on="s3://b/e").report_digest == REPORT
    assert train("m", "1", "s3://b/d", evaluate_on="").report_digest is None, "--no-evaluate"
    queued = train("m", "1", "s3://b/d", job_id="tj-0123456789ab")
    assert queued.report_digest is None, "a job was settled when it was submitted"
    assert (judged_on, notes) == (["s3://b/d", "s3://b/e"], [])


def test_one_that_cannot_be_judged_names_none_and_says_why(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*_: Any) -> Any:
        raise GateRefused("no reason")

    monkeypatch.setattr(train_flow, "judge", judge)
    answer = train_flow.train_model.fn("m", "1", "s3://b/d", evaluate_on="s3://b/d")
    assert answer.report_digest is None
    assert "is not judged: no reason" in notes[0]


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("hosts", [(), ("node-0",)], ids=["own nodes of Slurm", "reserved hosts"])
def test_data_that_are_refused_cost_no_nodes_and_no_relay(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    paid: list[str] = []
    run = train_flow.Run.open(None, None)
    run.runtime.profile.cluster.per_job = not hosts
    link = SimpleNamespace(
        hosts=hosts, user="", sweep=None, admitted=lambda: paid.append("nodes"),
        relayed=lambda _: None,
    )  # fmt: skip

    def refuse(*_: Any) -> None:
        raise DataRejected("the snapshot failed its validation")

    def relay(*_: Any, **__: Any) -> Any:
        paid.append("relay")
        return SimpleNamespace(relay=None)

    monkeypatch.setattr(train_flow, "linked", lambda *_: contextlib.nullcontext(link))
    monkeypatch.setattr(train_flow, "distribute_model", relay)
    monkeypatch.setattr(train_flow, "validate_data", refuse)
    with pytest.raises(DataRejected):
        train_flow.train_model.fn("m", "1", "s3://b/d")
    assert paid == []
