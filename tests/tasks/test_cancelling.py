"""A cancel in Prefect is noticed while work goes on, not once it is done."""

from __future__ import annotations

import pytest

from tasks import cancelling


class FlowRun:
    """Stands for ``prefect.runtime.flow_run`` inside a flow."""

    def __init__(self, *ids: str | None) -> None:
        self._ids = ids

    def get_id(self) -> str | None:
        return self._ids[0]

    def get_root_flow_run_id(self) -> str | None:
        return self._ids[-1]


def test_a_cancel_of_the_outermost_run_sets_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def cancelled_of(ids: list[str]) -> str | None:
        asked.append(ids)
        if len(asked) == 1:
            raise ConnectionError("the server is away")
        return "outer" if len(asked) > 2 else None

    monkeypatch.setattr(cancelling, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(cancelling, "flow_run", FlowRun("inner", "outer"))
    monkeypatch.setattr(cancelling, "_cancelled_of", cancelled_of)
    with cancelling.noticed() as cancelled:
        assert cancelled.wait(20), "a server that was away cancels nothing, and is asked again"
    assert asked == [["inner", "outer"]] * 3


def test_outside_a_flow_run_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(ids: list[str]) -> str | None:
        raise AssertionError(f"asked about {ids}")

    monkeypatch.setattr(cancelling, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(cancelling, "flow_run", FlowRun(None, None))
    monkeypatch.setattr(cancelling, "_cancelled_of", never)
    with cancelling.noticed() as cancelled:
        assert not cancelled.wait(0.1)
