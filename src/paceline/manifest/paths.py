"""Which paths a model may have: one rule for building and parsing. Touches no file system."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from itertools import pairwise

from paceline.errors import InvalidManifest
from paceline.manifest.model import MANIFEST_FILE

MAX_PATH_BYTES = 1024
MAX_COMPONENT_BYTES = 255
MAX_DEPTH = 32


def check_paths(paths: Iterable[str]) -> None:
    """Raise InvalidManifest where a path could leave the model's directory, or where two of them
    are one file (or a file and a directory) after NFC and case folding, as on macOS.
    """
    # With NUL in the place of "/", below every letter of a path, a file sorts right before what is
    # below it. Sets of all parents took 0.9 GB for a manifest of 45 MB.
    folded = sorted((fold(check_path(path)).replace("/", "\0"), path) for path in paths)
    for (first, other), (second, path) in pairwise(folded):
        if second == first or second.startswith(f"{first}\0"):
            raise InvalidManifest(
                "two paths collide after NFC and case folding",
                got=f"{path!r} and {other!r}",
                wanted="paths that differ on every file system",
                do="Rename one of the files.",
            )


def check_path(path: str) -> str:
    """Return ``path`` where it is a plain relative path, else raise InvalidManifest."""
    problem = _problem(path)
    if problem:
        raise InvalidManifest(
            f"path {problem}",
            got=repr(path[:MAX_PATH_BYTES]),
            wanted="a relative path of plain components",
            where="files[].path",
            do="Rename the file.",
        )
    return path


def fold(path: str) -> str:
    """Return what ``path`` is on a file system that ignores case and normal form."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _problem(path: str) -> str | None:
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "is not Unicode text"
    if not path:
        return "is empty"
    if len(raw) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "has a backslash"
    if any(byte < 0x20 or byte == 0x7F for byte in raw):
        return "has a control character"
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        return f"is deeper than {MAX_DEPTH} directories"
    for part in parts:
        if part in ("", ".", ".."):
            return f"has the component {part!r}"
        if len(part.encode()) > MAX_COMPONENT_BYTES:
            return f"has a component longer than {MAX_COMPONENT_BYTES} bytes"
    if fold(path) == MANIFEST_FILE:
        return "is the manifest's own"
    return None
