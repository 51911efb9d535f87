"""A server, a registry of it, and evidence to register with."""

from __future__ import annotations

import pytest

from paceline.registry import Registry
from tests.support.mlflow_server import mlflow_url  # noqa: F401 - the fixture


@pytest.fixture(scope="session")
def registry(mlflow_url: str) -> Registry:  # noqa: F811
    return Registry(mlflow_url)
