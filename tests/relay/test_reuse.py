"""What a disk holds already does not travel, and is never written to; old versions make room."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.reuse import main
from paceline.errors import StorageFull
from paceline.manifest import Manifest, verify_directory
from paceline.relay.protocol import Extent, SessionLimits
from paceline.relay.store import (
    Store,
    StorePolicy,
    freed_bytes,
    leftovers,
    missing_bytes,
    reclaimable_bytes,
)
from tests.relay.kit import damage, manifest_of, write_model
from tests.relay.test_store import fill


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 600_000)


def published(store: Store, model: Path, version: str) -> Manifest:
    manifest = manifest_of(model, version=version)
    staging = store.open(manifest)
    store.reuse(staging)
    fill(staging, model)
    store.publish(staging)
    staging.close()
    return manifest


def inode(store: Store, version: str, path: str) -> int:
    return (store.final_path("m", version) / path).stat().st_ino


def test_published_files_are_read_only(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    for path in store.final_path("m", "v1").rglob("*"):
        assert path.is_dir() or not path.stat().st_mode & 0o222


def test_a_file_that_an_older_version_holds_takes_no_room(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    (model / "config.json").write_text('{"layers": 3}')
    newer = manifest_of(model, version="v2")
    staging = store.open(newer)
    assert staging.reused_bytes == newer.total_size - len('{"layers": 3}')
    store.reuse(staging)
    fill(staging, model)
    verify_directory(store.publish(staging), newer)
    assert inode(store, "v1", "shards/a.bin") == inode(store, "v2", "shards/a.bin")
    assert inode(store, "v1", "config.json") != inode(store, "v2", "config.json")


def test_a_longer_first_file_shifts_nothing(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    (model / "config.json").write_text("x" * 50_000)  # sorted before the shards
    (model / "a-new-header").write_text("y" * 20_000)
    newer = manifest_of(model, version="v2")
    staging = store.open(newer)
    store.reuse(staging)
    assert staging.reused_bytes == newer.total_size - 70_000


def test_only_changed_pieces_of_a_changed_file_are_missing(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    damage(model / "shards/a.bin", 100_000, b"fine-tuned")
    newer = manifest_of(model, version="v2")
    staging = store.open(newer)
    store.reuse(staging)
    missing = list(staging.durable.gaps(Extent(0, newer.piece_count)))
    assert len(missing) == 1
    assert missing[0].stop - missing[0].first == 1
    fill(staging, model)
    verify_directory(store.publish(staging), newer)


@pytest.fixture
def rotten(tmp_path: Path, model: Path) -> Store:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    file = store.final_path("m", "v1") / "shards/a.bin"
    damage(file, 50_000, b"rot")
    file.chmod(0o444)
    return store


def test_a_linked_file_with_a_rotten_piece_is_mended_as_a_copy(
    tmp_path: Path, model: Path, rotten: Store
) -> None:
    (model / "config.json").write_text("2")
    newer = manifest_of(model, version="v2")
    staging = rotten.open(newer)
    rotten.reuse(staging)
    missing = list(staging.durable.gaps(Extent(0, newer.piece_count)))
    assert sum(gap.stop - gap.first for gap in missing) == 2  # config.json, and the rotten one
    fill(staging, model)
    verify_directory(rotten.publish(staging), newer)
    assert b"rot" in (rotten.final_path("m", "v1") / "shards/a.bin").read_bytes()


def test_of_a_copy_that_was_set_aside_only_the_rotten_piece_is_missing(
    model: Path, rotten: Store
) -> None:
    aside = rotten.root / "rotten" / "m-v1-1"
    aside.parent.mkdir()
    rotten.final_path("m", "v1").rename(aside)
    again = manifest_of(model, version="v1")
    staging = rotten.open(again)
    rotten.reuse(staging)
    missing = list(staging.durable.gaps(Extent(0, again.piece_count)))
    assert [gap.stop - gap.first for gap in missing] == [1]
    fill(staging, model)
    verify_directory(rotten.publish(staging), again)
    assert b"rot" in (aside / "shards/a.bin").read_bytes()


def test_a_link_that_rots_before_it_is_published_is_mended_as_a_copy(
    tmp_path: Path, model: Path
) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    (model / "config.json").write_text("2")
    newer = manifest_of(model, version="v2")
    staging = store.open(newer)
    shard = next(f for f, file in enumerate(newer.files) if file.path == "shards/a.bin")
    piece = newer.file_pieces(shard).start + 3
    damage(staging.data / "shards/a.bin", 3 * newer.piece_bytes, b"rot")
    (staging.data / "shards/a.bin").chmod(0o444)
    before = staging.descriptor(shard)
    assert staging.recheck_piece(piece)
    assert staging.descriptor(shard) != before
    os.fstat(before)  # still good for a peer that reads from it
    fill(staging, model)
    verify_directory(store.publish(staging), newer)


def test_after_a_crash_links_are_verified_before_they_count(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    (model / "config.json").write_text("2")
    newer = manifest_of(model, version="v2")
    staging = store.open(newer)
    (staging.directory / "marks").write_bytes(b"")  # linked, and died before the first mark
    staging.close()
    store.close()
    store = Store(tmp_path / "store")
    store._trash(store.final_path("m", "v1"))  # the version they came from is gone, too
    again = store.open(newer)
    fill(again, model)
    verify_directory(store.publish(again), newer)


def test_versions_of_other_piece_hashes_share_whole_files_and_no_piece(
    tmp_path: Path, model: Path
) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    damage(model / "shards/a.bin", 100_000, b"fine-tuned")
    newer = manifest_of(model, version="v2", piece_hash="sha256")
    staging = store.open(newer)
    store.reuse(staging)
    b = next(file for file in newer.files if file.path == "shards/b.bin")
    assert staging.reused_bytes == b.size + (model / "config.json").stat().st_size
    fill(staging, model)
    verify_directory(store.publish(staging), newer, full=True)


def test_an_older_store_with_writable_files_is_copied_from(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    for path in store.final_path("m", "v1").rglob("*.bin"):
        path.chmod(0o644)
    (model / "config.json").write_text("2")
    staging = store.open(manifest_of(model, version="v2"))
    store.reuse(staging)
    assert staging.reused_pieces == staging.manifest.piece_count - 1
    assert inode(store, "v1", "shards/a.bin") != (staging.data / "shards/a.bin").stat().st_ino


# ── room ─────────────────────────────────────────────────────────────────────────────────────────


def versions(store: Store) -> list[str]:
    return [each.version for each in store.versions()]


def several(store: Store, tmp_path: Path, count: int) -> None:
    for number in range(1, count + 1):
        model = write_model(tmp_path / f"model-{number}", 100_000, seed=number)
        published(store, model, f"v{number}")


def test_the_newest_are_kept_and_the_active_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", StorePolicy(keep_versions=2))
    several(store, tmp_path, 2)
    store.activate("m", "v1")
    several(Store(tmp_path / "other"), tmp_path / "more", 1)
    for number in (3, 4, 5):
        published(store, write_model(tmp_path / f"n{number}", 100_000, seed=number), f"v{number}")
    # before v5 came, v3 and v4 were the newest two; the active one stays beyond them
    assert versions(store) == ["v1", "v3", "v4", "v5"]
    held = store.manifest_of(store.final_path("m", "v3"))
    assert [v.version for v in store.collect(1, {held.digest})] == ["v4"]


def disk(monkeypatch: pytest.MonkeyPatch, free: int, size: int = 10_000_000) -> None:
    """Let every disk have ``free`` bytes left, and more with each version that goes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=size))


