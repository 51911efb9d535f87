"""One Prefect server for the session, as the flows' own process sees it: a fixture of every test.

Its tests are of the group "prefect", as those of MLflow's server: each starts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Have flows run against a server of their own on SQLite; it starts once."""
    from prefect.settings import PREFECT_LOGGING_TO_API_BATCH_INTERVAL, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    sooner: dict[Any, Any] = {PREFECT_LOGGING_TO_API_BATCH_INTERVAL: 0.1}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(sooner):
        yield


def eventually(ask: Callable[[], T], timeout_s: float = 60.0) -> T:
    """Return the first true answer: Prefect's server records task runs and logs a moment later."""
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer
