"""The promotion gate: a pure decision from an evaluation report and lineage.

Missing evidence counts against the candidate and is listed. The rules:

- *better than X* (each name in ``must_beat``): the whole paired interval of candidate − X is below
  zero. Equal weights, or an interval that touches zero, is not better: a run of zero steps fails.
- *simple baselines*: each of ``BASELINES`` must be beaten in the same way, unless the policy
  excepts it (``except_baselines``); an exception remains visible as a check marked so.
- *no regression against the champion*: non-inferiority. The upper end of the paired interval is at
  most 1 % of the champion's bits per byte; "not significantly worse" alone would let anything pass
  on few documents.
- *not evaluated on training data*: every snapshot in the candidate's lineage was compared with the
  held-out documents, and contains none of them.
- At least 5 documents: with fewer, all of them agree by chance more than once in 20.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.config import GateSettings
from paceline.schemas import EvaluationReport, GateCheck, GateDecision, Interval, ModelScore

CANDIDATE = "candidate"
MISSING = "missing"
MIN_DOCUMENTS = 5  # 2**-5 = 3.1 % < 5 %
REGRESSION_MARGIN = 0.01
FORMATS = ("safetensors",)
BASELINES = ("ngram", "gzip", "xz")
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


# Placeholder for a candidate that was not evaluated: all its facts are missing.
_NOTHING = ModelScore(
    name=CANDIDATE, kind="transformer", bits_per_byte=Interval(value=0, low=0, high=0)
)


def decide(
    report: EvaluationReport,
    settings: GateSettings,
    *,
    champion: str | None,
    lineage: Mapping[str, str | None],
) -> GateDecision:
    """Return the decision on ``report``'s "candidate", with one entry for every check.

    ``champion`` is the name under which the champion was evaluated, None where there is none yet;
    ``lineage`` must have every key of ``LINEAGE``.
    """
    candidate = report.score(CANDIDATE)
    facts = candidate or _NOTHING
    checks = [
        _evaluated(report, candidate),
        _at_least("held-out documents", report.documents, MIN_DOCUMENTS),
        *(
            _better_than(name, report, candidate)
            for name in dict.fromkeys((*settings.must_beat, *BASELINES))
            if name in settings.must_beat or name not in settings.except_baselines
        ),
        *(
            _excepted(name, report, candidate)
            for name in settings.except_baselines
            if name not in settings.must_beat
        ),
    ]
    if champion is not None:
        checks.append(_no_regression(champion, report, candidate))
    bits = candidate.bits_per_byte.high if candidate and _sound(candidate.bits_per_byte) else None
    checks += [
        _at_most("bits per byte, upper end", bits, settings.max_bits_per_byte),
        _one_of("weights format", facts.format, FORMATS),
        _one_of("weights dtype", facts.dtype, settings.dtypes),
        _at_most("model bytes", facts.model_bytes, settings.max_model_bytes),
        _at_most("latency in ms", facts.latency_ms, settings.max_latency_ms),
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
        *_not_trained_on(report, lineage.get("training_snapshot_digest")),
    ]  # fmt: skip
    return GateDecision(passed=all(each.passed for each in checks), checks=tuple(checks))


def _evaluated(report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    wanted = "a transformer with a score"
    if candidate is None:
        return _check("candidate evaluated", False, report.failures.get(CANDIDATE, MISSING), wanted)
    return _check("candidate evaluated", candidate.kind == "transformer", candidate.kind, wanted)


def _better_than(name: str, report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    title, wanted = f"better than {name}", BELOW_ZERO
    gain = candidate.gain_over.get(name) if candidate else None
    other = report.score(name)
    if candidate is None or gain is None or other is None:
        return _check(title, False, report.failures.get(name, MISSING), wanted)
    if candidate.weights_digest is not None and candidate.weights_digest == other.weights_digest:
        return _check(title, False, "the same weights", wanted)
    return _check(title, _sound(gain) and gain.high < 0, _show(gain), wanted)


def _excepted(name: str, report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    found = _better_than(name, report, candidate)
    return found if found.passed else found.model_copy(update={"passed": True, "wanted": EXCEPTED})


def _not_trained_on(report: EvaluationReport, training_snapshot: str | None) -> list[GateCheck]:
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
    ]


def _no_regression(name: str, report: EvaluationReport, candidate: ModelScore | None) -> GateCheck:
    title = f"no regression against {name}"
    gain = candidate.gain_over.get(name) if candidate else None
    other = report.score(name)
    if gain is None or other is None or not _sound(other.bits_per_byte):
        got = report.failures.get(name, MISSING)
        return _check(title, False, got, f"an upper end within {REGRESSION_MARGIN:.0%}")
    margin = REGRESSION_MARGIN * other.bits_per_byte.value
    return _check(
        title, _sound(gain) and gain.high <= margin, _show(gain), f"an upper end ≤ {margin:.4f}"
    )


def _traceable(key: str, value: str | None) -> GateCheck:
    name = f"lineage: {key.replace('_', ' ')}"
    return _check(name, bool(value and value.strip()), value or MISSING, "a value")


def _at_least(name: str, value: float | None, least: float) -> GateCheck:
    good = value is not None and math.isfinite(value) and value >= least
    return _check(name, good, _number(value), f"≥ {_number(least)}")


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