def test_the_oldest_go_while_the_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", StorePolicy(free_share=0.05))
    several(store, tmp_path, 4)
    store.activate("m", "v2")
    served = store.manifest_of(store.final_path("m", "v3")).digest
    disk(monkeypatch, free=1_000)
    newer = manifest_of(write_model(tmp_path / "new", 100_000, seed=9), version="v9")
    gone = store.make_room(newer, {served})
    assert [each.version for each in gone] == ["v1", "v4"]
    assert versions(store) == ["v2", "v3"]


def test_what_was_left_of_versions_that_never_came_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    store = Store(root, StorePolicy(make_room=True))
    several(store, tmp_path, 1)
    begun = [
        manifest_of(write_model(tmp_path / f"b{n}", 100_000, seed=50 + n), version=f"b{n}")
        for n in range(3)
    ]
    for age, manifest in zip((3000, 2000, 1000), begun, strict=True):
        store.open(manifest).close()
        then = time.time() - age
        os.utime(root / "staging" / manifest.digest / "marks", (then, then))
    (root / "rotten/m-v0-1").mkdir(parents=True)
    (root / "rotten/m-v0-1/weights").write_bytes(bytes(50_000))
    store.close()
    store = Store(root, StorePolicy(make_room=True))
    newest = begun[2].digest
    assert reclaimable_bytes(root, newest) >= 250_000
    assert not (set(leftovers(root, {newest})) & {root / "staging" / newest})
    freed = iter([0, 0, 10_000_000])  # short, short again, enough
    disk = lambda _: SimpleNamespace(free=next(freed), total=10_000_000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", disk)
    newer = manifest_of(write_model(tmp_path / "new", 100_000, seed=99), version="v9")
    assert store.make_room(newer, {newest}) == [], "no version had to go"
    assert not list((root / "rotten").iterdir())
    staged = {path.name for path in (root / "staging").iterdir()}
    assert staged == {begun[1].digest, newest}, "the one left first is gone, what is open is not"


def test_nothing_goes_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store", StorePolicy(free_share=0.05, make_room=True))
    several(store, tmp_path, 2)
    disk(monkeypatch, free=5_000_000)
    newer = manifest_of(write_model(tmp_path / "new", 100_000, seed=9), version="v9")
    assert store.make_room(newer) == []


def test_a_disk_that_stays_too_small_fails_and_keeps_the_active_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", StorePolicy(make_room=True))
    several(store, tmp_path, 2)
    store.activate("m", "v1")
    room = os.statvfs(tmp_path)
    full = os.statvfs_result([*room[:3], 10, 10, *room[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    newer = manifest_of(write_model(tmp_path / "new", 200_000, seed=9), version="v9")
    with pytest.raises(StorageFull, match="does not fit"):
        store.open(newer)
    assert versions(store) == ["v1"]
    assert list((tmp_path / "store/staging").iterdir()) == []


def test_a_version_removed_for_its_successor_still_gives_it_its_files(
    tmp_path: Path, model: Path
) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    whole = freed_bytes(store.final_path("m", "v1"))
    store.close()
    store = Store(tmp_path / "store", StorePolicy(free_share=0.999))
    (model / "config.json").write_text("2")
    newer = manifest_of(model, version="v2")
    staging = store.open(newer)
    assert versions(store) == []
    assert staging.reused_bytes == newer.total_size - 1
    fill(staging, model)
    verify_directory(store.publish(staging), newer)
    assert freed_bytes(store.final_path("m", "v2")) <= whole


def test_what_is_linked_frees_nothing(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    published(store, model, "v1")
    assert freed_bytes(store.final_path("m", "v1")) >= 600_000
    (model / "config.json").write_text("2")
    published(store, model, "v2")
    for version in ("v1", "v2"):  # nothing of their own but config.json and manifest.json
        assert freed_bytes(store.final_path("m", version)) < 60_000


def test_room_counts_what_is_there(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    manifest = manifest_of(model)
    lacks = lambda root, of: missing_bytes(root, of.digest, of.files)  # noqa: E731
    assert lacks(tmp_path / "nowhere", manifest) == manifest.total_size
    staging = store.open(manifest)
    assert lacks(store.root, manifest) < 10_000  # preallocated
    fill(staging, model)
    store.publish(staging)
    assert lacks(store.root, manifest) == 0
    (model / "config.json").write_text("x" * 100)
    assert lacks(store.root, manifest_of(model, version="v2")) == 100


def test_a_version_that_changes_two_percent_moves_three_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--bytes", "16e6", "--workers", "3", "--changed", "0.02"]) == 0
    result = json.loads(capsys.readouterr().out)
    reused = result["reused_bytes"] / (result["bytes"] * result["workers"])
    assert reused >= 0.97
    # On a busy machine the end of a transfer may be requested from a second source too.
    hedged = SessionLimits().least_hedges * result["piece_bytes"] / result["bytes"]
    assert 1.0 <= result["first_moved_share"] <= 1.0 + hedged
    assert 1 - reused <= result["second_moved_share"] <= 1 - reused + hedged
    assert result["second_origin_share"] <= 0.03 + hedged
