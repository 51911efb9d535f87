"""The installed software, once a run, for all journeys."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.bed import why_not
from tests.journeys.hosts import ROOT, build_software, newest_python
from tests.support.wall_jump import build_shim

# Of the release before, until there are tags: without jobs' rows and group tokens.
EARLIER = "140152f5"
Build = Callable[..., Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return ``build_software`` by name: the first process of the run builds, the others wait."""
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent  # of all processes of the run

    def build_once(name: str, *locks: str, **options: Any) -> Path:
        directory = run / f"software-{name}"
        with (run / f"software-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = directory / "built"
            if not done.exists():
                directory.mkdir()
                done.write_text(str(build_software(directory, *locks, **options)))
            return Path(done.read_text())

    return build_once


@pytest.fixture(scope="session")
def software(build: Build) -> Path:
    """Return the directory of the installed wheel; skips where there are no namespaces."""
    if reason := why_not():
        if "netns" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    return build("base", "base")


@pytest.fixture(scope="session")
def earlier_software(
    software: Path, build: Build, tmp_path_factory: pytest.TempPathFactory
) -> Path:
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
    return build("earlier", "base", "stores", "train", "torch", source=source)


@pytest.fixture(scope="session")
def newest_software(software: Path, build: Build) -> Path:
    """Return the software of a host with the newest Python of this machine, which may be the only
    one."""
    if not (python := newest_python()):
        return software
    return build("newest", "base", python=python)


@pytest.fixture(scope="session")
def hub_software(software: Path, build: Build) -> Path:
    """Return the software of a host that loads models with Hugging Face's libraries."""
    return build("hub", "base", "hf")


@pytest.fixture(scope="session")
def clock_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that moves a host's clock (``hosts.clock_ahead``)."""
    return build_shim(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="session")
def control_software(software: Path, build: Build) -> Path:
    """Return the software of a coordinator that keeps its state in etcd, Redis, PostgreSQL."""
    return build("control", "base", "stores")


@pytest.fixture(scope="session")
def plane_software(software: Path, build: Build) -> Path:
    """Return the software of hosts that run flows, ranks, Prefect and MLflow on PostgreSQL."""
    return build("plane", "base", "control", "train", "torch", "sweeps")
