"""A process with thousands of open files still talks to its children."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from paceline.system import is_readable, is_writable

MANY = 3_000  # select.select ends at 1,024


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose descriptors have high numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 100), hard))
    low = os.pipe()
    high = tuple(fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, MANY) for each in low)
    try:
        yield high[0], high[1]
    finally:
        for each in (*low, *high):
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pipes_with_high_descriptors_are_awaited(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    assert not is_readable(reading, 0.0)
    assert is_writable(writing, 0.0)
    os.write(writing, b"x")
    assert is_readable(reading, -1.0)
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, bytes(65536))
    assert not is_writable(writing, 0.01)
