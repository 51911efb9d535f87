"""What a disk keeps, shows and forgets."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import (
    Cancelled,
    Conflict,
    CorruptData,
    InvalidInput,
    NotFound,
    StateLocked,
    StorageFailed,
    StorageFull,
)
from paceline.manifest import Manifest, verify_directory
from paceline.relay.protocol import Extent
from paceline.relay.store import OpenModels, Staging, Store, StorePolicy
from tests.relay.kit import manifest_of, paper_manifest, write_model

MIB = 1024 * 1024


class Clock:
    """The ``time`` of a module, which stands still."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def fill(staging: Staging, source: Path, pieces: range | None = None) -> None:
    manifest = staging.manifest
    for index in pieces or range(manifest.piece_count):
        piece = manifest.piece_of(index)
        data = (source / manifest.files[piece.file_index].path).read_bytes()
        if not staging.claim(index):
            continue  # this disk held it already
        part = memoryview(data)[piece.file_offset :][: piece.length]
        staging.write(staging.descriptor(piece.file_index), part, piece.file_offset)
        staging.hold(piece)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 300_000)


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return manifest_of(model)


def test_full_sha256_finds_a_manifest_that_contradicts_itself_in_time(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    first, second, *others = manifest.files
    wrong = replace(manifest, files=(first, replace(second, sha256="0" * 64), *others))
    for full, root in ((True, tmp_path / "full"), (False, tmp_path / "plain")):
        store = Store(root, StorePolicy(full_sha256=full))
        staging = store.open(wrong)
        fill(staging, model)
        if full:
            with pytest.raises(CorruptData, match="does not match its digest"):
                store.publish(staging)
        else:
            store.publish(staging)
        assert store.final_path("m", "v1").exists() is not full


def test_a_transfer_does_not_wait_until_memory_for_all_of_it_is_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = paper_manifest(64, piece_bytes=4 * MIB)
    clock, reserved = Clock(), []

    def zeroes(_descriptor: int, offset: int, size: int) -> None:
        reserved.append((offset, size))
        clock.now_s += size / (1000 * MIB)  # tmpfs on a busy machine

    monkeypatch.setattr("paceline.relay.store.staging.time", clock)
    monkeypatch.setattr(os, "posix_fallocate", zeroes)
    staging = Store(tmp_path / "store").open(manifest)
    assert reserved == [(0, 16 * MIB), (16 * MIB, 32 * MIB), (48 * MIB, 64 * MIB)]
    assert (staging.data / "weights.bin").stat().st_size == manifest.total_size


def test_a_disk_that_allocates_at_once_reserves_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = paper_manifest(64, piece_bytes=4 * MIB)
    ends = []
    monkeypatch.setattr("paceline.relay.store.staging.time", Clock())
    monkeypatch.setattr(os, "posix_fallocate", lambda _file, at, size: ends.append(at + size))
    Store(tmp_path / "store").open(manifest)
    assert ends[-1] == manifest.total_size


def test_nothing_is_visible_until_everything_is_and_then_all_of_it(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    final = store.final_path("m", "v1")
    fill(staging, model, range(manifest.piece_count - 1))
    with pytest.raises(Conflict, match="not complete"):
        store.publish(staging)
    assert not final.exists()
    fill(staging, model, range(manifest.piece_count - 1, manifest.piece_count))
    assert store.publish(staging) == final
    verify_directory(final, manifest)
    assert store.publish(staging) == final
    assert list((tmp_path / "store/staging").iterdir()) == []
    assert [(v.version, v.digest, v.active) for v in store.versions("m")] == [
        ("v1", manifest.digest, False)
    ]
    # What was open stays readable for peers after the rename.
    piece = manifest.piece_of(0)
    data = os.pread(staging.descriptor(piece.file_index), piece.length, piece.file_offset)
    assert manifest.matches(piece, data)


def test_only_durable_pieces_survive_the_process(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    fill(staging, model, range(5))
    assert staging.commit() == [Extent(0, 5)]
    assert staging.commit() == []
    fill(staging, model, range(5, 8))  # verified, not committed
    store.close()
    again = Store(tmp_path / "store").open(manifest)
    assert list(again.durable) == [Extent(0, 5)]


def test_a_rotten_piece_loses_its_mark_and_cannot_be_published(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    fill(staging, model)
    staging.commit()
    assert not staging.recheck_piece(7)
    piece = manifest.piece_of(7)
    with (staging.data / manifest.files[piece.file_index].path).open("r+b") as file:
        file.seek(piece.file_offset)
        file.write(b"rot")
    assert staging.recheck_piece(7)
    with pytest.raises(Conflict, match="not complete"):
        store.publish(staging)
    store.close()
    again = Store(tmp_path / "store").open(manifest)
    assert list(again.durable.gaps(Extent(0, manifest.piece_count))) == [Extent(7, 8)]
    fill(again, model, range(7, 8))
    again.commit()
    assert again.durable.count == manifest.piece_count


def test_a_torn_mark_and_what_follows_it_is_not_trusted(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    for first in (0, 4, 8):
        fill(staging, model, range(first, first + 2))
        staging.commit()
    store.close()
    marks = staging.directory / "marks"
    raw = bytearray(marks.read_bytes())
    raw[13] ^= 1
    marks.write_bytes(raw + b"\0\0\0")
    again = Store(tmp_path / "store").open(manifest)
    assert list(again.durable) == [Extent(0, 2)]


def test_a_disk_that_takes_marks_bit_by_bit_keeps_all_of_them(
    tmp_path: Path, model: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    for first in (0, 4, 8):
        fill(staging, model, range(first, first + 2))
        staging.commit()
    monkeypatch.undo()
    store.close()
    again = Store(tmp_path / "store").open(manifest)
    assert list(again.durable) == [Extent(0, 2), Extent(4, 6), Extent(8, 10)]


def test_marks_without_their_file_are_not_trusted(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    fill(staging, model, range(5))
    staging.commit()
    store.close()
    (staging.data / "shards/a.bin").unlink()
    assert not Store(tmp_path / "store").open(manifest).durable


def test_a_model_that_cannot_fit_is_refused_before_a_byte_moves(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    room = os.statvfs(tmp_path)
    full = os.statvfs_result([*room[:4], 10, *room[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with pytest.raises(StorageFull, match="does not fit"):
        store.open(manifest)


def test_a_disk_that_refuses_to_sync_publishes_nothing(
    tmp_path: Path, model: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    fill(staging, model)

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(StorageFailed):
        store.publish(staging)
    assert not store.final_path("m", "v1").exists()
    store.discard(staging)
    assert list((tmp_path / "store/staging").iterdir()) == []


def test_one_name_never_has_two_contents(tmp_path: Path, model: Path, manifest: Manifest) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    fill(staging, model)
    store.publish(staging)
    assert store.open(manifest).published
    (model / "config.json").write_text('{"layers": 3}')
    with pytest.raises(Conflict, match="other content"):
        store.open(manifest_of(model))


def test_activation_switches_atomically_and_back(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(NotFound):
        store.activate("m", "v1")
    for version in ("v1", "v2", "v3"):
        (model / "config.json").write_text(version)
        staging = store.open(manifest_of(model, version=version))
        fill(staging, model)
        store.publish(staging)
    assert store.active("m") is None
    store.activate("m", "v2")
    store.activate("m", "v1")
    link = tmp_path / "store/models/m/active"
    assert link.is_symlink()
    assert (link / "config.json").read_text() == "v1"
    assert store.active("m") == "v1"
    assert {v.version for v in store.versions()} == {"v1", "v2", "v3"}
    gone = store.collect(keep=1)
    assert [v.version for v in gone] == ["v2"]  # v1 is active, v3 the newest
    assert {v.version for v in store.versions()} == {"v1", "v3"}


def test_a_discarded_version_leaves_nothing_and_its_streams_stop(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    staging = store.open(manifest)
    fill(staging, model)
    store.discard(staging)
    with pytest.raises(Cancelled):
        store.publish(staging)
    with pytest.raises(Cancelled), staging.using():
        pass
    assert not store.final_path("m", "v1").exists()
    assert list((tmp_path / "store/staging").iterdir()) == []


def test_descriptors_stay_open_under_a_running_use(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    staging = Store(tmp_path / "store").open(manifest)
    with staging.using():
        descriptor = staging.descriptor(0)
        staging.close()
        os.fstat(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_one_process_owns_a_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(StateLocked):
        Store(tmp_path / "store")
    store.close()
    Store(tmp_path / "store").close()


@pytest.mark.parametrize("version", ["active", "..", ".hidden", "a/b", ""])
def test_names_never_leave_the_store(tmp_path: Path, version: str) -> None:
    with pytest.raises(InvalidInput):
        Store(tmp_path / "store").final_path("m", version)


def test_manifests_of_earlier_processes_are_read_when_somebody_asks(
    tmp_path: Path, model: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looks = Store(tmp_path / "store"), []
    staging = store.open(manifest)
    fill(staging, model)
    store.publish(staging)
    staging.close()
    versions = store.versions
    monkeypatch.setattr(store, "versions", lambda *given: looks.append(1) or versions(*given))
    library = OpenModels(store)
    assert looks == [], "an agent is ready before"
    for _ in range(2):
        found = library.find(manifest.digest, 0.0)
        assert found is not None
        assert found.published
    assert library.find("0" * 64, 0.0) is None
    assert looks == [1]
    library.close()


def test_a_link_planted_in_staging_is_not_followed(
    tmp_path: Path, model: Path, manifest: Manifest
) -> None:
    store = Store(tmp_path / "store")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    data = tmp_path / "store/staging" / manifest.digest / "data"
    data.mkdir(parents=True)
    (data / "config.json").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        store.open(manifest)
    assert victim.read_text() == "precious"
