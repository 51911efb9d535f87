"""A node's store: published versions, versions in progress, and the link to the active version.

``models/<model>/<version>/`` appears by one rename after everything in it is durable, and never
changes again; ``models/<model>/active`` is a symlink that switches atomically. ``<model>`` is the
model's id with ``+`` for each ``/``; ``hub_cache`` shows such models a second time. Versions in
progress live in ``staging/<digest>/`` on the same filesystem. It does not depend on sources or a
network.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import Conflict, InvalidInput, InvalidManifest, NotFound, StateLocked
from paceline.manifest import (
    ACTIVE,
    MANIFEST_FILE,
    Manifest,
    directory_name,
    parse_manifest,
    verify_directory,
)
from paceline.relay.store import hub_cache
from paceline.relay.store.disk_space import (
    StorePolicy,
    corrupt_copies,
    excess_versions,
    leftovers,
    missing_bytes,
    oldest_removable,
)
from paceline.relay.store.reuse import LocalContent, copy_pieces, link_files, verify_linked_files
from paceline.relay.store.staging import READ_ONLY, Staging, disk_errors
from paceline.system import create_durably, sync_directories, sync_directory

log = logging.getLogger(__name__)


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

    def __init__(self, root: Path, policy: StorePolicy | None = None) -> None:
        self.root = root
        self._policy = policy or StorePolicy()
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
            for left in self._staging.iterdir():
                # a removal that was interrupted, and the remains of a publication just before its
                # process ended
                if left.name.startswith(".trash-") or not (left / "data").exists():
                    shutil.rmtree(left, ignore_errors=True)
            self._mend_hub_cache()

    def close(self) -> None:
        """Release the lock, so that another process can own the store."""
        os.close(self._lock_file)

    def available_bytes(self) -> int:
        """Return how many bytes this store's filesystem has free."""
        return shutil.disk_usage(self.root).free

    # ── one version ──────────────────────────────────────────────────────────────────────────────

    def final_path(self, model_id: str, version: str) -> Path:
        """Return where this version is, or will be, visible."""
        for name in (directory_name(model_id), version):
            if not name or name.startswith(".") or "/" in name or "\0" in name:
                raise InvalidInput("not a name", got=repr(name), wanted="a model id and a version")
        if version == ACTIVE:
            raise InvalidInput("a version cannot be called 'active'", do="Choose another name.")
        return self._models / directory_name(model_id) / version

    def open(self, manifest: Manifest, in_use: Collection[str] = ()) -> Staging:
        """Return the version's files: complete where it is published, else resumed or new.

        Old versions are removed as the policy allows, but none of ``in_use``. Raises Conflict where
        other content has this name, StorageFull where it cannot fit; then nothing is left of it.
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
        new = not staging.directory.exists()
        try:
            held = self._held(manifest)
            link_files(staging.data, manifest, held)  # first: what is linked outlives its version
            self.make_room(manifest, in_use)
            staging.prepare()
            verify_linked_files(staging, held)
        except BaseException:
            staging.close()
            if new and staging.directory.exists():
                self._trash(staging.directory)
            raise
        return staging

    def publish(self, staging: Staging) -> Path:
        """Publish a complete version at its final path and return that path; idempotent.

        Raises StorageFull or StorageFailed, or CorruptData where the SHA-256 of a file or chunk is
        checked and wrong (then nothing is visible), and Conflict as ``open`` does.
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
        if self._policy.full_sha256:
            verify_directory(staging.data, manifest, allow_extra=True, full=True)
        with self._publish_lock, staging.using(), disk_errors(final):
            data = staging.data
            for index, file in enumerate(manifest.files):
                size = os.fstat(staging.descriptor(index)).st_size
                if size != file.size:
                    raise Conflict(f"{file.path} changed size", got=size, wanted=file.size)
                os.fchmod(staging.descriptor(index), READ_ONLY)
            (data / MANIFEST_FILE).unlink(missing_ok=True)  # of an interrupted publish
            create_durably(data / MANIFEST_FILE, manifest.to_bytes(), READ_ONLY)
            sync_directories(data, (file.path for file in manifest.files))
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists() and self._published(final) is None:
                self._trash(final)  # not a version: ours appear whole, with their manifest
            data.rename(final)
            sync_directory(final.parent)
            sync_directory(self._models)
            hub_cache.show(self.root, manifest, final)
            work = staging.directory
            staging.moved(final)
            shutil.rmtree(work, ignore_errors=True)
        return final

    def withdraw(self, staging: Staging) -> None:
        """Unpublish a version with a corrupt piece, and keep its good pieces.

        ``open`` resumes it. Its files stay read-only: they may be another version's too.
        """
        with self._publish_lock, staging.using(), disk_errors(staging.directory):
            if not staging.published:
                return
            final, work = staging.directory, self._staging / staging.manifest.digest
            if work.exists():
                self._trash(work)
            work.mkdir(parents=True)
            hub_cache.hide(self.root, staging.manifest.model_id, staging.manifest.version)
            final.rename(work / "data")
            for directory in (final.parent, work, self._staging):
                sync_directory(directory)
            (work / "data" / MANIFEST_FILE).unlink()
            staging.withdrawn(work)

    def discard(self, staging: Staging) -> None:
        """Delete a version in progress with all its bytes; a published one stays."""
        with self._publish_lock:  # either it is published by now, or it never will be
            staging.close()
            if not staging.published and staging.directory.exists():
                self._trash(staging.directory)

    def forget(self, digest: str) -> None:
        """Delete a version that an earlier process began and that is not open."""
        with self._publish_lock:
            work = self._staging / digest
            if work.is_dir():
                self._trash(work)

    def reuse(self, staging: Staging) -> None:
        """Fill missing pieces from versions that this disk already holds, each verified again."""
        if not staging.published:
            copy_pieces(staging, self._held(staging.manifest))

    # ── all versions ─────────────────────────────────────────────────────────────────────────────

    def versions(self, model_id: str | None = None) -> list[StoredVersion]:
        """Return what is published here, oldest first."""
        found = []
        model = directory_name(model_id) if model_id else "*"
        for path in self._models.glob(f"{model}/*/{MANIFEST_FILE}"):
            directory = path.parent
            if directory.is_symlink() or directory.name == ACTIVE:
                continue
            manifest = self._published(directory)
            if manifest is None:
                continue
            name, version, at = manifest.model_id, directory.name, path.stat().st_mtime
            size, active = manifest.total_size, self.active(name) == version
            each = StoredVersion(name, version, directory, manifest.digest, size, at, active)
            found.append(each)
        return sorted(found, key=lambda each: (each.published_at, each.version))

    def active(self, model_id: str) -> str | None:
        """Return the active version of ``model_id``, or None."""
        try:
            link = self._models / directory_name(model_id) / ACTIVE
            return os.readlink(link)  # noqa: PTH115 (a name, not a path)
        except OSError:
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
            hub_cache.activate(self.root, model_id, version)

    def manifest_of(self, path: Path) -> Manifest:
        """Return the manifest of the version at ``path``; raises NotFound where there is none."""
        found = self._published(path)
        if found is None:
            raise NotFound("no version is published there", where=path)
        return found

    def collect(self, keep: int, in_use: Collection[str] = ()) -> list[StoredVersion]:
        """Remove all but the ``keep`` newest versions of each model and return the removed ones.

        The active version, and digests in ``in_use``, always stay.
        """
        gone = excess_versions(self.versions(), keep, in_use)
        for each in gone:
            self._remove(each)
        return gone

    def make_room(self, manifest: Manifest, in_use: Collection[str] = ()) -> list[StoredVersion]:
        """Free space for ``manifest`` as the policy allows, and return the removed versions.

        The active version, and digests in ``in_use``, always stay.
        """
        policy, stay = self._policy, {*in_use, manifest.digest}
        gone = self.collect(policy.keep_versions, stay) if policy.keep_versions else []
        needed = missing_bytes(self.root, manifest.digest, manifest.files)
        while self._is_short(needed):
            if left := leftovers(self.root, stay):
                log.info("removed what was left at %s to make room", left[0])
                self._trash(left[0])
            elif (oldest := oldest_removable(self.versions(), stay)) is not None:
                self._remove(oldest)
                gone.append(oldest)
            else:
                break
        for each in gone:
            log.info("removed model=%s version=%s to make room", each.model_id, each.version)
        return gone

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _is_short(self, needed: int) -> bool:
        disk, policy = shutil.disk_usage(self.root), self._policy
        left, watermark = disk.free - needed, policy.free_share * disk.total
        return (policy.make_room and left < 0) or (watermark > 0 and left < watermark)

    def _published(self, path: Path) -> Manifest | None:
        """Return the manifest of the version at ``path``, None where its files lack bytes."""
        try:
            manifest = parse_manifest((path / MANIFEST_FILE).read_bytes())
            sizes = [(path / file.path).lstat().st_size for file in manifest.files]
        except (FileNotFoundError, NotADirectoryError, InvalidManifest):
            return None
        return manifest if sizes == [file.size for file in manifest.files] else None

    def _held(self, manifest: Manifest) -> LocalContent:
        # A copy that was set aside for one wrong byte still has its other pieces.
        copies = [*corrupt_copies(self.root), *(each.path for each in self.versions())]
        found = ((each, self._published(each)) for each in copies)
        return LocalContent.of(((each, it) for each, it in found if it is not None), manifest)

    def _remove(self, version: StoredVersion) -> None:
        hub_cache.hide(self.root, version.model_id, version.version)
        self._trash(version.path)

    def _mend_hub_cache(self) -> None:
        """Show and hide what a process that ended did not: another one may unpublish a version."""
        here = {
            (path.parent.parent.name.replace("+", "/"), path.parent.name)
            for path in self._models.glob(f"*+*/*/{MANIFEST_FILE}")
            if not path.parent.is_symlink()
        }
        shown = hub_cache.shown(self.root)
        for model_id, version in shown - here:
            hub_cache.hide(self.root, model_id, version)
        for model_id, version in here - shown:
            final = self.final_path(model_id, version)
            if (manifest := self._published(final)) is not None:
                hub_cache.show(self.root, manifest, final)
        for model_id in {model_id for model_id, _ in here}:
            if (active := self.active(model_id)) is not None:
                hub_cache.activate(self.root, model_id, active)

    def _trash(self, path: Path) -> None:
        """Remove a directory atomically: no process ever finds half of it."""
        trash = self._staging / f".trash-{os.getpid()}-{os.urandom(6).hex()}"
        path.rename(trash)
        sync_directory(path.parent)  # or a power loss may bring back the name and not the files
        sync_directory(self._staging)
        shutil.rmtree(trash, ignore_errors=True)
