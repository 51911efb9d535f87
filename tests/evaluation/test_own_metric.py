"""Metrics of user code: their figures are those of the samples, and every mistake is one line."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.config import (
    DataSettings,
    EvaluationSettings,
    MetricSettings,
    Policy,
    load_runtime,
    save_runtime,
)
from paceline.data import Conversation, build_snapshot, open_tokenizer
from paceline.errors import AccessDenied, PacelineError
from paceline.evaluation import (
    AllowedCode,
    HeldOutDocument,
    Resampler,
    TextModel,
    as_markdown,
    decide,
    generate,
    require_metrics,
    score_models,
    score_transformer,
    with_metrics,
)
from paceline.evaluation.user_code import process
from paceline.evaluation.user_code.metrics import PROBE, UserMetric
from paceline.models import config_for, local_model_digest, new_model, save_model
from paceline.registry.lineage import evaluation_metrics
from paceline.schemas import EvaluationReport, EvaluationSpec, RecordedScore, metric_digest
from paceline.storage import DiskStore
from paceline.training.user_code import tree_digest
from tests.evaluation.reports import LINEAGE
from tests.evaluation.test_own_tokens import words  # noqa: F401 - a fixture
from tests.evaluation.test_policy import LOOSE
from tests.evaluation.test_run import evaluate, spec  # noqa: F401 - a fixture
from tests.support.hugging_face import write_model

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
CODE = """
import math, os, time, zlib

def bits(samples):
    return [-sum(each.log_probs) / math.log(2) for each in samples]

def accuracy(samples):
    return [sum(each.correct) / len(each.tokens) for each in samples]

def written(samples):
    assert len(samples) <= 64 and "AWS_SECRET_ACCESS_KEY" not in os.environ
    said = [f"{s.name} {s.prompt} {s.prediction} {s.reference}" for s in samples]
    return [zlib.crc32(each.encode()) for each in said]

def constant(samples):
    return [0.5] * len(samples)

def wrong(samples):
    name = samples[0].name
    if name == "raising":
        raise RuntimeError("no such table: users")
    if name == "sleeping":
        time.sleep(100)
    return {"fewer": [0.5], "nan": [float("nan")] * 2, "words": ["much"] * 2}[name]

def leaving(samples):
    os._exit(3)

def odd_texts(samples):
    return [1 / ("def f_65(" not in each.text) for each in samples]

