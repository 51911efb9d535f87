"""A registry on the session's MLflow server."""

from __future__ import annotations

import pytest

from paceline.registry import Registry


@pytest.fixture(scope="session")
def registry(mlflow_url: str) -> Registry:
    return Registry(mlflow_url)
