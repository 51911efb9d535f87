"""Fixtures that every package's tests may use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import reaper, servers
from tests.support.rclone import RcloneS3, rclone_s3
from tests.support.shared import lifecycle, small_disk, stack  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def s3() -> Iterator[RcloneS3]:
    """One real S3 server for the session; use a bucket of your own."""
    with rclone_s3() as server:
        yield server


def pytest_configure() -> None:
    """Have what this process starts end with it (each process of the run comes here)."""
    reaper.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process: their module fixtures (gangs, servers) are expensive."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that writes the report which servers were started here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["servers"] = servers.STARTED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear which servers another process started."""
    servers.STARTED.extend(getattr(node, "workeroutput", {}).get("servers", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List each state store's real server by version and process id."""
    if servers.STARTED:
        terminalreporter.section("state stores started by this run")
        for each in sorted(servers.STARTED):
            terminalreporter.line(each)
