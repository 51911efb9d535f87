"""The evaluation process, whole: a snapshot and models in a real S3 server, JSON lines out."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paceline.config import (
    DataSettings,
    Endpoints,
    EvaluationSettings,
    Profile,
    Runtime,
    Secrets,
    save_runtime,
)
from paceline.data import Snapshot, build_snapshot, in_held_out
from paceline.evaluation import as_markdown, run
from paceline.evaluation.overlap import find_overlap
from paceline.manifest import publish_model
from paceline.models import (
    config_for,
    local_model_digest,
    new_model,
    save_model,
    weights_digest,
)
from paceline.schemas import (
    EvaluationReport,
    EvaluationSpec,
    Overlap,
    RecordedScore,
    TrainingData,
)
from tests.evaluation.test_tasks import CHOICE, ROWS, write_tasks
from tests.support.hugging_face import MARKED, write_model, write_tokenizer
from tests.support.rclone import RcloneS3

BUCKET = "evaluation-run"


@pytest.fixture
def spec(s3: RcloneS3, tmp_path: Path) -> EvaluationSpec:
    store = s3.store()
    store.ensure_bucket(BUCKET)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        text = f"def function_{number}():\n    return {number}\n" * 40
        (source / f"module_{number}.py").write_text(text)
    settings = DataSettings(source=str(source), held_out_share=0.3)
    snapshot = build_snapshot(str(source), f"s3://{BUCKET}/data", settings, store)
    config = config_for(20_000, 32)
    for name, seed in (("base", 0), ("candidate", 1)):
        save_model(new_model(config, seed), config, tmp_path / name)
    for file in (tmp_path / "candidate").iterdir():
        store.upload_file(file, f"s3://{BUCKET}/jobs/1/export/{file.name}")
    save_runtime(
        Runtime(
            profile=Profile(),
            state_dir=tmp_path,
            endpoints=Endpoints(s3_url=s3.endpoint_url),
            secrets=Secrets(s3_access_key=s3.access_key, s3_secret_key=s3.secret_key),
        )
    )
    return EvaluationSpec(
        run_id="run-20261120-153600-9f3a1c",
        state_dir=str(tmp_path),
        snapshot_url=snapshot.url,
        snapshot_digest=snapshot.digest,
        models={"candidate": f"s3://{BUCKET}/jobs/1/export", "base": str(tmp_path / "base")},
        settings=EvaluationSettings(held_out_bytes=4096, bootstrap_samples=100, ngram_order=3),
    )


def evaluate(stdin: str) -> tuple[int, list[dict[str, object]], str]:
    """What the process does, in this one."""
    asked, out, err = io.TextIOWrapper(io.BytesIO(stdin.encode())), io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "stdin", asked),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run.main()
    return code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def test_the_process_reports_on_models_from_disk_and_s3(
    spec: EvaluationSpec, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.evaluation.run"],
        input=spec.model_dump_json(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["event"] for line in lines[:-1]} == {"progress"}
    assert lines[-1]["event"] == "result"
    report = EvaluationReport.model_validate(lines[-1]["data"])
    assert [each.name for each in report.scores] == ["candidate", "base", "ngram", "gzip", "xz"]
    candidate = report.score("candidate")
    assert candidate is not None
    assert candidate.weights_digest == weights_digest(tmp_path / "candidate")
    assert set(candidate.difference_to) == {"base", "ngram", "gzip", "xz"}
    assert report.documents >= 2
    assert [each.name for each in (tmp_path / "work").iterdir()] == ["evaluation.lock"]


def test_a_wrong_snapshot_and_a_malformed_spec_are_one_clear_line(spec: EvaluationSpec) -> None:
    swapped = spec.model_copy(update={"snapshot_digest": "0" * 64})
    for stdin, error, told in (
        (swapped.model_dump_json(), "CorruptData", "not the snapshot"),
        ('{"run_id": 7}', "InvalidInput", "not an evaluation spec"),
    ):
        code, lines, stderr = evaluate(stdin)
        assert code != 0
        assert lines[-1]["event"] == "failed"
        assert lines[-1]["data"]["code"] == error  # type: ignore[index]
        assert told in stderr
        assert stderr.count("\n") == 1


def test_of_conversations_assistants_are_scored_and_whole_copies_found(
    spec: EvaluationSpec, s3: RcloneS3, tmp_path: Path
) -> None:
    """A model of another tokenizer has no figure; copies under other names are found, and with
    another system prompt, or none."""
    prompts = ("be exact and polite " * 20, "Be brief!", "")
    answers = [f"it is {number * 7}" for number in range(40)]
    model = write_model("llama", tmp_path / "chat", vocab_size=320)
    write_tokenizer(model, answers, 290, template=MARKED, end="<|im_end|>")

    def built(name: str, seed: int, prompt: str) -> Snapshot:
        system = [{"role": "system", "content": prompt}] * bool(prompt)
        rows = [
            {
                "key": f"{name}-{number}",
                "messages": [
                    *system,
                    {"role": "user", "content": f"{number} times 7?"},
                    {"role": "assistant", "content": answer},
                ],
            }
            for number, answer in enumerate(answers)
        ]
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps(each) + "\n" for each in rows))
        settings = DataSettings(
            format="jsonl", tokenizer=str(model / "tokenizer.json"), held_out_share=0.3, seed=seed
        )
        return build_snapshot(str(source), f"s3://{BUCKET}/data", settings, s3.store())

    judged = built("judged", 1, prompts[0])
    copied = [built("copied", 2, each) for each in prompts]
    trained_on = tuple(
        TrainingData(snapshot_url=each.url, snapshot_digest=each.digest) for each in copied
    )
    asked = spec.model_copy(
        update={
            "snapshot_url": judged.url,
            "snapshot_digest": judged.digest,
            "models": {"candidate": str(model), "base": str(tmp_path / "base")},
            "trained_on": trained_on,
        }
    )
    code, lines, stderr = evaluate(asked.model_dump_json())
    assert code == 0, stderr
    report = EvaluationReport.model_validate(lines[-1]["data"])
    held_out, again = (
        {number for number in range(40) if in_held_out(f"{name}-{number}", 0.3, seed)}
        for name, seed in (("judged", 1), ("copied", 2))
    )
    assert report.documents == len(held_out)
    assert report.bytes == sum(len(f"{answers[each]}<|im_end|>") for each in held_out)
    copies = len(held_out - again)
    assert copies > 0
    assert [(each.found, each.overlapping) for each in report.overlaps] == [
        (copies, 0), (0, copies), (0, copies),  # a shared prompt says nothing
    ]  # fmt: skip
    assert set(report.failures) == {"base"}
    assert "tokens of another tokenizer" in report.failures["base"]
    candidate = report.score("candidate")
    assert candidate is not None
    assert 0 < candidate.tokens <= report.bytes
    assert f"what assistants say in {len(held_out)} conversations" in as_markdown(report)


def test_what_was_scored_or_compared_before_is_not_again(
    spec: EvaluationSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same report from recorded scores; a score of other documents or files is not used.
    Training data are compared after models are measured, and after transformers is imported: of
    two threads that import it at once one gets a module without AutoConfig."""
    done: list[str] = []

    def compare(*given: Any, **named: Any) -> Overlap:
        done.append("compare")
        return find_overlap(*given, **named)

    monkeypatch.setattr(run, "import_module", done.append)
    monkeypatch.setattr(run, "find_overlap", compare)
    learned = TrainingData(snapshot_url=spec.snapshot_url, snapshot_digest=spec.snapshot_digest)
    asked = spec.model_copy(update={"scorer": "this release", "trained_on": (learned,)})
    code, lines, stderr = evaluate(asked.model_dump_json())
    assert code == 0, stderr
    assert done.index("transformers") < done.index("compare")
    scores = {
        score.subject: score
        for line in lines
        if line["event"] == "score"
        for score in [RecordedScore.model_validate(line["data"])]
    }
    candidate, base = (local_model_digest(tmp_path / name) for name in ("candidate", "base"))
    assert [*scores][:2] == [candidate, base], "nothing else ran while they were measured"
    assert {*scores} == {candidate, base, "training data", "ngram of order 3", "gzip", "xz"}
    first = EvaluationReport.model_validate(lines[-1]["data"])
    assert first.overlaps

    def again(*_: object, **__: object) -> None:
        raise AssertionError("compared again")

    monkeypatch.setattr(run, "find_overlap", again)
    short = scores[base].model_copy(update={"bits": scores[base].bits[:-1]})
    other = scores[base].model_copy(update={"subject": "0" * 64, "bits": (0.0,) * first.documents})
    mine, data = scores[candidate], scores["training data"]
    known = (mine, data, other, *(scores[each] for each in ("ngram of order 3", "gzip", "xz")))
    for its, fresh in ((known, [base]), ((mine, data, short), [base, "ngram of order 3"])):
        asked = asked.model_copy(update={"known": its})
        code, lines, stderr = evaluate(asked.model_dump_json())
        assert code == 0, stderr
        made = [each["data"]["subject"] for each in lines if each["event"] == "score"]  # type: ignore[index]
        assert made[: len(fresh)] == fresh and len(made) == (1 if its is known else 4)
        second = EvaluationReport.model_validate(lines[-1]["data"])
        for before, after in zip(first.scores, second.scores, strict=True):
            assert after.bits_per_byte == before.bits_per_byte
            assert after.difference_to == before.difference_to
        assert second.score("candidate") == first.score("candidate"), "latency too"
        assert second.overlaps == first.overlaps
    unlike = learned.model_copy(update={"quarantined_shards": ("0" * 64,)})
    with pytest.raises(AssertionError, match="compared again"):
        evaluate(asked.model_copy(update={"trained_on": (unlike,)}).model_dump_json())


