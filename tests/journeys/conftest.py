"""The installed software, once a run, for all journeys."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.testbed.bed import why_not
from tests.journeys.hosts import ROOT, build_software, newest_python
from tests.support.wall_jump import build_shim

EARLIER = "0053e57"  # of the release before, until there are tags


@pytest.fixture(scope="session")
def software(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the installed wheel; skips where there are no namespaces."""
    if reason := why_not():
        if "netns" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    return build_software(tmp_path_factory.mktemp("software"), "base")


@pytest.fixture(scope="session")
def earlier_software(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the software of the release before, built from its commit; skips without history."""
    source = tmp_path_factory.mktemp("earlier")
    packed = subprocess.run(
        ["git", "archive", EARLIER], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    if packed.returncode:
        pytest.skip(f"this checkout has no commit {EARLIER}: {packed.stderr.decode()[-200:]}")
    subprocess.run(["tar", "-x", "-C", str(source)], input=packed.stdout, check=True, timeout=60)
    project = source / "pyproject.toml"
    project.write_text(
        re.sub(r'(?m)^version = ".*"', 'version = "0.0.9"', project.read_text(), count=1)
    )
    return build_software(tmp_path_factory.mktemp("earlier-software"), "base", source=source)


@pytest.fixture(scope="session")
def newest_software(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the software of a host with the newest Python of this machine, which may be the only
    one."""
    if not (python := newest_python()):
        return software
    return build_software(tmp_path_factory.mktemp("newest"), "base", python=python)


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
