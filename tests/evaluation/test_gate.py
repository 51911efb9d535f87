"""The gate's table: what passes, and each single thing that refuses, named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.config import GateSettings
from paceline.evaluation import LINEAGE as LINEAGE_KEYS, decide
from paceline.schemas import EvaluationReport, Interval, ModelScore
from tests.evaluation.reports import LINEAGE, interval, passing, transformer

BASELINES = ("ngram", "gzip", "xz")
SETTINGS = GateSettings(
    max_bits_per_byte=3.0,
    except_baselines=BASELINES,
    max_latency_ms=1000.0,
    max_model_bytes=2_000_000_000,
)


def refusals(
    report: EvaluationReport,
    settings: GateSettings = SETTINGS,
    champion: str | None = "champion",
    lineage: dict[str, str | None] | None = None,
) -> list[str]:
    lineage = LINEAGE if lineage is None else lineage
    decision = decide(report, settings, champion=champion, lineage=lineage)
    failed = [check.name for check in decision.checks if not check.passed]
    assert decision.passed == (not failed)
    assert len(decision.reasons) == len(failed)
    return failed


def without(report: EvaluationReport, name: str) -> EvaluationReport:
    kept = tuple(each for each in report.scores if each.name != name)
    return report.model_copy(update={"scores": kept})


def test_by_default_a_model_may_have_any_size_and_latency() -> None:
    its = GateSettings(max_bits_per_byte=3.0, except_baselines=BASELINES)
    large = passing(latency_ms=90_000.0, model_bytes=140_000_000_000)
    assert refusals(large, settings=its) == []


def test_a_better_and_traceable_candidate_passes() -> None:
    assert refusals(passing()) == []
    assert refusals(without(passing(), "champion"), champion=None) == []


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"latency_ms": None}, "latency in ms"),
        ({"latency_ms": 1000.1}, "latency in ms"),
        ({"dtype": None}, "weights dtype"),
        ({"dtype": "float64"}, "weights dtype"),
        ({"format": None}, "weights format"),
        ({"format": "pickle"}, "weights format"),
        ({"model_bytes": None}, "model bytes"),
        ({"model_bytes": 2_000_000_001}, "model bytes"),
        ({"weights_digest": None}, "weights digest"),
        ({"kind": "ngram"}, "candidate evaluated"),
        ({"bits_per_byte": interval(2.96)}, "bits per byte, upper end"),
    ],
)
def test_each_broken_constraint_refuses_alone(changes: dict[str, Any], refused: str) -> None:
    assert refusals(passing(**changes)) == [refused]


@pytest.mark.parametrize(("size", "passes"), [(16_000, True), (16_001, False), (None, False)])
def test_the_bound_on_files_is_of_the_largest_of_the_weights(
    size: int | None, passes: bool
) -> None:
    settings = SETTINGS.model_copy(update={"max_file_bytes": 16_000})
    decision = decide(
        passing(), settings, champion="champion", lineage=LINEAGE, packaged_file_bytes=size
    )
    assert decision.passed is passes
    assert passes or ["bytes of a weights file" in each for each in decision.reasons] == [True]


@pytest.mark.parametrize(("packaged_bytes", "passes"), [(16, True), (17, False)])
def test_the_bound_on_bytes_is_of_all_files(packaged_bytes: int, passes: bool) -> None:
    """model.pt2 has the weights once more, and a tokenizer may be as large as a small model."""
    settings = SETTINGS.model_copy(update={"max_model_bytes": 16})
    decision = decide(
        passing(model_bytes=8), settings, champion="champion", lineage=LINEAGE,
        packaged_bytes=packaged_bytes,
    )  # fmt: skip
    assert decision.passed is passes
    of_weights = passing(model_bytes=17)  # what a report says counts where nothing is packaged
    assert refusals(of_weights, settings) == ["model bytes"]


@pytest.mark.parametrize(
    ("gain", "passes"),
    [
        (interval(-0.4), True),
        (Interval(value=-0.01, low=-0.02, high=-1e-9), True),
        (Interval(value=-0.01, low=-0.03, high=0.0), False),  # touches zero
        (interval(0.0, 0.0), False),  # zero steps
        (interval(-0.01, 0.05), False),  # not shown
        (interval(0.4), False),
        (None, False),
    ],
)
def test_better_than_the_base_means_the_whole_interval(gain: Interval | None, passes: bool) -> None:
    gains = {"champion": interval(-0.1)} | ({} if gain is None else {"base": gain})
    assert refusals(passing(difference_to=gains)) == ([] if passes else ["better than base"])


@pytest.mark.parametrize(
    ("gain", "passes"),
    [
        (interval(-0.1), True),
        (interval(0.0, 0.02), True),  # within 1 % of 2.5
        (Interval(value=0.001, low=-0.02, high=0.025), True),
        (Interval(value=0.001, low=-0.02, high=0.0251), False),
        (interval(0.0, 0.5), False),  # too few documents to tell
        (interval(0.2), False),
        (None, False),
    ],
)
def test_no_regression_means_not_inferior(gain: Interval | None, passes: bool) -> None:
    gains = {"base": interval(-0.4)} | ({} if gain is None else {"champion": gain})
    wanted = [] if passes else ["no regression against champion"]
    assert refusals(passing(difference_to=gains)) == wanted


@pytest.mark.parametrize("key", LINEAGE_KEYS)
@pytest.mark.parametrize("value", [None, "", " ", "absent"])
def test_missing_lineage_is_named(key: str, value: str | None) -> None:
    lineage = {**LINEAGE, key: value}
    if value == "absent":
        del lineage[key]
    failed = refusals(passing(), lineage=lineage)
    assert f"lineage: {key.replace('_', ' ')}" in failed
    assert set(failed) <= {
        f"lineage: {key.replace('_', ' ')}",
        "judged on the snapshot it names",
        "held-out documents compared with the training data",
        "weights digest",
    }


def test_another_snapshot_is_refused() -> None:
    lineage = {**LINEAGE, "snapshot_digest": "6" * 64}
    assert refusals(passing(), lineage=lineage) == ["judged on the snapshot it names"]


def test_a_missing_candidate_fails_everything_about_it() -> None:
    report = without(passing(), "candidate")
    failed = refusals(report)
    assert {"candidate evaluated", "better than base", "weights format", "latency in ms"} <= {
        *failed
    }
    report = report.model_copy(update={"failures": {"candidate": "predictions are not finite"}})
    decision = decide(report, SETTINGS, champion=None, lineage=LINEAGE)
    assert "predictions are not finite" in decision.reasons[0]


def test_missing_opponents_are_refused() -> None:
    assert refusals(without(passing(), "base")) == ["better than base"]
    assert refusals(without(passing(), "champion")) == ["no regression against champion"]
    settings = SETTINGS.model_copy(update={"must_beat": ("base", "ngram", "nobody")})
    assert refusals(passing(), settings) == ["better than ngram", "better than nobody"]


def test_the_bases_own_weights_are_not_a_candidate() -> None:
    weights = transformer("base", 1.0).weights_digest
    report = passing(weights_digest=weights)
    lineage = LINEAGE | {"weights_digest": weights}
    assert refusals(report, lineage=lineage) == ["better than base"]


def test_few_documents_prove_nothing() -> None:
    few = passing().model_copy(update={"documents": 4})
    assert refusals(few) == ["held-out documents"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["value", "low", "high"])
def test_what_is_not_a_number_never_passes(bad: float, field: str) -> None:
    # The wire refuses NaN; a record that was built around it must not pass either.
    broken = Interval.model_construct(**{"value": -0.4, "low": -0.5, "high": -0.3, field: bad})
    for name in ("base", "champion"):
        gains = {"base": interval(-0.4), "champion": interval(-0.1), name: broken}
        report = passing().model_copy(
            update={"scores": (_rebuilt(difference_to=gains), *passing().scores[1:])}
        )
        assert len(refusals(report)) == 1
    report = passing().model_copy(
        update={"scores": (_rebuilt(bits_per_byte=broken), *passing().scores[1:])}
    )
    assert refusals(report) == ["bits per byte, upper end"]


@pytest.mark.parametrize("field", ["latency_ms", "model_bytes"])
def test_a_constraint_that_is_nan_refuses(field: str) -> None:
    report = passing().model_copy(
        update={"scores": (_rebuilt(**{field: math.nan}), *passing().scores[1:])}
    )
    assert len(refusals(report)) == 1


def _rebuilt(**changes: Any) -> ModelScore:
    return passing().scores[0].model_copy(update=changes)
