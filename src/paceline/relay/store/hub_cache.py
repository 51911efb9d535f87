"""The store's versions as Hugging Face's cache, so that its tools find them offline.

A model whose id has a ``/`` (``org/name``) is also at ``hub/models--org--name/``: ``blobs/`` has
each file under its SHA-256, a hard link to the version's file, so that the directory is whole where
only it is mounted; ``snapshots/VERSION/`` has links to the blobs by path; ``refs/main`` names the
active version, or the first one until one is active. ``hub`` is what those tools take as the
directory of their cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from paceline.manifest import Manifest
from paceline.system import sync_directory

DIRECTORY = "hub"
MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")  # found without a file in refs/


def _repository(store: Path, model_id: str) -> Path | None:
    name = model_id.replace("/", "--")
    # Of two ids with the same name one is no repository's: the hub refuses "--" in names.
    if "/" not in model_id or name.replace("--", "/") != model_id:
        return None
    return store / DIRECTORY / f"models--{name}"


def shown(store: Path) -> set[tuple[str, str]]:
    """Return the model id and version of everything that is shown."""
    return {
        (each.parent.parent.name.removeprefix("models--").replace("--", "/"), each.name)
        for each in (store / DIRECTORY).glob("models--*/snapshots/*")
    }


def show(store: Path, manifest: Manifest, directory: Path) -> None:
    """Show the published version in ``directory``; one that is shown already stays as it is."""
    repository = _repository(store, manifest.model_id)
    if repository is None or (repository / "snapshots" / manifest.version).exists():
        return
    blobs, fresh = repository / "blobs", repository / f".{manifest.version}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    for each in (blobs, fresh, repository / "snapshots", repository / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        _link(directory / file.path, blobs / file.sha256)
        link = fresh / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * (2 + file.path.count("/")) + f"blobs/{file.sha256}")
    fresh.rename(repository / "snapshots" / manifest.version)
    sync_directory(repository / "snapshots")
    if not _COMMIT.fullmatch(manifest.version):
        _refer(repository, manifest.version, manifest.version)
    if not (repository / "refs" / MAIN).exists():
        _refer(repository, MAIN, manifest.version)


def hide(store: Path, model_id: str, version: str) -> None:
    """Remove a version from the cache, and the blobs that no other version has."""
    repository = _repository(store, model_id)
    if repository is None or not (repository / "snapshots" / version).exists():
        return
    gone = repository / f".{version}.new"
    shutil.rmtree(gone, ignore_errors=True)
    (repository / "snapshots" / version).rename(gone)
    sync_directory(repository / "snapshots")
    shutil.rmtree(gone, ignore_errors=True)
    for ref in (repository / "refs").iterdir():
        if ref.read_text() == version:
            ref.unlink()
    used = {
        Path(os.readlink(each)).name  # noqa: PTH115 (a name, not a path)
        for each in (repository / "snapshots").rglob("*")
        if each.is_symlink()
    }
    for blob in (repository / "blobs").iterdir():
        if blob.name not in used:
            blob.unlink()


def activate(store: Path, model_id: str, version: str) -> None:
    """Make ``version`` what a user gets who names no revision."""
    repository = _repository(store, model_id)
    if repository is not None:
        _refer(repository, MAIN, version)


def _link(file: Path, blob: Path) -> None:
    """Make ``blob`` a link to ``file``; an older copy with other disk blocks is replaced."""
    fresh = blob.with_name(f".{blob.name}.new")
    with contextlib.suppress(FileNotFoundError):
        if blob.samefile(file):
            return
    fresh.unlink(missing_ok=True)
    try:
        os.link(file, fresh, follow_symlinks=False)
    except OSError:  # a file system without hard links, or too many of them
        fresh.symlink_to(os.path.relpath(file, blob.parent))
    fresh.replace(blob)


def _refer(repository: Path, name: str, version: str) -> None:
    fresh = repository / f".{name}.ref"
    fresh.write_text(version)
    fresh.replace(repository / "refs" / name)
