"""The gate refuses what learned nothing: zero steps, shuffled labels, random bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from paceline.config import Runtime
from paceline.registry import Registry
from paceline.schemas.command_results import RunSummary
from tests.support.stack import Ended, paceline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]


def judged(
    stack: Runtime,
    lifecycle: Ended,
    tmp_path: Path,
    *,
    snapshot: str | None = None,
    **training: str,
) -> Ended:
    """Train from the base as asked, evaluate on the real held-out files, and try to promote."""
    summary = RunSummary.model_validate(lifecycle.answer)
    state, model = stack.state_dir, summary.model.model_id
    real = f"{stack.data_url}/snapshots/{summary.data.digest}"
    options = [word for key, value in training.items() for word in (f"--{key}", value)]
    trained = paceline(
        "train", model, "1", "--snapshot", snapshot or real, *options, "--json", state=state
    )
    assert trained.code == 0, trained.err
    job = tmp_path / "trained.json"
    job.write_text(json.dumps(trained.answer))
    base = ["--base", "1", "--trained", str(job), "--snapshot", real]
    evaluated = paceline("evaluate", model, *base, "--json", state=state)
    assert evaluated.code == 0, evaluated.err
    report = tmp_path / "report.json"
    report.write_text(json.dumps(evaluated.answer))
    return paceline("promote", model, *base, "--report", str(report), "--json", state=state)


def assert_refused(ended: Ended, stack: Runtime, lifecycle: Ended) -> None:
    assert ended.code == 3, ended.err
    assert ended.answer["error"]["code"] == "GateRefused"
    assert "base" in ended.answer["error"]["got"]
    champion = Registry.from_runtime(stack).champion(lifecycle.answer["model"]["model_id"])
    assert champion is not None
    assert champion.version == lifecycle.answer["registry"]["version"]


def test_a_candidate_of_zero_steps_is_refused(
    stack: Runtime, lifecycle: Ended, tmp_path: Path
) -> None:
    assert_refused(judged(stack, lifecycle, tmp_path, steps="0"), stack, lifecycle)


def test_a_candidate_trained_on_shuffled_labels_is_refused(
    stack: Runtime, lifecycle: Ended, tmp_path: Path
) -> None:
    ended = judged(stack, lifecycle, tmp_path, labels="shuffled")
    assert_refused(ended, stack, lifecycle)


def test_a_candidate_trained_on_random_bytes_is_refused(
    stack: Runtime, lifecycle: Ended, tmp_path: Path
) -> None:
    texts = tmp_path / "random"
    texts.mkdir()
    noise = random.Random(7)
    for index in range(40):
        text = "".join(chr(noise.randrange(32, 127)) for _ in range(8192))
        (texts / f"noise-{index}.txt").write_text(text)
    built = paceline("snapshot", str(texts), "--json", state=stack.state_dir)
    assert built.code == 0, built.err
    ended = judged(stack, lifecycle, tmp_path, snapshot=built.answer["url"])
    assert_refused(ended, stack, lifecycle)
