"""A model's own policy: what it leaves out is as in [gate], and its digest names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import (
    Endpoints,
    Policy,
    Profile,
    Runtime,
    Secrets,
    load_profile,
    load_runtime,
    save_runtime,
)
from paceline.errors import InvalidProfile
from paceline.evaluation import as_markdown, decide
from paceline.schemas import (
    EvaluationReport,
    GateDecision,
    MetricScore,
    Serving,
    TaskOverlap,
    TaskScore,
    digest_of,
)
from tests.evaluation.reports import CLEAN, LINEAGE, interval, passing

LOOSE = {"except_baselines": ("ngram", "gzip", "xz")}
TEXT = """
[gate]
max_latency_ms = 50.0
except_baselines = ["ngram", "gzip", "xz"]

[gate.models."acme/7b"]
max_model_bytes = 9_000_000
max_regression = 0.5
max_slice_regression = {directory = 0.1}
"""


def load(directory: Path, text: str) -> Profile:
    (directory / "mine.toml").write_text(text)
    return load_profile(str(directory / "mine.toml"))


def refused(policy: Policy, champion: str | None = "champion") -> list[str]:
    decision = decide(passing(), policy, champion=champion, lineage=LINEAGE)
    return [each.name for each in decision.checks if not each.passed]


def test_a_model_has_its_own_policy_and_the_rest_of_the_common_one(tmp_path: Path) -> None:
    gate = load(tmp_path, TEXT).gate
    own, common = gate.policy("acme/7b"), gate.policy("acme/8b")
    assert (own.max_model_bytes, own.max_latency_ms) == (9_000_000, 50.0)
    assert own.except_baselines == common.except_baselines == ("ngram", "gzip", "xz")
    assert (common.max_model_bytes, common.max_regression) == (None, 0.01)
    assert digest_of(own) != digest_of(common)
    assert digest_of(common) == digest_of(gate.policy("another"))


def test_an_installation_keeps_the_policies_as_they_were_read(tmp_path: Path) -> None:
    """runtime.json names every value: what was inherited stays what it was."""
    profile = load(tmp_path, TEXT)
    runtime = Runtime(profile=profile, state_dir=tmp_path, endpoints=Endpoints(), secrets=Secrets())
    save_runtime(runtime)
    found = load_runtime(tmp_path).profile.gate
    for model in ("acme/7b", "acme/8b"):
        assert digest_of(found.policy(model)) == digest_of(profile.gate.policy(model))


def test_a_decision_names_its_policy_and_an_older_versions_does_not() -> None:
    policy = Policy(**LOOSE)
    decision = decide(passing(), policy, champion=None, lineage=LINEAGE)
    assert decision.policy_digest == digest_of(policy)
    assert "policy_digest" not in GateDecision(passed=True, checks=()).model_dump()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('max_latency = 3', "gate.models.acme.max_latency.*max_latency_ms"),
        ('max_regression = 2.0', "gate.models.acme.max_regression = 2.0"),
        ('max_slice_regression = {":x" = 0.1}', "max_slice_regression"),
        ('min_documents = 4', "greater than or equal to 5"),
    ],
)  # fmt: skip
def test_a_bad_policy_is_one_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(InvalidProfile, match=words):
        load(tmp_path, f"[gate.models.acme]\n{line}\n")


@pytest.mark.parametrize("key", ["gate.models.'\"acme\"'.approval", 'gate.models."acme.approval'])
def test_a_policy_of_no_model_is_refused(key: str) -> None:
    """A name that no model can have would be a policy that judges nothing."""
    with pytest.raises(InvalidProfile, match=r"a model's id|not a key"):
        load_profile("ci", {key: "anyone"})


def test_an_override_reaches_a_models_policy() -> None:
    gate = load_profile("ci", {'gate.models."acme/7.5b".approval': "anyone"}).gate
    assert gate.policy("acme/7.5b").approval == "anyone", "named as in a profile's file"
    gate = load_profile("ci", {"gate.models.bytelm.min_documents": "30"}).gate
    assert gate.policy("bytelm").min_documents == 30
    assert gate.policy("bytelm").except_baselines == gate.except_baselines != ()


SERVING = Serving(
    machine="judge",
    cpu="a processor",
    threads=1,
    batch=1,
    context=256,
    prefill_ms=20.0,
    decode_ms_per_token=2.0,
    peak_memory_bytes=500_000_000,
    throughput_rows=8,
    throughput_ms=100.0,
)


def test_bounds_on_serving_are_of_what_was_measured_and_need_it() -> None:
    token, memory, rate = "latency in ms a token", "peak memory in bytes", "tokens a second"
    bounds = {"max_latency_ms_per_token": 2.0, "max_memory_bytes": 500_000_000}
    bounds |= {"min_tokens_per_second": 8 * 256 / 0.1}

    def failed(serving: Serving | None, **given: float) -> list[str]:
        report, policy = passing(serving=serving), Policy(**LOOSE, **given)
        decision = decide(report, policy, champion="champion", lineage=LINEAGE)
        return [each.name for each in decision.checks if not each.passed]

    assert failed(None) == failed(SERVING, **bounds) == [], "a report of before has no figures"
    assert failed(None, **bounds) == [token, memory, rate]
    assert failed(SERVING, **bounds | {"max_latency_ms_per_token": 1.9}) == [token]
    assert failed(SERVING, **bounds | {"max_memory_bytes": 499_999_999}) == [memory]
    unknown = SERVING.model_copy(update={"peak_memory_bytes": None})
    assert failed(unknown, **bounds) == [memory]
    assert failed(SERVING, **bounds | {"min_tokens_per_second": 20_481}) == [rate]
    before = SERVING.model_copy(update={"throughput_rows": None, "throughput_ms": None})
    assert failed(before, **bounds) == [rate]
    assert "min_tokens_per_second" not in Policy().model_dump(), "policies keep their digest"
    assert "serving" not in passing().scores[0].model_dump(), "keeps its digest"
    assert (
        "| candidate | 1 × 256 | 20.0 ms | 2.00 ms | 500 MB | "
        "8 × 256: 100.0 ms, 20,480 tokens a second | judge: a processor, 1 thread |"
        in (as_markdown(passing(serving=SERVING)))
    )


@pytest.mark.parametrize(
    ("margins", "refusals"),
    [
        ({"size": 0.0}, []),  # 2.5 against 2.6, 2.3 against 2.4
        ({"size: 1 to 900 bytes": 0.0}, []),
        ({"directory": 0.1}, ["no regression in directory"]),  # the report has none
        ({"colour: red": 0.1}, ["no regression in colour: red"]),
        ({"size: 5 to 6 bytes": 0.1}, ["no regression in size: 5 to 6 bytes"]),
    ],
)
def test_slices_have_margins_of_their_own(margins: dict[str, float], refusals: list[str]) -> None:
    assert refused(Policy(**LOOSE, max_slice_regression=margins)) == refusals


def test_a_slice_without_an_interval_is_refused() -> None:
    report = passing()
    rows = tuple({**each, "difference_to": {}} for each in report.slices)
    policy = Policy(**LOOSE, max_slice_regression={"size": 0.5})
    report = report.model_copy(update={"slices": rows})
    decision = decide(report, policy, champion="champion", lineage=LINEAGE)
    assert len([each for each in decision.checks if not each.passed]) == 2
    assert decide(report, Policy(**LOOSE), champion="champion", lineage=LINEAGE).passed


def test_a_slice_that_is_worse_refuses_alone() -> None:
    report = passing()
    worse = dict(report.slices[0]) | {
        "bits_per_byte": {"candidate": 2.7, "champion": 2.6},
        "difference_to": {"champion": interval(0.1, 0.02).model_dump()},
    }
    report = report.model_copy(update={"slices": (worse, report.slices[1])})

    def names(margin: float, champion: str | None) -> list[str]:
        policy = Policy(**LOOSE, max_slice_regression={"size": margin})
        decision = decide(report, policy, champion=champion, lineage=LINEAGE)
        return [each.name for each in decision.checks if not each.passed]

    # 0.1 more of 2.6 is 0.038, and the interval's end 0.12 is 0.046
    for margin in (0.03, 0.04):
        assert names(margin, "champion") == [
            "no regression against champion in size: 1 to 900 bytes"
        ]
    assert names(0.05, "champion") == []
    # before there is a champion, nodes run the base; this row has no figure of it
    assert names(0.5, None) == ["no regression against base in size: 1 to 900 bytes"]


@pytest.mark.parametrize(
    ("judged_on", "url", "passes"),
    [
        ((), "s3://b/data/snapshots/x", True),
        (("s3://b/data/snapshots/x",), "s3://b/data/snapshots/x", True),
        (("s3://b/data",), "s3://b/data/snapshots/x/", True),
        (("s3://b/data/snapshots/x",), "s3://b/data/snapshots/xy", False),
        (("s3://b/data",), "s3://b/database/x", False),
        ((passing().snapshot_digest,), "s3://elsewhere/x", True),
        (("s3://b/data",), "", False),
    ],
)
def test_the_policy_says_which_snapshot_may_judge(
    judged_on: tuple[str, ...], url: str, passes: bool
) -> None:
    policy = Policy(**LOOSE, judged_on=judged_on)
    decision = decide(passing(), policy, champion=None, lineage=LINEAGE, judged_on=url)
    failed = [each.name for each in decision.checks if not each.passed]
    assert failed == ([] if passes else ["snapshot that may judge"])


def test_margin_and_documents_are_the_policys() -> None:
    assert refused(Policy(**LOOSE, min_documents=41)) == ["held-out documents"]
    report = passing(difference_to={"base": interval(-0.4), "champion": interval(0.1)})
    for margin, passes in ((0.01, False), (0.1, True)):
        policy = Policy(**LOOSE, max_regression=margin)
        assert decide(report, policy, champion="champion", lineage=LINEAGE).passed is passes


@pytest.mark.parametrize(
    ("name", "bound", "value"),
    [("max_parameters", 100, 101), ("max_parameters", 100, None), ("min_context", 64, 63)],
)
def test_parameters_and_context_are_bounded_where_the_policy_says_so(
    name: str, bound: int, value: int | None
) -> None:
    field = name.partition("_")[2]
    policy = Policy.model_validate(LOOSE | {name: bound})

    def failed(value: int | None, policy: Policy) -> list[str]:
        report = passing(**{"judged_context": 64, field: value})
        decision = decide(report, policy, champion="champion", lineage=LINEAGE)
        return [each.name for each in decision.checks if not each.passed]

    assert failed(value, policy) == [field]
    assert failed(bound, policy) == failed(value, Policy.model_validate(LOOSE)) == []


def test_tasks_are_bounded_from_below_and_may_not_get_worse() -> None:
    def with_task(own: tuple[float, float], gain: tuple[float, float]) -> EvaluationReport:
        score = TaskScore(
            task="t",
            metric="acc",
            documents=50,
            scores={"candidate": interval(*own)},
            difference_to={"champion": interval(*gain)},
        )
        rows = TaskOverlap(task="t", rows=50, found=2)
        clean = CLEAN.model_copy(update={"tasks": (rows,)})
        return passing().model_copy(update={"tasks": (score,), "overlaps": (clean,)})

    def failed(report: EvaluationReport, **policy: object) -> list[str]:
        own = Policy.model_validate(LOOSE | policy)
        decision = decide(report, own, champion="champion", lineage=LINEAGE)
        return [each.name for each in decision.checks if not each.passed]

    better = with_task((0.6, 0.05), (0.1, 0.05))
    assert failed(better) == failed(better, min_tasks={"t/acc": 0.5}) == []
    assert failed(better, min_tasks={"t/acc": 0.58}) == ["task t/acc, lower end"]
    assert failed(better, min_tasks={"u/acc": 0.1}) == ["task u/acc, lower end"]
    unclear = with_task((0.6, 0.05), (-0.02, 0.05))
    assert failed(unclear) == []
    worse = with_task((0.6, 0.05), (-0.1, 0.05))
    assert failed(worse) == ["task t/acc no worse than champion"]
    assert failed(worse, max_task_regression=0.06) == []
    missing = better.model_copy(
        update={"tasks": (better.tasks[0].model_copy(update={"difference_to": {}}),)}
    )
    assert failed(missing) == ["task t/acc no worse than champion"]
    checks = decide(better, Policy(**LOOSE), champion="champion", lineage=LINEAGE).checks
    wanted = {each.name: each.wanted for each in checks}
    assert wanted["task t/acc no worse than champion"] == "an interval that reaches 0", "not -0"


def test_a_policy_can_demand_a_program_of_torch_export() -> None:
    policy, name = Policy(**LOOSE, formats=("safetensors", "torch.export")), "program_digest"
    assert refused(policy) == ["lineage: program digest"]
    assert not refused(Policy(**LOOSE))
    decision = decide(passing(), policy, champion="champion", lineage=LINEAGE | {name: "d" * 64})
    assert decision.passed


def test_metrics_of_user_code_are_bounded_where_the_policy_names_them() -> None:
    def report(*, higher: bool, own: float, gain: float) -> EvaluationReport:
        score = MetricScore(
            metric="tone",
            code_ref="m:f@sha256:0",
            higher_is_better=higher,
            documents=40,
            scores={"candidate": interval(own)},
            difference_to={"champion": interval(gain)},
        )
        return passing().model_copy(update={"metrics": (score,)})

    def failed(found: EvaluationReport, **policy: object) -> list[str]:
        decision = decide(
            found, Policy.model_validate(LOOSE | policy), champion="champion", lineage=LINEAGE
        )
        return [each.name for each in decision.checks if not each.passed]

    named = ["metric tone"]
    down = report(higher=False, own=-0.3, gain=0.1)  # intervals are ± 0.05
    assert failed(down) == [], "a metric that no limit names is only shown"
    assert failed(down, max_metrics={"tone": -0.25}, min_metrics={"tone": -0.35}) == []
    assert failed(down, max_metrics={"tone": -0.26}) == named
    assert failed(down, min_metrics={"tone": -0.34}) == named
    assert failed(down, max_metrics={"other": 1.0}) == ["metric other"]
    worse = ["metric tone no worse than champion"]
    assert failed(down, max_metric_regression={"tone": 0.151}) == []
    assert failed(down, max_metric_regression={"tone": 0.149}) == worse
    up = report(higher=True, own=0.3, gain=0.1)
    assert failed(up, max_metric_regression={"tone": 0.0}) == []
    lower = report(higher=True, own=0.3, gain=-0.01)
    assert failed(lower, max_metric_regression={"tone": 0.061}) == []
    assert failed(lower, max_metric_regression={"tone": 0.059}) == worse
    assert "max_metrics" not in Policy().model_dump(), "policies keep their digest"


def test_a_metric_of_one_slice_that_is_worse_refuses_alone() -> None:
    def report(*, higher: bool) -> EvaluationReport:
        def row(name: str, gain: float) -> dict[str, object]:
            gains = {"champion": interval(gain).model_dump()}  # ± 0.05
            return {"slice": "directory", "name": name, "difference_to": gains}

        score = MetricScore(
            metric="tone", code_ref="m:f@sha256:0", higher_is_better=higher, documents=40,
            scores={"candidate": interval(0.3)}, slices=(row("legal", -0.1), row("src", 0.0)),
        )  # fmt: skip
        return passing().model_copy(update={"metrics": (score,)})

    def failed(found: EvaluationReport, **margins: float) -> list[str]:
        own = {"max_metric_slice_regression": {"tone": margins}}
        policy = Policy.model_validate(LOOSE | own)
        decision = decide(found, policy, champion="champion", lineage=LINEAGE)
        return [each.name for each in decision.checks if not each.passed]

    legal = ["metric tone no worse than champion in directory: legal"]
    assert failed(report(higher=True), directory=0.14) == legal
    assert failed(report(higher=True), directory=0.16) == []
    assert failed(report(higher=True), **{"directory: src": 0.06}) == []
    assert failed(report(higher=False), directory=0.06) == [], "0.1 less is better"
    absent = ["metric tone no worse than champion in size"]
    assert failed(report(higher=True), size=1.0) == absent
    assert failed(passing(), directory=1.0) == ["metric tone no worse than champion in directory"]
    assert "max_metric_slice_regression" not in Policy().model_dump(), "policies keep their digest"
