"""A cancel in Prefect is noticed while work goes on, not once it is done."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
from prefect.client.schemas.objects import StateType

from paceline.errors import Cancelled, ServiceUnavailable
from paceline.tasks._support import cancelling


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


def test_a_superseded_flow_run_is_told_although_nobody_cancelled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancelling, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(cancelling, "flow_run", FlowRun("inner", "outer"))
    monkeypatch.setattr(cancelling, "_cancelled_of", lambda ids: None)
    superseded = threading.Event()
    with cancelling.noticed(superseded) as cancelled:
        assert not cancelled.wait(0.05)
        superseded.set()
        assert cancelled.wait(20)


def test_outside_a_flow_run_no_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(ids: list[str]) -> str | None:
        raise AssertionError(f"asked about {ids}")

    monkeypatch.setattr(cancelling, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(cancelling, "flow_run", FlowRun(None, None))
    monkeypatch.setattr(cancelling, "_cancelled_of", never)
    with cancelling.noticed() as cancelled:
        assert not cancelled.wait(0.1)


class Ended(BaseException):
    """What a signal's handler raises, as Prefect's does."""


@pytest.fixture
def ending() -> Iterator[None]:
    """Have SIGTERM raise Ended, and Ctrl-C KeyboardInterrupt, whoever runs the tests."""

    def end(*_: object) -> None:
        raise Ended

    before = (
        signal.signal(signal.SIGTERM, end),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    yield
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])


@pytest.mark.usefixtures("ending")
def test_a_signal_is_noticed_at_once_and_delivered_at_the_end() -> None:
    done: list[str] = []
    with pytest.raises(Ended), cancelling.noticed() as cancelled:
        signal.raise_signal(signal.SIGTERM)
        assert cancelled.is_set()
        done.append("the ranks have saved")
    assert done == ["the ranks have saved"]
    with pytest.raises(Ended), cancelling.held_back():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise Cancelled("the work's own end is the context of the signal's")
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize(("asked", "ended"), [("inner", Cancelled), (None, Ended)])
def test_a_flow_that_ends_as_cancelled_needs_no_signal_more(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, ended: type[BaseException]
) -> None:
    monkeypatch.setattr(cancelling, "flow_run", FlowRun("inner", "outer"))
    monkeypatch.setattr(cancelling, "_cancelled_of", lambda _ids: asked)
    with pytest.raises(ended), cancelling.noticed() as cancelled:
        signal.raise_signal(signal.SIGTERM)
        assert cancelled.is_set()
        raise Cancelled("the ranks have saved")
    with pytest.raises(Ended), cancelling.noticed():
        signal.raise_signal(signal.SIGTERM)  # and the work came to its own end: it says so


@pytest.mark.usefixtures("ending")
def test_ctrl_c_twice_ends_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), cancelling.held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("once")
        signal.raise_signal(signal.SIGINT)
        done.append("twice")
    assert done == ["once"]


@pytest.mark.usefixtures("ending")
def test_what_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As a command does that a script starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with cancelling.noticed() as cancelled:
        signal.raise_signal(signal.SIGINT)
        assert not cancelled.is_set()


def test_a_cancelled_flow_ends_as_cancelled_and_others_are_unchanged() -> None:
    why = Cancelled("the run was cancelled", where="here")

    @cancelling.cancellable
    def body(kind: str, times: int = 2) -> str:
        if kind == "cancelled":
            raise why
        if kind == "failed":
            raise ValueError(kind)
        return kind * times

    assert body("ok") == "okok"
    with pytest.raises(ValueError, match="failed"):
        body("failed")
    state = body("cancelled")
    assert (state.type, state.message, state.data) == (StateType.CANCELLED, why.one_line(), why)
    names = list(inspect.signature(body).parameters)
    assert names == ["kind", "times"], "Prefect reads the parameters"


def test_a_busy_prefect_server_ends_a_flow_with_an_error_that_may_pass() -> None:
    def body() -> None:
        raise httpx.ReadTimeout("30 s")

    with pytest.raises(ServiceUnavailable, match=r"does not answer.*ReadTimeout"):
        cancelling.cancellable(body)()
