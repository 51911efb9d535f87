"""What the testbed's tests share: the reason to skip where no testbed can be built."""

from __future__ import annotations

import os

import pytest

from benchmarks.testbed import why_not


@pytest.fixture(autouse=True)
def _namespaces(request: pytest.FixtureRequest) -> None:
    """Skip what needs namespaces, or fail where PACELINE_REQUIRE says that nothing is skipped."""
    if request.node.get_closest_marker("netns") and (reason := why_not()):
        if "netns" in os.environ.get("PACELINE_REQUIRE", ""):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
