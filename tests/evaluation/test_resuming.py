"""An evaluation that is killed while it scores a model goes on from the rows that were done."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import CorruptData
from paceline.evaluation import transformer
from paceline.models import config_for, local_model_digest, new_model, save_model
from paceline.schemas import EvaluationReport, EvaluationSpec, RecordedScore
from tests.evaluation.test_own_tokens import documents_of
from tests.evaluation.test_run import evaluate, spec as spec  # noqa: PLC0414 - a fixture

RANDOM = np.random.default_rng(5)
DOCUMENTS = documents_of([RANDOM.bytes(int(size)) for size in RANDOM.integers(1, 90, size=300)])
SAVES_ALL = (
    "from paceline.evaluation import run, transformer\n"
    "transformer.SAVE_EVERY_S = 0.0\n"
    "raise SystemExit(run.main())\n"
)


def record(subject: str, bits: Any, facts: Any) -> RecordedScore:
    """A record as it comes back from the bucket."""
    score = RecordedScore(
        subject=subject, snapshot_digest="5" * 64, held_out_bytes=1, scorer="paceline 1",
        bits=tuple(bits.tolist()), facts=facts, run_id="run-1", unfinished=True,
    )  # fmt: skip
    return RecordedScore.model_validate_json(score.model_dump_json())


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each row that is predicted in this process: its document, and where it begins there."""
    seen: list[tuple[int, int]] = []
    predicted = transformer._predicted

    def counted(model: Any, group: Any, *more: Any) -> Any:
        seen.extend((each.document, each.start) for each in group)
        return predicted(model, group, *more)

    monkeypatch.setattr(transformer, "_predicted", counted)
    return seen


def test_what_is_saved_goes_on_to_the_same_figures_to_the_bit(
    tmp_path: Path, rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "SAVE_EVERY_S", 0.0)
    config = config_for(20_000, 32)
    save_model(new_model(config, 1), config, tmp_path)
    saved: list[RecordedScore] = []
    whole = transformer.score_transformer(
        tmp_path, DOCUMENTS, lambda _: None, on_rows=lambda *its: saved.append(record("m", *its))
    )
    every = len(rows)
    assert len(set(rows)) == every > 300, "documents of several rows"
    assert len(saved) > 5
    for begun in (saved[0], saved[len(saved) // 2], saved[-1]):
        rows.clear()
        found = transformer.score_transformer(tmp_path, DOCUMENTS, lambda _: None, begun=begun)
        assert len(rows) == every - len(begun.bits)
        assert found.bits.tobytes() == whole.bits.tobytes()
        assert vars(found) | {"bits": 0} == vars(whole) | {"bits": 0}, "serving figures, too"
    rows.clear()
    other = saved[0].model_copy(update={"facts": saved[0].facts | {"order": "of a GPU"}})
    found = transformer.score_transformer(tmp_path, DOCUMENTS, lambda _: None, begun=other)
    assert len(rows) == every, "rows in another order are not taken"
    assert found.bits.tobytes() == whole.bits.tobytes()
    theirs = saved[0].facts["serving"] | {"machine": "elsewhere", "prefill_ms": 0.01}  # type: ignore[operator]
    other = saved[0].model_copy(update={"facts": saved[0].facts | {"serving": theirs}})
    found = transformer.score_transformer(tmp_path, DOCUMENTS, lambda _: None, begun=other)
    assert found.serving.machine == platform.node(), "measured here"
    assert found.bits.tobytes() == whole.bits.tobytes()


def test_predictions_that_are_not_finite_are_named_where_rows_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "SAVE_EVERY_S", 0.0)
    config = config_for(20_000, 32)
    model = new_model(config, 1)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "mlp" in name:
                each.fill_(3e38)  # finite; its products are not
    save_model(model, config, tmp_path)
    with pytest.raises(CorruptData, match="predictions are not finite"):
        transformer.score_transformer(
            tmp_path, DOCUMENTS, print, on_rows=lambda *its: record("m", *its)
        )


def killed(spec: EvaluationSpec, saves: int) -> list[RecordedScore]:
    """Kill an evaluation's process after so many saves of "base"; return what it has reported."""
    base = local_model_digest(Path(spec.models["base"]))
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES_ALL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(spec.model_dump_json().encode())
        process.stdin.close()
        found: dict[str, RecordedScore] = {}
        for line in map(json.loads, process.stdout):
            if line["event"] == "score":
                score = RecordedScore.model_validate(line["data"])
                found[score.key] = score  # as in the bucket
                saves -= score.unfinished and score.subject == base
            if not saves:
                break
        os.kill(process.pid, signal.SIGKILL)
    return [*found.values()]


def test_a_killed_evaluation_predicts_no_row_twice(
    spec: EvaluationSpec, rows: list[tuple[int, int]]
) -> None:
    asked = spec.model_copy(update={"scorer": "this release"})
    _, lines, _ = evaluate(asked.model_dump_json())
    whole = EvaluationReport.model_validate(lines[-1]["data"])
    of_a_model = len(rows) // 2
    rows.clear()
    left = killed(asked, 2)
    (begun,) = (each for each in left if each.unfinished and each.subject not in finished_of(left))
    assert 0 < len(begun.bits) < of_a_model
    code, lines, stderr = evaluate(
        asked.model_copy(update={"known": tuple(left)}).model_dump_json()
    )
    assert code == 0, stderr
    assert len(rows) == of_a_model - len(begun.bits), "none of the candidate, few of the base"
    found = EvaluationReport.model_validate(lines[-1]["data"])
    unmeasured = {"serving": None, "latency_ms": None}
    for one, other in zip(found.scores, whole.scores, strict=True):
        assert one.model_copy(update=unmeasured) == other.model_copy(update=unmeasured)
    ended = {"scores": (), "seconds": 0.0}
    assert found.model_copy(update=ended) == whole.model_copy(update=ended)
    base = found.score("base")
    assert base is not None
    assert base.serving is not None
    assert base.serving.model_dump(mode="json") == begun.facts["serving"], (
        "it is not measured again"
    )


def finished_of(scores: list[RecordedScore]) -> set[str]:
    return {each.subject for each in scores if not each.unfinished}
