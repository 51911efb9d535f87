"""A run is found whatever experiment it is in; what is not there is not made."""

from __future__ import annotations

import pytest

from paceline.errors import NotFound
from paceline.registry import MetricPoint, Registry


def test_an_unknown_run_is_not_found_and_not_made(registry: Registry) -> None:
    made = registry.ensure_run("run-20260101-000000-aaaaaa", experiment="finding")
    assert registry.find_run("run-20260101-000000-aaaaaa") == made
    for _ in range(2):
        with pytest.raises(NotFound, match="no such run"):
            registry.find_run("run-20260101-000000-bbbbbb")


def test_a_loss_is_read_back_bit_for_bit_and_the_last_of_a_step_counts(registry: Registry) -> None:
    run = registry.ensure_run("run-20260101-000000-cccccc", experiment="finding")
    losses = {step: 5.545177444479562 / step for step in range(1, 30)}
    registry.log_metrics(run, [MetricPoint("train.loss", 9.9, 3, at_ms=1)])
    registry.log_metrics(run, [MetricPoint("train.loss", v, s) for s, v in losses.items()])
    assert registry.history(run, "train.loss") == losses


def test_what_was_written_is_read_and_what_was_not_is_not_there(registry: Registry) -> None:
    run = registry.ensure_run("run-20260101-000000-dddddd", experiment="finding")
    registry.log_artifact_text(run, '{"a": 1}', "training/job.json")
    assert registry.read_artifact(run, "training/job.json") == b'{"a": 1}'
    with pytest.raises(NotFound):
        registry.read_artifact(run, "training/result.json")
    registry.log_tags(run, {"paceline.code_version": "0.1"})
    assert registry.call("get_run", run).data.tags["paceline.code_version"] == "0.1"
