"""Files that outlast a power loss, and files that only their owner can read.

A file is written beside its place, synced, renamed and its directory synced. Knows nothing of what
is written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from paceline.errors import AccessDenied

PRIVATE = 0o600
PRIVATE_DIRECTORY = 0o700
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Replace ``path`` by ``content``: whole or not at all, also after a power loss.

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
    """Write ``content`` durably, so that only the owner can read it."""
    write_durably(path, content, PRIVATE)


def create_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write ``content`` into the new file ``path`` and sync it, but not its directory.

    Raises FileExistsError where anything has that name, a dangling symlink included.
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
    """Make the names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path, mode: int = 0o777) -> None:
    """Make ``directory`` and its parents with ``mode``, each new name durable."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        each.mkdir(mode, exist_ok=True)
        sync_directory(each.parent)


def sync_directories(root: Path, files: Iterable[str]) -> None:
    """Make durable every directory from the parents of ``files`` (relative) up to ``root``."""
    between = {parent for file in files for parent in PurePosixPath(file).parents}
    for directory in sorted({root, *(root / each for each in between)}, reverse=True):
        sync_directory(directory)


def sync_tree(root: Path) -> None:
    """Make every file and directory below ``root``, and ``root``, durable."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(directory, name)
            if path.is_symlink():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))


def own_directory(path: Path, most: int = PRIVATE_DIRECTORY) -> None:
    """Make ``path`` a directory of ours without permissions beyond ``most``, tightened if it is.

    Raises AccessDenied where it belongs to another user.
    """
    owner = narrow_directory(path, most)
    if owner != os.geteuid():
        raise AccessDenied(
            "the directory belongs to another user",
            got=f"owner {owner}",
            wanted=f"owner {os.geteuid()}",
            where=path,
            do="Name another with --state, or change its owner.",
        )


def narrow_directory(path: Path, most: int) -> int:
    """Make ``path`` where it is missing, take permissions beyond ``most`` where it is ours, and
    return its owner (of a mounted volume, another one).
    """
    make_directories(path, most)
    found = path.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~most:
        path.chmod(stat.S_IMODE(found.st_mode) & most)
    return found.st_uid


def ensure_private(path: Path) -> None:
    """Make the file ``path`` where it is missing; take the permissions of others where it is ours.

    For what a library opens by name afterwards (a database, a log).
    """
    with _opened(path) as descriptor:
        found = os.fstat(descriptor)
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if ours and stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & 0o700)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
