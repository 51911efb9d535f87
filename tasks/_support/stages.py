"""``@stage``: a Prefect task of a flow, whose memory is the ledger and not Prefect's cache.

A stage runs in the flow's process (a transaction's rollback would be lost elsewhere). Its deadline
is its own: Prefect's ``timeout_seconds`` does not interrupt a call that blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from paceline.errors import TemporaryError

P = ParamSpec("P")
R = TypeVar("R")


def stage(name: str, *, retries: int = 0) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Return the decorator of a stage. With ``retries`` a TemporaryError is tried again, after a
    delay that doubles and varies, so that many flows do not return at the same moment.

    A stage that is long, or repairs itself (relay, train), takes no retries.
    """
    return task(
        name=name,
        cache_policy=NO_CACHE,
        retries=retries,
        retry_delay_seconds=exponential_backoff(backoff_factor=1.0),
        retry_jitter_factor=0.5,
        retry_condition_fn=_is_temporary,
    )


def _is_temporary(_task: Any, _task_run: Any, state: Any) -> bool:
    try:
        state.result()
    except TemporaryError:
        return True
    except BaseException:  # noqa: BLE001 - of whatever kind: it is raised, not retried
        return False
    return False
