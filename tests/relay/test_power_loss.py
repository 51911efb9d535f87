"""The power goes at any moment: what is marked is there, what is visible is whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from paceline.errors import CorruptData
from paceline.relay.store import staging, store
from tests.relay.kit import write_versions
from tests.relay.store_work import work
from tests.relay.test_kills import check_invariants
from tests.support.powerloss import Disk, PowerCut


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_versions(tmp_path_factory.mktemp("models"), 150_000)


def calls_of(models: Path, scratch: Path) -> int:
    (scratch / "store").mkdir(parents=True)
    disk = Disk(scratch / "store")
    with disk.watching():
        work(scratch / "store", models)
    return disk.calls


def check_cut(models: Path, scratch: Path, cut: int, seed: int) -> None:
    before, after = scratch / "before", scratch / "after"
    for path in (before, after):
        shutil.rmtree(path, ignore_errors=True)
    before.mkdir()
    disk = Disk(before, cut_after=cut)
    with disk.watching(), pytest.raises(PowerCut):
        work(before, models)
    disk.after(after, seed)
    check_invariants(after, models)
    work(after, models)
    check_invariants(after, models)
    assert sorted(path.name for path in after.glob("models/m/v*")) == ["v2", "v3"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_after_a_power_loss_only_durable_bytes_are_believed(
    models: Path, tmp_path: Path, seed: int
) -> None:
    draw = Random(seed)
    calls = calls_of(models, tmp_path / "count")
    for cut in draw.sample(range(1, calls), 12):
        try:
            check_cut(models, tmp_path, cut, seed=draw.randrange(10**6))
        except BaseException as error:
            error.add_note(f"seed {seed}: the power went at call {cut} of {calls}")
            raise


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_the_power_may_go_at_every_call(models: Path, tmp_path: Path) -> None:
    calls = calls_of(models, tmp_path / "count")
    assert calls > 100
    for cut in range(1, calls):
        for seed in range(3):
            try:
                check_cut(models, tmp_path, cut, seed)
            except BaseException as error:
                error.add_note(f"seed {seed}: the power went at call {cut} of {calls}")
                raise


def test_the_shim_loses_what_was_not_synced(tmp_path: Path) -> None:
    """The instrument itself: a store that marks before it syncs must be caught."""
    root = tmp_path / "before"
    root.mkdir()
    lost = 0
    for seed in range(20):
        disk = Disk(root)
        with disk.watching():
            (root / "file").write_bytes(b"x" * 10_000)
        shutil.rmtree(tmp_path / "after", ignore_errors=True)
        disk.after(tmp_path / "after", seed)
        lost += (
            not (tmp_path / "after/file").exists()
            or (tmp_path / "after/file").read_bytes() != b"x" * 10_000
        )
    assert 5 < lost <= 20


@pytest.mark.parametrize("forgotten", ["data", "names"])
def test_a_store_that_forgets_to_sync_is_caught(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Planted bugs: marks are written before their bytes are durable; names are never synced."""
    if forgotten == "names":
        monkeypatch.setattr(staging, "sync_directory", lambda _path: None)
        monkeypatch.setattr(store, "sync_directory", lambda _path: None)
    else:
        synced = Disk._synced

        def only_marks(self: Disk, descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            if path.is_dir() or path.name in ("marks", "manifest.json"):
                synced(self, descriptor)

        monkeypatch.setattr(Disk, "_synced", only_marks)
    calls = calls_of(models, tmp_path / "count")
    with pytest.raises((AssertionError, CorruptData)):
        for cut in range(1, calls, 2):
            check_cut(models, tmp_path, cut, seed=cut)
