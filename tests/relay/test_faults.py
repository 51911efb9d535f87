"""The kernel's own faults: a full disk and an fsync that fails; ``test_kills`` has the kills."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import DeploymentFailed
from paceline.manifest import Manifest, write_manifest
from tests.relay.kit import DEPLOYMENT, manifest_of, plan, write_model
from tests.support import kills
from tests.support.local_fleet import LocalFleet
from tests.support.reaper import mount_small_disk

NODE = Path(__file__).with_name("one_node.py")


def missing(what: str) -> None:
    """Skip, or fail where the environment says that nothing may be skipped."""
    if "netns" in os.environ.get("PACELINE_REQUIRE", ""):
        pytest.fail(f"required but missing: {what}")
    pytest.skip(what)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 600_000)


@pytest.fixture
def manifest(model: Path) -> Manifest:
    made = manifest_of(model)
    write_manifest(model, made)
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "nodes/node-1"
    disk.mkdir(parents=True)
    if not mount_small_disk(disk, "1m"):
        missing("mounting a tmpfs needs root and a machine that allows it")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_fails_its_worker_with_the_reason_and_nobody_else(
    tmp_path: Path, small_disk: Path
) -> None:
    model = write_model(tmp_path / "model", 2_000_000)
    manifest = manifest_of(model)
    names = ["node-0", "node-1", "node-2"]
    with LocalFleet(tmp_path / "nodes", names) as fleet:
        planned = plan(manifest, fleet.addresses, source_url=str(model))
        fleet.deploy(manifest, {each.worker_id: each for each in planned.workers})
        with pytest.raises(DeploymentFailed, match="StorageFull"):
            fleet.receipts(DEPLOYMENT, ["node-1"])
        fleet.receipts(DEPLOYMENT, ["node-0", "node-2"], timeout_s=4)  # told, not timed out
        assert list((small_disk / "store/staging").glob("*/data/**/*.bin")) == []


def test_a_disk_that_fills_up_midway_leaves_nothing_behind(
    tmp_path: Path, small_disk: Path, manifest: Manifest, model: Path
) -> None:
    with LocalFleet(tmp_path / "nodes", ["node-1"]) as fleet:
        store = fleet.drivers["node-1"].store
        staging = store.open(manifest)  # preallocated: a neighbour cannot take this room any more
        neighbour = small_disk / "neighbour"
        with pytest.raises(OSError, match="No space"):
            neighbour.write_bytes(bytes(1_000_000))
        staging.close()
        planned = plan(manifest, fleet.addresses, source_url=str(model))
        fleet.deploy(manifest, {each.worker_id: each for each in planned.workers})
        with pytest.raises(DeploymentFailed, match="StorageFull"):
            fleet.receipts(DEPLOYMENT)  # not even the marks fit now
        assert store.versions() == []
        assert list((small_disk / "store/staging").iterdir()) == []


def test_a_failing_sync_publishes_nothing_and_discards_the_file(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    kills.require_strace()
    failing = ("-o", "/dev/null", "-e", "inject=fdatasync:error=EIO:when=1")
    done = kills.run([NODE, tmp_path / "nodes", model], failing)
    assert done.returncode == 1, done.stderr
    assert "StorageFailed" in done.stdout
    assert not list((tmp_path / "nodes").glob("*/store/models/*/*/manifest.json"))
    assert not list((tmp_path / "nodes").glob("*/store/staging/*"))
