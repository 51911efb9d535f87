"""The promotion gate: a pure decision from an evaluation report and lineage.

Missing evidence counts against the candidate and is listed. The rules:

- *better than X* (each name in ``must_beat``): the whole paired interval of candidate − X is below
  zero. Equal weights, or an interval that touches zero, is not better: a run of zero steps fails.
- *simple baselines*: each of ``BASELINES`` must be beaten in the same way, unless the policy
  excepts it (``except_baselines``); an exception remains visible as a check marked so.
- *no regression against the champion*: non-inferiority. The upper end of the paired interval is at
  most ``max_regression`` of the champion's bits per byte; "not significantly worse" alone would let
  anything pass on few documents. ``max_slice_regression`` bounds slices in the same way; without a
  champion, against the base.
- *not evaluated on training data*: every snapshot in the candidate's lineage was compared with the
  held-out documents, and contains none of them. Documents that lie there in large part, such as
  copies with a changed header, are at most ``max_overlap`` of them.
- *rows of tasks*: likewise at most ``max_overlap`` of each task's rows lie there, as a copy or not.
- *the same exam*: a snapshot that ``judged_on`` names judges; without that, the one that judged the
  champion, or another release of its source with the same held-out split; of a team's first
  champion, a release of the profile's source.
- *tasks*: the lower end of each interval is at least what ``min_tasks`` says, and no task's
  interval of candidate − champion (without one: − base) is wholly below −``max_task_regression``.
- *metrics of user code*, of those that the policy names: the lower end is at least what
  ``min_metrics`` says, the upper end at most what ``max_metrics`` says; non-inferiority against the
  champion (without one: the base) by ``max_metric_regression``, in the metric's own unit, and in
  single slices by ``max_metric_slice_regression``.
- At least ``min_documents`` (5 or more): with fewer, all of them agree by chance more than once in
  20.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from paceline.config import Policy
from paceline.schemas import (
    EvaluationReport,
    GateCheck,
    GateDecision,
    Interval,
    ModelScore,
    Overlap,
    digest_of,
)

CANDIDATE = "candidate"
MISSING = "missing"
FORMATS = ("safetensors",)
PROGRAM = "program_digest"  # in the lineage, of an export that has a torch.export program
BASELINES = ("ngram", "gzip", "xz")
METRIC = "metric {}"  # key in a report's failures: why it has no figures
TRAINING_DATA = "training data"  # key in a report's failures: why it could not be compared
BELOW_ZERO = "the whole interval below 0"
EXCEPTED = f"{BELOW_ZERO}, but the policy excepts it"
LINEAGE = (
    "manifest_digest",
    "snapshot_digest",
    "training_snapshot_digest",
    "weights_digest",
    "config_digest",
    "code_version",
    "job_id",
)


EXAM = "snapshot that may judge"  # the check of that name

# Placeholder for a candidate that was not evaluated: all its facts are missing.
_NOTHING = ModelScore(
    name=CANDIDATE, kind="transformer", bits_per_byte=Interval(value=0, low=0, high=0)
)


def decide(
    report: EvaluationReport,
    policy: Policy,
    *,
    champion: str | None,
    lineage: Mapping[str, str | None],
    judged_on: str = "",
    judges: Mapping[str, str] = MappingProxyType({}),
    of_profile: bool | None = None,
    packaged_bytes: int | None = None,
    packaged_file_bytes: int | None = None,
) -> GateDecision:
    """Return the decision on ``report``'s "candidate" under ``policy``, with one entry for every
    check and the policy's digest.

    ``champion`` is the name under which the champion was evaluated, None where there is none yet;
    ``lineage`` must have every key of ``LINEAGE``; ``judged_on`` is the URL of the report's
    snapshot; ``judges`` are the digests that may judge where the policy names none, with their URLs
    where these are known; empty: any. ``of_profile``: of a team's first champion, whether its
    snapshot is of the profile's source, as it must be then. ``packaged_bytes``: of all files as
    they would be published; None: the report's figure, which is of the weights alone.
    ``packaged_file_bytes``: of the largest safetensors file among them.
    """
    candidate = report.score(CANDIDATE)
    facts = candidate or _NOTHING
    checks = (
        *_quality(report, policy, candidate, champion),
        *_limits(policy, candidate, lineage, packaged_bytes, packaged_file_bytes),
        _check(
            "weights digest",
            bool(facts.weights_digest) and facts.weights_digest == lineage.get("weights_digest"),
            facts.weights_digest or MISSING,
            lineage.get("weights_digest") or MISSING,
        ),
        *(_traceable(key, lineage.get(key)) for key in LINEAGE),
        _check(
            "judged on the snapshot it names",
            lineage.get("snapshot_digest") == report.snapshot_digest,
            lineage.get("snapshot_digest") or MISSING,
            report.snapshot_digest,
        ),
        *_may_judge(policy.judged_on, judges, of_profile, judged_on, report.snapshot_digest),
        *_not_trained_on(report, lineage.get("training_snapshot_digest"), policy.max_overlap),
    )
    return GateDecision(
        passed=all(each.passed for each in checks),
        checks=checks,
        policy_digest=digest_of(policy),
    )


def _quality(
    report: EvaluationReport, policy: Policy, candidate: ModelScore | None, champion: str | None
) -> Iterator[GateCheck]:
    """Yield the checks of the candidate's scores against baselines, champion, slices and tasks."""
    yield _evaluated(report, candidate)
    yield _at_least("held-out documents", report.documents, policy.min_documents)
    for name in dict.fromkeys((*policy.must_beat, *BASELINES)):
        if name in policy.must_beat or name not in policy.except_baselines:
            yield _better_than(name, report, candidate)
    for name in policy.except_baselines:
        if name not in policy.must_beat:
            yield _excepted(name, report, candidate)
    if champion is not None:
        yield _no_regression(champion, report, candidate, policy.max_regression)
    for name, margin in policy.max_slice_regression.items():
        yield from _slices_hold(name, margin, report, champion or "base")
    yield from _tasks_hold(report, policy, champion or "base")
    yield from _metrics_hold(report, policy, champion or "base")


