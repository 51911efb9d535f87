"""Candidates of ranks that wait less are judged and promoted like any other, on real servers.

A local-SGD job through the whole lifecycle, then a parameter server's by one command a stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Runtime, load_runtime, save_runtime
from paceline.registry import Registry
from tests.support.stack import installation, paceline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def relaxed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """An installation whose ranks average their weights."""
    with installation(
        tmp_path_factory.mktemp("relaxed") / "state",
        "training.steps=40",
        "training.ranks=2",
        "training.synchrony.kind=local-sgd",
    ) as runtime:
        yield runtime


def use(runtime: Runtime, kind: str, **training: Any) -> None:
    """Have jobs from now on be of ``kind``."""
    profile = load_runtime(runtime.state_dir).profile
    synchrony = profile.training.synchrony.model_copy(update={"kind": kind})
    settings = profile.training.model_copy(update={"synchrony": synchrony, **training})
    profile = profile.model_copy(update={"training": settings})
    save_runtime(runtime.model_copy(update={"profile": profile}))


def test_their_candidates_are_judged_promoted_and_rolled_out(
    relaxed: Runtime, tmp_path: Path
) -> None:
    def run(*words: str) -> dict[str, Any]:
        ended = paceline(*words, "--json", state=relaxed.state_dir, timeout_s=400)
        assert ended.code == 0, ended.err
        return ended.answer

    whole = run("lifecycle")
    assert whole["gate"]["passed"] and whole["status"] == "complete"
    model, base = whole["model"]["model_id"], whole["model"]["base_version"]
    champion = Registry.from_runtime(relaxed).champion(model)
    assert champion is not None

    use(relaxed, "parameter-server", ranks=4, steps=150)
    snapshot = run("snapshot")["url"]
    trained, report = tmp_path / "trained.json", tmp_path / "report.json"
    trained.write_text(json.dumps(run("training", "start", model, base, "--snapshot", snapshot)))
    said = json.loads(trained.read_text())
    assert (said["ranks"], said["steps"]) == (4, 150)
    of = (model, "--base", base, "--trained", str(trained), "--snapshot", snapshot)
    report.write_text(json.dumps(run("evaluate", *of)))
    assert {"candidate", "base", "champion"} <= {
        each["name"] for each in json.loads(report.read_text())["scores"]
    }
    promoted = run("promote", *of, "--report", str(report))
    assert promoted["gate"]["passed"]
    after = Registry.from_runtime(relaxed).champion(model)
    assert after is not None and after.version != champion.version
    assert after.evidence is not None
    assert after.evidence.weights_digest == said["weights_digest"]
