"""A candidate beats every simple baseline, or the policy names the exception, in sight."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.config import GateSettings, Profile, load_profile
from paceline.errors import InvalidProfile
from paceline.evaluation import EXCEPTED, decide
from paceline.schemas import EvaluationReport, GateDecision, Interval, ModelScore
from tests.evaluation.reports import LINEAGE, interval, passing
from tests.support.stack import Ended

BASELINES = ("ngram", "gzip", "xz")
BETTER, EVEN, WORSE = interval(-0.3), Interval(value=-0.1, low=-0.2, high=0.0), interval(0.3)


def report_with(**gains: Interval) -> EvaluationReport:
    """Return a report whose candidate beats base and champion, and the baselines as told."""
    scores = [
        ModelScore(name=name, kind="compressor", bits_per_byte=interval(2.7)) for name in gains
    ]
    over = {"base": interval(-0.4), "champion": interval(-0.1)} | gains
    report = passing(difference_to=over)
    kept = [each for each in report.scores if each.kind == "transformer"]
    return report.model_copy(update={"scores": (*kept, *scores)})


def decided(report: EvaluationReport, *excepted: str) -> GateDecision:
    settings = GateSettings.model_validate({"except_baselines": excepted})
    return decide(report, settings, champion="champion", lineage=LINEAGE)


def refused(decision: GateDecision) -> list[str]:
    return [each.name for each in decision.checks if not each.passed]


def test_a_candidate_that_beats_all_passes() -> None:
    decision = decided(report_with(ngram=BETTER, gzip=BETTER, xz=BETTER))
    assert decision.passed
    assert {f"better than {name}" for name in BASELINES} <= {each.name for each in decision.checks}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("gain", [EVEN, WORSE, None], ids=["even", "worse", "missing"])
def test_each_baseline_refuses_alone(name: str, gain: Interval | None) -> None:
    gains = dict.fromkeys(BASELINES, BETTER)
    if gain is None:
        del gains[name]
    else:
        gains[name] = gain
    report = report_with(**gains)
    assert refused(decided(report)) == [f"better than {name}"]
    decision = decided(report, name)
    assert decision.passed
    (check,) = [each for each in decision.checks if each.wanted == EXCEPTED]
    assert check.name == f"better than {name}"


def test_an_exception_excepts_one_baseline_only() -> None:
    report = report_with(ngram=WORSE, gzip=WORSE, xz=BETTER)
    assert refused(decided(report, "gzip")) == ["better than ngram"]
    assert refused(decided(report, "gzip", "ngram")) == []


def test_a_shorter_list_of_models_to_beat_excepts_no_baseline() -> None:
    report = report_with(ngram=WORSE, gzip=BETTER, xz=BETTER)
    for must_beat in ((), ("base",), ("ngram",)):
        settings = GateSettings(must_beat=must_beat)
        decision = decide(report, settings, champion="champion", lineage=LINEAGE)
        assert refused(decision) == ["better than ngram"]
    both = GateSettings(must_beat=("ngram",), except_baselines=("ngram",))
    decision = decide(report, both, champion="champion", lineage=LINEAGE)
    assert refused(decision) == ["better than ngram"]


@pytest.mark.parametrize("name", ["base", "champion", "candidate", "NGRAM"])
def test_only_a_simple_baseline_can_be_excepted(name: str) -> None:
    with pytest.raises(ValidationError):
        GateSettings.model_validate({"except_baselines": [name]})
    with pytest.raises(InvalidProfile, match="except_baselines"):
        load_profile("embedded", {"gate.except_baselines": f'["{name}"]'})


def test_only_the_profile_of_tests_excepts_any() -> None:
    assert Profile().gate.except_baselines == ()
    for name in ("embedded", "local", "hosts", "ssh", "fleet-1000"):
        assert load_profile(name).gate.except_baselines == ()
    assert load_profile("ci").gate.except_baselines == BASELINES


@pytest.mark.slow
@pytest.mark.xdist_group("installation")
@pytest.mark.timeout(600)
def test_the_last_screen_names_the_exceptions(lifecycle: Ended) -> None:
    (note,) = [each for each in lifecycle.answer["notes"] if "gate.except_baselines" in each]
    assert note.startswith("the policy excepts ngram, gzip, xz")
    unbeaten = [
        each["name"] for each in lifecycle.answer["gate"]["checks"] if each["wanted"] == EXCEPTED
    ]
    assert unbeaten
    assert all(f"not {name}" in note for name in unbeaten)
