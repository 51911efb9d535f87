"""Figures on their way: whoever leaves them never waits, and what waits is bounded and sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from paceline.errors import InvalidInput, ServiceUnavailable
from paceline.registry import MetricPoint
from paceline.tasks._support import figures
from paceline.tasks._support.figures import Figures


def points(count: int, first: int = 0) -> list[MetricPoint]:
    return [MetricPoint("train/loss", 1.0, step) for step in range(first, first + count)]


class Server:
    """MLflow as it should be, or hanging, or away."""

    def __init__(self) -> None:
        self.goes = threading.Event()
        self.asked = threading.Event()
        self.errors: list[Exception] = []
        self.steps: list[int] = []

    def send(self, given: Sequence[MetricPoint]) -> None:
        self.asked.set()
        assert self.goes.wait(20)
        if self.errors:
            raise self.errors.pop(0)
        self.steps += [each.step for each in given]


def test_a_hanging_server_delays_no_step_and_gets_the_rest_at_the_end() -> None:
    server, shown = Server(), []
    with Figures(server.send, shown.append) as sending:
        sending.take(points(figures.METRICS_A_REQUEST), 0.5)
        assert server.asked.wait(20)
        sending.take(points(3, 1000), 1.0)  # returns at once, though the server hangs
        assert server.steps == []
        server.goes.set()
    assert server.steps == [*range(figures.METRICS_A_REQUEST), 1000, 1001, 1002]
    assert shown == [0.5, 1.0]


def test_what_a_server_that_is_away_did_not_take_comes_later_in_order() -> None:
    server = Server()
    server.goes.set()
    server.errors = [ServiceUnavailable("away")]
    with Figures(server.send, lambda _: None) as sending:
        sending.take(points(figures.METRICS_A_REQUEST), 0.0)
        assert server.asked.wait(20)
        sending.take(points(2, 1000), 0.0)
    assert server.steps == [*range(figures.METRICS_A_REQUEST), 1000, 1001]


def test_what_waits_is_bounded_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(figures, "METRICS_KEPT", 10)
    server = Server()
    server.goes.set()
    with Figures(server.send, lambda _: None) as sending:
        sending.take(points(25), 0.0)
    assert server.steps == list(range(15, 25))
    assert "count=15" in caplog.text, "what is lost is told"


def test_figures_that_mlflow_refuses_stop_no_ranks(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.goes.set()
    server.errors = [InvalidInput("no such metric")]
    with Figures(server.send, lambda _: None) as sending:
        sending.take(points(figures.METRICS_A_REQUEST), 0.0)
        assert server.asked.wait(20)
    assert "no such metric" in caplog.text