def _limits(
    policy: Policy,
    candidate: ModelScore | None,
    lineage: Mapping[str, str | None],
    packaged_bytes: int | None,
    packaged_file_bytes: int | None,
) -> Iterator[GateCheck]:
    """Yield the checks of the candidate's own figures: those that every policy has, then those for
    which this one names a bound."""
    facts = candidate or _NOTHING
    serving = facts.serving
    bits = candidate.bits_per_byte.high if candidate and _sound(candidate.bits_per_byte) else None
    yield _at_most("bits per byte, upper end", bits, policy.max_bits_per_byte)
    yield _one_of("weights format", facts.format, FORMATS)
    if "torch.export" in policy.formats:
        yield _traceable(PROGRAM, lineage.get(PROGRAM))
    yield _one_of("weights dtype", facts.dtype, policy.dtypes)
    token_ms = serving.decode_ms_per_token if serving else None
    peak_bytes = serving.peak_memory_bytes if serving else None
    throughput = serving.tokens_per_second if serving else None
    model_bytes = facts.model_bytes if packaged_bytes is None else packaged_bytes
    for check, name, value, bound in (
        (_at_most, "model bytes", model_bytes, policy.max_model_bytes),
        (_at_most, "bytes of a weights file", packaged_file_bytes, policy.max_file_bytes),
        (_at_most, "latency in ms", facts.latency_ms, policy.max_latency_ms),
        (_at_most, "parameters", facts.parameters, policy.max_parameters),
        (_at_least, "context", facts.context, policy.min_context),
        (_judged_at_least, "longest row scored", facts.judged_context, policy.min_context),
        (_at_most, "latency in ms a token", token_ms, policy.max_latency_ms_per_token),
        (_at_most, "peak memory in bytes", peak_bytes, policy.max_memory_bytes),
        (_at_least, "tokens a second", throughput, policy.min_tokens_per_second),
        (_at_least, "token accuracy", facts.token_accuracy, policy.min_token_accuracy),
        (_at_most, "calibration error", facts.calibration_error, policy.max_calibration_error),
    ):
        if bound is not None:
            yield check(name, value, bound)


def _may_judge(
    allowed: Sequence[str],
    judges: Mapping[str, str],
    of_profile: bool | None,
    url: str,
    digest: str,
) -> list[GateCheck]:
    if not allowed and of_profile is not None:
        wanted = (
            "for a team's first champion, one that this installation built of the profile's source "
            "([data] source) with its settings, or one that the policy names (gate.judged_on)"
        )
        return [_check(EXAM, of_profile, digest, wanted)]
    if not allowed and judges:
        first, where = next(iter(judges.items()))
        wanted = (
            f"{first}{where and f' ({where})'}, which judged the champion, another one that this "
            "installation built of its source with its held-out split, or one that the policy "
            "names (gate.judged_on)"
        )
        return [_check(EXAM, digest in judges, digest, wanted)]
    if not allowed:
        return []
    begins = [f"{each.rstrip('/')}/" for each in allowed]
    passed = digest in allowed or any(f"{url.rstrip('/')}/".startswith(each) for each in begins)
    return [_check(EXAM, passed, url or digest, " or ".join(allowed))]


