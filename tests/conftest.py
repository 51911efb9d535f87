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
