"""Digests that pin code: of a directory's files, or of an installed module. Imports none of it."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import InvalidInput

MAX_FILES, MAX_BYTES = 10_000, 256 * 1024 * 1024  # of a tree


def tree_digest(directory: Path) -> str:
    """Return the SHA-256 over names and bytes of all files below ``directory``, caches apart."""
    found = hashlib.sha256()
    for path in files_of(directory):
        data = path.read_bytes()
        found.update(f"{path.relative_to(directory).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()


def module_digest(module: str) -> str:
    """Return the digest of the installed package (or single file) that ``module`` is part of.

    Nothing of it is imported. Raises InvalidInput where it is not installed as plain files.
    """
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidInput(
            "module of the code reference is not installed",
            got=top,
            wanted="a package of .py files",
        )
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return hashlib.sha256(origin.read_bytes()).hexdigest()
    return tree_digest(origin.parent)


def files_of(directory: Path) -> Iterator[Path]:
    """Yield the files below ``directory`` in order, caches apart; raises InvalidInput for links,
    devices, and more than anybody's code is."""
    count = size = 0
    for path in sorted(directory.rglob("*")):
        if "__pycache__" in path.parts or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise InvalidInput(
                "code holds something not a plain file", got=path.name, where=directory
            )
        count, size = count + 1, size + path.stat().st_size
        if count > MAX_FILES or size > MAX_BYTES:
            raise InvalidInput(
                "code is too large",
                wanted=f"≤ {MAX_FILES} files, ≤ {MAX_BYTES} bytes",
                where=directory,
            )
        yield path
