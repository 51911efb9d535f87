"""Of serving a model one pass of each kind is enough: tests compare no times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.evaluation import serving


@pytest.fixture(scope="package", autouse=True)
def one_pass() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "MEASURED_S", 0.0)
        yield
