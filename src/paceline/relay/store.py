"""A node's disk: versions at their final paths, versions in progress, and the switch between them.

``models/<model_id>/<version>/`` appears by one rename after everything in it is durable, and never
changes again; ``models/<model_id>/active`` is a symlink that switches atomically. Versions in
progress live in ``staging/<digest>/`` on the same filesystem. It knows no sources and no network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import Conflict, InvalidInput, InvalidManifest, NotFound, StateLocked
from paceline.manifest import (
    MANIFEST_FILE,
    Manifest,
    Piece,
    parse_manifest,
    verify_directory,
)
from paceline.relay.staging import Staging, disk_errors

ACTIVE = "active"
_COPY = 4 * 1024 * 1024


@dataclass(frozen=True)
class StoredVersion:
    """One version at its final path."""

    model_id: str
    version: str
    path: Path
    digest: str
    total_bytes: int
    published_at: float  # modification time of its manifest
    active: bool


class Store:
    """The store below ``root``; one process at a time (StateLocked)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models = root / "models"
        self._staging = root / "staging"
        self._publish_lock = threading.Lock()
        with disk_errors(root):
            self._models.mkdir(parents=True, exist_ok=True)
            self._staging.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock_file)
                raise StateLocked(
                    "another agent owns this store", where=root, do="Stop the other agent first."
                ) from error
            for trash in self._staging.glob(".trash-*"):
                shutil.rmtree(trash, ignore_errors=True)

    def close(self) -> None:
        """Let another process own the store."""
        os.close(self._lock_file)

    def available_bytes(self) -> int:
        """Return how many bytes this store's filesystem has left."""
        room = os.statvfs(self.root)
        return room.f_bavail * room.f_frsize

    # ── one version ──────────────────────────────────────────────────────────────────────────────

    def final_path(self, model_id: str, version: str) -> Path:
        """Return where this version is, or will be, visible."""
        for name in (model_id, version):
            if not name or name.startswith(".") or "/" in name or "\0" in name:
                raise InvalidInput("not a name", got=repr(name), wanted="a model id and a version")
        if version == ACTIVE:
            raise InvalidInput("a version cannot be called 'active'", do="Choose another name.")
        return self._models / model_id / version

    def open(self, manifest: Manifest) -> Staging:
        """Return the version's files: complete where it is published, else resumed or new.

        Raises Conflict where other content has this name, StorageFull where it cannot fit.
        """
        final = self.final_path(manifest.model_id, manifest.version)
        if (found := self._published(final)) is not None:
            if found.digest == manifest.digest:
                return Staging(manifest, final, published=True)
            raise Conflict(
                "this version exists here with other content",
                got=found.digest,
                wanted=manifest.digest,
                where=final,
                do="Publish under a new version.",
            )
        staging = Staging(manifest, self._staging / manifest.digest)
        try:
            staging.prepare()
        except BaseException:
            staging.close()
            raise
        return staging

    def publish(self, staging: Staging) -> Path:
        """Show a complete version at its final path, return that; doing it again changes nothing.

        Raises StorageFull or StorageFailed (then nothing is visible), Conflict as ``open`` does.
        """
        manifest = staging.manifest
        final = self.final_path(manifest.model_id, manifest.version)
        if staging.published:
            return final
        staging.commit()
        if staging.durable.count != manifest.piece_count:
            raise Conflict(
                "the version is not complete",
                got=f"{staging.durable.count} pieces",
                wanted=manifest.piece_count,
            )
        with self._publish_lock, staging.using(), disk_errors(final):
            data = staging.data
            for index, file in enumerate(manifest.files):
                size = os.fstat(staging.descriptor(index)).st_size
                if size != file.size:
                    raise Conflict(f"{file.path} changed size", got=size, wanted=file.size)
            _write_durably(data / MANIFEST_FILE, manifest.to_bytes())
            for directory in {data, *((data / file.path).parent for file in manifest.files)}:
                sync_directory(directory)
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists() and self._published(final) is None:
                self._trash(final)  # not a version: ours appear whole, with their manifest
            data.rename(final)
            sync_directory(final.parent)
            sync_directory(self._models)
            work = staging.directory
            staging.moved(final)
            shutil.rmtree(work, ignore_errors=True)
        return final

    def discard(self, staging: Staging) -> None:
        """Drop a version in progress with all its bytes; a published one stays."""
        with self._publish_lock:  # either it is published by now, or it never will be
            staging.close()
            if not staging.published and staging.directory.exists():
                self._trash(staging.directory)

    def reuse(self, staging: Staging) -> None:
        """Fill missing pieces from versions that this disk already holds, each verified again."""
        if staging.published:
            return
        wanted = {piece.sha256 for piece in staging.manifest.pieces}
        have = self._pieces_on_disk(wanted, staging.manifest.digest)
        if not have:
            return
        buffer = bytearray(_COPY)
        for piece in staging.manifest.pieces:
            found = have.get(piece.sha256)
            if found is None or piece.index in staging.verified:
                continue
            source, offset = found
            if not staging.claim(piece.index):
                continue
            with staging.using():
                if _copy(source, offset, staging.descriptor(piece.file_index), piece, buffer):
                    staging.hold(piece)
                    staging.reused_pieces += 1
                    staging.reused_bytes += piece.length
                else:
                    staging.release(piece.index)
        staging.commit()

    def verify(self, model_id: str, version: str) -> None:
        """Read every byte of a published version again; raises CorruptData where one differs."""
        path = self.final_path(model_id, version)
        verify_directory(path, self.manifest_of(path))

    # ── all versions ─────────────────────────────────────────────────────────────────────────────

    def versions(self, model_id: str | None = None) -> list[StoredVersion]:
        """Return what is published here, oldest first."""
        found = []
        for path in self._models.glob(f"{model_id or '*'}/*/{MANIFEST_FILE}"):
            directory = path.parent
            if directory.is_symlink() or directory.name == ACTIVE:
                continue
            manifest = self._published(directory)
            if manifest is None:
                continue
            name, version = directory.parent.name, directory.name
            found.append(
                StoredVersion(
                    name,
                    version,
                    directory,
                    manifest.digest,
                    manifest.total_size,
                    path.stat().st_mtime,
                    self.active(name) == version,
                )
            )
        return sorted(found, key=lambda each: (each.published_at, each.version))

    def active(self, model_id: str) -> str | None:
        """Return the active version of ``model_id``, or None."""
        try:
            return os.readlink(self._models / model_id / ACTIVE)  # noqa: PTH115 (a name, not a path)
        except (FileNotFoundError, OSError):
            return None

    def activate(self, model_id: str, version: str) -> None:
        """Make ``version`` the active one, atomically; raises NotFound where it is not here."""
        path = self.final_path(model_id, version)
        if self._published(path) is None:
            raise NotFound(
                "only a published version can become active",
                got=f"{model_id} {version}",
                where=self.root,
                do="Distribute it first.",
            )
        with disk_errors(path):
            link, fresh = path.parent / ACTIVE, path.parent / ".active.new"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(version)
            fresh.replace(link)
            sync_directory(path.parent)

    def manifest_of(self, path: Path) -> Manifest:
        """Return the manifest of the version at ``path``; raises NotFound where there is none."""
        found = self._published(path)
        if found is None:
            raise NotFound("no version is published there", where=path)
        return found

    def collect(self, keep: int, in_use: Collection[str] = ()) -> list[StoredVersion]:
        """Remove all but the ``keep`` newest versions of each model and return what went.

        The active version, and digests in ``in_use``, always stay.
        """
        by_model: dict[str, list[StoredVersion]] = {}
        for each in self.versions():
            by_model.setdefault(each.model_id, []).append(each)
        gone = []
        for versions in by_model.values():
            for each in versions[: max(0, len(versions) - keep)]:
                if not each.active and each.digest not in in_use:
                    self._trash(each.path)
                    gone.append(each)
        return gone

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _published(self, path: Path) -> Manifest | None:
        """Return the manifest of what is published at ``path`` and has its sizes, else None."""
        try:
            manifest = parse_manifest((path / MANIFEST_FILE).read_bytes())
            sizes = [(path / file.path).lstat().st_size for file in manifest.files]
        except (FileNotFoundError, NotADirectoryError, InvalidManifest):
            return None
        return manifest if sizes == [file.size for file in manifest.files] else None

    def _pieces_on_disk(self, wanted: set[str], but: str) -> dict[str, tuple[Path, int]]:
        have: dict[str, tuple[Path, int]] = {}
        for stored in self.versions():
            manifest = self._published(stored.path)
            if manifest is None or manifest.digest == but:
                continue
            for piece in manifest.pieces:
                if piece.sha256 in wanted:
                    file = manifest.files[piece.file_index]
                    have[piece.sha256] = (stored.path / file.path, piece.file_offset)
        return have

    def _trash(self, path: Path) -> None:
        """Remove a directory so that nobody ever sees half of it."""
        trash = self._staging / f".trash-{os.getpid()}-{os.urandom(6).hex()}"
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, offset: int, target: int, piece: Piece, buffer: bytearray) -> bool:
    """Copy one piece between files (sharing blocks where the filesystem can) and return whether
    what arrived has its digest.
    """
    at, length = piece.file_offset, piece.length
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        for _ in _copied(descriptor, offset, target, at, length, buffer):
            pass
    finally:
        os.close(descriptor)
    digest, view, done = hashlib.sha256(), memoryview(buffer), 0
    while done < length:
        got = os.preadv(target, [view[: min(len(buffer), length - done)]], at + done)
        if not got:
            return False
        digest.update(view[:got])
        done += got
    return digest.hexdigest() == piece.sha256


def _copied(
    source: int, offset: int, target: int, at: int, length: int, buffer: bytearray
) -> Iterator[int]:
    done, by_kernel = 0, hasattr(os, "copy_file_range")
    while done < length:
        if by_kernel:
            try:
                got = os.copy_file_range(source, target, length - done, offset + done, at + done)
            except OSError:  # other filesystems, older kernels
                by_kernel = False
                continue
        else:
            view = memoryview(buffer)[: min(len(buffer), length - done)]
            got = os.preadv(source, [view], offset + done)
            if got:
                with disk_errors(source):
                    os.pwrite(target, view[:got], at + done)
        if not got:
            return
        done += got
        yield done
