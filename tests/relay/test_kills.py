"""SIGKILL at the system calls of the store: all or nothing is shown, and what is marked is there.

A few in `make test`, more in `make test-nightly`, all in `make chaos`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.manifest import verify_directory
from paceline.relay.store import Store
from tests.relay.kit import write_versions
from tests.relay.store_work import VERSIONS, manifest_in, work
from tests.support import kills
from tests.support.kills import Point

PROGRAM = Path(__file__).with_name("store_work.py")
SEED = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kills.require_strace()
    return write_versions(tmp_path_factory.mktemp("models"), 200_000)


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    scratch = tmp_path_factory.mktemp("trace")
    program = [PROGRAM, scratch / "store", models]
    return kills.points(program, kills.DISK_CALLS, scratch / "trace")


def check_invariants(root: Path, models: Path) -> None:
    """I1: what is visible is whole. I2: what is marked as held is there."""
    shown = {path.name for path in root.glob("models/m/*") if path.name in VERSIONS}
    for version in shown:
        verify_directory(root / "models/m" / version, manifest_in(models / version))
    active = root / "models/m/active"
    if active.is_symlink():
        assert str(active.readlink()) in shown
    if not root.exists():
        return
    store = Store(root)
    try:
        for version in sorted(set(VERSIONS) - shown):
            manifest = manifest_in(models / version)
            if not (root / "staging" / manifest.digest / "marks").exists():
                continue
            staging = store.open(manifest)
            for index in staging.durable.pieces():
                piece = manifest.piece_of(index)
                data = os.pread(
                    staging.descriptor(piece.file_index), piece.length, piece.file_offset
                )
                assert manifest.matches(piece, data), f"piece {index}"
            staging.close()
    finally:
        store.close()


def check_kill(point: Point, root: Path, models: Path) -> None:
    kills.kill([PROGRAM, root, models], point)
    check_invariants(root, models)
    work(root, models)
    check_invariants(root, models)
    left = sorted(path.name for path in root.glob("models/m/v*"))
    assert left == ["v2", "v3"]
    assert str((root / "models/m/active").readlink()) == "v3"
    assert not list((root / "staging").iterdir())
    shutil.rmtree(root)


@kills.SAMPLED
def test_a_kill_at_sampled_calls_of_the_store_shows_all_or_nothing(
    found: list[Point], models: Path, tmp_path: Path, count: int
) -> None:
    for point in kills.sample(found, count, SEED):
        try:
            check_kill(point, tmp_path / "store", models)
        except BaseException as error:
            error.add_note(f"killed at {point}")
            raise


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_kill_at_every_call_of_the_store_shows_all_or_nothing(
    found: list[Point], models: Path, tmp_path: Path
) -> None:
    died = 0
    for point in found:
        try:
            check_kill(point, tmp_path / "store", models)
        except BaseException as error:
            error.add_note(f"killed at {point}")
            raise
        died += 1
    assert died == len(found) > 50