def _tasks_hold(report: EvaluationReport, policy: Policy, other: str) -> list[GateCheck]:
    found = {f"{each.task}/{each.metric}": each for each in report.tasks}
    checks = []
    for name, least in policy.min_tasks.items():
        own = found[name].scores.get(CANDIDATE) if name in found else None
        checks.append(_at_least(f"task {name}, lower end", own.low if own else None, least))
    margin = policy.max_task_regression
    for name, each in found.items():
        gain = each.differences.get(other)
        got = MISSING if gain is None else f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"
        passed = gain is not None and _sound(gain) and gain.high >= -margin
        wanted = f"an interval that reaches {0 - margin:g}"
        checks.append(_check(f"task {name} no worse than {other}", passed, got, wanted))
    return checks


def _metrics_hold(report: EvaluationReport, policy: Policy, other: str) -> list[GateCheck]:
    found = {each.metric: each for each in report.metrics}
    checks = []

    def check(name: str, what: str, figure: Interval | None, sign: int, bound: float) -> None:
        title = METRIC.format(name)
        got = report.failures.get(title, MISSING) if figure is None else _show(figure)
        wanted = f"an upper end ≤ {bound:g}" if sign > 0 else f"a lower end ≥ {0 - bound:g}"
        worst = None if figure is None else figure.high if sign > 0 else -figure.low
        passed = figure is not None and _sound(figure) and worst is not None and worst <= bound
        checks.append(_check(title + what, passed, got, wanted))

    for bounds, sign in ((policy.min_metrics, -1), (policy.max_metrics, 1)):
        for name, bound in bounds.items():
            own = found[name].scores.get(CANDIDATE) if name in found else None
            check(name, "", own, sign, sign * bound)
    for name, margin in policy.max_metric_regression.items():
        gain = found[name].differences.get(other) if name in found else None
        sign = -1 if name in found and found[name].higher_is_better else 1
        check(name, f" no worse than {other}", gain, sign, margin)
    for name, margins in policy.max_metric_slice_regression.items():
        sign = -1 if name in found and found[name].higher_is_better else 1
        for asked, margin in margins.items():
            rows = _rows_of(found[name].slices if name in found else (), asked)
            for where, row in rows or [(asked, {})]:
                gain = _gain(row, other)
                check(name, f" no worse than {other} in {where}", gain, sign, margin)
    return checks