@pytest.mark.xdist_group("harness")  # one worker imports lm_eval
def test_figures_on_tasks_are_recorded_by_model_and_tasks(
    spec: EvaluationSpec, s3: RcloneS3, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    write_tasks(rows, CHOICE | {"num_fewshot": 0, "metric_list": [{"metric": "acc"}]})
    manifest = publish_model(
        rows, f"s3://{BUCKET}/tasks", model_id="tasks", version="1", store=s3.store(), link_mbit=100
    )
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(10):  # the first rows, with the right answers
        (texts / f"mine-{n}").write_text(f"line {n} is {(n * n, n, 'thirteen')[n % 3]}\n")
    settings = DataSettings(held_out_share=0.1)
    copied = build_snapshot(str(texts), f"s3://{BUCKET}/data", settings, s3.store())
    trained_on = TrainingData(snapshot_url=copied.url, snapshot_digest=copied.digest)
    asked = spec.model_copy(
        update={
            "scorer": "this release",
            "trained_on": (trained_on,),
            "tasks_url": f"s3://{BUCKET}/tasks",
            "tasks_digest": manifest.digest,
            "models": spec.models | {"champion": spec.models["base"]},
        }
    )
    reports, scored = [], []
    for _ in range(2):
        code, lines, stderr = evaluate(asked.model_dump_json())
        assert code == 0, stderr
        scores = [RecordedScore.model_validate(x["data"]) for x in lines if x["event"] == "score"]
        scored.append([each for each in scores if each.snapshot_digest == manifest.digest])
        reports.append(EvaluationReport.model_validate(lines[-1]["data"]))
        asked = asked.model_copy(update={"known": tuple(scores)})
    assert [each.subject for each in scored[0]] == [
        local_model_digest(tmp_path / name) for name in ("candidate", "base")
    ], "base and champion are one"
    assert scored[1] == []
    assert reports[0].tasks == reports[1].tasks
    assert set(reports[0].tasks[0].scores) == {"candidate", "base", "champion"}
    trained = sum(each.documents for each in copied.of_split("train"))
    assert 0 < trained < 10
    for report in reports:
        ((found,),) = (each.tasks for each in report.overlaps)
        assert (found.task, found.rows, found.found) == ("next_number", ROWS, trained)
        assert f"Of the {ROWS} rows of task next_number {trained} are there" in as_markdown(report)
