"""Fixtures that every package's tests may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rclone import RcloneS3, rclone_s3


@pytest.fixture(scope="session")
def s3() -> Iterator[RcloneS3]:
    """One real S3 server for the session; use a bucket of your own."""
    with rclone_s3() as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process: their module fixtures (gangs, servers) are expensive."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
