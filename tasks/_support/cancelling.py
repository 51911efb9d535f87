"""A cancel in Prefect: noticed while work goes on, and reported as a cancel.

Nothing is published or promoted after it was acknowledged (I11).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled as CancelledState

from paceline.errors import AwaitingApproval, Cancelled, PacelineError, ServiceUnavailable
from paceline.schemas import (
    FLOW_PARAMETERS,
    FLOW_RESULT,
    INTERRUPTED,
    StageRecord,
    flow_result_key,
)
from paceline.tasks._support.artifacts import send_log
from paceline.tasks._support.run import Run

logger = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
_ENDINGS = (signal.SIGTERM, signal.SIGINT)

P = ParamSpec("P")
R = TypeVar("R")


class Interrupted(Cancelled):
    """Ctrl-C, as the error of a flow run; ``declaring`` raises KeyboardInterrupt from it. Prefect's
    event loop, which hands the error over, would end with a KeyboardInterrupt."""


def cancellable(body: Callable[P, R]) -> Callable[P, R]:
    """Have a flow's run end as CANCELLED where ``body`` raises Cancelled or AwaitingApproval, or is
    interrupted by Ctrl-C: Prefect would say FAILED or CRASHED, or leave it CANCELLING for ever. The
    caller gets the same error, or Interrupted; ServiceUnavailable where Prefect's server is away.

    The result of a run that a client started is recorded for it (``schemas.clients``).
    """

    signature = inspect.signature(body, eval_str=True)

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        send_log()
        given = signature.bind(*args, **kwargs).arguments  # Prefect passes them by position
        with _recorded_for_client(given) as record:
            try:
                result = body(*args, **kwargs)
            except Cancelled as error:
                return CancelledState(message=error.one_line(), data=error)
            except AwaitingApproval as error:  # the kind in the message: a client reads it there
                message = f"{error.code}: {error.one_line()}"
                return CancelledState(name=error.code, message=message, data=error)
            except Exception as error:
                if (away := prefect_away(error)) is not None:
                    raise away from error
                raise
            except KeyboardInterrupt:
                named = f" with --run-id {given['run_id']}" if given.get("run_id") else ""
                message = f"interrupted by Ctrl-C; the same command{named} goes on"
                # The name tells it from a person's cancel: its deployments go on.
                return CancelledState(name=INTERRUPTED, message=message, data=Interrupted(message))
            record(result)
            return result

    # Prefect would look for the annotations' names in this module, where `run` is from.
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def prefect_away(error: Exception) -> ServiceUnavailable | None:
    """Return what ``error`` says of Prefect's server: it is away or busy. None: another error.

    Prefect's client has tried several times before it raises. A job of the queue then starts again.
    """
    import httpx  # comes with Prefect, of which the imports above name the extra

    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    if status < HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, httpx.TransportError):
        return None
    return ServiceUnavailable(
        "Prefect's server does not answer",
        got=f"{type(error).__name__}: {error}".splitlines()[0],
        do="Start it again: it goes on from where it was.",
    )


@contextlib.contextmanager
def _recorded_for_client(parameters: Mapping[str, Any]) -> Iterator[Callable[[Any], None]]:
    """Yield what records the result of this flow run, where a client may have started it."""
    flow_run_id, run_id = flow_run.get_id(), parameters.get("run_id")
    started = flow_run.get_flow_name() in FLOW_PARAMETERS and deployment.get_id()
    if not (flow_run_id and run_id and started) or flow_run.get_parent_flow_run_id():
        yield lambda _result: None
        return
    run = Run.open(parameters.get("state_dir"), run_id)  # the flow opens the same, with its notes
    began = time.monotonic()

    def record(result: Any) -> None:
        output = {"result": result.model_dump(mode="json"), "notes": list(run.summary.notes)}
        kept = StageRecord.of(
            FLOW_RESULT,
            flow_result_key(str(flow_run_id)),
            output,
            run.run_id,
            time.monotonic() - began,
        )
        try:
            run.retry(lambda: run.coordinator.ledger_put(kept))
        except PacelineError as error:  # too large, or the ledger is full: the run itself is done
            logger.warning("the result is not recorded for the client: %s", error)

    yield record


def stop_if_cancelled() -> None:
    """Raise Cancelled where Prefect says that the flow run we are in, or its parent, is cancelled.

    Outside a flow run no one can have cancelled through Prefect.
    """
    if found := cancelled_flow_run():
        raise Cancelled(
            "the run was cancelled",
            got="a cancelled flow run",
            wanted="a running flow",
            where=f"flow run {found}",
            do="Start it again: it goes on from where it was.",
        )


def cancelled_flow_run() -> str | None:
    """Return which flow run, ours or the outermost, a person cancelled in Prefect; None if none."""
    return _cancelled_of(ids) if (ids := _ids()) else None


def _ids() -> list[str]:
    """Return the ids of this flow run and of the outermost one; none outside a flow run."""
    mine = flow_run.get_id(), flow_run.get_root_flow_run_id()
    return sorted({str(each) for each in mine if each})


def _cancelled_of(ids: list[str]) -> str | None:
    with get_client(sync_client=True) as client:
        for each in ids:
            state = client.read_flow_run(UUID(each)).state
            if state and state.type in {StateType.CANCELLING, StateType.CANCELLED}:
                return each
    return None


@contextlib.contextmanager
def held_back(
    on_signal: Callable[[], None] = lambda: None, *, ends: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Keep SIGTERM and Ctrl-C from tearing the ``with`` apart: ``on_signal`` is called at once, and
    the signal is delivered at the end. A second Ctrl-C is not held back.

    Prefect's worker ends a cancelled flow by SIGTERM, and by SIGKILL 30 s later. Where ``ends()``
    says that the flow ends by itself as cancelled, its SIGTERM has done its work: delivered, it
    would have Prefect say CRASHED. Off the main thread, where no signal arrives, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if number == signal.SIGINT and number in came:
            raise KeyboardInterrupt
        came.append(number)
        on_signal()

    # What a script starts in the background ignores Ctrl-C, and stays so.
    heard = (number for number in _ENDINGS if signal.getsignal(number) is not signal.SIG_IGN)
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in dict.fromkeys(came):
            if each != signal.SIGTERM or not ends():
                signal.raise_signal(each)


@contextlib.contextmanager
def noticed(*others: threading.Event) -> Iterator[threading.Event]:
    """Give an event that is set within seconds of a cancel in Prefect, for as long as the ``with``,
    at once when a signal asks this process to end, and soon after one of ``others`` is set.

    For work that goes on for hours: asking once it is done would be too late. A server that does
    not answer for a while cancels nothing.
    """
    cancelled, over = threading.Event(), threading.Event()
    ids = _ids()  # here: the context is this thread's
    ending = False

    def ends() -> bool:
        try:
            return ending and _cancelled_of(ids) is not None
        except Exception as error:  # noqa: BLE001 - httpx's many; then the signal says what we are
            logger.warning("cannot ask Prefect whether the run was cancelled: %s", error)
            return False

    def ask() -> None:
        while not over.wait(ASK_EVERY_S):
            try:
                if any(each.is_set() for each in others) or _cancelled_of(ids):
                    cancelled.set()
                    return
            except Exception as error:  # noqa: BLE001 - httpx's many; we ask again
                logger.warning("cannot ask Prefect whether the run was cancelled: %s", error)

    thread = threading.Thread(target=ask, name="cancel-watch", daemon=True)
    if ids:
        thread.start()
    try:
        with held_back(cancelled.set, ends=ends):
            try:
                yield cancelled
            except Cancelled:
                ending = True
                raise
    finally:
        over.set()
        if ids:
            thread.join(10.0)
