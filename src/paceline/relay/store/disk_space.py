"""Disk space: how much a model needs, and which old versions are removed for it.

Two rules: of each model the newest ``keep_versions`` stay, and while the disk has less free than
``free_share`` (or the next model does not fit) leftovers are removed, then the oldest versions. The
active version always stays, and so does a version that is being served or received.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Profile
from paceline.errors import InvalidManifest
from paceline.manifest import ACTIVE, MANIFEST_FILE, FileEntry, parse_manifest

if TYPE_CHECKING:
    from paceline.relay.store.store import StoredVersion


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """What may be removed to free space (the default: nothing), and what is verified when."""

    keep_versions: int = 0  # of each model; 0: all
    free_share: float = 0.0  # of the disk
    make_room: bool = False  # remove the oldest where a model does not fit
    full_sha256: bool = False  # of files and chunks, before a version becomes visible

    @classmethod
    def of(cls, profile: Profile) -> StorePolicy:
        return cls(
            keep_versions=profile.store.keep_versions,
            free_share=profile.store.free_share,
            make_room=True,
            full_sha256=profile.relay.full_sha256,
        )


def excess_versions(
    versions: Iterable[StoredVersion], keep: int, in_use: Collection[str]
) -> list[StoredVersion]:
    """Return the removable versions older than the ``keep`` newest of their model."""
    by_model: dict[str, list[StoredVersion]] = {}
    for each in versions:
        by_model.setdefault(each.model_id, []).append(each)
    return [
        each
        for ofmodel in by_model.values()
        for each in ofmodel[: max(0, len(ofmodel) - keep)]
        if not each.active and each.digest not in in_use
    ]


def oldest_removable(
    versions: Sequence[StoredVersion], in_use: Collection[str]
) -> StoredVersion | None:
    """Return the oldest removable version whose removal frees any bytes."""
    for each in versions:
        if not each.active and each.digest not in in_use and freed_bytes(each.path):
            return each
    return None


def leftovers(store: Path, in_use: Collection[str]) -> list[Path]:
    """Return the removable leftovers in the store directory ``store``, in the order of removal:
    corrupt copies, then interrupted versions that are not ``in_use``, the longest untouched first.
    """
    begun = [each for each in _directories(store / "staging") if each.name not in in_use]
    return corrupt_copies(store) + sorted(begun, key=_touched)


def corrupt_copies(store: Path) -> list[Path]:
    """Return the copies in the store directory ``store`` that were found corrupt."""
    return sorted(_directories(store / "rotten"))


def _directories(parent: Path) -> list[Path]:
    try:
        found = list(parent.iterdir())
    except FileNotFoundError:
        return []
    return [e for e in found if e.is_dir() and not e.is_symlink() and not e.name.startswith(".")]


def _touched(staging: Path) -> float:
    marks = staging / "marks"
    return (marks if marks.exists() else staging).stat().st_mtime


def freed_bytes(directory: Path) -> int:
    """Return the bytes that removing ``directory`` frees: none of files linked elsewhere too."""
    links = 2 if "+" in directory.parent.name else 1
    found = (each.lstat() for each in directory.rglob("*") if each.is_file())
    return sum(status.st_blocks * 512 for status in found if status.st_nlink <= links)


def missing_bytes(store: Path, digest: str, files: Iterable[FileEntry]) -> int:
    """Return how many more bytes the store directory ``store`` needs for the manifest ``digest`` of
    ``files``.

    Not counted are the bytes that an interrupted relay allocated and the files that a version there
    holds.
    """
    stored = list(_stored(store))
    if any(each == digest for _, each, _ in stored):
        return 0
    staged = store / "staging" / digest / "data"
    have = {sha256 for _, _, held in stored for sha256 in held}
    lacking = 0
    for file in files:
        try:
            taken = (staged / file.path).stat().st_blocks * 512
        except OSError:
            taken = file.size if file.sha256 in have else 0
        lacking += max(0, file.size - taken)
    return lacking


def reclaimable_bytes(store: Path, digest: str) -> int:
    """Return the bytes of versions that are not active and of leftovers, but ``digest``."""
    versions = sum(
        freed_bytes(path)
        for path, _, _ in _stored(store)
        if not (path.parent / ACTIVE).is_symlink()
        or str((path.parent / ACTIVE).readlink()) != path.name
    )
    return versions + sum(map(freed_bytes, leftovers(store, {digest})))


def _stored(store: Path) -> Iterator[tuple[Path, str, set[str]]]:
    for path in store.glob(f"models/*/*/{MANIFEST_FILE}"):
        if path.parent.is_symlink():
            continue
        try:
            manifest = parse_manifest(path.read_bytes())
        except (OSError, InvalidManifest):
            continue  # not a version: not counted
        yield path.parent, manifest.digest, {file.sha256 for file in manifest.files}