value = 7
"""
TOKENS_OF = "line 1 of file 2 is 3 ÄÖ→ line 4 of file 5 is 6".encode()
TEXTS = [f"def f_{n}(x):\n    return x + {n}  # →\n".encode() * (2 + n % 5) for n in range(66)]
HELD_OUT = [HeldOutDocument(f"{n}.py", text, len(text)) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("code")
    (directory / "own_metrics.py").write_text(CODE)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config, directory = config_for(20_000, 32), tmp_path_factory.mktemp("models")
    for name, seed in (("candidate", 1), ("base", 2)):
        save_model(new_model(config, seed), config, directory / name)
    return {name: directory / name for name in ("candidate", "base")}


def named(code: Path, function: str, *, higher: bool = True, new_tokens: int = 0) -> MetricSettings:
    ref = f"file://{code}@sha256:{tree_digest(code)}#own_metrics:{function}"
    return MetricSettings(code_ref=ref, higher_is_better=higher, max_new_tokens=new_tokens)


def settings_of(**metrics: MetricSettings) -> EvaluationSettings:
    return EvaluationSettings(bootstrap_samples=100, ngram_order=2, metrics=metrics)


def judged(
    models: dict[str, Path], held_out: Sequence[HeldOutDocument], settings: EvaluationSettings
) -> EvaluationReport:
    return score_models(
        models, held_out, lambda: TEXTS, settings, snapshot_digest="5" * 64,
        on_progress=lambda *_: None,
    )  # fmt: skip


def test_figures_are_those_of_each_document_with_paired_intervals(
    code: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    settings = settings_of(
        bits=named(code, "bits", higher=False),
        accuracy=named(code, "accuracy"),
        written=named(code, "written", new_tokens=5),
        tone=named(code, "odd_texts"),
    )
    plain = judged(models, HELD_OUT, settings)
    by_key: dict[tuple[str, str], np.ndarray] = {}
    report = with_metrics(
        plain, models, HELD_OUT, settings, AllowedCode((str(code),), tmp_path),
        on_scored=lambda subject, digest, found: by_key.update({(subject, digest): found}),
    )  # fmt: skip
    assert [each.metric for each in report.metrics] == ["bits", "accuracy", "written"]
    assert list(report.failures) == ["metric tone"]
    for said in ("ZeroDivisionError", "evaluation.metrics.tone"):
        assert said in report.failures["metric tone"]
    policy = Policy.model_validate(LOOSE | {"min_metrics": {"tone": 0.5, "accuracy": 0.0}})
    checks = {
        each.name: each for each in decide(report, policy, champion=None, lineage=LINEAGE).checks
    }
    assert checks["metric accuracy"].passed and not checks["metric tone"].passed
    assert "ZeroDivisionError" in checks["metric tone"].got
    figures = {
        name: {
            metric: by_key[local_model_digest(models[name]), metric_digest("5" * 64, its)]
            for metric, its in settings.metrics.items()
            if metric != "tone"
        }
        for name in models
    }
    for name, found in figures.items():
        scored = score_transformer(models[name], HELD_OUT, lambda _fraction: None)
        assert found["bits"] == pytest.approx(scored.bits)
        count = sum(scored.calibration[each][0] for each in range(10))
        right = sum(scored.calibration[each][1] for each in range(10))
        lengths = np.array([len(each) for each in TEXTS])
        assert found["accuracy"] @ lengths == pytest.approx(right) and count == lengths.sum()
    model = TextModel.open(models["candidate"])
    for at in (0, 3, 65):  # the last one is in a second call
        text = TEXTS[at].decode()
        prompt = TEXTS[at][: len(TEXTS[at]) // 2].decode(errors="ignore")
        said = "".join(generate(model, [model.first, *prompt.encode()], max_tokens=5))
        whole = f"{at}.py {prompt} {said} {text.removeprefix(prompt)}"
        assert figures["candidate"]["written"][at] == zlib.crc32(whole.encode())
    draws = Resampler(np.ones(66), samples=100, confidence=0.95, seed=0)
    bits = report.metrics[0]
    assert bits.scores["base"] == draws.ratio(figures["base"]["bits"])
    gain = draws.ratio(figures["candidate"]["bits"] - figures["base"]["bits"])
    assert bits.difference_to == {"base": gain}
    assert [each["slice"] for each in bits.slices] == [*["size"] * 4, "directory"]
    shortest = sorted(range(66), key=lambda each: len(TEXTS[each]))[:17]
    quarter, draws = bits.slices[0], Resampler(np.ones(17), samples=100, confidence=0.95, seed=0)
    ours, its = (figures[each]["bits"][shortest] for each in ("candidate", "base"))
    assert quarter["documents"] == 17
    its_means = {"candidate": draws.ratio(ours), "base": draws.ratio(its)}
    assert quarter["scores"] == {name: each.model_dump() for name, each in its_means.items()}
    assert quarter["difference_to"] == {"base": draws.ratio(ours - its).model_dump()}
    page = as_markdown(report)
    assert f"| bits, lower is better | size: {quarter['name']} | 17 | base | " in page
    assert f"| bits, lower is better | candidate | {bits.scores['candidate'].value:.4f} (" in page
    points = {each.key: each.value for each in evaluation_metrics(report)}
    assert points["eval/base/metric/bits"] == bits.scores["base"].value
    again = with_metrics(
        plain, models, HELD_OUT,
        settings_of(**{name: its for name, its in settings.metrics.items() if name != "tone"}),
        AllowedCode((), tmp_path),  # nothing has to run
        known=[
            RecordedScore(
                subject=subject, snapshot_digest=digest, held_out_bytes=1, scorer="", run_id="",
                bits=tuple(found),
            )
            for (subject, digest), found in by_key.items()
        ],
    )  # fmt: skip
    assert again.metrics == report.metrics


@pytest.mark.parametrize(
    ("message", "change", "function"),
    [
        (r"not what the reference is pinned to", "0" * 64, "constant"),
        (r"names no function.*got int.*evaluation\.metrics\.tone", "", "value"),
        (r"ended its process: got exit code 3.*evaluation\.metrics\.tone", "", "leaving"),
    ],
)
def test_a_metric_that_cannot_judge_is_one_line_before_any_model(
    message: str, change: str, function: str, code: Path, tmp_path: Path
) -> None:
    its = named(code, function)
    if change:
        its = its.model_copy(update={"code_ref": its.code_ref.replace(tree_digest(code), change)})
    with pytest.raises(PacelineError, match=message) as found:
        require_metrics(settings_of(tone=its), AllowedCode((str(code),), tmp_path))
    assert "\n" not in found.value.one_line()


def test_a_metric_that_answers_wrongly_is_one_line(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = UserMetric("tone", named(code, "wrong"), AllowedCode((str(code),), tmp_path))
    for name, message in {
        "fewer": r"a number for each sample: got 1 figures, wanted 2",
        "nan": r"a number for each sample: got nan of nan",
        "words": r"code raised.*could not convert.*much",
        "raising": r"no such table: users \(own_metrics\.py, line \d+\)",
        "sleeping": r"does not come to an end",
    }.items():
        if name == "sleeping":
            monkeypatch.setattr(process, "DEADLINE_S", 0.5)
        with pytest.raises(PacelineError, match=message) as found:
            metric([each.model_copy(update={"name": name}) for each in PROBE])
        assert "\n" not in found.value.one_line()
        assert "evaluation.metrics.tone" in found.value.one_line()


def test_a_source_that_is_not_allowed_is_refused(code: Path, tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match=r"evaluation\.metrics\.tone file://"):
        require_metrics(settings_of(tone=named(code, "constant")), AllowedCode(("/srv",), tmp_path))


def test_of_a_conversation_the_last_answer_is_the_reference(
    words: Path,  # noqa: F811
    code: Path,
    tmp_path: Path,
) -> None:
    model, tokenizer = (
        write_model("llama", tmp_path / "m", vocab_size=310),
        open_tokenizer(str(words)),
    )
    (model / "tokenizer.json").write_bytes(words.read_bytes())
    (tokens,) = tokenizer.encode([TOKENS_OF])
    assert not isinstance(tokens, str)
    mask = np.isin(np.arange(len(tokens)), [2, 3, 7, 8, 9])  # two answers
    text = tokenizer.text(tokens[mask])
    chat = HeldOutDocument("chat", text, len(text), Conversation(tokens, mask))
    settings = settings_of(written=named(code, "written", new_tokens=4), bits=named(code, "bits"))
    report = score_models(
        {"candidate": model}, [chat], lambda: TEXTS, settings, snapshot_digest="5" * 64,
        on_progress=lambda *_: None, tokenizer=tokenizer,
    )  # fmt: skip
    allowed = AllowedCode((str(code),), tmp_path / "cache")
    report = with_metrics(report, {"candidate": model}, [chat], settings, allowed, tokenizer)
    said = "".join(generate(TextModel.open(model), tokens[:7].tolist(), max_tokens=4))
    before, answer = (tokenizer.text(tokens[part]).decode() for part in (slice(7), slice(7, 10)))
    written, bits = report.metrics
    assert written.scores["candidate"].value == zlib.crc32(
        f"chat {before} {said} {answer}".encode()
    )
    candidate = report.score("candidate")
    assert candidate is not None
    assert bits.scores["candidate"].value == pytest.approx(
        candidate.bits_per_byte.value * len(text)
    )


def test_the_process_records_figures_by_model_and_pin(
    spec: EvaluationSpec,  # noqa: F811
    code: Path,
    tmp_path: Path,
) -> None:
    runtime = load_runtime(tmp_path)
    security = runtime.profile.security.model_copy(update={"code_sources": (str(code),)})
    profile = runtime.profile.model_copy(update={"security": security})
    save_runtime(runtime.model_copy(update={"profile": profile}))
    metric = named(code, "bits", higher=False)

    def evaluated(its: MetricSettings, known: tuple[RecordedScore, ...]) -> list[RecordedScore]:
        settings = spec.settings.model_copy(update={"metrics": {"own": its}})
        given = {"scorer": "this release", "settings": settings, "known": known}
        models = {"models": spec.models | {"champion": spec.models["base"]}}
        exit_code, lines, stderr = evaluate(
            spec.model_copy(update=given | models).model_dump_json()
        )
        assert exit_code == 0, stderr
        report = EvaluationReport.model_validate(lines[-1]["data"])
        assert set(report.metrics[0].scores) == {"candidate", "base", "champion"}
        found = [RecordedScore.model_validate(x["data"]) for x in lines if x["event"] == "score"]
        return [each for each in found if each.snapshot_digest != spec.snapshot_digest]

    fresh = evaluated(metric, ())
    assert [each.subject for each in fresh] == [
        local_model_digest(tmp_path / name) for name in ("candidate", "base")
    ], "base and champion are one"
    assert {each.snapshot_digest for each in fresh} == {metric_digest(spec.snapshot_digest, metric)}
    short = fresh[1].model_copy(update={"bits": fresh[1].bits[:-1]})
    assert evaluated(metric, (fresh[0], short)) == [fresh[1]], "of other documents"
    assert len(evaluated(metric.model_copy(update={"max_new_tokens": 1}), tuple(fresh))) == 2


def test_python_judges_with_the_metric_of_the_examples(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """``paceline.evaluate`` on a snapshot in a directory; the process checks the example's pin."""
    example, source = ROOT / "examples/own_metric", tmp_path / "source"
    source.mkdir()
    for number, text in enumerate(TEXTS):
        (source / f"{number}.py").write_bytes(text)
    data = DataSettings(source=str(source), held_out_share=0.3)
    url = DiskStore.url_of(tmp_path / "data")
    snapshot = build_snapshot(str(source), url, data, DiskStore())
    metric = {
        "code_ref": f"file://{example}@sha256:{tree_digest(example)}#repetition:repeated",
        "higher_is_better": False,
        "max_new_tokens": 12,
    }
    settings = {
        "evaluation.metrics": {"repeated": metric},
        "evaluation.bootstrap_samples": 100,
        "security.code_sources": [str(example)],
    }
    report = paceline.evaluate(models, snapshot.url, settings=settings)
    assert not report.failures
    (repeated,) = report.metrics
    assert repeated.documents == report.documents and set(repeated.scores) == set(models)
    assert all(0 <= each.low <= each.high < 1 for each in repeated.scores.values())
