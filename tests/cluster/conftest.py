"""Parts that the fleet's tests share: small profiles, stand-in services, and a look for orphans."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import cluster as fleet
from paceline.cluster import Fleet
from paceline.config import ClusterSettings, Profile, Runtime, ServiceSettings

AGENT = Path(__file__).with_name("stand_in_agent.py")
AGENT_ARGV = (sys.executable, "-S", str(AGENT))


def small_profile(nodes: int = 3, racks: int = 2, **services: float) -> Profile:
    return Profile(
        cluster=ClusterSettings(nodes=nodes, racks=racks),
        services=ServiceSettings(ready_timeout_s=60, **services),
    )


def processes_of(state_dir: Path) -> list[psutil.Process]:
    """Return every process that belongs to ``state_dir``, by its command line or its variables."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            told = [*process.cmdline(), *process.environ().values(), process.cwd()]
        except psutil.Error:
            continue
        if any(str(state_dir) in each for each in told) and process.pid != psutil.Process().pid:
            found.append(process)
    return found


def eventually(true: Callable[[], object], timeout_s: float = 60.0) -> object:
    """Return what ``true`` gives once it is true; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not true within {timeout_s} s")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A supervised Dask cluster of three nodes, without the other servers."""
    state = tmp_path_factory.mktemp("cluster")
    runtime = fleet.start(small_profile(), state, detach=False, only=("dask",))
    yield runtime
    fleet.stop(state)
    assert processes_of(state) == []


@pytest.fixture(scope="session")
def connected(cluster: Runtime) -> Iterator[Fleet]:
    with Fleet.connect(cluster) as connection:
        yield connection


def run_on(
    connection: Fleet, worker_id: str, fn: Callable[..., Any], *args: Any, timeout_s: float
) -> Any:
    """Return ``fn(*args)`` as run on one node; raise the error that it ended with."""

    def call(*given: Any, worker_id: str) -> Any:
        return fn(*given)

    answer = connection.map_nodes(call, [worker_id], *args, timeout_s=timeout_s)[worker_id]
    if isinstance(answer, BaseException):
        raise answer
    return answer
