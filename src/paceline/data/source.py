"""Where text comes from: the running Python's standard library, or a directory of text files.

The order is a function of path and seed, so that a byte budget takes a sample of the whole source
and not its first letters. Knows no splits, shards or stores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import InvalidInput, SourceMissing
from paceline.profile import DataSettings

STDLIB = "stdlib"
MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class SourceText:
    """One file's text, as UTF-8 bytes."""

    path: str  # relative to the source, with forward slashes
    text: bytes
    sha256: str


@dataclass
class Gathered:
    """The texts taken, in order, and what was left out and why."""

    source: str
    texts: list[SourceText] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    duplicates: int = 0


def gather(settings: DataSettings, source: str | None = None) -> Gathered:
    """Return up to ``settings.max_bytes`` of text of ``source`` (default: the settings').

    Raises SourceMissing for a directory that is not there, InvalidInput for one without text.
    """
    source = source or settings.source
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        gathered = Gathered(f"python-stdlib-{platform.python_version()}")
        pattern = ".py"
    else:
        root = Path(source)
        if not root.is_dir():
            raise SourceMissing(
                "no directory of text files here",
                got="a file" if root.exists() else "nothing",
                wanted="a directory, or 'stdlib'",
                where=root.absolute(),
                do="Set data.source to a directory of UTF-8 text files.",
            )
        gathered = Gathered("directory")
        pattern = ""
    seen: set[str] = set()
    left = settings.max_bytes
    for relative in sorted(
        _files(root, pattern), key=lambda each: (_rank(each, settings.seed), each)
    ):
        text = _read(root / relative, gathered.skipped, relative)
        if text is None:
            continue
        digest = hashlib.sha256(text).hexdigest()
        if digest in seen:
            gathered.duplicates += 1
        elif len(text) <= left:
            seen.add(digest)
            left -= len(text)
            gathered.texts.append(SourceText(relative, text, digest))
    _require_text(gathered, root, settings)
    return gathered


def _files(root: Path, suffix: str) -> Iterator[str]:
    for parent, directories, names in os.walk(root):
        directories[:] = sorted(
            each for each in directories if each not in _SKIPPED_DIRECTORIES and each[0] != "."
        )
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                yield (Path(parent) / name).relative_to(root).as_posix()


def _rank(path: str, seed: int) -> bytes:
    return hashlib.sha256(f"order:{seed}:{path}".encode(errors="surrogateescape")).digest()


def _read(path: Path, skipped: list[str], relative: str) -> bytes | None:
    """Return the file's text, or None after noting why it is not one."""
    try:
        if path.is_symlink() or not path.is_file():
            reason = "not a regular file"
        elif path.stat().st_size > MAX_DOCUMENT_BYTES:
            reason = "too large"
        else:
            text = path.read_bytes()
            if b"\0" in text:
                reason = "binary"
            elif not text.strip():
                reason = "empty"
            else:
                text.decode("utf-8")
                relative.encode("utf-8")
                return text
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except UnicodeEncodeError:
        relative = relative.encode(errors="backslashreplace").decode()
        reason = "name is not UTF-8"
    except OSError as error:
        reason = error.strerror or "unreadable"
    skipped.append(f"{relative}: {reason}")
    return None


def _require_text(gathered: Gathered, root: Path, settings: DataSettings) -> None:
    if len(gathered.texts) >= 2:
        return
    examples = "; ".join(gathered.skipped[:3])
    raise InvalidInput(
        "too little text for a training and a held-out split",
        got=f"{len(gathered.texts)} usable file(s), {len(gathered.skipped)} skipped"
        + (f" ({examples})" if examples else ""),
        wanted=f"at least 2 different UTF-8 text files within {settings.max_bytes} bytes",
        where=root.absolute(),
        do="Add text files, or raise data.max_bytes.",
    )
