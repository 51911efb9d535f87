"""Write files that survive a power loss, and files that only their owner can read.

A file is written under a temporary name in its directory, synced and renamed; then the directory is
synced. Does not depend on the files' content.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from paceline.errors import AccessDenied

PRIVATE = 0o600
PRIVATE_DIRECTORY = 0o700
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Replace ``path`` with ``content`` atomically and durably.

    ``mode`` is narrowed by the umask. A symlink at ``path`` is replaced, never followed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        create_durably(temporary, content, mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """Replace ``path`` with ``content`` durably; only the owner can read it."""
    write_durably(path, content, PRIVATE)


def create_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write ``content`` into the new file ``path`` and sync it, but not its directory.

    Raises FileExistsError if the name exists, also as a dangling symlink.
    """
    descriptor = os.open(path, _NEW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    _sync(path, os.O_DIRECTORY)


def _sync(path: Path, flag: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path, mode: int = 0o777) -> None:
    """Create ``directory`` and missing parents with ``mode``, durably."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        each.mkdir(mode, exist_ok=True)
        sync_directory(each.parent)


def sync_directories(root: Path, files: Iterable[str]) -> None:
    """Sync every directory from the parents of ``files`` (relative) up to ``root``."""
    between = {parent for file in files for parent in PurePosixPath(file).parents}
    for directory in sorted({root, *(root / each for each in between)}, reverse=True):
        sync_directory(directory)


def sync_tree(root: Path) -> None:
    """Sync ``root`` and every file and directory below it."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(directory, name)
            if path.is_symlink():
                continue
            _sync(path, os.O_NOFOLLOW)
        sync_directory(Path(directory))


def ensure_own_directory(path: Path, most: int = PRIVATE_DIRECTORY) -> None:
    """Create ``path`` if missing, and remove its permissions beyond ``most``.

    Raises AccessDenied if it belongs to another user.
    """
    owner = restrict_directory(path, most)
    if owner != os.geteuid():
        raise AccessDenied(
            "the directory belongs to another user",
            got=f"owner {owner}",
            wanted=f"owner {os.geteuid()}",
            where=path,
            do="Name another with --state, or change its owner.",
        )


def restrict_directory(path: Path, most: int) -> int:
    """Create ``path`` if missing and return its owner's uid.

    Permissions beyond ``most`` are removed if this user owns it (a mounted volume may have another
    owner).
    """
    make_directories(path, most)
    found = path.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~most:
        path.chmod(stat.S_IMODE(found.st_mode) & most)
    return found.st_uid


def ensure_private(path: Path) -> None:
    """Create the file ``path`` if missing; remove group and other permissions if this user owns it.

    For files that a library opens by name afterwards (a database, a log).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        found = os.fstat(descriptor)
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if ours and stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & 0o700)
    finally:
        os.close(descriptor)
