"""One installation for all slow tests of a session: real servers, four nodes, 8 Mbit/s each."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Runtime
from tests.support.stack import Ended, installation, paceline

SMALL_DISK_MB = 24  # what node-3 has, where we may mount: room for the demo's models, not for more


@pytest.fixture(scope="session")
def small_disk() -> bool:
    """Whether node-3 has a disk of its own with a real size limit (needs root)."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, small_disk: bool) -> Iterator[Runtime]:
    """Yield the running installation that integration tests share."""
    state: Path = tmp_path_factory.mktemp("stack") / "state"
    disk = state / "nodes" / "node-3" / "store"
    if small_disk:
        disk.mkdir(parents=True)
        small_disk = _mounted(disk)
    try:
        with installation(
            state, "cluster.link_mbit=8", "training.steps=40", "control.flow_starter=prefect"
        ) as runtime:
            yield runtime
    finally:
        if small_disk:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def lifecycle(stack: Runtime) -> Ended:
    """The lifecycle, run once to its end through the command line."""
    ended = paceline("lifecycle", "--json", state=stack.state_dir, timeout_s=400)
    assert ended.code == 0, ended.err
    return ended


def _mounted(disk: Path) -> bool:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m", "paceline-test", str(disk)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0