def _evaluated(report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    wanted = "a transformer with a score"
    if candidate is None:
        return _check("candidate evaluated", False, report.failures.get(CANDIDATE, MISSING), wanted)
    return _check("candidate evaluated", candidate.kind == "transformer", candidate.kind, wanted)


def _better_than(name: str, report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    title, wanted = f"better than {name}", BELOW_ZERO
    gain = candidate.differences.get(name) if candidate else None
    other = report.score(name)
    if candidate is None or gain is None or other is None:
        return _check(title, False, report.failures.get(name, MISSING), wanted)
    if candidate.weights_digest is not None and candidate.weights_digest == other.weights_digest:
        return _check(title, False, "the same weights", wanted)
    return _check(title, _sound(gain) and gain.high < 0, _show(gain), wanted)


def _excepted(name: str, report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    found = _better_than(name, report, candidate)
    return found if found.passed else found.model_copy(update={"passed": True, "wanted": EXCEPTED})


def _not_trained_on(
    report: EvaluationReport, training_snapshot: str | None, most: float
) -> list[GateCheck]:
    overlaps = report.overlaps or ()
    compared = [each.snapshot_digest for each in overlaps]
    copies = [each for each in overlaps if each.found]
    got = "; ".join(
        f"{each.found} of {each.held_out_documents} in snapshot {each.snapshot_digest[:12]} "
        f"({', '.join(each.examples)}{', …' if each.found > len(each.examples) else ''})"
        for each in copies
    )
    return [
        _check(
            "held-out documents compared with the training data",
            training_snapshot in compared,
            ", ".join(compared) or report.failures.get(TRAINING_DATA, MISSING),
            training_snapshot or MISSING,
        ),
        _check("held-out documents in the training data", not copies, got or "none", "none"),
        *(_little_overlap(each, most) for each in overlaps),
        *(
            _few_rows(task, each, most)
            for each in overlaps
            for task in dict.fromkeys(score.task for score in report.tasks)
        ),
    ]


def _little_overlap(overlap: Overlap, most: float) -> GateCheck:
    title = f"held-out documents that overlap with snapshot {overlap.snapshot_digest[:12]}"
    found, total = overlap.overlapping, overlap.held_out_documents
    return _small_share(title, found, total, overlap.overlapping_examples, most)


def _few_rows(task: str, overlap: Overlap, most: float) -> GateCheck:
    title = f"rows of task {task} in snapshot {overlap.snapshot_digest[:12]}"
    for each in overlap.tasks:
        if each.task == task:
            return _small_share(title, each.found, each.rows, each.examples, most)
    return _small_share(title, None, 0, (), most)


def _small_share(
    title: str, found: int | None, total: int, examples: Sequence[str], most: float
) -> GateCheck:
    wanted = f"at most {most:.1%}"
    if found is None:
        return _check(title, False, MISSING, wanted)
    share = found / max(1, total)
    named = f" ({', '.join(examples)}{', …' if found > len(examples) else ''})" if found else ""
    return _check(title, share <= most, f"{found} of {total}, {share:.1%}{named}", wanted)


def _no_regression(
    name: str, report: EvaluationReport, candidate: ModelScore | None, share: float
) -> GateCheck:
    title = f"no regression against {name}"
    gain = candidate.differences.get(name) if candidate else None
    other = report.score(name)
    if gain is None or other is None or not _sound(other.bits_per_byte):
        got = report.failures.get(name, MISSING)
        return _check(title, False, got, f"an upper end within {share:.2%}")
    margin = share * other.bits_per_byte.value
    return _check(
        title, _sound(gain) and gain.high <= margin, _show(gain), f"an upper end ≤ {margin:.4f}"
    )


def _slices_hold(name: str, share: float, report: EvaluationReport, other: str) -> list[GateCheck]:
    """Return a check for each slice that ``name`` names; a failed one where the report has none."""
    found = []
    for where, row in _rows_of(report.slices, name):
        figures = row.get("bits_per_byte")
        figures = figures if isinstance(figures, dict) else {}
        title = f"no regression against {other} in {where}"
        before, interval = figures.get(other), _gain(row, other)
        if before is None or interval is None:  # a report of an older version has no intervals
            found.append(_check(title, False, MISSING, f"an interval of candidate − {other}"))
            continue
        margin = share * before
        passed = _sound(interval) and interval.high <= margin
        found.append(_check(title, passed, _show(interval), f"an upper end ≤ {margin:.4f}"))
    return found or [_check(f"no regression in {name}", False, MISSING, "such a slice")]


def _rows_of(
    slices: Sequence[Mapping[str, object]], asked: str
) -> list[tuple[str, Mapping[str, object]]]:
    """Return the rows of ``slices`` that a policy names as ``asked``, each with its own name."""
    kind, _, one = asked.partition(": ")
    return [
        (f"{kind}: {row.get('name')}", row)
        for row in slices
        if row.get("slice") == kind and (not one or row.get("name") == one)
    ]


def _gain(row: Mapping[str, object], other: str) -> Interval | None:
    gains = row.get("difference_to")
    gain = gains.get(other) if isinstance(gains, dict) else None
    return None if gain is None else Interval.model_validate(gain)


def _traceable(key: str, value: str | None) -> GateCheck:
    name = f"lineage: {key.replace('_', ' ')}"
    return _check(name, bool(value and value.strip()), value or MISSING, "a value")


def _at_least(name: str, value: float | None, least: float) -> GateCheck:
    good = value is not None and math.isfinite(value) and value >= least
    return _check(name, good, _number(value), f"≥ {_number(least)}")


def _judged_at_least(name: str, value: float | None, least: float) -> GateCheck:
    check = _at_least(name, value, least)
    do = f": evaluation.context = {least:g}, and held-out documents of as many tokens"
    return check if check.passed else check.model_copy(update={"wanted": check.wanted + do})


def _at_most(name: str, value: float | None, most: float) -> GateCheck:
    good = value is not None and math.isfinite(value) and 0 <= value <= most
    return _check(name, good, _number(value), f"≤ {_number(most)}")


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> GateCheck:
    return _check(name, value in allowed, value or MISSING, " or ".join(allowed) or "nothing")


def _check(name: str, passed: bool, got: str, wanted: str) -> GateCheck:
    return GateCheck(name=name, passed=passed, got=got, wanted=wanted)


def _sound(interval: Interval) -> bool:
    ends = (interval.low, interval.value, interval.high)
    return all(math.isfinite(each) for each in ends) and ends == tuple(sorted(ends))


def _show(interval: Interval) -> str:
    return f"{interval.value:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.10g}"
