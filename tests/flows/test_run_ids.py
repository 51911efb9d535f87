"""A run's id names its training and its evaluation in the flows that go on with them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.flows import evaluate, promote
from paceline.schemas import RunResult

RUN = "run-20261120-153600-9f3a1c"
MADE = RunResult(
    run_id=RUN,
    kind="training",
    digest="a" * 64,
    model_id="org/name",
    base_version="1",
    snapshot_url="s3://b/data/1",
)


class Reached(Exception):
    """Raised with what the flow asked for."""


def reached(*given: Any, **more: Any) -> Any:
    raise Reached(*given[1:], more)


@pytest.mark.parametrize("module", [evaluate, promote], ids=lambda each: each.__name__)
def test_a_run_id_stands_for_what_the_run_recorded(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(run_id=RUN, alone=lambda _what: nullcontext())
    monkeypatch.setattr(module, "Run", SimpleNamespace(open=lambda *_: run))
    monkeypatch.setattr(module, "recorded", lambda *_: nullcontext())
    asked: list[tuple[str, str]] = []

    def of_run(_run: object, run_id: str, kind: str) -> RunResult:
        asked.append((run_id, kind))
        return MADE

    monkeypatch.setattr("paceline.tasks.sealed.of_run", of_run)
    if module is evaluate:
        monkeypatch.setattr("paceline.tasks.sealed.find", lambda *_: SimpleNamespace())
        monkeypatch.setattr(evaluate, "published_url", reached)
        with pytest.raises(Reached) as found:
            evaluate.evaluate_model.fn.__wrapped__(RUN)
        assert found.value.args[:2] == ("org/name", "1")
        assert asked == [(RUN, "training")]
    else:
        monkeypatch.setattr("paceline.tasks.promote.recorded_evidence", reached)
        with pytest.raises(Reached) as found:
            promote.promote_model.fn.__wrapped__(RUN)
        assert found.value.args[0] == MADE.digest
        assert asked == [(RUN, "evaluation")]
