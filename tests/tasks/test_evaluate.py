"""What judging follows from: its deadline, its tasks, and its key in the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config import EvaluationSettings, MetricSettings, load_profile
from paceline.errors import InvalidInput
from paceline.manifest import Manifest
from paceline.models import model_digest
from paceline.schemas import EvaluationSpec, RecordedScore, TrainingData, metric_digest
from paceline.storage import DiskStore
from paceline.tasks import evaluate as judging
from paceline.tasks._support import scores, sealed_records
from paceline.tasks._support.run import Run
from paceline.tasks._support.scores import recorded_besides
from paceline.training.export_policy import BaseFacts
from tests.evaluation.test_tasks import CHOICE, write_tasks
from tests.security.test_a_forged_report_is_refused import Bucket, run_of
from tests.support.hugging_face import write_tokenizer

HELD_OUT_BYTES = 32 * 262_144
WEIGHTS = {"candidate": 400_000_000, "champion": 200_000_000}


class Store(Bucket):
    """Objects of these sizes; every file is one of ``directory``."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def list(self, url: str) -> list[Any]:
        if url.startswith("s3://tasks"):
            return [SimpleNamespace(url=url + each.name) for each in self.directory.iterdir()]
        return [SimpleNamespace(size=WEIGHTS[url.rpartition("/")[2]])]

    def download_file(self, url: str, into: Path) -> None:
        into.write_bytes((self.directory / url.rpartition("/")[2]).read_bytes())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run on published tasks of 250,000 bytes, and snapshots of 80 MB, 8 MB of it held out."""
    run = run_of(Store(write_tasks(tmp_path / "tasks", CHOICE)))
    files = [SimpleNamespace(size=50_000), SimpleNamespace(size=200_000)]
    run.manifest = lambda _url: cast("Manifest", SimpleNamespace(files=files, digest="d" * 64))  # type: ignore[method-assign]
    snapshot = SimpleNamespace(
        record=SimpleNamespace(total_bytes=80_000_000),
        is_paired=False,
        of_split=lambda _split: [SimpleNamespace(text_bytes=HELD_OUT_BYTES // 2)] * 2,
    )
    for module in (judging, scores.data):
        monkeypatch.setattr(module, "load_snapshot", lambda _url, _store: snapshot)
    return run


def test_the_deadline_follows_weights_text_context_tasks_and_data(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadline_s(models: Mapping[str, str], **more: Any) -> float:
        spec = EvaluationSpec(
            run_id="r", snapshot_url="s3://b/s", snapshot_digest="0" * 64, models=dict(models),
            **{"settings": EvaluationSettings()} | more,
        )  # fmt: skip
        files = [SimpleNamespace(size=1_000_000_000)]
        base = SimpleNamespace(files=files, model_id="m", version="1")
        return judging._deadline_s(run, spec, cast("Manifest", base))

    candidate = {"candidate": "s3://b/candidate"}
    assert deadline_s({"champion": "s3://b/champion"}) == 900, "at the least"
    assert deadline_s(candidate | {"champion": "s3://b/champion"}) == 1.5 * 900
    assert deadline_s(candidate | {"base": "node:m/1"}) == 3.5 * 900, "the base is on the nodes"
    tasks = {"tasks_url": "s3://tasks", "tasks_digest": "d" * 64}
    assert deadline_s(candidate, **tasks) == 3.5 * 900
    metric = MetricSettings(code_ref="m:f", higher_is_better=True, max_new_tokens=64)
    measured = EvaluationSettings(held_out_bytes=2_097_152, metrics={"a": metric})
    assert deadline_s(candidate, settings=measured) == (8 + 2.097152 * (1 + 64 / 32)) * 900

    def settings(**given: int) -> dict[str, Any]:
        return {"settings": EvaluationSettings.model_validate(given)}

    much = {"held_out_bytes": HELD_OUT_BYTES}
    assert deadline_s(candidate, **settings(held_out_bytes=1024, context=64)) == 900
    assert deadline_s(candidate, **settings(**much)) == 32 * 900
    assert deadline_s(candidate, **settings(**much, context=8192)) == 8 * 32 * 900
    more = {"held_out_bytes": 10 * HELD_OUT_BYTES}
    assert deadline_s(candidate, **settings(**more)) == 32 * 900, "all that is held out"
    for context, times in ((4096, 4), (None, 1)):
        facts = BaseFacts("float32", 1, context)
        monkeypatch.setattr(judging, "base_facts", lambda *_, facts=facts: facts)
        assert deadline_s(candidate, **settings(context=0)) == times * 900, "the base's own"
    data = [TrainingData(snapshot_url="s3://b/s", snapshot_digest="0" * 64)]
    assert deadline_s(candidate, **tasks, trained_on=data) == 3.5 * 900 + 10


def test_published_tasks_are_read_before_a_node_is_busy(run: Run, tmp_path: Path) -> None:
    evaluation = EvaluationSettings(tasks="s3://tasks")
    profile = run.runtime.profile.model_copy(update={"evaluation": evaluation})
    run.runtime = run.runtime.model_copy(update={"profile": profile})
    assert judging.published_tasks(run) == ("s3://tasks", "d" * 64)
    (tmp_path / "tasks" / "rows.jsonl").write_text("")
    with pytest.raises(InvalidInput, match=r"no rows.*rows\.jsonl"):
        judging.published_tasks(run)


def test_a_base_without_a_working_chat_template_is_refused_at_once(tmp_path: Path) -> None:
    evaluation = EvaluationSettings(tasks="./tasks", tasks_as_chat=True)
    profile = load_profile("local", {}).model_copy(update={"evaluation": evaluation})
    run = cast(
        "Run",
        SimpleNamespace(
            store=DiskStore(), runtime=SimpleNamespace(profile=profile, state_dir=tmp_path)
        ),
    )
    base = write_tokenizer(tmp_path / "base", ["a text"], template=None)
    template = base / "chat_template.jinja"
    for content, words in (
        (None, "no chat template"),
        ("{{ messages[0].content }}", ""),
        ("{{ raise_exception('no users') }}", "no users.*Publish the base with a template that"),
        ("{% for", "not a chat template.*Publish the base"),
    ):
        if content is not None:
            template.write_text(content)
        with pytest.raises(InvalidInput, match=words) if words else nullcontext():
            judging.require_judgeable(run, profile, "s3://b/s", base.as_uri())
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{{ x }}"}))
    template.unlink()
    judging.require_judgeable(run, profile, "s3://b/s", base.as_uri())


def test_metrics_are_tried_before_a_node_is_busy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_require_buildable", lambda _run, _url: None)
    metric = MetricSettings(code_ref="own_metrics:tone", higher_is_better=True)
    evaluation = EvaluationSettings(metrics={"tone": metric})
    profile = run.runtime.profile.model_copy(update={"evaluation": evaluation})
    run.runtime = run.runtime.model_copy(update={"profile": profile, "state_dir": tmp_path})
    models = {"candidate": {"url": "s3://b/candidate", "digest": "c" * 64}}
    for judge in (
        lambda: judging.require_judgeable(run, profile, "s3://b/s", "s3://b/m"),
        lambda: judging.evaluate.fn(
            run, models, {"url": "s3://b/s", "digest": "0" * 64}, [], trained_on=(),
            base=cast("Manifest", None), training_digest="e" * 64,
        ),
    ):  # fmt: skip
        with pytest.raises(
            InvalidInput, match=r"not pinned.*evaluation\.metrics\.tone own_metrics"
        ):
            judge()


def test_scores_on_tasks_are_found_by_the_weights_and_the_tasks(run: Run) -> None:
    spec = EvaluationSpec(
        run_id="r", snapshot_url="s3://b/s", snapshot_digest="0" * 64, models={}, scorer="now",
        settings=EvaluationSettings(), tasks_url="s3://tasks", tasks_digest="d" * 64,
    )  # fmt: skip
    models = {"candidate": {"url": "s3://b/candidate", "digest": "c" * 64}}
    score = RecordedScore(
        subject=model_digest("c" * 64, {}), snapshot_digest="d" * 64, scorer="now", bits=(),
        held_out_bytes=spec.settings.held_out_bytes, facts={"t": {"acc": [1.0]}}, run_id="r",
    )  # fmt: skip
    sealed_records.save_score(run, score)
    assert recorded_besides(run, spec, models) == [score]
    as_chat = {"settings": EvaluationSettings(tasks_as_chat=True)}
    others = [{"tasks_digest": "e" * 64}, {"scorer": "before"}, {"tasks_url": ""}, as_chat]
    for other in others:
        assert not recorded_besides(run, spec.model_copy(update=other), models)
    metric = MetricSettings(code_ref="m:f@sha256:0", higher_is_better=True)
    settings = EvaluationSettings(metrics={"a": metric})
    measured = spec.model_copy(update={"settings": settings, "tasks_url": ""})
    figures = {"snapshot_digest": metric_digest("0" * 64, metric), "bits": (0.5,), "facts": {}}
    sealed_records.save_score(run, score.model_copy(update=figures))
    assert recorded_besides(run, measured, models) == [score.model_copy(update=figures)]
    changed = EvaluationSettings(metrics={"a": metric.model_copy(update={"code_ref": "m:f@1"})})
    assert not recorded_besides(run, measured.model_copy(update={"settings": changed}), models)
    models["candidate"]["digest"] = "f" * 64
    assert not recorded_besides(run, spec, models)


def test_rows_and_the_comparison_that_were_done_are_found_again(run: Run) -> None:
    trained = TrainingData(snapshot_url="s3://b/t", snapshot_digest="1" * 64)
    spec = EvaluationSpec(
        run_id="r", snapshot_url="s3://b/s", snapshot_digest="0" * 64, models={}, scorer="now",
        settings=EvaluationSettings(), trained_on=(trained,),
    )  # fmt: skip
    models = {"candidate": {"url": "s3://b/candidate", "digest": "c" * 64}}
    begun = RecordedScore(
        subject=model_digest("c" * 64, {}), snapshot_digest="0" * 64, scorer="now", bits=(1.0,),
        held_out_bytes=spec.settings.held_out_bytes, run_id="r", unfinished=True,
    )  # fmt: skip
    sealed_records.save_score(run, begun)
    assert scores.unfinished_scores(run, spec, models) == (begun,)
    assert not scores.recorded_scores(run, spec, models), "it is no score"
    sealed_records.save_score(
        run, begun.model_copy(update={"unfinished": False, "bits": (1.0, 2.0)})
    )
    assert scores.unfinished_scores(run, spec, models) == (begun,), "each has its own key"
    newer = spec.model_copy(update={"scorer": "later"})
    assert not scores.unfinished_scores(run, newer, models)
    compared = begun.model_copy(
        update={
            "subject": "training data",
            "snapshot_digest": spec.compared_digest,
            "bits": (),
            "unfinished": False,
        }
    )
    sealed_records.save_score(run, compared)
    assert recorded_besides(run, spec, models) == [compared]
    others = [{"trained_on": ()}, {"tasks_digest": "d" * 64}, {"scorer": "later"}]
    for other in others:
        assert not recorded_besides(run, spec.model_copy(update=other), models)


def test_an_evaluation_of_models_that_read_otherwise_is_not_taken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's key has the version of what models are given to read."""
    keys: list[Any] = []

    def stage(_name: str, inputs: Mapping[str, Any], *_: Any, **__: Any) -> None:
        keys.append(dict(inputs))
        raise LookupError

    monkeypatch.setattr(run, "stage", stage)
    monkeypatch.setattr(judging, "_require_buildable", lambda _run, _url: None)
    for reads in (judging.READS, judging.READS + 1):
        monkeypatch.setattr(judging, "READS", reads)
        with pytest.raises(LookupError):
            judging.evaluate.fn(
                run, {"candidate": {"url": "s3://b/candidate", "digest": "c" * 64}},
                {"url": "s3://b/s", "digest": "0" * 64}, [], trained_on=(),
                base=cast("Manifest", None), training_digest="e" * 64,
            )  # fmt: skip
    assert keys[0] != keys[1]
    assert keys[0] | {"reads": 0} == keys[1] | {"reads": 0}
