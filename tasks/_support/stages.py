"""``@stage``: a Prefect task of a flow, whose memory is the ledger and not Prefect's cache.

A stage runs in the flow's process (a transaction's rollback would be lost elsewhere). Its deadline
is its own: Prefect's ``timeout_seconds`` does not interrupt a call that blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import State, Task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.states import Cancelled as CancelledState
from prefect.tasks import exponential_backoff

from paceline.errors import Cancelled, TemporaryError
from paceline.schemas import INTERRUPTED
from paceline.tasks._support.cancelling import Interrupted

P = ParamSpec("P")
R = TypeVar("R")

RUN_NAME_CHARS = 120


def stage(name: str, *, retries: int = 0) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Return the decorator of a stage. With ``retries`` a TemporaryError is tried again, after a
    delay that doubles and varies, so that many flows do not return at the same moment.

    A stage that is long, or repairs itself (relay, train), takes no retries.
    """

    def decorate(body: Callable[P, R]) -> Task[P, R]:
        return _Stage(
            _cancellable(body),
            name=name,
            task_run_name=_named(name),
            cache_policy=NO_CACHE,
            retries=retries,
            retry_delay_seconds=exponential_backoff(backoff_factor=1.0),
            retry_jitter_factor=0.5,
            retry_condition_fn=_is_temporary,
        )

    return decorate


class _Stage(Task[P, R]):
    """A task whose caller gets the error where its run ended as CANCELLED."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        if not isinstance(made, State):
            return made
        try:
            return made.result()  # raises: of a cancelled run
        except Interrupted as error:
            raise KeyboardInterrupt from error


def _cancellable(body: Callable[P, R]) -> Callable[P, R]:
    """Have a task's run end as CANCELLED where ``body`` raises Cancelled, or is interrupted by
    Ctrl-C: Prefect would say FAILED or CRASHED."""

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return body(*args, **kwargs)
        except (Cancelled, KeyboardInterrupt) as error:
            if TaskRunContext.get() is None:  # called without Prefect
                raise
            if isinstance(error, Cancelled):
                return CancelledState(message=error.one_line(), data=error)
            message = "interrupted by Ctrl-C"
            return CancelledState(name=INTERRUPTED, message=message, data=Interrupted(message))

    return run


def _named(name: str) -> Callable[..., str]:
    """Return what names a stage's run on Prefect's pages: "rollout-relay acme/tiny 2"."""

    def named(parameters: dict[str, Any]) -> str:
        record = next((x for x in parameters.values() if hasattr(x, "model_id")), None)
        if record is not None:  # a manifest, a sweep, evidence
            words = record.model_id, getattr(record, "version", "")
        else:
            sources = (parameters.get(x) for x in ("model_id", "url", "model", "source"))
            words = next(filter(None, sources), ""), parameters.get("version", "")
        given = (parameters.get("stage") or name, *words)
        return " ".join(filter(None, given))[:RUN_NAME_CHARS]

    return named


def _is_temporary(_task: Any, _task_run: Any, state: Any) -> bool:
    try:
        state.result()
    except TemporaryError:
        return True
    except BaseException:  # noqa: BLE001 - of whatever kind: it is raised, not retried
        return False
    return False
