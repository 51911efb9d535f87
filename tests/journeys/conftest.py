"""The installed software, once a run, for all journeys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.testbed.bed import why_not
from tests.journeys.hosts import build_software
from tests.support.wall_jump import build_shim


@pytest.fixture(scope="session")
def software(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the installed wheel; skips where there are no namespaces."""
    if reason := why_not():
        if "netns" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    return build_software(tmp_path_factory.mktemp("software"), "base")


@pytest.fixture(scope="session")
def hub_software(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the software of a host that loads models with Hugging Face's libraries."""
    return build_software(tmp_path_factory.mktemp("hub"), "base", "hf")


@pytest.fixture(scope="session")
def clock_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that moves a host's clock (``hosts.clock_ahead``)."""
    return build_shim(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="session")
def control_software(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the software of a coordinator that keeps its state in etcd, Redis, PostgreSQL."""
    return build_software(tmp_path_factory.mktemp("control"), "base", "stores")


@pytest.fixture(scope="session")
def training_software(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the software of hosts that run flows and ranks."""
    return build_software(tmp_path_factory.mktemp("training"), "base", "flows", "train", "torch")


@pytest.fixture(scope="session")
def plane_software(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the software of a fleet that trains, with its Prefect and MLflow on PostgreSQL."""
    return build_software(tmp_path_factory.mktemp("plane"), "base", "control", "train", "torch")
