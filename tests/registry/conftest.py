"""A registry on the session's MLflow server."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.registry import Registry


@pytest.fixture(scope="session")
def registry(mlflow_url: str) -> Registry:
    return Registry(mlflow_url)


@pytest.fixture
def near(registry: Registry, mlflow_directory: Path) -> Registry:
    """The registry by its database instead of its server: a kill at each write is a hundred calls,
    and a call by HTTP takes 15 ms of CPU time."""
    from mlflow import MlflowClient

    database = f"sqlite:///{mlflow_directory / 'mlflow.db'}"
    return Registry(registry.tracking_uri, client=MlflowClient(registry.tracking_uri, database))
