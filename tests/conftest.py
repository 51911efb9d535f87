"""Fixtures that every package's tests may use."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import reaper, servers
from tests.support.mlflow_server import mlflow_directory, mlflow_url  # noqa: F401 - fixtures
from tests.support.prefect_server import prefect_server  # noqa: F401 - a fixture
from tests.support.rclone import RcloneS3, rclone_s3
from tests.support.rgw import rgw  # noqa: F401 - a fixture
from tests.support.shared import (  # noqa: F401 - fixtures
    demonstrated,
    lifecycle,
    rejected,
    small_disk,
    stack,
)

# Matrices of tests are tiny: threads that spin for each other take ten times the CPU time. This
# is before torch is imported, and before the conftest.py of any package.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def s3() -> Iterator[RcloneS3]:
    """One real S3 server for the session; use a bucket of your own."""
    with rclone_s3() as server:
        yield server


MOST_SKIPPED = 40  # in a run of CI


def pytest_xdist_auto_num_workers() -> int:
    """Run a process more than there are cores: they wait for servers much of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Start this process's reaper (each process of the run comes here)."""
    reaper.start()
    config.option.loadscopereorder = False  # xdist keeps the order of the groups below
    gc.disable()  # looking at what 360 files import takes a sixth of the time of importing it


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage."""
    import hypothesis  # noqa: F401 - its plugin's last report does: warns where all is frozen

    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Keep the mark by which the reaper finds what a test starts; start nothing after the time."""
    if (until := float(os.environ.get("PACELINE_TESTS_UNTIL", "inf"))) < time.time():
        late_s = time.time() - until
        pytest.skip(f"NOT RUN: the time of this run was up {late_s:.0f} s before its turn")
    reaper.keep_mark()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a file's tests in one process, and the groups with the longest time limits first.

    The fixtures of a module (gangs, servers) are expensive. A long group that starts last leaves
    the other process idle.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
        mark = item.get_closest_marker("xdist_group")
        assert mark is not None
        groups.setdefault(mark.args[0], []).append(item)

    def limit(group: list[pytest.Item]) -> float:
        marks = (each.get_closest_marker("timeout") for each in group)
        return sum(float(mark.args[0]) for mark in marks if mark is not None)

    ordered = sorted(groups.values(), key=lambda group: (-limit(group), -len(group)))
    if until := os.environ.get("PACELINE_TESTS_UNTIL"):  # others are the last ones each time
        random.Random(until).shuffle(ordered)
    items[:] = [item for group in ordered for item in group]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a named group's servers with its last test: they take CPU time while they idle, too."""
    mine = item.get_closest_marker("xdist_group")
    others = nextitem and nextitem.get_closest_marker("xdist_group")
    if mine and others and mine.args != others.args and mine.args[0] != str(item.path):
        item.session._setupstate.teardown_exact(None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the servers started here to the process that writes the report; where nothing may be
    skipped (CI), a run that skipped many tests fails: something has switched them off.
    """
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = 0 if report is None else len(report.stats.get("skipped", []))
    late = "PACELINE_TESTS_UNTIL" in os.environ  # these say NOT RUN
    if os.environ.get("PACELINE_REQUIRE") and skipped > MOST_SKIPPED and not late:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["servers"] = servers.STARTED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the servers that another process started."""
    servers.STARTED.extend(getattr(node, "workeroutput", {}).get("servers", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List each state store's real server by version and process id."""
    if servers.STARTED:
        terminalreporter.section("state stores started by this run")
        for each in sorted(servers.STARTED):
            terminalreporter.line(each)
